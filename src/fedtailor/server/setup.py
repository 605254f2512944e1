"""A run as a value: everything that decides what its rounds do, built once and then only read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.grid import Grid
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError, require
from fedtailor.fleet import Fleet, Population
from fedtailor.fleet.roster import Roster
from fedtailor.method import Method
from fedtailor.privacy.guard import Guard
from fedtailor.privacy.ledger import Ledger, seeded_key
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.privacy.terms import Terms
from fedtailor.secure.aggregation import Aggregation, Parties
from fedtailor.secure.settings import SecureSettings
from fedtailor.secure.together import Together
from fedtailor.seeds import Seeds
from fedtailor.server.schedule import Work
from fedtailor.server.stopping import Stopping
from fedtailor.storage.checkpoint import Checkpoint, settle


@dataclass(frozen=True)
class NormSettings:
    """How many clients are asked to measure, where norm statistics are measured on clients' data."""

    calibration_clients: int = 100
    """Clients that measure the norm statistics of a width after training; 0: all that can run it."""
    evaluation_clients: int = 100
    """Clients of each tier that evaluate their own networks, where they keep statistics to themselves; 0: all."""

    def __post_init__(self) -> None:
        for name in ("calibration_clients", "evaluation_clients"):
            require(getattr(self, name) >= 0, f"norm.{name}", getattr(self, name), "at least 0")


@dataclass(frozen=True)
class AsynchronousSettings:
    """Merging that waits for nobody, in simulated time: fleet.devices says how long each client takes."""

    buffer: int = 0
    """Answers that make a new model; 0: rounds, in which all wait for the last."""
    concurrency: int = 0
    """Clients that train at any time; 0: clients_per_round."""
    staleness: float = 0.5
    """The exponent a of (1 + t)^-a, by which a difference counts that is t models old; 0: all alike."""
    most_staleness: int = 20
    """An answer to an older model than this is refused."""

    def __post_init__(self) -> None:
        require(self.buffer >= 0, "asynchronous.buffer", self.buffer, "at least 0")
        require(self.concurrency >= 0, "asynchronous.concurrency", self.concurrency, "at least 0")
        fine = 0 <= self.staleness < float("inf")
        require(fine, "asynchronous.staleness", self.staleness, "at least 0")
        require(self.most_staleness >= 0, "asynchronous.most_staleness", self.most_staleness, "at least 0")


@dataclass(frozen=True)
class RoundSettings:
    """How long a run is and how many clients take part."""

    rounds: int = 20
    clients_per_round: int = 10
    evaluate_every: int | Literal["auto"] = "auto"  # rounds; the last round is always evaluated
    stopping: Stopping = field(default_factory=Stopping)
    engine: EngineSettings = field(default_factory=EngineSettings)
    norm: NormSettings = field(default_factory=NormSettings)
    asynchronous: AsynchronousSettings = field(default_factory=AsynchronousSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    secure: SecureSettings = field(default_factory=SecureSettings)

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")
        require(self.clients_per_round >= 1, "clients_per_round", self.clients_per_round, "at least 1")
        every = self.evaluate_every
        fine = every == "auto" or (isinstance(every, int) and every >= 1)
        require(fine, "evaluate_every", every, "auto, or at least 1")

    @property
    def concurrency(self) -> int:
        """How many clients train at any time, where nobody waits for the others."""
        return self.asynchronous.concurrency or self.clients_per_round

    def evaluates(self, round: int) -> bool:
        """Whether every tier is evaluated after this round; ``auto`` alone, before a setup settles it, at the end."""
        every = self.rounds if self.evaluate_every == "auto" else self.evaluate_every
        return round % every == 0 or round == self.rounds


@dataclass(frozen=True)
class Chosen:
    """What ``auto`` took."""

    method: Mapping[str, Any]  # as [method] of a config
    why: str  # in a sentence


@dataclass(frozen=True)
class Setup:
    """Who trains what, on which data, how long; ``start`` is the state before the first round."""

    method: Method
    model: ElasticModel
    data: FederatedData
    fleet: Fleet
    settings: RoundSettings
    seeds: Seeds
    start: Checkpoint
    roster: Roster | None = None  # who is there, where clients come and go
    audited: bool = False  # whether records hold what a signed log needs
    guard: Guard | None = None  # of private runs, from their start on
    masks: Aggregation | None = None  # of runs whose updates are summed under masks, the same
    chosen: Chosen | None = None  # of runs whose method was ``auto``
    aligned: Grid | None = None  # of runs whose ``align`` was

    @classmethod
    def of(
        cls,
        method: Method,
        model: ElasticModel,
        data: FederatedData,
        fleet: Fleet,
        settings: RoundSettings,
        seeds: Seeds,
    ) -> Setup:
        """A setup whose method makes its first state now, once for the whole run."""
        return cls(method, model, data, fleet, settings, seeds, Checkpoint(settle(method.init(model))))

    def settled(self) -> Setup:
        """The same, where it is known how often to evaluate."""
        settings = self.settings
        if settings.evaluate_every != "auto":
            return self
        every = self.work().rounds_between(settings.rounds)
        return replace(self, settings=replace(settings, evaluate_every=every))

    def work(self) -> Work:
        """What a round of training and an evaluation are estimated to cost."""
        state, count = self.start.state, self.settings.clients_per_round
        norm = self.settings.norm
        asked = norm.evaluation_clients if self.method.policy.kept_by_clients else norm.calibration_clients
        return Work.of(self.method, self.model, self.data, self.fleet, state, count, asked)

    def clients(self, round: int) -> Population:
        """All clients with the tiers and budgets that they have in this round."""
        if self.roster is not None:
            return self.roster.population(self.fleet, round, self.seeds)
        return self.fleet.capacity(self.data.sizes, round, self.seeds)

    @property
    def terms(self) -> Terms:
        """What a private run adds and pays."""
        names, counts = [tier.name for tier in self.fleet.tiers], self.fleet.counts(self.data.num_clients)
        settings = self.settings
        return Terms.of(settings.privacy, names, counts, settings.clients_per_round, settings.rounds)

    def guarded(self, folder: Path | None, released: int, parties: Parties | None = None) -> Setup:
        """The same with what [privacy] or [secure] puts before the merge; so many rounds were released before.

        ``parties`` are clients that hold their own secrets; without them this process plays all sides.
        """
        privacy, secure = self.settings.privacy, self.settings.secure
        if self.roster is not None and privacy.active:
            raise FedtailorError("[privacy]: on Flower clients come and go; expected a simulation")
        if secure.active:
            held = parties or Together(self.method, self.model)
            masks = Aggregation(self.method, self.model, self.fleet.tiers, secure, self.seeds, held)
            return replace(self, masks=masks)
        if not privacy.active:
            return self
        terms, key = self.terms, seeded_key(self.seeds.root) if privacy.seeded else b""
        ledger = Ledger(terms, privacy.epsilon, folder if privacy.hides else None, key)
        if privacy.hides:
            ledger.check_covers(released)
        return replace(
            self, guard=Guard(self.method, self.model, self.fleet.tiers, terms, ledger, self.seeds)
        )

    @property
    def between(self) -> Guard | Aggregation | None:
        """What stands between clients' answers and their merge, where they are not merged themselves."""
        return self.guard or self.masks

    @property
    def tells_later(self) -> bool:
        """Whether a round's record may be made while the next one trains, as that changes nothing in it.

        A method of the user's own may change its state in place when the next round begins.
        """
        own = type(self.method).__module__.startswith("fedtailor.")
        return own and self.between is None and not self.audited and not self.waits_for_nobody

    @property
    def waits_for_nobody(self) -> bool:
        """Whether answers are merged as they come, in simulated time."""
        return self.settings.asynchronous.buffer > 0

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.model.module.parameters())).device
