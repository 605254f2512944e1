"""The one round loop, for every method and every engine.

round r → method.begin → the state to start from
        → fleet.capacity → method.participants → sample → clients with this round's budgets
client  → method.assign → Task
tasks   → engine.run → updates           (method.perform on the client; until the deadline)
updates → check_answers → a quorum?      (or abandon the round and ask others)
        → method.merge → state of round r + 1
every k rounds: calibrate → deploy(budget) per tier, or the clients' own networks → evaluation → method.observe
→ one metrics row and a checkpoint: all that the next round needs
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.fitting import check_honoured
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.engine import Engine
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import require
from fedtailor.fleet import Fleet
from fedtailor.messages import Client, Dropped, Task
from fedtailor.method import Method
from fedtailor.seeds import Seeds
from fedtailor.server import faults
from fedtailor.server.checking import check_answers
from fedtailor.server.evaluation import calibrate, evaluate_clients, evaluate_tiers
from fedtailor.server.faults import Timely, Try
from fedtailor.server.notes import round_notes
from fedtailor.server.sampling import sample
from fedtailor.server.stopping import Stopping
from fedtailor.storage.checkpoint import Checkpoint, settle

Row = dict[str, Any]
_ACCOUNTED = (
    "loss",
    "examples",
)  # metrics of a client that go into the row's sums; others are written for each


@dataclass(frozen=True)
class RoundSettings:
    """How long a run is and how many clients take part."""

    rounds: int = 20
    clients_per_round: int = 10
    evaluate_every: int = 5  # rounds; the last round is always evaluated
    stopping: Stopping = field(default_factory=Stopping)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        require(self.rounds >= 1, "rounds", self.rounds, "at least 1")
        require(self.clients_per_round >= 1, "clients_per_round", self.clients_per_round, "at least 1")
        require(self.evaluate_every >= 1, "evaluate_every", self.evaluate_every, "at least 1")


def run_rounds(
    method: Method,
    model: ElasticModel,
    data: FederatedData,
    fleet: Fleet,
    engine: Engine,
    settings: RoundSettings,
    seeds: Seeds,
    on_round: Callable[[Row, Checkpoint], None],
    start: Checkpoint | None = None,
) -> Checkpoint:
    """Run the rounds that are left; ``on_round`` is told about each of them as it ends.

    A run that starts from a checkpoint of itself goes through the same rounds, bit for bit.
    """
    for tier in fleet.tiers:
        check_honoured(tier.budget, method.honours, method.name)
    at = start or first_checkpoint(method, model)
    engine = engine if isinstance(engine, Timely) else Timely(engine, settings.engine.deadline)
    while at.state.round < settings.rounds and not settings.stopping.reached(at.best):
        started = time.monotonic()
        at = replace(at, state=method.begin(at.state, model))
        clients = fleet.capacity(data.sizes, at.state.round, seeds)
        tries, strikes = hold_round(at, clients, method, model, engine, settings, seeds)
        state, best = method.merge(at.state, tries[-1].updates, model), at.best
        row = {"round": state.round, **account(method, model, tries)}
        if state.round % settings.evaluate_every == 0 or state.round == settings.rounds:
            refused, able = list[Dropped](), faults.awake(clients, strikes, settings.engine)
            if method.policy.kept_by_clients:
                ended = at.after(state, tries[-1].updates, best, strikes)
                row["tiers"] = evaluate_clients(
                    method, ended, fleet.tiers, able, model, data.test, engine, seeds, refused
                )
            else:
                budgets = [tier.budget for tier in fleet.tiers]
                state = calibrate(method, state, budgets, able, model, engine, seeds, refused)
                row["tiers"] = evaluate_tiers(method, state, fleet.tiers, model, data.test, engine.engine)
            strikes = faults.with_strikes(strikes, able, refused)
            row["refused"] = faults.counted(row["refused"], refused)
            state = method.observe(state, row["tiers"])
            best = settings.stopping.judge(best, state.round, row["tiers"])
            row["best_round"] = best.round
        row["resting"] = len(faults.resting(strikes, settings.engine))
        at = at.after(state, tries[-1].updates, best, strikes)
        shown = fleet.tiers if "tiers" in row and not method.policy.kept_by_clients else ()
        row["method"] = dict(method.notes(state, tries[-1].updates, model))
        row["notes"] = round_notes(method, state, tries[-1].updates, model, shown)
        on_round({**row, "seconds": round(time.monotonic() - started, 4)}, at)
    return at


def hold_round(
    at: Checkpoint,
    clients: Sequence[Client],
    method: Method,
    model: ElasticModel,
    engine: Engine,
    settings: RoundSettings,
    seeds: Seeds,
) -> tuple[list[Try], dict[int, int]]:
    """Ask clients until enough of them have answered: all tries, the last of which counts, and the new strikes.

    What decides is derived from the round and the number of the try, so a round that is redone goes the same way.
    """
    state, rules, count = at.state, settings.engine, settings.clients_per_round
    tries: list[Try] = []
    strikes = dict(at.strikes)
    willing = method.participants(state, clients, model)
    while len(tries) <= rules.retries:
        if tries:
            time.sleep(faults.pause_before(len(tries), rules))
        without = faults.resting(strikes, rules)
        size, retry = faults.cohort_size(count, rules), len(tries)
        cohort = sample(willing, size, state.round, seeds, without=without, retry=retry)
        if willing and not cohort:
            raise faults.nobody_left(state.round, rules)
        tasks = [method.assign(state, client, model, seeds) for client in cohort]
        tasks = [_with_memory(task, at) for task in tasks]
        updates, dropped = check_answers(tasks, engine.run(tasks), model)
        strikes = faults.with_strikes(strikes, cohort, dropped)
        tries.append(Try(tasks, updates, dropped))
        if faults.enough(tries[-1], count, rules):
            return tries, strikes
    raise faults.give_up(state.round, tries, count, rules)


def first_checkpoint(method: Method, model: ElasticModel) -> Checkpoint:
    """Where a run starts."""
    return Checkpoint(settle(method.init(model)))


def _with_memory(task: Task, at: Checkpoint) -> Task:
    since, memory = at.memory_of(task.client.id)
    return replace(task, memory=memory, memory_round=since)


def account(method: Method, model: ElasticModel, tries: list[Try]) -> Row:
    """What the round cost and who took part; abandoned tries cost too, but only the last one is learnt from."""
    tasks = [task for each in tries for task in each.tasks]
    updates = [update for each in tries for update in each.updates]
    macs = sum(_macs(method, model, each) for each in tries)
    merged = tries[-1].updates
    weight = sum(update.weight for update in merged)
    loss = sum(update.metrics.get("loss", 0.0) * update.weight for update in merged)
    reported = {
        str(u.client): {name: value for name, value in u.metrics.items() if name not in _ACCOUNTED}
        for u in merged
    }
    return {
        "clients": len(tasks),
        "merged": len(merged),
        "refused": faults.counted({}, [drop for each in tries for drop in each.dropped]),
        "abandoned": len(tries) - 1,
        "bytes_down": sum(task.nbytes for task in tasks),
        "bytes_up": sum(update.patch.nbytes for update in updates),
        "macs": macs,
        "train_loss": loss / weight if weight else None,
        **({"reported": reported} if any(reported.values()) else {}),
    }


def _macs(method: Method, model: ElasticModel, tried: Try) -> int:
    examples = {update.client: update.metrics.get("examples", update.weight) for update in tried.updates}
    worked = [task for task in tried.tasks if task.client.id in examples]
    return sum(method.work(task, model).macs * int(examples[task.client.id]) for task in worked)
