"""How long an event of OFA-FL takes on 11 million weights, and what the map of all densities takes.

    python benchmarks/pruning.py [--record]

Seconds are processor time of one thread: pruning to the next density by magnitude over all layers, and masking the
weights again.
"""

from __future__ import annotations

import argparse
import time
from fractions import Fraction

import results
import torch

from fedtailor.methods.pruning import prune, unpruned

LAYERS, SHAPE = 10, (1100, 1000)
RATIOS = [Fraction(fifths, 5) for fifths in (4, 3, 2, 1)]


def main() -> None:
    """Measure one event after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    results.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    weights = {str(layer): torch.randn(SHAPE, generator=generator) for layer in range(LAYERS)}
    levels, events = unpruned(weights, list(weights)), []
    for depth, ratio in enumerate(RATIOS):
        started = time.process_time()
        levels = prune(weights, levels, depth, ratio)
        pruned = time.process_time()
        masked = {name: value * (levels.maps[name] > depth) for name, value in weights.items()}
        events.append(
            {
                "density": str(ratio),
                "pruning_seconds": round(pruned - started, 3),
                "masking_seconds": round(time.process_time() - pruned, 3),
                "survivors": sum(int(value.count_nonzero()) for value in masked.values()),
            }
        )
    result = {
        "weights": sum(value.numel() for value in weights.values()),
        "bytes_of_all_masks": levels.nbytes,
        "events": events,
    }
    results.report("events", result, options)


if __name__ == "__main__":
    main()
