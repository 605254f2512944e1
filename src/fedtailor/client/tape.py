"""A step's forward and backward pass as it once ran, operation by operation, to be run again on other numbers.

In a network of a few thousand weights most of a step's time goes into layers' Python and into the graph that autograd
builds and takes apart. A tape has neither: its operations read and write the tensors of the step that was recorded,
which stay where they are; views of them are right without being taken again. It counts only if it leaves the bits that
a step leaves which nobody recorded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedtailor.data.batches import Batch, values_of

Operation = Callable[[], object]
Step = Callable[[Batch], Tensor]  # the loss, which knows what it came from
Recording = Callable[[Step, Batch], "Tape | None"]

LEAST_STEPS = 64  # that were taken before one is recorded, which takes as long as about fifty
MOST_TAPES = 4  # of a piece; clients with other numbers of examples have other last batches


@dataclass(frozen=True)
class Tape:
    """What runs, the batch that it runs on, and where it leaves the loss and the gradients."""

    operations: tuple[Operation, ...]
    batch: Batch
    loss: Tensor
    gradients: list[Tensor]

    @torch.no_grad()
    def run(self, batch: Batch) -> float:
        """Forward and backward pass on a batch of the same form, which may lie in the tape's own already."""
        if batch is not self.batch:
            for place, values in zip(values_of(self.batch), values_of(batch), strict=True):
                place.copy_(values)
        for operation in self.operations:
            operation()
        return self.loss.item()

    def takes(self, batch: Batch) -> bool:
        """Whether a batch has the form of the recorded one."""
        return batch is self.batch or _form(batch) == _form(self.batch)


class Tapes:
    """The tapes of a piece, by the number of examples in a batch: each is made once enough steps were taken."""

    def __init__(self, record: Recording, clients: int = 1) -> None:
        """``clients`` take one step together: it is worth that of so many."""
        self._record = record
        self._least = LEAST_STEPS // clients
        self._taken: Counter[int] = Counter()
        self.known: dict[int, Tape | None] = {}

    def place(self, examples: int) -> Batch | None:
        """Where a batch of so many examples may be gathered, so that it need not be copied."""
        tape = self.known.get(examples)
        return None if tape is None else tape.batch

    def of(self, examples: int, batch: Batch, step: Step) -> Tape | None:
        """What this step runs from, if from any."""
        if examples in self.known:
            tape = self.known[examples]
            return tape if tape is not None and tape.takes(batch) else None
        self._taken[examples] += 1
        if self._taken[examples] <= self._least or len(self.known) == MOST_TAPES:
            return None
        tape = self.known[examples] = self._record(step, batch)
        return tape


def _form(batch: Batch) -> tuple[list[str], list[tuple[torch.Size, torch.dtype]]]:
    names = list(batch) if isinstance(batch, dict) else []
    return names, [(column.shape, column.dtype) for column in values_of(batch)]
