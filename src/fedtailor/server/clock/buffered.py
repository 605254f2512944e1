"""Buffered asynchronous merging (FedBuff): nobody waits for the slowest, every ``buffer`` answers make a new model.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022. ``concurrency`` clients train
at any time; who is done is followed by another, with the model of that moment. An answer that was trained on an older
model moves the present one by the same difference, coordinate by coordinate of its cut, less the older it is:

    w_i <- w_now + s(t) * (w_i - w_sent),   s(t) = (1 + t)^-a,   t merges ago;        then the method's own merge

An answer to the present model is left as it is, to the bit: with a buffer of all and no delay, this is the synchronous
run. Events at one moment: answers arrive, then the model is merged, then others are asked.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from fedtailor.elasticity.cutting.names import is_tagged, plain
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.protocol import Engine
from fedtailor.errors import FedtailorError
from fedtailor.fleet.devices.trips import Timetable
from fedtailor.messages import Client, Flight, Refused, ServerState, Task, UnderWay, Update, marked
from fedtailor.method import Method
from fedtailor.server import faults
from fedtailor.server.checking import check_answers
from fedtailor.server.clock.timetable import LATE, NOBODY_SECONDS, assigned, there, trip_of
from fedtailor.server.faults import Held, Try
from fedtailor.server.sampling import sample
from fedtailor.server.setup import Setup
from fedtailor.steps import in_phase
from fedtailor.storage.checkpoint import Checkpoint

STALE = "stale"


def check_buffered(method: Method) -> None:
    """Refuse a method whose updates cannot be moved to a newer model.

    Stricter than ``shared_merge``: what a method does in ``merge`` beyond the shared one (trajectories, stages, masks)
    speaks of one model that all clients were sent.
    """
    if not method.only_shared_merge:
        raise FedtailorError(
            f"asynchronous.buffer: {method.name} does more in its merge than the shared one, and that speaks of one "
            "model for all; set it to 0, or take a method without such, as heterofl or fjord"
        )


def fill_buffer(setup: Setup, at: Checkpoint, engine: Engine) -> Held:
    """Let clients come and go until enough have answered; a buffer without a quorum is filled again."""
    rules, clients = setup.settings.engine, setup.clients(at.state.round)
    sky, strikes = _Sky(setup, at, clients), dict(at.strikes)
    tries: list[Try] = []
    while len(tries) <= rules.retries:
        tried = sky.gather(engine, strikes)
        strikes = faults.with_strikes(strikes, [task.client for task in tried.tasks], tried.refused)
        tries.append(tried)
        if faults.enough(tried, setup.settings.asynchronous.buffer, rules):
            return Held(tries, strikes, clients, sky.under_way())
    count = setup.settings.asynchronous.buffer
    raise faults.give_up(at.state.round, tries, count, rules, setup.data.client_name)


class _Sky:
    """Who is under way, and the time."""

    def __init__(self, setup: Setup, at: Checkpoint, clients: Sequence[Client]) -> None:
        self.setup, self.at, self.clients = setup, at, clients
        self.state, self.settings = at.state, setup.settings.asynchronous
        self.now, self.flights = at.under_way.now, list(at.under_way.flights)
        self.bases: Mapping[int, ServerState] = {**at.under_way.bases, self.state.round: self.state}
        self.draws = 0
        self.asked = {each.client for each in self.flights if each.base == self.state.round}

    def gather(self, engine: Engine, strikes: Mapping[int, int]) -> Try:
        """The next answers, as many as the buffer holds, merged by nobody yet."""
        begun = self.now
        landed: list[Flight] = []
        while len(landed) < self.settings.buffer:
            self._start(strikes, {each.client for each in landed})
            if not self.flights:
                self.now += 0.0 if landed else NOBODY_SECONDS
                break
            self.now = min(each.ends for each in self.flights)
            arriving = sorted(each for each in self.flights if each.ends == self.now)
            arriving = arriving[: self.settings.buffer - len(landed)]
            landed += arriving
            self.flights = [each for each in self.flights if each not in arriving]
        landed.sort(key=lambda each: each.client)
        tasks = [marked(self._task(each)) for each in landed]
        refused = [
            Refused(each.client, each.base, reason) for each in landed if (reason := self._fault(each))
        ]
        bad = {each.client for each in refused}
        fine = [task for task in tasks if task.client.id not in bad]
        updates, wrong = check_answers(fine, in_phase("train", engine.run(fine)), self.setup.model)
        by_client = {task.client.id: task for task in tasks}
        moved = [self._moved(by_client[each.client], each) for each in updates]
        trips = {each.client: trip_of(self.setup, by_client[each.client], each.began) for each in landed}
        table = Timetable(trips, self.now - begun, frozenset(bad), together=False)
        return Try(
            tasks, moved, sorted([*wrong, *refused], key=lambda each: (each.client, each.reason)), table
        )

    def under_way(self) -> UnderWay:
        """What the next buffer begins with."""
        used = {each.base for each in self.flights}
        return UnderWay(
            self.now, tuple(self.flights), {n: base for n, base in self.bases.items() if n in used}
        )

    def _start(self, strikes: Mapping[int, int], landed: set[int]) -> None:
        """Ask others in the places of those who are done."""
        setup, round = self.setup, self.state.round
        places = setup.settings.concurrency - len(self.flights)
        busy = {each.client for each in self.flights} | landed | self.asked
        if places <= 0:
            return
        willing = setup.method.participants(self.state, self.clients, setup.model)
        without = faults.resting(strikes, setup.settings.engine) | busy
        chosen = sample(
            willing, places, round, setup.seeds, without=without, retry=self.draws,
            there=there(setup, round, self.now, self.draws),
        )  # fmt: skip
        self.draws += 1
        for client in chosen:
            task = self._with_memory(assigned(setup, self.state, client, self.now))
            seconds = trip_of(setup, task, self.now).seconds
            late = seconds > self._deadline
            ends = self.now + (self._deadline if late else seconds)
            self.flights.append(Flight(ends, client.id, task.client.tier, round, self.now, late))
            self.asked.add(client.id)

    @property
    def _deadline(self) -> float:
        assert self.setup.fleet.equipment is not None
        return self.setup.fleet.equipment.deadline

    def _task(self, flight: Flight) -> Task:
        """The task that a client was given when it began, cut again from the model of that moment."""
        setup, base = self.setup, self.bases[flight.base]
        client = setup.clients(flight.base).find(flight.client)
        if client.tier != flight.tier:  # it took a smaller piece
            tier = next(each for each in setup.fleet.tiers if each.name == flight.tier)
            client = replace(client, tier=tier.name, budget=tier.budget)
        return self._with_memory(setup.method.assign(base, client, setup.model, setup.seeds))

    def _with_memory(self, task: Task) -> Task:
        since, memory = self.at.memory_of(task.client.id)
        return replace(task, memory=memory, memory_round=since)

    def _fault(self, flight: Flight) -> str:
        if flight.late:
            return LATE
        return STALE if self.state.round - flight.base > self.settings.most_staleness else ""

    def _moved(self, task: Task, update: Update) -> Update:
        age = self.state.round - task.round
        if age == 0:
            return update
        scale = (1 + age) ** -self.settings.staleness
        values = moved(task.patch, update.patch, self.state.weights, self.setup.model, scale)
        return replace(update, patch=replace(update.patch, values=values))


def moved(
    sent: Patch, returned: Patch, now: Mapping[str, Tensor], model: ElasticModel, scale: float
) -> dict[str, Tensor]:
    """What came back, moved to the present model: its difference to what was sent, scaled, added to what is there now.

    Statistics of norms go a part of the way from what is there now to what was measured, so that no variance falls
    below zero; counts are taken as they are.
    """
    before = model.part(sent, returned.cut).values
    present = model.cut(now, returned.cut, frozenset(returned.values)).values
    present |= {name: now[name] for name in returned.values if is_tagged(name) and name in now}
    values = {}
    for name, value in returned.values.items():
        if not value.is_floating_point() or name not in present or name not in before:
            values[name] = value
            continue
        start = present[name] if plain(name) in model.statistics else before[name]
        values[name] = present[name] + scale * (value - start)
    return values
