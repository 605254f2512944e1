"""The last global update as it travels: k numbers beside the weights, and the seed of the transform that made them."""

from __future__ import annotations

from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.methods.flado.alignment import Trajectory, trained_names
from fedtailor.methods.flado.sketch import Transform

SKETCH, SEED = tagged("trajectory", "sketch"), tagged("trajectory", "seed")


def trajectory_of(patch: Patch, model: ElasticModel) -> Trajectory:
    """The sketch that travelled with a patch, and its own transform."""
    size = sum(patch.values[name].numel() for name in trained_names(model))
    sketch = patch.values[SKETCH]
    return Trajectory(sketch, Transform(size, len(sketch), int(patch.values[SEED])))


def without_trajectory(patch: Patch) -> Patch:
    """The weights alone."""
    return Patch(
        {name: value for name, value in patch.values.items() if name not in (SKETCH, SEED)}, patch.cut
    )
