"""How good the deployed pieces are: calibration where the norm policy asks for it, then accuracy of every tier.

Where clients keep their norm statistics to themselves (policy ``local``) they evaluate their networks themselves.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Literal, TypeVar

from torch import Tensor

from fedtailor.client.evaluate import evaluate_deployed
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, fit, meets
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.engines.protocol import Engine, Measuring, MeasuringAside
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Tier
from fedtailor.merging import by_samples, holder_mean
from fedtailor.merging.optimising import to_deploy, to_train
from fedtailor.messages import Client, Lease, Measure, Refused, ServerState, Task, Update
from fedtailor.method import Method
from fedtailor.record import Spent
from fedtailor.server import faults
from fedtailor.server.faults import Timely
from fedtailor.server.inquiry import Inquiry
from fedtailor.server.sampling import sample_able, sample_of_tiers
from fedtailor.server.setup import Setup
from fedtailor.steps import step
from fedtailor.storage.checkpoint import Checkpoint

T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """What each tier is worth; and, where all its devices are given the same network, what a prediction costs."""

    tiers: dict[str, dict[str, float]]
    deployed: dict[str, dict[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Deployed:
    """The different networks that devices are given, each as patches that answer together."""

    networks: list[tuple[Patch, ...]]
    places: dict[str, int]  # of each tier's network among them

    def by_tier(self, found: Sequence[T]) -> dict[str, T]:
        """What was found out about each network, for each tier."""
        return {tier: found[place] for tier, place in self.places.items()}


@dataclass(frozen=True)
class Evaluation:
    """The scores of a round, and what it took to know them."""

    state: ServerState  # with the statistics that were measured on the way
    scores: Scores
    refused: Sequence[Refused] = ()
    spent: Spent = field(default_factory=Spent)
    validation: dict[str, dict[str, float]] | None = None  # on the examples that choose, where there are such
    sampled: int = 0  # how many clients were asked, where these were not all

    @property
    def deciding(self) -> dict[str, dict[str, float]]:
        """What may decide something: on test examples only where there are no others."""
        return self.scores.tiers if self.validation is None else self.validation


LaterEvaluation = Callable[[], Evaluation]


def evaluate(setup: Setup, at: Checkpoint, clients: Sequence[Client], engine: Timely) -> Evaluation:
    """Evaluate every tier at the end of a round, with the help of these clients where the norm policy asks for it."""
    inquiry, tiers = Inquiry(setup, engine), setup.fleet.tiers
    actions: list[Measure] = ["evaluate"] if setup.data.validation is None else ["evaluate", "validate"]
    if setup.method.policy.kept_by_clients:
        step("evaluating on clients")
        state = at.state
        shown = replace(at, state=to_deploy(state))
        scores = [Scores(each) for each in evaluate_clients(inquiry, shown, clients, actions)]
    else:
        measured = calibrate(inquiry, to_deploy(at.state), [tier.budget for tier in tiers], clients)
        state = to_train(measured, at.state)
        step(f"evaluating {len(tiers)} tiers")
        deployed = deployed_to(setup, measured, tiers)
        scores = [_measured(setup, deployed, engine.engine, action) for action in actions]
    validation = scores[1].tiers if len(scores) > 1 else None
    return Evaluation(state, scores[0], inquiry.refused, inquiry.spent, validation, inquiry.sampled)


def evaluate_aside(setup: Setup, at: Checkpoint, engine: Timely) -> LaterEvaluation | None:
    """The same while the next round trains, where neither that round nor the state can depend on what comes out.

    None where clients are asked, where a method looks at the scores or anything is chosen by them, and where nobody but
    this process could do it.
    """
    method, workers = setup.method, engine.engine
    needs_clients = method.policy.kept_by_clients or asks_for_statistics(method, setup.model)
    decides = setup.settings.stopping.chooses or type(method).observe is not Method.observe
    if (
        needs_clients
        or decides
        or setup.data.validation is not None
        or not isinstance(workers, MeasuringAside)
    ):
        return None
    deployed = deployed_to(setup, to_deploy(at.state), setup.fleet.tiers)
    later = workers.measure_aside(deployed.networks)
    return lambda: Evaluation(at.state, _scores_of(setup, deployed, later()))


def asks_for_statistics(method: Method, model: ElasticModel) -> bool:
    """Whether norm statistics are measured on clients before anything is evaluated."""
    return method.policy.measured_after and bool(model.statistics)


def calibrate(
    inquiry: Inquiry, state: ServerState, budgets: Sequence[Budget], clients: Sequence[Client]
) -> ServerState:
    """A round of statistics queries (HeteroFL's sBN): each width's norms on the data of clients that can run it.

    Merged by the number of batches, the result is the plain average of all batch statistics. Of many clients some are
    asked (``norm.calibration_clients``). A width that no client can train in this round (levels are redrawn, or it lies
    at the end of a range) is measured on the data of any.
    """
    method, model = inquiry.setup.method, inquiry.setup.model
    if not asks_for_statistics(method, model):
        return state
    step("measuring norms")
    weights = dict(state.weights)
    cuts = [method.cut_for(state, budget, model) for budget in budgets]
    for cut in {cut.tag: cut for cut in cuts}.values():  # widths may share a cut, but not a name
        for name in norm.tagged_statistics(model, cut):
            weights.pop(name, None)  # statistics of older weights are of no use
        answers = _statistics_of_some(inquiry, state, cut, clients)
        weights = holder_mean(weights, answers, model, by_samples)
    return replace(state, weights=weights)


def _statistics_of_some(
    inquiry: Inquiry, state: ServerState, cut: Cut, clients: Sequence[Client]
) -> list[Update]:
    """The statistics of one width on the data of some clients that can run it, or else of some of all."""
    setup = inquiry.setup
    count = setup.settings.norm.calibration_clients

    def can(budget: Budget) -> bool:
        return _can_run(setup, state, budget, cut)

    asked: list[Client] = []
    for able in (can, lambda _budget: True):
        asked = sample_able(clients, count, state.round, setup.seeds, able)
        inquiry.sampled = max(inquiry.sampled, len(asked) if 0 < count < len(clients) else 0)
        if answers := _statistics(inquiry, state, cut, asked):
            return answers
    what = f"measuring norms after round {state.round}: no client got through"
    broken = faults.nobody_got_through(what, inquiry.refused, setup.data.client_name)
    if broken is not None:
        raise broken
    return []


def _can_run(setup: Setup, state: ServerState, budget: Budget, cut: Cut) -> bool:
    """Whether a budget pays for a cut; single weights are left out in the method's own cuts only.

    How many units or weights it keeps decides, not which: a method may choose them by other things than their order.
    """
    method, model = setup.method, setup.model
    if budget.density is not None or cut.sparse is not None:
        own = method.cut_for(state, budget, model)
        return own.holds(cut) or model.cost(own).params >= model.cost(cut).params
    if cut.absent or budget.depth is not None:  # no prefix holds it: what it costs decides
        width, depth = budget.width, budget.depth
        wide = width is None or cut.share(model.groups) <= as_width(width)
        deep = depth is not None and (cut.depth or 1) > as_width(depth)
        return wide and not deep and meets(model.costs, cut, budget, method.workload)
    try:
        own = fit(model.costs, budget, method.grid, workload=method.workload)
        return own.holds(cut) or all(map(operator.ge, model.costs.counts(own), model.costs.counts(cut)))
    except TooSmallError:  # a method that looks at no budget gives it a piece all the same
        return False


def _statistics(inquiry: Inquiry, state: ServerState, cut: Cut, clients: Sequence[Client]) -> list[Update]:
    """Ask clients for the statistics of one width on their data; they are sent the same patch, which they only read."""
    setup, model = inquiry.setup, inquiry.setup.model
    patch = model.cut(state.weights, cut, setup.method.policy.travelling(model))
    patch = setup.method.as_deployed(state, patch, model)  # statistics are those of what will run
    lease = Lease(norm.tagged_statistics(model, cut), cut)
    return inquiry.ask(
        [Task(client, state.round, patch, lease, setup.seeds, action="calibrate") for client in clients]
    )


def evaluate_tiers(
    setup: Setup,
    state: ServerState,
    tiers: Sequence[Tier],
    engine: Engine | None = None,
    action: Measure = "evaluate",
) -> Scores:
    """Loss and metrics of what each tier is given; an engine that has workers lets them do it."""
    return _measured(setup, deployed_to(setup, state, tiers), engine, action)


def _measured(setup: Setup, deployed: Deployed, engine: Engine | None, action: Measure) -> Scores:
    if isinstance(engine, Measuring):
        scores = engine.measure(deployed.networks, action)
    else:
        _, examples = setup.data.measured[action]
        scores = evaluate_deployed(setup.model, deployed.networks, examples)
    return _scores_of(setup, deployed, scores)


def _scores_of(setup: Setup, deployed: Deployed, scores: Sequence[dict[str, float]]) -> Scores:
    """What was measured of each network, with what a prediction costs, by tier."""
    model = setup.model
    costs = [[model.cost(patch.cut) for patch in patches] for patches in deployed.networks]
    prediction = [
        {"params": sum(c.params for c in each), "macs": sum(c.macs for c in each)} for each in costs
    ]
    return Scores(deployed.by_tier(scores), deployed.by_tier(prediction))


def deployed_to(setup: Setup, state: ServerState, tiers: Sequence[Tier]) -> Deployed:
    """What devices are given; tiers that are given the same piece share it."""
    places: dict[str, int] = {}
    known: dict[tuple[tuple[Cut, str], ...], int] = {}
    networks: list[tuple[Patch, ...]] = []
    for tier in tiers:
        patches = setup.method.deploy(state, tier.budget, setup.model).patches
        # Equal cuts of different widths may have statistics of their own, which their tags name.
        cuts = tuple((patch.cut, patch.cut.tag) for patch in patches)
        if cuts not in known or len(cuts) > 1:
            known[cuts] = len(networks)
            networks.append(patches)
        places[tier.name] = known[cuts]
    return Deployed(networks, places)


def evaluate_clients(
    inquiry: Inquiry, at: Checkpoint, clients: Sequence[Client], actions: Sequence[Measure] = ("evaluate",)
) -> list[dict[str, dict[str, float]]]:
    """What clients measure of their own networks, on their own examples or the common ones: the mean of each tier.

    Of a tier without clients that answer, a device without data is evaluated.
    """
    setup = inquiry.setup
    everyone, count = len(clients), setup.settings.norm.evaluation_clients
    clients = sample_of_tiers(clients, count, at.state.round, setup.seeds)
    inquiry.sampled = len(clients) if len(clients) < everyone else 0
    memories = {client.id: at.memory_of(client.id)[1] for client in clients}
    if setup.model.statistics:
        calibrated = _asked("calibrate", inquiry, at.state, clients, memories)
        memories = {update.client: update.memory for update in calibrated}
    able = [client for client in clients if client.id in memories]
    answers = [_asked(action, inquiry, at.state, able, memories) for action in actions]
    return [_by_tier(inquiry, at, able, each, action) for each, action in zip(answers, actions, strict=True)]


def _by_tier(
    inquiry: Inquiry, at: Checkpoint, clients: Sequence[Client], answers: Sequence[Update], action: Measure
) -> dict[str, dict[str, float]]:
    setup = inquiry.setup
    tiers, tier_of = setup.fleet.tiers, {client.id: client.tier for client in clients}
    found = {
        tier.name: [each.metrics for each in answers if tier_of[each.client] == tier.name] for tier in tiers
    }
    empty = [tier for tier in tiers if not found[tier.name]]
    elsewhere = action not in setup.data.measured  # examples that lie with their clients
    engine = inquiry.engine.engine if elsewhere and isinstance(inquiry.engine, Timely) else None
    deployed = evaluate_tiers(setup, at.state, empty, engine, action).tiers if empty else {}
    # Metrics of a method's own count where most clients report them: one that leaves them out takes them from nobody.
    said = Counter(key for scores in found.values() for each in scores for key in each)
    kept = [key for key, times in said.items() if 2 * times > len(answers)]
    return {
        name: {
            key: fmean(values) for key in kept if (values := [each[key] for each in scores if key in each])
        }
        if scores
        else deployed[name]
        for name, scores in found.items()
    }


def personal_network(inquiry: Inquiry, at: Checkpoint, client: Client) -> Patch:
    """The network that a client runs: its own part of the model, on statistics that only it has."""
    setup, method, model = inquiry.setup, inquiry.setup.method, inquiry.setup.model
    memories = {client.id: at.memory_of(client.id)[1]}
    cut = method.select(at.state, client, model, setup.seeds)
    answers = _asked("calibrate", inquiry, at.state, [client], memories)
    if not answers:
        what = f"the network of client {setup.data.client_name(client.id)} cannot be made"
        reasons = ", ".join(f"{each.reason}: {each.detail}" for each in inquiry.refused)
        raise faults.nobody_got_through(what, inquiry.refused, setup.data.client_name) or FedtailorError(
            f"{what}: its statistics were refused ({reasons})"
        )
    (update,) = answers
    return norm.with_own(
        model, model.cut(at.state.weights, cut, method.policy.travelling(model)), update.memory
    )


def _asked(
    action: Literal["calibrate"] | Measure,
    inquiry: Inquiry,
    state: ServerState,
    clients: Sequence[Client],
    memories: Mapping[int, dict[str, Tensor]],
) -> list[Update]:
    """Send everyone the same model, which they only read, and let them do something with their part of it."""
    setup, method, model = inquiry.setup, inquiry.setup.method, inquiry.setup.model
    patch = model.cut(state.weights, Cut.everything(), method.policy.travelling(model))
    cuts = {client.id: method.select(state, client, model, setup.seeds) for client in clients}
    return inquiry.ask(
        [
            Task(
                client, state.round, patch, Lease(frozenset(), cuts[client.id]), setup.seeds, action,
                memory=memories[client.id], memory_round=state.round - 1,
            )
            for client in clients
        ]
    )  # fmt: skip
