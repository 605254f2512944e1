"""Whether the curve that ``fedtailor bench-device`` draws says how long a step takes at widths that were not measured.

    python benchmarks/step_curve.py [--record]

For three networks: steps at the five widths of ``bench``, the curve through them, and steps at other widths, rounded up
to multiples of eight channels as ``method.align = 8`` does. All are measured in many short turns, because whatever else
the machine does slows it down for seconds; the medians are compared. One thread.
"""

from __future__ import annotations

import argparse
from fractions import Fraction
from statistics import median
from typing import Any

import results
import torch

from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.costing.timing import step_time
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet.bench import WIDTHS, Point, curve_of
from fedtailor.models import build_model

ALIGN = 8
HELD_OUT = tuple(Fraction(number, 8) for number in (2, 3, 5, 7))
NETWORKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "cnn": ((1, 28, 28), {"channels": [32, 64, 128]}),
    "resnet18": ((3, 32, 32), {"widths": [32, 64, 128, 256]}),
    "mobilenetv2": ((3, 32, 32), {}),
}


def build(name: str, batch: int) -> ElasticModel:
    """A network that is traced on noise."""
    shape, options = NETWORKS[name]
    torch.manual_seed(0)
    example = (torch.randn(batch, *shape), torch.zeros(batch, dtype=torch.int64))
    return elastic(build_model(name, input_shape=shape, num_classes=10, **options), example)


def measured(model: ElasticModel, workload: Workload, turns: int, seconds: float) -> dict[str, Any]:
    """The curve's line, and how far the curve is off at each width that it has not seen."""
    cuts = {width: prefix(model.groups, width, ALIGN) for width in (*WIDTHS, *HELD_OUT)}
    times: dict[Fraction, list[float]] = {width: [] for width in cuts}
    for _ in range(turns):
        for width, cut in cuts.items():
            times[width].append(step_time(model.costs.pieces, cut, workload, seconds) / 1e9)
    points = [Point(width, model.cost(cuts[width]).macs, median(times[width]), 0) for width in WIDTHS]
    curve = curve_of(points, workload.batch_size)
    found = {}
    for width in HELD_OUT:
        took, said = median(times[width]), curve.seconds(model.cost(cuts[width]).macs)
        found[str(width)] = {"milliseconds": round(1e3 * took, 3), "predicted": round(said / took, 3)}
    return {
        "gmacs_per_second": round(curve.rate / 1e9, 2),
        "overhead_ms": round(1e3 * curve.overhead, 3),
        "widths": found,
    }


def main() -> None:
    """Measure and show."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=25)
    parser.add_argument("--seconds", type=float, default=0.05, help="of steps, for each width and turn")
    parser.add_argument("--batch", type=int, default=32)
    results.add_option(parser)
    options = parser.parse_args()
    torch.set_num_threads(1)
    workload = Workload(options.batch)
    figures = {
        name: measured(build(name, options.batch), workload, options.turns, options.seconds)
        for name in NETWORKS
    }
    results.report("held_out_widths", figures, options)


if __name__ == "__main__":
    main()
