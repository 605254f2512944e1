"""The one round loop, for every method and every engine.

round r → method.begin → the state to start from
        → fleet.capacity → method.participants → sample → clients with this round's budgets
client  → method.assign → Task
tasks   → engine.run → updates           (method.perform on the client; until the deadline)
updates → check_answers → a quorum?      (or abandon the round and ask others)
        → method.merge → state of round r + 1
every k rounds: calibrate → deploy(budget) per tier, or the clients' own networks → evaluation → method.observe
                (aside, while the next round trains, where nothing depends on it)
→ one record for people, and a checkpoint: all that the next round needs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Protocol

from fedtailor.elasticity.costing.fitting import check_honoured
from fedtailor.engines.protocol import Answer, Engine, HandingOut
from fedtailor.errors import FedtailorError
from fedtailor.merging.optimising import check_applied
from fedtailor.messages import Client, Refused, ServerState, Task, Update, marked
from fedtailor.record import Best, RoundRecord
from fedtailor.server import faults
from fedtailor.server.checking import check_answers
from fedtailor.server.clock.buffered import fill_buffer
from fedtailor.server.clock.timetable import NOBODY_SECONDS, assigned, there, timetable
from fedtailor.server.evaluation import Evaluation, LaterEvaluation, evaluate, evaluate_aside
from fedtailor.server.faults import Held, Timely, Try
from fedtailor.server.recording import evaluated, round_record
from fedtailor.server.sampling import sample
from fedtailor.server.setup import Setup
from fedtailor.server.stopping import Stopping
from fedtailor.steps import TRAINING, in_phase, phase, step
from fedtailor.storage.checkpoint import Checkpoint, settle

OnEnd = Callable[[RoundRecord, Checkpoint], None]


class Requests(Protocol):
    """Whether someone wants the run to stop after the round in which it is."""

    @property
    def asked_to_stop(self) -> bool:
        """Whether it is so."""

    def stop_if_asked(self, at: Checkpoint) -> None:
        """End the run by an exception, if it is."""


def run_rounds(
    setup: Setup,
    engine: Engine,
    on_end: OnEnd,
    at: Checkpoint | None = None,
    requests: Requests | None = None,
) -> Checkpoint:
    """Run the rounds that are left; ``on_end`` is told about each of them as it ends.

    A run that starts from a checkpoint of itself goes through the same rounds, bit for bit. A round that is evaluated
    while the next one trains ends with that one: rounds are always told in their order.
    """
    method, model, settings = setup.method, setup.model, setup.settings
    check_budgets(setup)
    at, late, ending = at or setup.start, None, Ending()
    timely = engine if isinstance(engine, Timely) else Timely(engine, settings.engine.deadline)
    while at.state.round < settings.rounds and not settings.stopping.reached(at.best):
        step(TRAINING)
        started = time.monotonic()
        try:
            at = replace(at, state=method.begin(at.state, model))
            held = _held(setup, at, timely, ending)
        except FedtailorError:
            if late is not None:  # the round before has come to its end all the same
                late.end(settings.stopping, on_end)
            raise
        finally:
            ending.tell()
        tries, updates, best, evaluation = held.tries, held.tries[-1].updates, at.best, None
        if late is not None:  # before the merge: what a method's own code raises costs this round alone
            best, late = late.end(settings.stopping, on_end), None
        state = merged(setup, at.state, tries[-1])
        ended = at.after(state, updates, best, held.strikes, held.under_way)
        last = ended.state.round >= settings.rounds or (requests is not None and requests.asked_to_stop)
        if settings.evaluates(ended.state.round):
            aside = None if last else _evaluated_aside(setup, ended, timely)
            if aside is not None:
                record = round_record(setup, ended, tries, None, time.monotonic() - started)
                at, late = ended, Late(record, ended, aside)
                continue
            evaluation, ended = evaluated_at_once(setup, ended, held.clients, timely)
        at = ended
        seconds = time.monotonic() - started
        ending = Ending(partial(_tell, setup, at, tries, evaluation, seconds, on_end))
        waits = ending.waits_if(partial(_may_wait, setup, timely, last or evaluation is not None))
        if not waits and requests is not None:
            requests.stop_if_asked(at)
    ending.tell()
    return at


def check_budgets(setup: Setup) -> None:
    """Refuse a fleet with limits that the method does not keep to."""
    for tier in setup.fleet.tiers:
        check_honoured(tier.budget, setup.method.honours, setup.method.name)


def _may_wait(setup: Setup, engine: Timely, at_once: bool) -> bool:
    """Whether a round may be told of when the next one's clients are at work: they are so in no time, and not here."""
    workers = engine.engine
    return not at_once and setup.tells_later and isinstance(workers, HandingOut) and workers.hands_out


def _tell(
    setup: Setup,
    at: Checkpoint,
    tries: Sequence[Try],
    evaluation: Evaluation | None,
    seconds: float,
    on_end: OnEnd,
) -> None:
    on_end(round_record(setup, at, tries, evaluation, seconds), at)


@dataclass
class Ending:
    """What is said of a round that has ended, once: as soon as the next one's clients are at work, who need not wait
    until it is written down."""

    say: Callable[[], None] | None = None

    def waits_if(self, may: Callable[[], bool]) -> bool:
        """Say it now, unless it may wait; also if asking that fails."""
        waits = False
        try:
            waits = may()
        finally:
            if not waits:
                self.tell()
        return waits

    def tell(self) -> None:
        """Say it, if it was not said yet."""
        say, self.say = self.say, None
        if say is not None:
            say()

    def told_with(self, answers: Iterable[Answer | None]) -> Iterator[Answer | None]:
        """The same answers; it is said when the first comes, or word that none has come yet."""
        for answer in answers:
            self.tell()
            yield answer


def merged(setup: Setup, state: ServerState, tried: Try) -> ServerState:
    """The state after a round: by the method's merge, of what clients sent or [privacy] or [secure] made of it."""
    method, updates = setup.method, tried.updates
    with phase("merge"):
        if setup.between is not None:
            updates = setup.between.release(state, tried.tasks, updates)
        after = method.merge(state, updates, setup.model)
        check_applied(method.server, type(method).__qualname__, after, method.merging)
        state.forget()
    return after


def _evaluated_aside(setup: Setup, ended: Checkpoint, engine: Timely) -> LaterEvaluation | None:
    with phase("evaluate"):
        return evaluate_aside(setup, ended, engine)


def evaluated_at_once(
    setup: Setup, ended: Checkpoint, clients: Sequence[Client], engine: Timely
) -> tuple[Evaluation, Checkpoint]:
    """Evaluate a round that has ended: what came out, and the round's end with what follows from it."""
    settings, strikes = setup.settings, ended.strikes
    able = faults.awake(clients, strikes, settings.engine)
    with phase("evaluate"):
        evaluation = evaluate(setup, ended, able, engine)
    tiers = evaluation.deciding
    state = setup.method.observe(evaluation.state, tiers)
    return evaluation, replace(
        ended,
        state=settle(state),
        best=settings.stopping.judge(ended.best, state.round, tiers),
        strikes=faults.with_strikes(strikes, able, evaluation.refused),
    )


@dataclass(frozen=True)
class Late:
    """A round that is being evaluated while the next one trains: its record without scores, its end, and the scores."""

    record: RoundRecord
    at: Checkpoint
    evaluation: LaterEvaluation

    def end(self, stopping: Stopping, on_end: OnEnd) -> Best:
        """Wait for the scores and tell of the round; the best evaluation so far is what the next round takes over."""
        with phase("evaluate"):
            evaluation = self.evaluation()
        best = stopping.judge(self.at.best, self.at.state.round, evaluation.deciding)
        on_end(evaluated(self.record, evaluation, best), replace(self.at, best=best))
        return best


def _held(setup: Setup, at: Checkpoint, engine: Timely, before: Ending) -> Held:
    return fill_buffer(setup, at, engine) if setup.waits_for_nobody else hold_round(setup, at, engine, before)


def hold_round(setup: Setup, at: Checkpoint, engine: Engine, before: Ending) -> Held:
    """Ask clients until enough have answered; meanwhile the round ``before`` is told of.

    What decides is derived from the round and the number of the try, so a round that is redone goes the same way.
    Where clients come and go, every try looks who is there; one that finds nobody has failed.
    """
    method, model, seeds, guard = setup.method, setup.model, setup.seeds, setup.guard
    state, rules, count = at.state, setup.settings.engine, setup.settings.clients_per_round
    if guard is not None:  # a private round is never abandoned: who is missing changes nothing
        seeds, count = guard.drawing, 0
    tries: list[Try] = []
    strikes, now = dict(at.strikes), at.under_way.now
    while len(tries) <= rules.retries:
        if tries:
            deserted = setup.roster is not None and not tries[-1].tasks  # simulated time needs no real pause
            time.sleep(faults.pause_before(len(tries), rules, deserted=deserted))
        with phase("select"):
            clients = setup.clients(state.round)
        if setup.roster is not None and not clients:
            tries.append(Try([], [], []))
            continue
        with phase("select"):
            willing = method.participants(state, clients, model)
            without = faults.resting(strikes, rules)
            size, retry = faults.cohort_size(count, rules), len(tries)
            if guard is not None:
                size = guard.cohort_size(len(willing) - len(without), state.round, retry)
            able = there(setup, state.round, now, retry)
            cohort = sample(willing, size, state.round, seeds, without=without, retry=retry, there=able)
        if able is not None and not cohort:
            now += NOBODY_SECONDS
            tries.append(Try([], [], []))
            continue
        if willing and not cohort and guard is None:
            raise faults.nobody_left(state.round, rules)
        with phase("cut"):
            tasks = [marked(_with_memory(assigned(setup, state, client, now), at)) for client in cohort]
            table, gone = timetable(setup, tasks, now)
        if setup.masks is not None:
            setup.masks.begin(state, tasks)
        updates, refused = _answers(setup, engine, tasks, gone, before)
        strikes = faults.with_strikes(strikes, cohort, refused)
        now += table.seconds if table is not None else 0.0
        tries.append(Try(tasks, updates, refused, table))
        if faults.enough(tries[-1], count, rules):
            return Held(tries, strikes, clients, replace(at.under_way, now=now))
    raise faults.give_up(state.round, tries, count, rules, setup.data.client_name)


def _answers(
    setup: Setup, engine: Engine, tasks: Sequence[Task], gone: Mapping[int, Refused], before: Ending
) -> tuple[list[Update], list[Refused]]:
    """What came of tasks, checked; of clients that are gone, that they are."""
    running = [task for task in tasks if task.client.id not in gone]
    answers = before.told_with(chain(gone.values(), in_phase("train", engine.run(running))))
    with phase("check"):
        updates, refused = check_answers(tasks, answers, setup.model, compare=setup.between is None)
    if setup.between is not None:
        updates = [setup.between.quiet(update) for update in updates]
    return updates, refused


def _with_memory(task: Task, at: Checkpoint) -> Task:
    since, memory = at.memory_of(task.client.id)
    if not memory and since == task.memory_round:  # nothing is kept of it, as nearly always
        return task
    return replace(task, memory=memory, memory_round=since)
