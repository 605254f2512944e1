"""W6, merging alone: 100 updates of ResNet-18 in five tiers, by fedtailor or by additions in place.

python benchmarks/rounds/merging.py merge|add
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from fractions import Fraction

import torch
from turns import take_turns
from workloads import CLASSES, TIERS, residuals

import fedtailor
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.merging.holders import holder_mean
from fedtailor.messages import Update

UPDATES, EXAMPLES, BASE = 100, 600, 64


def merging(kind: str) -> Callable[[], object]:
    """What is done with the same updates: the merge rule, or every number of theirs added to one sum in float32."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    example = torch.rand(2, 3, 32, 32), torch.arange(2) % CLASSES
    model = fedtailor.elastic(residuals(1.0, BASE), example)
    weights = model.weights()
    cuts = [prefix(model.groups, Fraction(width).limit_denominator(5)) for width in TIERS]
    updates = [
        Update(client, 0, 0, model.cut(weights, cuts[client % len(cuts)]), EXAMPLES)
        for client in range(UPDATES)
    ]
    if kind == "merge":
        return lambda: holder_mean(weights, updates, model)
    sums = {name: torch.zeros_like(value) for name, value in weights.items() if value.is_floating_point()}

    def add() -> None:
        for update in updates:
            for name, value in update.patch.values.items():
                if name in sums:
                    sums[name][tuple(slice(size) for size in value.shape)].add_(value)

    return add


def main() -> None:
    """A merge at a time."""
    merge = merging(sys.argv[1])
    merge()
    take_turns(merge)


if __name__ == "__main__":
    main()
