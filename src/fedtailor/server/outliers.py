"""Updates that no honest training makes: finite, of the right shape, and many orders of magnitude too large.

An update is refused when it lies far beyond both what was sent to the client and what the other clients of the round
sent back. Either alone would refuse honest clients: a model that starts at zero moves by more than its own size, and a
client with much data by more than most. Sizes are root mean squares, so that narrow and wide pieces compare.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Refused, Task, Update

BEYOND_OTHERS = 100.0  # times the median of the round's other clients
BEYOND_SENT = 3.0  # times what was sent


@dataclass(frozen=True)
class Sizes:
    """How far an update is from what was sent, against how large that was."""

    step: float
    sent: float


def refuse_outliers(
    tasks: Mapping[int, Task], updates: Sequence[Update], model: ElasticModel
) -> tuple[list[Update], list[Refused]]:
    """The updates that stay, in their order, and those that are absurdly large.

    The largest is compared first, and with a refused one gone the rest is judged as if it had never been there.
    """
    kept, refused = list(updates), []
    for reason, suffixes in (("absurd-step", ()), ("absurd-statistics", (".running_mean", ".running_var"))):
        sizes = {u.client: _sizes(tasks[u.client], u, model, suffixes) for u in kept} if len(kept) > 1 else {}
        while (client := _outlier(sizes)) is not None:
            del sizes[client]
            kept = [update for update in kept if update.client != client]
            refused.append(Refused(client, tasks[client].round, reason, "far beyond all others"))
    return kept, refused


def _outlier(sizes: Mapping[int, Sizes]) -> int | None:
    """The client with the largest step, if that is absurd."""
    if len(sizes) < 2:
        return None
    client = max(sizes, key=lambda each: (sizes[each].step, each))
    others = statistics.median(size.step for each, size in sizes.items() if each != client)
    largest = sizes[client]
    absurd = largest.step > BEYOND_OTHERS * others and largest.step > BEYOND_SENT * largest.sent
    return client if absurd else None


def _sizes(task: Task, update: Update, model: ElasticModel, suffixes: tuple[str, ...]) -> Sizes:
    """Of the trained tensors, or of those statistics whose names end so."""
    own = {name: plain(name) for name in update.patch.values}
    chosen = [n for n, p in own.items() if (p.endswith(suffixes) if suffixes else p in model.trainable)]
    if not chosen:
        return Sizes(0.0, 0.0)
    sent = dict(task.patch.values)
    if update.patch.cut != task.patch.cut:
        sent.update(model.narrow(task.patch, update.patch.cut).values)
    before = [sent.get(name) for name in chosen]
    after = [update.patch.values[name] for name in chosen]
    steps = (new if old is None else new - old for new, old in zip(after, before, strict=True))
    count = max(1, sum(value.numel() for value in after))
    return Sizes(
        _root(steps) / math.sqrt(count), _root(old for old in before if old is not None) / math.sqrt(count)
    )


def _root(tensors: Iterable[Tensor]) -> float:
    """The root of the sum of all squares; infinite where float32 ends, which is large enough to compare."""
    return math.hypot(*(float(torch.linalg.vector_norm(value.float())) for value in tensors))
