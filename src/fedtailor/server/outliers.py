"""Updates that no honest training makes: finite, of the right shape, and many orders of magnitude too large.

An update is refused when it lies far beyond both what was sent to the client and what the other clients of the round
sent back. Either alone would refuse honest clients: a model that starts at zero moves by more than its own size, and a
client with much data by more than most. Sizes are root mean squares, so that narrow and wide pieces compare.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Refused, Task, Update

BEYOND_OTHERS = 100.0  # times the median of the round's other clients
BEYOND_SENT = 3.0  # times what was sent
JUDGED = {  # the reason of a refusal, and how the names of what is judged end; no ends: what is trained
    "absurd-step": (),
    "absurd-statistics": (".running_mean", ".running_var"),
}


@dataclass(frozen=True)
class Sizes:
    """How far an update is from what was sent, against how large that was."""

    step: float
    sent: float


@dataclass(frozen=True)
class Sent:
    """What clients of one piece were sent of the tensors that are judged, and how large that is."""

    names: frozenset[str]  # all that the answer has
    values: dict[str, Tensor | None]  # None: nothing of that name was sent
    shared: dict[str, Tensor]  # those of which something was
    row: Tensor | None  # the same, one behind the other, where that is all that comes back
    moved: (
        Tensor | None
    )  # where the difference to a row is put: memory that is asked for anew costs more than that
    parts: Sequence[Tensor]  # its tensors
    root: float
    count: float  # root of how many numbers that are


class Outliers:
    """Measures updates as they come, so that at the end of a round nothing is left but to compare."""

    def __init__(self, tasks: Mapping[int, Task], model: ElasticModel) -> None:
        self._tasks, self._model = tasks, model
        self._sizes: dict[str, dict[int, Sizes]] = {reason: {} for reason in JUDGED}
        self._known: dict[str, dict[tuple[int, int], Sent]] = {reason: {} for reason in JUDGED}

    def measure(self, update: Update) -> set[str]:
        """Note how large an update is; returns the tensors of which that says that all their numbers are finite."""
        sent, finite = self._tasks[update.client].patch, set[str]()
        for reason, suffixes in JUDGED.items():
            before = _before(sent, update.patch, self._model, suffixes, self._known[reason])
            size = self._sizes[reason][update.client] = _sizes(before, update.patch)
            if math.isfinite(size.step):
                finite.update(before.values)
        return finite

    def refuse(self, updates: Sequence[Update]) -> tuple[list[Update], list[Refused]]:
        """The updates that stay, in their order, and those that are absurdly large.

        The largest is compared first, and with a refused one gone the rest is judged as if it had never been there.
        """
        kept, refused = list(updates), []
        for reason, measured in self._sizes.items():
            sizes = {update.client: measured[update.client] for update in kept}
            while (client := _outlier(sizes)) is not None:
                del sizes[client]
                kept = [update for update in kept if update.client != client]
                refused.append(Refused(client, self._tasks[client].round, reason, "far beyond all others"))
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


def _before(
    sent: Patch,
    got: Patch,
    model: ElasticModel,
    suffixes: tuple[str, ...],
    known: dict[tuple[int, int], Sent],
) -> Sent:
    """What was sent of the trained tensors, or of statistics whose names end so; ``known``: by patch and cut."""
    place = (id(sent), id(got.cut))
    if place not in known or known[place].names != got.values.keys():
        known[place] = _sent(sent, got, model, suffixes)
    return known[place]


def _sizes(before: Sent, got: Patch) -> Sizes:
    if not before.values:
        return Sizes(0.0, 0.0)
    if got.row is not None and before.row is not None and got.row.shape == before.row.shape:
        torch.sub(got.row, before.row, out=before.moved)
        return Sizes(_root(before.parts) / before.count, before.root / before.count)
    new = [got.values[name] for name in before.shared]
    moved = torch._foreach_sub(new, list(before.shared.values())) if new else ()
    beside = (got.values[name] for name, old in before.values.items() if old is None)
    return Sizes(_root([*moved, *beside]) / before.count, before.root / before.count)


def _sent(sent: Patch, got: Patch, model: ElasticModel, suffixes: tuple[str, ...]) -> Sent:
    """What was sent of the tensors that are judged."""
    own = {name: plain(name) for name in got.values}
    chosen = [n for n, p in own.items() if (p.endswith(suffixes) if suffixes else p in model.trainable)]
    values = dict(sent.values)
    if chosen and got.cut != sent.cut:
        values.update(model.narrow(sent, got.cut).values)
    before = {name: values.get(name) for name in chosen}
    count = math.sqrt(max(1, sum(got.values[name].numel() for name in chosen)))
    shared = {name: old for name, old in before.items() if old is not None}
    whole = list(shared) == list(got.values) and len({value.dtype for value in shared.values()}) == 1
    row = (
        torch.cat([value.reshape(-1) for value in shared.values()]) if whole and got.row is not None else None
    )
    moved = None if row is None else torch.empty_like(row)
    parts = () if moved is None else moved.split([value.numel() for value in shared.values()])
    return Sent(frozenset(own), before, shared, row, moved, parts, _root(list(shared.values())), count)


def _root(tensors: Sequence[Tensor]) -> float:
    """The root of the sum of all squares; infinite where float32 ends, which is large enough to compare."""
    norms = torch._foreach_norm([value.float() for value in tensors]) if tensors else ()
    return math.hypot(*[norm.item() for norm in norms])
