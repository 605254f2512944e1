"""The examples of clients that step together, as one batch of batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedtailor.client.training import augmenting
from fedtailor.data.batches import Batch, Examples, map_tensors, values_of
from fedtailor.messages import Task


class Table:
    """The examples of all clients of a flock."""

    def __init__(self, tasks: Sequence[Task], data: Sequence[Examples]) -> None:
        self.data = data
        self.as_one = all(own.lies_with(data[0]) for own in data)
        self.augment = [augmenting(task, own) for task, own in zip(tasks, data, strict=True)]

    def batch(self, those: Mapping[int, Tensor], place: Batch | None = None) -> Batch:
        """Their batches of one size, (clients, examples, ...); gathered at a place, where that can be done."""
        if self.as_one:  # one gathering for all of them
            all_rows = torch.cat(list(those.values()))
            flat = None if place is None else map_tensors(place, lambda each: each.view(-1, *each.shape[2:]))
            if flat is not None and place is not None and self.data[0].fits(flat):
                self.data[0].at(all_rows, place=flat)
                return place
            return map_tensors(
                self.data[0].at(all_rows), lambda column: column.unflatten(0, (len(those), -1))
            )
        return stacked([self.data[n].at(rows, generator=self.augment[n]) for n, rows in those.items()])


def stacked(parts: Sequence[Batch]) -> Batch:
    """Batches of one size, (clients, examples, ...)."""
    columns = [torch.stack(column) for column in zip(*map(values_of, parts), strict=True)]
    first = parts[0]
    return dict(zip(first, columns, strict=True)) if isinstance(first, dict) else tuple(columns)
