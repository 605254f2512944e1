"""The one round loop, for every method and every engine.

    round r → fleet.capacity → method.participants → sample → clients with this round's budgets
    client  → method.assign → Task
    tasks   → engine.run → updates           (method.perform on the client)
    updates → check_answers → method.merge → state of round r + 1
    every k rounds: calibrate → deploy(budget) per tier → evaluation → method.observe
    → one metrics row
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fedtailor.data.federated import FederatedData
from fedtailor.elastic.model import ElasticModel
from fedtailor.engines.engine import Engine
from fedtailor.errors import require
from fedtailor.fleet import Fleet
from fedtailor.method import Method
from fedtailor.round import Dropped, ServerState, Task, Update
from fedtailor.server.checking import check_answers
from fedtailor.server.evaluation import calibrate, evaluate_tiers
from fedtailor.server.sampling import sample
from fedtailor.server.seeds import Seeds

Row = dict[str, Any]


@dataclass(frozen=True)
class RoundSettings:
    """How long a run is and how many clients take part."""

    rounds: int = 20
    clients_per_round: int = 10
    evaluate_every: int = 5    # rounds; the last round is always evaluated

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
    on_row: Callable[[Row, ServerState], None],
) -> ServerState:
    """Run all rounds; ``on_row`` is told about each of them as it ends."""
    state = method.init(model)
    memories: dict[int, tuple[int, Mapping[str, Any]]] = {}    # what each client keeps for itself, and since when
    while state.round < settings.rounds:
        started = time.monotonic()
        clients = fleet.capacity(data.sizes, state.round, seeds)
        cohort = sample(method.participants(state, clients), settings.clients_per_round, state.round, seeds)
        tasks = [method.assign(state, client, model, seeds) for client in cohort]
        tasks = [_with_memory(task, slot, memories) for slot, task in enumerate(tasks)]
        updates, dropped = check_answers(tasks, engine.run(tasks), model)
        memories.update({update.client: (state.round, update.memory) for update in updates if update.memory})
        state = method.merge(state, updates, model)
        row = account(method, model, tasks, updates, dropped)
        if state.round % settings.evaluate_every == 0 or state.round == settings.rounds:
            budgets = [tier.budget for tier in fleet.tiers]
            state = calibrate(method, state, budgets, clients, model, engine, seeds)
            row["tiers"] = evaluate_tiers(method, state, fleet.tiers, model, data.test)
            state = method.observe(state, row["tiers"])
        on_row({"round": state.round, **row, "seconds": round(time.monotonic() - started, 4)}, state)
    return state


def _with_memory(task: Task, slot: int, memories: Mapping[int, tuple[int, Mapping[str, Any]]]) -> Task:
    since, memory = memories.get(task.client.id, (-1, {}))
    return replace(task, slot=slot, memory=dict(memory), memory_round=since)


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
