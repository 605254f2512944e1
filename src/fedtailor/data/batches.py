"""What a batch is, and data sets as whole tensors: no object per example, floats only when used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.columns import MapStyleDataset, as_tensor, columns_of_dataset
from fedtailor.errors import FedtailorError

Batch = tuple[Tensor, ...] | dict[str, Tensor]
"""A tuple whose last entry is the target, or a dict that holds the target under one of ``TARGET_KEYS``."""

Preparation = Callable[[Batch, torch.Generator | None], Batch]
"""Turns stored columns into what the model sees; it may augment only when it is given a generator."""

TARGET_KEYS = ("target", "targets", "label", "labels", "y")


def target_key(batch: Mapping[str, Any]) -> str:
    """The key of a dict batch that holds the target."""
    found = [key for key in TARGET_KEYS if key in batch]
    if len(found) != 1:
        raise FedtailorError(
            f"batch keys {sorted(batch)}: expected exactly one of {', '.join(TARGET_KEYS)} as the target"
        )
    return found[0]


def target_of(batch: Batch) -> Tensor:
    """The labels of a batch.

    >>> target_of((torch.zeros(2, 3), torch.tensor([0, 1])))
    tensor([0, 1])
    """
    if isinstance(batch, dict):
        return batch[target_key(batch)]
    return batch[-1]


def inputs_of(batch: Batch) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Positional and keyword arguments for the module: everything but the target."""
    if isinstance(batch, dict):
        key = target_key(batch)
        return (), {name: value for name, value in batch.items() if name != key}
    return tuple(batch[:-1]), {}


def values_of(batch: Batch) -> Sequence[Tensor]:
    """The tensors of a batch, in their order."""
    return list(batch.values()) if isinstance(batch, dict) else batch


def batch_size(batch: Batch) -> int:
    """How many examples a batch holds."""
    return target_of(batch).shape[0]


def map_tensors(batch: Batch, function: Callable[[Tensor], Tensor]) -> Batch:
    """The batch with ``function`` applied to each of its tensors."""
    if isinstance(batch, dict):
        return {name: function(value) for name, value in batch.items()}
    return tuple(function(value) for value in batch)


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """A data set as whole tensors of equal length, one per input; the last (or target key) has the labels.

    ``indices`` picks rows of the columns, so that the parts of a million clients share one copy of the data.
    ``preparation`` runs on each batch that is taken: pixels rest as uint8 and become floats only there.

    >>> examples = Examples.of([[0.0], [1.0], [2.0]], [0, 1, 0])
    >>> examples.subset([2, 0]).take(torch.tensor([0]))
    (tensor([[2.]]), tensor([0]))
    >>> examples.subset([2, 0])
    2 examples: float32 (1), int64
    """

    columns: Batch
    indices: Tensor | None = None
    preparation: Preparation | None = None

    def __post_init__(self) -> None:
        values = values_of(self.columns)
        if len(values) < 2:
            raise FedtailorError(
                f"examples with {len(values)} column(s): expected at least an input and a target"
            )
        if any(value.dim() == 0 for value in values):
            raise FedtailorError(
                "examples with a column that is a single number: expected one entry per example"
            )
        lengths = {value.shape[0] for value in values}
        if len(lengths) != 1:
            raise FedtailorError(
                f"examples with columns of lengths {sorted(lengths)}: expected equal lengths"
            )
        if isinstance(self.columns, dict):
            target_key(self.columns)
        if self.indices is not None and (self.indices.dim() != 1 or self.indices.dtype != torch.int64):
            raise FedtailorError(
                f"indices of shape {tuple(self.indices.shape)} and type {self.indices.dtype}: "
                f"expected one axis of int64"
            )

    @classmethod
    def of(cls, *inputs_then_labels: object, preparation: Preparation | None = None) -> Examples:
        """Examples from tensors, arrays or lists, the labels last: ``Examples.of(x, y)``."""
        return cls(tuple(as_tensor(values) for values in inputs_then_labels), preparation=preparation)

    @classmethod
    def named(cls, columns: Mapping[str, object], preparation: Preparation | None = None) -> Examples:
        """Examples from named columns; the names of the inputs are the module's keyword arguments."""
        return cls({name: as_tensor(values) for name, values in columns.items()}, preparation=preparation)

    @classmethod
    def from_dataset(cls, dataset: MapStyleDataset, preparation: Preparation | None = None) -> Examples:
        """Examples from any map-style PyTorch data set, read once and kept as whole tensors.

        Random transforms of ``dataset`` are drawn once, here; augmentation that should change with every
        batch belongs in ``preparation``.
        """
        return cls(columns_of_dataset(dataset), preparation=preparation)

    def __len__(self) -> int:
        held = target_of(self.columns) if self.indices is None else self.indices
        return held.shape[0]

    def __repr__(self) -> str:
        columns = (
            self.columns.items() if isinstance(self.columns, dict) else ((None, x) for x in self.columns)
        )
        told = [f"{name} " * (name is not None) + _kind(value) for name, value in columns]
        return f"{len(self):,} examples: {', '.join(told)}{', prepared' if self.preparation else ''}"

    @property
    def raw(self) -> Batch:
        """The held examples as they rest, before any preparation: ``x, y = examples.raw``."""
        rows = self.indices
        return self.columns if rows is None else map_tensors(self.columns, lambda x: x.index_select(0, rows))

    @property
    def device(self) -> torch.device:
        """Where the columns are."""
        return target_of(self.columns).device

    @property
    def targets(self) -> Tensor:
        """The labels of the held examples; integer labels as int64, the type that losses want."""
        labels = target_of(self.columns)
        return _as_labels(labels if self.indices is None else labels.index_select(0, self.indices))

    def take(self, indices: Tensor, *, generator: torch.Generator | None = None) -> Batch:
        """The prepared batch at these positions among the held examples; a generator allows augmentation."""
        return self._prepared(self._rows(indices), generator)

    def runs(self, order: Tensor, size: int, *, skip_single: bool = False) -> Iterator[Tensor]:
        """One run of ``size`` positions after the other, as rows of the columns; a last run of one may be skipped."""
        for rows in self._rows(order).split(size):
            if not (skip_single and rows.shape[0] == 1):
                yield rows

    def at(
        self, rows: Tensor, *, generator: torch.Generator | None = None, place: Batch | None = None
    ) -> Batch:
        """The prepared batch of these rows of the columns; ``place``: tensors that ``fits`` has found fit to be it."""
        if place is None:
            return self._prepared(rows, generator)
        for column, where in zip(values_of(self.columns), values_of(place), strict=True):
            torch.index_select(column, 0, rows, out=where)
        return place

    def fits(self, batch: Batch) -> bool:
        """Whether batches are rows of the columns as they are, and of the form of these tensors."""
        own, others = values_of(self.columns), values_of(batch)
        return (
            self.preparation is None
            and len(own) == len(others)
            and all(
                a.dtype is b.dtype and a.shape[1:] == b.shape[1:] for a, b in zip(own, others, strict=True)
            )
        )

    def _rows(self, indices: Tensor) -> Tensor:
        """Where positions among the held examples lie in the columns."""
        rows = indices.to(self.device)
        return rows if self.indices is None else self.indices.index_select(0, rows)

    def lies_with(self, other: Examples) -> bool:
        """Whether rows of both are rows of the same columns, and nothing else is done to either."""
        return self.columns is other.columns and self.preparation is None and other.preparation is None

    def _prepared(self, rows: Tensor, generator: torch.Generator | None) -> Batch:
        batch: Batch
        if isinstance(self.columns, dict):
            batch = {name: column.index_select(0, rows) for name, column in self.columns.items()}
            batch[target_key(batch)] = _as_labels(target_of(batch))
        else:
            *inputs, labels = [column.index_select(0, rows) for column in self.columns]
            batch = (*inputs, _as_labels(labels))
        return batch if self.preparation is None else self.preparation(batch, generator)

    def subset(self, indices: Tensor | np.ndarray[Any, Any] | list[int]) -> Examples:
        """The examples at ``indices`` as a data set of their own; the columns are shared, not copied."""
        rows = as_tensor(indices).to(device=self.device, dtype=torch.int64)
        low, high = (each.item() for each in rows.aminmax()) if rows.numel() else (0, len(self) - 1)
        if not 0 <= low <= high < len(self):
            raise FedtailorError(f"indices {low} to {high}: expected 0 to {len(self) - 1}")
        rows = rows if self.indices is None else self.indices.index_select(0, rows)
        return Examples(self.columns, rows, self.preparation)

    def prepared_by(self, preparation: Preparation | None) -> Examples:
        """The same examples with another preparation."""
        return replace(self, preparation=preparation)

    def to(self, device: torch.device | str) -> Examples:
        """The same examples on another device; a preparation that holds tensors moves too."""
        preparation = self.preparation
        if preparation is not None and hasattr(preparation, "to"):
            preparation = preparation.to(device)
        return Examples(
            map_tensors(self.columns, lambda column: column.to(device)),
            None if self.indices is None else self.indices.to(device),
            preparation,
        )


def _kind(column: Tensor) -> str:
    shape = f" ({' x '.join(map(str, column.shape[1:]))})" if column.dim() > 1 else ""
    return f"{str(column.dtype).removeprefix('torch.')}{shape}"


def _as_labels(labels: Tensor) -> Tensor:
    return labels if labels.dtype is torch.int64 or labels.is_floating_point() else labels.long()
