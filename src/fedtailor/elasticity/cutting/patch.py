"""A patch: the values at a cut, and the index arithmetic that takes them out of tensors and puts them back."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import numpy as np
import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Survivors
from fedtailor.elasticity.groups import Extent, Indices

Index = slice | Tensor  # a prefix of an axis, or positions on it
Column = tuple[int, Sequence[int]]  # the number of a table, and the shape of a tensor in it
Where = tuple[Index, ...] | Survivors  # one index per axis of a tensor, or single weights of it

WHOLE = slice(None)


@dataclass(frozen=True)
class Patch:
    """A piece of the global model and its address.

    ``values`` holds whole small tensors of exactly the size of the cut. A tensor of the model that is not
    named here is not held (normalisation statistics, for instance, may stay at the server).
    """

    values: dict[str, Tensor]
    cut: Cut
    # The same numbers, one tensor behind the other, where they came as one row: what is done to all is one operation
    row: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    # The table that the row is in, and its number there
    table: Tensor | None = field(default=None, init=False, repr=False, compare=False)
    place: int = field(default=0, init=False, repr=False, compare=False)

    @classmethod
    def of_rows(cls, tables: Sequence[Tensor], columns: Mapping[str, Column], cut: Cut) -> list[Patch]:
        """A patch for each row of tables, one of each type of numbers; its tensors are views of the rows.

        >>> table = torch.arange(6.0).view(2, 3)
        >>> first, _ = Patch.of_rows([table], {"a": (0, [1]), "b": (0, [2, 1])}, Cut.everything())
        >>> first.values["b"].tolist(), first.row.tolist()
        ([[1.0], [2.0]], [0.0, 1.0, 2.0])
        """
        used, by_name = [0] * len(tables), {}
        for name, (number, shape) in columns.items():
            start = used[number]
            used[number] += math.prod(shape)
            by_name[name] = (
                tables[number][:, start : used[number]].view(len(tables[number]), *shape).unbind(0)
            )
        patches = [
            cls({name: values[place] for name, values in by_name.items()}, cut)
            for place in range(len(tables[0]))
        ]
        if len(tables) == 1:
            for place, (patch, row) in enumerate(zip(patches, tables[0].unbind(0), strict=True)):
                vars(patch).update(row=row, table=tables[0], place=place)
        return patches

    @classmethod
    def of_row(cls, values: Mapping[str, Tensor], cut: Cut) -> Patch:
        """A patch of copies of these tensors, all of one type, that lie one behind the other.

        >>> patch = Patch.of_row({"a": torch.tensor([0.0]), "b": torch.tensor([[1.0], [2.0]])}, Cut.everything())
        >>> patch.values["b"].tolist(), patch.row.tolist()
        ([[1.0], [2.0]], [0.0, 1.0, 2.0])
        """
        tensors = list(values.values())
        row = _flatten_dense_tensors(tensors)
        row = row.clone() if len(tensors) == 1 else row  # of one alone that is a view
        patch = cls(dict(zip(values, _unflatten_dense_tensors(row, tensors), strict=True)), cut)
        vars(patch).update(row=row)
        return patch

    @property
    def runs(self) -> list[tuple[int, int]]:
        """Where in a row each tensor starts and ends."""
        sizes = (value.numel() for value in self.values.values())
        return list(pairwise(accumulate(sizes, initial=0)))

    @property
    def nbytes(self) -> int:
        """Bytes of the values: what travels, without the header."""
        return sum(value.numel() * value.element_size() for value in self.values.values())


def kept_positions(extent: Extent, cut: Cut, counts: Mapping[str, int]) -> Indices | int:
    """The positions of one axis that a cut keeps; a number n stands for the prefix 0 .. n-1."""
    driven = [axis for axis in extent.axes if axis.group in cut.channels]
    if not driven:
        return extent.length
    first, units = driven[0], cut.channels[driven[0].group]
    if isinstance(units, range) and first.spans(extent.length, counts[first.group]):
        return len(units) * first.repeat  # a prefix, as nearly always
    keep = np.ones(extent.length, dtype=bool)
    for axis in driven:
        units = cut.channels[axis.group]
        keep[axis.positions(range(counts[axis.group]))] = False
        keep[axis.positions(units)] = True
    positions = np.flatnonzero(keep)
    return len(positions) if positions[-1] == len(positions) - 1 else positions


def where_of(extents: Sequence[Extent], cut: Cut, counts: Mapping[str, int]) -> tuple[Index, ...]:
    """The index of one tensor at a cut, axis by axis."""
    kept = (kept_positions(extent, cut, counts) for extent in extents)
    return tuple(_as_index(positions, extent.length) for positions, extent in zip(kept, extents, strict=True))


def where_inside(
    extents: Sequence[Extent], outer: Cut, inner: Cut, counts: Mapping[str, int]
) -> tuple[Index, ...]:
    """The index of ``inner`` inside a tensor that was already cut to ``outer``."""
    index: list[Index] = []
    for extent in extents:
        held, wanted = kept_positions(extent, outer, counts), kept_positions(extent, inner, counts)
        length = held if isinstance(held, int) else len(held)
        if isinstance(held, int):
            index.append(_as_index(wanted, length))
        else:
            positions = np.searchsorted(held, np.arange(wanted) if isinstance(wanted, int) else wanted)
            prefix = len(positions) == 0 or positions[-1] == len(positions) - 1
            index.append(_as_index(len(positions) if prefix else positions, length))
    return tuple(index)


def _as_index(positions: Indices | int, length: int) -> Index:
    if isinstance(positions, int):
        return WHOLE if positions == length else slice(0, positions)
    return torch.from_numpy(positions)


def is_whole(where: Where) -> bool:
    """Whether nothing of a tensor is left out."""
    return isinstance(where, tuple) and all(isinstance(index, slice) and index == WHOLE for index in where)


def is_prefix(where: Where) -> bool:
    """Whether no positions are listed: the part is a view."""
    return isinstance(where, tuple) and all(isinstance(index, slice) for index in where)


def gather(tensor: Tensor, where: Where) -> Tensor:
    """The part of ``tensor`` at ``where``, as a new tensor. Differentiable."""
    if isinstance(where, Survivors):
        return tensor.reshape(-1).index_select(0, where.positions.to(tensor.device))
    view = tensor[tuple(index if isinstance(index, slice) else WHOLE for index in where)]
    for dim, index in enumerate(where):
        if not isinstance(index, slice):
            view = view.index_select(dim, index.to(tensor.device))
    return view.clone() if view._is_view() or view is tensor else view


def prefix_shape(where: Where, full: Sequence[int]) -> tuple[int, ...]:
    """The shape of the part at ``where`` if it is a prefix; empty if positions are listed or all is kept."""
    if isinstance(where, Survivors):
        return ()
    stops = [index.stop if isinstance(index, slice) else -1 for index in where]
    if -1 in stops or all(stop is None for stop in stops):
        return ()
    return tuple(length if stop is None else stop for stop, length in zip(stops, full, strict=True))


def scatter_index(tensor: Tensor, where: Where) -> tuple[Tensor, tuple[Tensor, ...]]:
    """A view of ``tensor`` and an index into it that together address ``where`` for reading and writing.

    An empty index means the whole view.
    """
    if isinstance(where, Survivors):
        positions = where.positions.to(tensor.device)
        if tensor.is_contiguous():
            return tensor.view(-1), (positions,)
        return tensor, tuple(torch.unravel_index(positions, tensor.shape))
    view = tensor[tuple(index if isinstance(index, slice) else WHOLE for index in where)]
    listed = [dim for dim, index in enumerate(where) if not isinstance(index, slice)]
    if not listed:
        return view, ()
    mesh: list[Tensor] = []
    last = listed[-1]
    for dim in range(last + 1):  # an open mesh over the leading axes keeps them in their order
        index = where[dim]
        positions = torch.arange(view.shape[dim]) if isinstance(index, slice) else index
        mesh.append(positions.to(tensor.device).view([-1 if d == dim else 1 for d in range(last + 1)]))
    return view, tuple(mesh)


def scatter(tensor: Tensor, where: Where, values: Tensor) -> None:
    """Write ``values`` into ``tensor`` at ``where``."""
    view, mesh = scatter_index(tensor, where)
    if mesh:
        view[mesh] = values
    else:
        view.copy_(values)
