"""How far a client's own update follows the trajectory: an estimate that needs no pass of its own.

A client's update is the sum of its steps. Its product with the trajectory, unit by unit, and its squares are all that
the closed form of ``alignment.expected_slope`` asks for: single steps are so noisy that they are nearly at right angles
to each other, and the square of their sum is the sum of their squares.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.unit_vectors import Vector
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.methods.flado.alignment import expected_slope, unit_sums


def followed(
    before: Mapping[str, Tensor],
    after: Mapping[str, Tensor],
    toward: Weights,
    length: float,
    probabilities: Vector,
    steps: int,
    power: int,
    model: ElasticModel,
) -> tuple[Vector, float]:
    """dC/dp, 0 for units that no step drew, and the cosine of a client's update and the trajectory.

    ``toward`` is the trajectory as its sketch gives it back, of this ``length`` in truth: what a sketch says of single
    numbers is mostly noise, which makes ``toward`` longer. A drawn filter's step grows as this ``power`` of its p.
    """
    everything, length = Cut.everything(), max(length, 1e-30)
    moved = {name: after[name] - before[name] for name in toward}
    along = unit_sums({name: value * toward[name] for name, value in moved.items()}, everything, model)
    squares = unit_sums({name: value * value for name, value in moved.items()}, everything, model)
    draws = np.append(probabilities * steps, steps)  # that are expected; all other numbers move in every step
    slope = expected_slope(probabilities, along / draws, squares / draws, power) / length
    size = float(squares.sum()) ** 0.5
    return slope, float(along.sum()) / (length * size) if size > 0 else 0.0
