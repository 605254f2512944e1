"""The global trajectory as it travels: k numbers beside the weights, and the seed of the transform that made them."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.messages import ServerState, Task
from fedtailor.methods.flado.alignment import Trajectory, by_tensor, sketched, trained_names
from fedtailor.methods.flado.sketch import Transform

SKETCH, SEED = tagged("trajectory", "sketch"), tagged("trajectory", "seed")
PATH = "trajectory"  # what the server remembers of it


def remembering(
    after: ServerState, before: ServerState, rows: int, memory: float, model: ElasticModel
) -> ServerState:
    """The state with a sketch of where it has been going, by the transform whose seed is the round's number.

    That is a running mean of what rounds moved, of which ``memory`` stays when a new one comes in.
    """
    names = trained_names(model)
    moved = {name: after.weights[name] - before.weights[name] for name in names}
    if not any(bool(value.any()) for value in moved.values()):
        return after  # nobody answered: the last direction still stands
    seed, kept = before.round + 1, dict[str, Tensor]()
    if memory > 0:
        fresh = torch.cat([value.reshape(-1) for value in moved.values()])
        kept[PATH] = memory * before.memory[PATH] + (1 - memory) * fresh if PATH in before.memory else fresh
        moved = by_tensor(kept[PATH], after.weights, model)
    numbers = sum(value.numel() for value in moved.values())
    sketch = sketched(names, moved, min(rows, numbers), seed).sketch.float()
    return replace(after, memory={**after.memory, **kept, SKETCH: sketch, SEED: seed})


def with_trajectory(task: Task, state: ServerState) -> Task:
    """The task with the sketch of the last update and its seed, if there is one: only k numbers more."""
    if SKETCH not in state.memory:
        return task
    seed = torch.tensor(state.memory[SEED], dtype=torch.int64)
    values = {**task.patch.values, SKETCH: state.memory[SKETCH], SEED: seed}
    return replace(task, patch=Patch(values, task.patch.cut))


def trajectory_of(patch: Patch, model: ElasticModel) -> Trajectory:
    """The sketch that travelled with a patch, and its own transform."""
    size = sum(patch.values[name].numel() for name in trained_names(model))
    sketch = patch.values[SKETCH]
    return Trajectory(sketch, Transform(size, len(sketch), int(patch.values[SEED])))


def whole_update(trajectory: Trajectory, patch: Patch, model: ElasticModel) -> Weights:
    """What the sketch says of every number: the update, and noise that the next round's transform draws anew."""
    return by_tensor(trajectory.transform.adjoint(trajectory.sketch), patch.values, model)


def without_trajectory(patch: Patch) -> Patch:
    """The weights alone."""
    return Patch(
        {name: value for name, value in patch.values.items() if name not in (SKETCH, SEED)}, patch.cut
    )
