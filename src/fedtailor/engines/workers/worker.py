"""A worker process: it builds the model once, then does one task after the other until its parent is gone.

    parent → worker    number of the job | mailbox | bytes of its tensors | bytes of the rest      both in the mailbox
    worker → parent    kind | mailbox | where the answer starts | its bytes                        in the same mailbox

Only these four numbers go through the socket, so neither side ever waits for the other to read. A worker has two
mailboxes: in one lies the job that it is at, and then the answer; in the other the next job may wait.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from fedtailor.client.evaluate import batch_scores
from fedtailor.data.batches import Batch, Examples
from fedtailor.data.federated import Measured, Parts
from fedtailor.data.partitions import Partition
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.tracing.rewrite import SizedGraph
from fedtailor.engines.protocol import Answer, answers_to, is_exhaustion
from fedtailor.engines.values import Tensors, Value, evaluation_of
from fedtailor.engines.workers.jobs import answers_value, tasks_of
from fedtailor.engines.workers.luggage import unpack
from fedtailor.engines.workers.shared_memory import LINE, SharedMemory, aligned
from fedtailor.errors import FedtailorError
from fedtailor.messages import Task
from fedtailor.method import Method
from fedtailor.objective import Objective
from fedtailor.steps import Stopwatch, measured_by
from fedtailor.storage.wire import decode, encode

SIGNAL = struct.Struct("<QQQQ")
READY, ANSWER, FAILED = range(3)
MAILBOXES = 2  # of a worker
START = LINE  # of the first message in a mailbox; what the line before it is for in the first mailbox, see lifeline
WITHDRAWN = slice(8, 16)  # ... and there: the number of a job that waited and is not to be done any more

Machine = dict[str, Any]


def machine_settings() -> Machine:
    """What PyTorch is told once per process and what changes the bits of a result."""
    return {
        "threads": torch.get_num_threads(),
        "default_dtype": torch.get_default_dtype(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
    }


def apply_settings(settings: Machine) -> None:
    """Make this process compute as the one that the settings are from."""
    torch.set_num_threads(settings["threads"])
    torch.set_num_interop_threads(1)
    torch.set_default_dtype(settings["default_dtype"])
    if settings["deterministic"]:
        # A process begins without, and to say so loads PyTorch's compiler: a second or more.
        torch.use_deterministic_algorithms(True, warn_only=settings["warn_only"])
    torch.set_float32_matmul_precision(settings["matmul_precision"])
    torch.backends.mkldnn.enabled = settings["mkldnn"]


@dataclass(frozen=True)
class Workshop:
    """All that a job needs, except for the job itself."""

    method: Method
    model: ElasticModel
    clients: Parts
    measured: Measured  # what is scored on

    def do(self, rest: Value, tensors: Tensors) -> Value:
        """What a job asks for."""
        if "batches" in rest:
            deployed, batches = evaluation_of(rest, tensors)
            scores = batch_scores(self.model, deployed, self.measured[rest["action"]][1], batches)
            return {"scores": [[[count, values] for count, values in each] for each in scores]}
        tasks = tasks_of(rest, tensors[0])
        flocks = [tasks] if rest["together"] else [[task] for task in tasks]
        return answers_value([answer for flock in flocks for answer in self._answers(flock)])

    def _answers(self, flock: list[Task]) -> list[Answer]:
        data = [self.clients.examples_for(task.client.id, task.action, self.measured) for task in flock]
        return answers_to(flock, self.method, data, self.model, exhaustible=True)


Own = tuple[Examples, torch.Tensor, torch.Tensor]  # examples, and their partition: order, offsets


@dataclass(frozen=True)
class Luggage:
    """What a worker is sent when it starts, the same for all workers.

    The model was traced in the parent, and its groups are plain data. Arrays travel as tensors, which lie in shared
    memory.
    """

    method: Method
    module: torch.nn.Module
    groups: ChannelGroups
    network: SizedGraph | None
    example: Batch
    objective: Objective
    examples: Examples
    test: Examples
    partition: tuple[torch.Tensor, torch.Tensor]  # of the examples over the clients: order, offsets
    tests: Own | None  # the clients' own
    validation: Own | None  # what they keep back to choose by
    machine: Machine

    @property
    def parts(self) -> dict[str, Any]:
        """Each part by its name: what cannot travel is refused by it."""
        return dict(vars(self))

    def workshop(self) -> Workshop:
        """Build the model, and give every client its examples."""
        model = ElasticModel(self.module, self.groups, self.example, self.objective, network=self.network)
        own = None if self.tests is None else _parts(*self.tests)
        measured: dict[str, tuple[Parts | None, Examples]] = {"evaluate": (own, self.test)}
        if self.validation is not None:
            kept = _parts(*self.validation)
            measured["validate"] = kept, kept.whole
        return Workshop(self.method, model, _parts(self.examples, *self.partition), measured)


def _parts(examples: Examples, order: torch.Tensor, offsets: torch.Tensor) -> Parts:
    return Parts(examples, Partition(order.numpy(), offsets.numpy()))


class Desk:
    """Where a worker gets its tasks and puts its answers."""

    def __init__(self, line: socket.socket, mailboxes: Sequence[SharedMemory]) -> None:
        self._line, self._mailboxes = line, mailboxes
        self._at, self._free = 0, START  # in which mailbox the next answer goes where

    def next_job(self) -> tuple[int, Value, Tensors] | None:
        """The number of the next job, what is to be done, and with which tensors; None when the parent has hung up."""
        received = b""
        while len(received) < SIGNAL.size:
            more = self._line.recv(SIGNAL.size - len(received))
            if not more:
                return None
            received += more
        number, self._at, tensor_bytes, rest_bytes = SIGNAL.unpack(received)
        rest = aligned(START + tensor_bytes)
        self._free = aligned(rest + rest_bytes)
        if number == int.from_bytes(self._mailboxes[0].view(1)[WITHDRAWN], "little"):
            self.put(ANSWER, [number, None, {}])
            return self.next_job()
        with self._mailboxes[self._at].view(self._free) as view:
            tensors = decode(view[START : START + tensor_bytes])
            return number, decode(view[rest : rest + rest_bytes]), tensors

    def put(self, kind: int, value: Any) -> None:
        """Leave a value for the parent."""
        end = self._mailboxes[self._at].write(self._free, encode(value))
        self._line.sendall(SIGNAL.pack(kind, self._at, self._free, end - self._free))


def work_in_batches() -> None:
    """Tell the system that this process computes and answers no people.

    When it is woken it does not push its parent aside then, who has the others' next jobs to hand out: that is a tenth
    to a seventh of a round of tiny clients. Its share of the processor stays the same.
    """
    with suppress(OSError, AttributeError):  # not permitted, or a system without such a thing
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def report_failure(
    desk: Desk, kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Tell the parent why this process ends: a mistake in the user's code is shown there, as without workers.

    A lack of memory is the machine's mistake: to the parent that is a worker that died.
    """
    if issubclass(kind, FedtailorError):
        desk.put(FAILED, str(error))
    elif issubclass(kind, Exception) and not issubclass(kind, ConnectionError) and not is_exhaustion(error):
        desk.put(FAILED, "".join(traceback.format_exception(kind, error, trace)).strip())


def main(mailboxes: Sequence[int], line: int, luggage: int) -> None:
    """The life of a worker, from the descriptors that it has inherited."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    desk = Desk(socket.socket(fileno=line), [SharedMemory(descriptor=each) for each in mailboxes])
    sys.excepthook = lambda kind, error, trace: report_failure(desk, kind, error, trace)
    unpacked = Luggage(**unpack(SharedMemory(descriptor=luggage)))
    apply_settings(unpacked.machine)
    workshop = unpacked.workshop()
    work_in_batches()
    desk.put(READY, None)
    watch = Stopwatch()
    with measured_by(watch):
        while (given := desk.next_job()) is not None:
            number, rest, tensors = given
            with watch.phase("evaluate" if "batches" in rest else "train"):
                done = workshop.do(rest, tensors)
            desk.put(ANSWER, [number, done, watch.lap()])
