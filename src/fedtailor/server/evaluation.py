"""How good the deployed pieces are: calibration where the norm policy asks for it, then accuracy of every tier.

Where clients keep their norm statistics to themselves (policy ``local``) they evaluate their networks themselves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Literal

from torch import Tensor

from fedtailor.client.evaluate import evaluate_patches
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import fit
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.engines.engine import Engine, Measuring
from fedtailor.fleet import Tier
from fedtailor.merging import by_samples, holder_mean
from fedtailor.messages import Client, Dropped, Reply, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.seeds import Seeds
from fedtailor.server.checking import check_answers
from fedtailor.storage.checkpoint import Checkpoint


def calibrate(
    method: Method,
    state: ServerState,
    budgets: Sequence[Budget],
    clients: Sequence[Client],
    model: ElasticModel,
    engine: Engine,
    seeds: Seeds,
    refused: list[Dropped] | None = None,
) -> ServerState:
    """A round of statistics queries (HeteroFL's sBN): each width's norms on the data of clients that can run it.

    Merged by the number of batches, the result is the plain average of all batch statistics. A width that no client
    can train in this round (levels are redrawn, or it lies at the end of a range) is measured on everyone's data.
    Answers that could not be used are added to ``refused``.
    """
    if not method.policy.measured_after or not model.statistics:
        return state
    weights, dropped = dict(state.weights), [] if refused is None else refused
    cuts = [method.cut_for(state, budget, model) for budget in budgets]
    for cut in {cut.tag: cut for cut in cuts}.values():  # widths may share a cut, but not a name
        for name in norm.tagged_statistics(model, cut):
            weights.pop(name, None)  # statistics of older weights are of no use
        everyone = [client for client in clients if client.num_examples > 1]
        able = [client for client in everyone if _can_run(method, state, client, cut, model)]
        answers = _statistics(method, state, cut, able, model, engine, seeds, dropped)
        answers = answers or _statistics(method, state, cut, everyone, model, engine, seeds, dropped)
        weights = holder_mean(weights, answers, model, by_samples)
    return replace(state, weights=weights)


def _can_run(method: Method, state: ServerState, client: Client, cut: Cut, model: ElasticModel) -> bool:
    """Whether a client's budget pays for a cut; single weights are left out in the method's own cuts only."""
    if client.budget.density is not None or cut.sparse is not None:
        return method.cut_for(state, client.budget, model).holds(cut)
    return fit(model.costs, client.budget, method.align, workload=method.workload).holds(cut)


def _statistics(
    method: Method,
    state: ServerState,
    cut: Cut,
    clients: Sequence[Client],
    model: ElasticModel,
    engine: Engine,
    seeds: Seeds,
    refused: list[Dropped],
) -> list[Update]:
    """Ask clients for the statistics of one width on their data; they are sent the same patch, which they only read."""
    patch = model.cut(state.weights, cut, method.policy.travelling(model))
    reply = Reply(norm.tagged_statistics(model, cut), cut)
    tasks = [Task(client, state.round, patch, reply, seeds, action="calibrate") for client in clients]
    updates, dropped = check_answers(tasks, engine.run(tasks), model)
    refused.extend(dropped)
    return updates


def evaluate_tiers(
    method: Method,
    state: ServerState,
    tiers: Sequence[Tier],
    model: ElasticModel,
    test: Examples,
    engine: Engine | None = None,
) -> dict[str, dict[str, float]]:
    """Loss and metrics of what each tier is given; an engine that has workers lets them do it."""
    places: dict[str, int] = {}
    known: dict[tuple[tuple[Cut, str], ...], int] = {}
    deployed: list[tuple[Patch, ...]] = []
    for tier in tiers:
        patches = method.deploy(state, tier.budget, model).patches
        # Equal cuts of different widths may have statistics of their own, which their tags name.
        cuts = tuple((patch.cut, patch.cut.tag) for patch in patches)
        if cuts not in known or len(cuts) > 1:  # tiers that are given the same piece are evaluated once
            known[cuts] = len(deployed)
            deployed.append(patches)
        places[tier.name] = known[cuts]
    if isinstance(engine, Measuring):
        scores = engine.measure(deployed)
    else:
        scores = [evaluate_patches(model, patches, test) for patches in deployed]
    return {name: scores[place] for name, place in places.items()}


def evaluate_clients(
    method: Method,
    at: Checkpoint,
    tiers: Sequence[Tier],
    clients: Sequence[Client],
    model: ElasticModel,
    test: Examples,
    engine: Engine,
    seeds: Seeds,
    refused: list[Dropped],
) -> dict[str, dict[str, float]]:
    """What clients measure of their own networks, on their own test examples or the common ones: the mean of each tier.

    Of a tier without clients that answer, a device without data is evaluated.
    """
    memories = {client.id: at.memory_of(client.id)[1] for client in clients}
    if model.statistics:
        calibrated = _asked("calibrate", method, at.state, clients, memories, model, engine, seeds, refused)
        memories = {update.client: update.memory for update in calibrated}
    able = [client for client in clients if client.id in memories]
    answers = _asked("evaluate", method, at.state, able, memories, model, engine, seeds, refused)
    tier_of = {client.id: client.tier for client in clients}
    found = {
        tier.name: [each.metrics for each in answers if tier_of[each.client] == tier.name] for tier in tiers
    }
    empty = [tier for tier in tiers if not found[tier.name]]
    deployed = evaluate_tiers(method, at.state, empty, model, test)
    return {
        name: {key: fmean(each[key] for each in scores) for key in scores[0]} if scores else deployed[name]
        for name, scores in found.items()
    }


def personal_network(
    method: Method, at: Checkpoint, client: Client, model: ElasticModel, engine: Engine, seeds: Seeds
) -> Patch:
    """The network that a client runs: its own part of the model, on statistics that only it has."""
    memories, cut = {client.id: at.memory_of(client.id)[1]}, method.select(at.state, client, model, seeds)
    (update,) = _asked("calibrate", method, at.state, [client], memories, model, engine, seeds, [])
    return norm.with_own(
        model, model.cut(at.state.weights, cut, method.policy.travelling(model)), update.memory
    )


def _asked(
    action: Literal["calibrate", "evaluate"],
    method: Method,
    state: ServerState,
    clients: Sequence[Client],
    memories: Mapping[int, dict[str, Tensor]],
    model: ElasticModel,
    engine: Engine,
    seeds: Seeds,
    refused: list[Dropped],
) -> list[Update]:
    """Send everyone the same model, which they only read, and let them do something with their part of it."""
    patch = model.cut(state.weights, Cut.everything(), method.policy.travelling(model))
    cuts = {client.id: method.select(state, client, model, seeds) for client in clients}
    tasks = [
        Task(
            client, state.round, patch, Reply(frozenset(), cuts[client.id]), seeds, action,
            memory=memories[client.id], memory_round=state.round - 1,
        )
        for client in clients
    ]  # fmt: skip
    updates, dropped = check_answers(tasks, engine.run(tasks), model)
    refused.extend(dropped)
    return updates
