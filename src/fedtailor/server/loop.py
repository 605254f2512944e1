"""The one round loop, for every method and every engine.

round r → fleet.capacity → method.participants → sample → clients with this round's budgets
client  → method.assign → Task
tasks   → engine.run → updates           (method.perform on the client)
updates → check_answers → method.merge → state of round r + 1
every k rounds: calibrate → deploy(budget) per tier → evaluation → method.observe
→ one metrics row and a checkpoint: all that the next round needs
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedtailor.data.federated import FederatedData
from fedtailor.elastic.model import ElasticModel
from fedtailor.engines.engine import Engine
from fedtailor.errors import require
from fedtailor.fleet import Fleet
from fedtailor.method import Method
from fedtailor.round import Dropped, Task, Update
from fedtailor.server.checking import check_answers
from fedtailor.server.checkpoint import Checkpoint, settle
from fedtailor.server.evaluation import calibrate, evaluate_tiers
from fedtailor.server.sampling import sample
from fedtailor.server.seeds import Seeds
from fedtailor.server.stopping import Stopping

Row = dict[str, Any]


@dataclass(frozen=True)
class RoundSettings:
    """How long a run is and how many clients take part."""

    rounds: int = 20
    clients_per_round: int = 10
    evaluate_every: int = 5  # rounds; the last round is always evaluated
    stopping: Stopping = field(default_factory=Stopping)

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
    at = start or first_checkpoint(method, model)
    while at.state.round < settings.rounds and not settings.stopping.reached(at.best):
        started, state = time.monotonic(), at.state
        clients = fleet.capacity(data.sizes, state.round, seeds)
        cohort = sample(method.participants(state, clients), settings.clients_per_round, state.round, seeds)
        tasks = [method.assign(state, client, model, seeds) for client in cohort]
        tasks = [_with_memory(task, slot, at) for slot, task in enumerate(tasks)]
        updates, dropped = check_answers(tasks, engine.run(tasks), model)
        state, best = method.merge(state, updates, model), at.best
        row = {"round": state.round, **account(method, model, tasks, updates, dropped)}
        if state.round % settings.evaluate_every == 0 or state.round == settings.rounds:
            budgets = [tier.budget for tier in fleet.tiers]
            state = calibrate(method, state, budgets, clients, model, engine, seeds)
            row["tiers"] = evaluate_tiers(method, state, fleet.tiers, model, data.test)
            state = method.observe(state, row["tiers"])
            best = settings.stopping.judge(best, state.round, row["tiers"])
            row["best_round"] = best.round
        at = at.after(state, updates, best)
        on_round({**row, "seconds": round(time.monotonic() - started, 4)}, at)
    return at


def first_checkpoint(method: Method, model: ElasticModel) -> Checkpoint:
    """Where a run starts."""
    return Checkpoint(settle(method.init(model)))


def _with_memory(task: Task, slot: int, at: Checkpoint) -> Task:
    since, memory = at.memory_of(task.client.id)
    return replace(task, slot=slot, memory=memory, memory_round=since)


def account(
    method: Method, model: ElasticModel, tasks: list[Task], updates: list[Update], dropped: list[Dropped]
) -> Row:
    """What the round cost and who took part."""
    examples = {update.client: update.metrics.get("examples", update.weight) for update in updates}
    macs = sum(method.work(task, model).macs * int(examples.get(task.client.id, 0)) for task in tasks)
    weight = sum(update.weight for update in updates)
    loss = sum(update.metrics.get("loss", 0.0) * update.weight for update in updates)
    return {
        "clients": len(tasks),
        "refused": dict(Counter(drop.reason for drop in dropped)),
        "bytes_down": sum(task.patch.nbytes for task in tasks),
        "bytes_up": sum(update.patch.nbytes for update in updates),
        "macs": macs,
        "train_loss": loss / weight if weight else None,
    }
