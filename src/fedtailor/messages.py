"""The messages of one round: what the server sends, what a client returns, and what the server remembers."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.seeds import Seeds

Action = str  # train, calibrate, evaluate, validate; or a method's own
Measure = Literal["evaluate", "validate"]  # score networks: on test examples, or on those that choose
Metrics = Mapping[str, float]
T = TypeVar("T")

MEMORY_TIMES, LEAST_MEMORY = (
    16,
    2**20,
)  # what a client may keep: times what it was sent, and bytes at any rate


@dataclass(frozen=True)
class Client:
    """A device as the server knows it in one round; tier and budget may change from round to round."""

    id: int
    tier: str
    budget: Budget
    num_examples: int
    slot: int = 0  # position in this round's cohort

    def in_slot(self, slot: int) -> Client:
        """The same in another place of the cohort; without ``replace``, as with ``Lease.with_nonce``."""
        return Client(self.id, self.tier, self.budget, self.num_examples, slot)


@dataclass(frozen=True)
class Lease:
    """What the answer to a task must look like. Anything else is refused before it reaches arithmetic."""

    names: frozenset[str]  # the tensors that come back
    cut: Cut  # their address
    partial: frozenset[str] = frozenset()  # groups of which the client may credit fewer units (label rows)
    most_metrics: int = 100  # how many metrics may come along
    memory: int = 0  # bytes that the client may keep for itself; 0: some times what it was sent
    nonce: str = ""  # known to the one who was asked alone: an answer without it is somebody else's

    def most_memory(self, sent: Patch) -> int:
        """How many bytes a client that was sent this may keep."""
        return self.memory or max(LEAST_MEMORY, MEMORY_TIMES * sent.nbytes)

    def with_nonce(self, nonce: str) -> Lease:
        """The same for one who is known by this mark; ``replace`` takes four times as long, and all are marked."""
        return Lease(self.names, self.cut, self.partial, self.most_metrics, self.memory, nonce)


@dataclass(frozen=True)
class Task:
    """Server to client: do this, with this piece of the model."""

    client: Client
    round: int
    patch: Patch
    lease: Lease
    seeds: Seeds
    action: Action = "train"
    memory: dict[str, Tensor] = field(default_factory=dict)  # what the client kept for itself
    memory_round: int = -1  # the round in which it kept it
    levels: Levels | None = None  # the map of its masks, where it has not been sent to this client before
    prepared: dict[str, Any] = field(
        default_factory=dict
    )  # what the client worked out for this round; never kept or sent

    @property
    def nbytes(self) -> int:
        """Bytes that travel to the client, without the header."""
        return self.patch.nbytes + (0 if self.levels is None else self.levels.nbytes)


def marked(task: Task) -> Task:
    """The task with a mark of its own, which nobody can guess. It decides about no result, so it is no ``Seeds``."""
    return Task(
        task.client, task.round, task.patch, task.lease.with_nonce(secrets.token_hex(8)), task.seeds, task.action,
        task.memory, task.memory_round, task.levels, task.prepared,
    )  # fmt: skip


@dataclass(frozen=True)
class Update:
    """Client to server: the piece after the work, and how much it counts."""

    client: int
    round: int
    base_round: int  # the round of the weights that the work started from
    patch: Patch
    weight: float  # the number of examples (or batches) behind the values
    metrics: dict[str, float] = field(default_factory=dict)
    memory: dict[str, Tensor] = field(default_factory=dict)
    nonce: str = ""  # of the lease that it answers

    def marked(self, nonce: str) -> Update:
        """The same with the mark of a lease."""
        return Update(
            self.client,
            self.round,
            self.base_round,
            self.patch,
            self.weight,
            self.metrics,
            self.memory,
            nonce,
        )


@dataclass(frozen=True)
class Refused:
    """A client whose answer cannot be used, and why: a value, not an exception, because the round goes on."""

    client: int
    round: int
    reason: str  # a short code: ``diverged``, ``non-finite``, ``wrong-shape`` ...
    detail: str = ""
    trace: str = ""  # where the client's own code raised an exception; never leaves the machine


@dataclass(frozen=True)
class ServerState:
    """Everything that is carried from round to round; ``memory`` is the method's own."""

    round: int
    weights: dict[str, Tensor]
    memory: dict[str, Any] = field(default_factory=dict)
    moments: dict[str, Any] = field(default_factory=dict)  # what the server's optimiser and its average keep
    _made: dict[Hashable, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    def once(self, maker: object, key: Hashable, make: Callable[[], T]) -> T:
        """What somebody makes of this state for many clients alike, made for the first; a new state begins anew."""
        place = (id(maker), key)
        if place not in self._made:
            self._made[place] = maker, make()  # who is kept has its id for itself
        made: T = self._made[place][1]
        return made

    def forget(self) -> None:
        """Let go of what was made: the round that needed it is over, though its state may be kept."""
        self._made.clear()


@dataclass(frozen=True, order=True)
class Flight:
    """A client under way, in simulated time: it was sent a piece of the model of round ``base``."""

    ends: float
    client: int
    tier: str
    base: int
    began: float
    late: bool = False  # it ends at the deadline, with nothing


@dataclass(frozen=True)
class UnderWay:
    """What simulated time hands from round to round: the time, who is under way, and the models these were sent."""

    now: float = 0.0
    flights: tuple[Flight, ...] = ()
    bases: Mapping[int, ServerState] = field(default_factory=dict)  # by round


@dataclass(frozen=True)
class Deployed:
    """What a device is given in the end: one piece of the model, or several whose outputs are averaged."""

    patches: tuple[Patch, ...]

    @property
    def cut(self) -> Cut:
        """The address of the first piece."""
        return self.patches[0].cut


# What a client keeps for itself lies with the server in a simulation, and on the client's own disk in a real fleet; the
# server then has the version alone.
_VERSION = "kept elsewhere"
_STAGES = ("train", "calibrate")


def kept_elsewhere(round: int, action: Action) -> dict[str, Tensor]:
    """In the place of a memory: in which round and for what it was kept."""
    stage = _STAGES.index(action) if action in _STAGES else 0
    return {_VERSION: torch.tensor([round, stage], dtype=torch.int64)}


def version_of(memory: Mapping[str, Tensor]) -> tuple[int, str] | None:
    """The round and the stage of a memory that is kept elsewhere; nothing of any other."""
    if _VERSION not in memory:
        return None
    round, stage = memory[_VERSION].tolist()
    return round, _STAGES[stage]
