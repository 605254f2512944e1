"""Patches and maps of levels as frames of the wire format: what one machine sends another.

A patch is read against its lease: the server knows the whole header in advance, so the length of the frame too, and
nothing is allocated before both are right. Of a patch with a mask the surviving values alone travel; the header names
the mask by the digest of its map of levels, a frame of its own that is sent once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut, Units
from fedtailor.elasticity.cutting.encoding import cut_value, units_from
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import Lease
from fedtailor.storage.wire import (
    Buffer,
    DecodeError,
    Slot,
    check_length,
    head_of,
    header_of,
    raw,
    structure_of,
    tensors_of,
    value_of,
)


@dataclass(frozen=True)
class LeasedFrame:
    """What the answer to a task must look like, down to the byte. Worth keeping for tasks of the same cut."""

    lease: Lease
    model: ElasticModel
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # of tensors that no cut sizes

    @cached_property
    def full(self) -> tuple[bytes, dict[str, Slot]]:
        """Head and tensors of the answer that holds everything that was leased."""
        return self.frame_at(self.lease.cut)

    def frame_at(self, cut: Cut) -> tuple[bytes, dict[str, Slot]]:
        """Head and tensors of an answer at a cut inside the leased one."""
        slots = {name: self._slot(name, cut) for name in sorted(self.lease.names)}
        return _patch_head(slots, cut), slots

    def _slot(self, name: str, cut: Cut) -> Slot:
        own = plain(name)
        shape = self.shapes[name] if name in self.shapes else self.model.shape(own, cut)
        return Slot(self.model.dtype(own), shape)

    @cached_property
    def limit(self) -> int:
        """The most bytes that an answer may have; exactly so many where nothing is partial."""
        head, slots = self.full
        return len(head) + self.slack + sum(slot.nbytes for slot in slots.values())

    @cached_property
    def slack(self) -> int:
        """How much longer the head may become when a partial group lists its units."""
        counts = self.model.groups.counts
        return sum(
            16 + 7 * len(group) + (len(str(counts[group])) + 1) * counts[group]
            for group in self.lease.partial
        )


def encode_patch(patch: Patch) -> list[Buffer]:
    """The frame of a patch, in pieces."""
    values = {name: patch.values[name].detach().cpu() for name in sorted(patch.values)}
    slots = {name: Slot(value.dtype, tuple(value.shape)) for name, value in values.items()}
    return [_patch_head(slots, patch.cut), *map(raw, values.values())]


def decode_patch(data: Buffer, leased: LeasedFrame) -> Patch:
    """The patch of a frame that is exactly what the lease allows; sizes are known before anything is allocated."""
    view = memoryview(data).cast("B")
    if len(view) > leased.limit:
        raise DecodeError(f"{len(view)} bytes instead of at most {leased.limit}")
    cut, (head, slots) = leased.lease.cut, leased.full
    if leased.lease.partial:
        cut = _stated_cut(view, leased)
        head, slots = leased.frame_at(cut)
    if view[: len(head)] != head:
        raise DecodeError("the header is not the one that was leased")
    check_length(view, len(head), list(slots.values()))
    return Patch(dict(zip(slots, tensors_of(view, len(head), list(slots.values())), strict=True)), cut)


def _stated_cut(view: memoryview, leased: LeasedFrame) -> Cut:
    """The leased cut with those units of its partial groups that the header names; the rest of it is not looked at."""
    header, _ = header_of(view, len(leased.full[0]) + leased.slack)
    value = value_of(header["value"], enumerate(_placeholders()), torch.device("cpu"), 0)
    stated = value.get("cut") if isinstance(value, dict) else None
    channels = stated.get("channels") if isinstance(stated, dict) else None
    if not isinstance(channels, dict):
        raise DecodeError("the header names no cut")
    kept: dict[str, Units] = dict(leased.lease.cut.channels)
    try:
        for group in leased.lease.partial & channels.keys():
            kept[group] = units_from(channels[group], leased.model.groups.counts[group])
        cut = leased.lease.cut.with_channels(leased.model.groups, kept)
    except FedtailorError as error:
        raise DecodeError(f"the header names no cut of this model: {error}") from None
    if not leased.lease.cut.holds(cut):
        raise DecodeError("the header names coordinates that were not leased")
    return cut


def _placeholders() -> Iterator[Tensor]:
    while True:
        yield torch.empty(0)


def _patch_head(slots: Mapping[str, Slot], cut: Cut) -> bytes:
    # A map that leaves nothing out need not travel, so the mask is not named either.
    address = structure_of(cut_value(cut if cut.sparse is not None else cut.unmasked), "cut", [], 0)
    values = [[name, {"tensor": number}] for number, name in enumerate(slots)]
    return head_of(list(slots.values()), {"dict": [["cut", address], ["values", {"dict": values}]]})


def encode_levels(levels: Levels) -> list[Buffer]:
    """The frame of a map of levels, in pieces."""
    maps = {name: levels.maps[name].cpu() for name in sorted(levels.maps)}
    return [_levels_head({name: tuple(each.shape) for name, each in maps.items()}), *map(raw, maps.values())]


def decode_levels(data: Buffer, names: Collection[str], model: ElasticModel) -> Levels:
    """The map of a frame for these tensors of a model, from which its size is known before anything is allocated."""
    shapes = {name: model.shape(name, Cut.everything()) for name in sorted(names)}
    head, view, slots = _levels_head(shapes), memoryview(data).cast("B"), _level_slots(shapes)
    if view[: len(head)] != head:
        raise DecodeError("the header is not that of a map of levels of these tensors")
    check_length(view, len(head), slots)
    return Levels(dict(zip(shapes, tensors_of(view, len(head), slots), strict=True)))


def _levels_head(shapes: Mapping[str, tuple[int, ...]]) -> bytes:
    values = [[name, {"tensor": number}] for number, name in enumerate(shapes)]
    return head_of(_level_slots(shapes), {"dict": [["levels", {"dict": values}]]})


def _level_slots(shapes: Mapping[str, tuple[int, ...]]) -> list[Slot]:
    return [Slot(torch.uint8, shape) for shape in shapes.values()]
