"""How good the deployed pieces are: calibration where the norm policy asks for it, then accuracy of every tier."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtailor.client.evaluate import evaluate_patches
from fedtailor.data.batches import Examples
from fedtailor.elastic import norm
from fedtailor.elastic.budget import Budget
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.model import ElasticModel
from fedtailor.engines.engine import Engine
from fedtailor.fleet import Tier
from fedtailor.method import Method
from fedtailor.round import Client, Reply, ServerState, Task, Update
from fedtailor.server.merging import by_samples, holder_mean
from fedtailor.server.seeds import Seeds


def calibrate(
    method: Method,
    state: ServerState,
    budgets: Sequence[Budget],
    clients: Sequence[Client],
    model: ElasticModel,
    engine: Engine,
    seeds: Seeds,
) -> ServerState:
    """A round of statistics queries (HeteroFL's sBN): each width's norms on the data of clients that can run it.

    Merged by the number of batches, the result is the plain average of all batch statistics.
    """
    if method.norm != "static" or not model.statistics:
        return state
    weights = dict(state.weights)
    for cut in dict.fromkeys(method.cut_for(budget, model) for budget in budgets):
        tasks = [
            calibration_task(method, state, client, cut, model, seeds)
            for client in clients
            if client.num_examples > 1 and method.cut_for(client.budget, model).holds(cut)
        ]
        answers = [answer for answer in engine.run(tasks) if isinstance(answer, Update) and answer.weight > 0]
        for name in norm.tagged_statistics(model, cut):
            weights.pop(name, None)    # statistics of older weights are of no use
        weights = holder_mean(weights, answers, model, by_samples)
    return replace(state, weights=weights)


def calibration_task(
    method: Method, state: ServerState, client: Client, cut: Cut, model: ElasticModel, seeds: Seeds
) -> Task:
    """Ask one client for the statistics of one width on its data."""
    patch = model.cut(state.weights, cut, norm.travelling(model, method.norm))
    reply = Reply(norm.tagged_statistics(model, cut), cut)
    return Task(client, state.round, patch, reply, seeds, action="calibrate")


def evaluate_tiers(
    method: Method, state: ServerState, tiers: Sequence[Tier], model: ElasticModel, test: Examples
) -> dict[str, dict[str, float]]:
    """Loss and metrics of what each tier is given."""
    results: dict[str, dict[str, float]] = {}
    measured: dict[tuple[Cut, ...], dict[str, float]] = {}
    for tier in tiers:
        deployed = method.deploy(state, tier.budget, model)
        cuts = tuple(patch.cut for patch in deployed.patches)
        if cuts not in measured or len(cuts) > 1:    # tiers that are given the same piece are evaluated once
            measured[cuts] = evaluate_patches(model, deployed.patches, test)
        results[tier.name] = measured[cuts]
    return results
