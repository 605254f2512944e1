"""From names, objects or a configuration to a ``Setup`` that can run: all that can be refused is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedtailor.client.together import check_together
from fedtailor.config import RunConfig
from fedtailor.data.datasets import load_dataset
from fedtailor.data.federated import FederatedData, federate
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, check_honoured
from fedtailor.elasticity.costing.grid import fastest_grid
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tag_of, untagged
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.opening import check_workers
from fedtailor.errors import FedtailorError, require
from fedtailor.fleet import Fleet, Tier
from fedtailor.fleet.presets import build_fleet
from fedtailor.messages import Client
from fedtailor.method import Method
from fedtailor.models import build_model
from fedtailor.models.pretrained import load_pretrained, read_weights
from fedtailor.objective import LearningTask, Objective
from fedtailor.privacy.checking import check_private
from fedtailor.privacy.guard import tiers_alike
from fedtailor.run.advice import advice
from fedtailor.run.auto.choosing import taken
from fedtailor.run.choosing import share_for
from fedtailor.run.learning import (
    check_loss,
    check_task,
    explained,
    of_task,
    outputs_for,
    report_what_is_known,
    too_few_outputs,
)
from fedtailor.secure.checking import check_secure
from fedtailor.seeds import Seeds
from fedtailor.server.clock.buffered import check_buffered
from fedtailor.server.clock.equipping import equipped
from fedtailor.server.setup import RoundSettings, Setup
from fedtailor.steps import OnNotice, step

MACS_STEPS = 10**6  # to which budgets that are drawn from a range are rounded
OF_TRACING = ("keep", "heads", "exits", "chain")  # keys of [model] that ``elastic`` takes


def read_data(
    config: RunConfig, task: LearningTask | None, on_notice: OnNotice | None = None
) -> FederatedData:
    """The data that a configuration names, spread over clients; ``on_notice`` is told what a user should know of it."""
    step(f"reading data: {Path(config.data.dataset).name}")
    seeds = Seeds(config.seed)
    dataset = of_task(load_dataset(config.data.dataset, **config.data.options), task)
    data = federate(dataset, config.data, seeds)
    if on_notice is not None:
        for notice in data.notices:
            on_notice(notice)
    share = share_for(config.data.validation, config.stopping, config.built_method)
    return data.with_validation(share, seeds, config.data.min_examples)


def prepare_config(config: RunConfig, on_notice: OnNotice | None = None) -> Setup:
    """Everything that a configuration asks for, checked and ready."""
    config.audit.check()
    seeds, objective = Seeds(config.seed), config.objective.build()
    data = read_data(config, objective.task, on_notice).to(pick_device(config.device))
    model = trace_model(config, data, objective)
    setup = prepare(config.built_method, model, data, build_fleet(config.fleet), config.round_settings, seeds)
    setup = dataclasses.replace(setup, audited=config.audit.active)
    if on_notice is not None:
        for sentence in advice(setup):
            on_notice(sentence)
    return setup


def trace_model(config: RunConfig, data: FederatedData, objective: Objective) -> ElasticModel:
    """The network that a configuration names, for examples like these, with the weights that it starts from."""
    seeds = Seeds(config.seed)
    wishes, options = wishes_and_options(config.model)
    inputs = data.example()
    shape = tuple((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]).shape[1:])
    with seeds.scope("model"):
        module = build_model(
            config.model["name"],
            input_shape=shape,
            num_classes=outputs_for(data, objective),
            symbols=data.origin.symbols,
            **options,
        )
    if "weights" in config.model:
        start_from(module, Path(config.model["weights"]))
    step(f"tracing {config.model['name']}")
    module = module.to(pick_device(config.device))
    with explained(data):
        model = elastic(module, data.example(), objective=objective, **wishes)
    if config.objective.metrics is None:
        report_what_is_known(model)
    return model


def wishes_and_options(model: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What [model] asks of cutting, and of its builder: ``heads`` as a word is a wish, as a number the network's."""
    wishes = {
        key: value
        for key, value in model.items()
        if key in OF_TRACING and (key != "heads" or isinstance(value, str))
    }
    options = {key: value for key, value in model.items() if key not in ("name", "weights", *wishes)}
    return wishes, options


def start_from(module: nn.Module, path: Path) -> None:
    """Set a module to the weights of a file or of a finished run.

    A run may keep normalisation statistics for every width apart (``bn1.running_mean@1/5``): those of the full width
    are the module's own, those of other widths are left alone.
    """
    found, full = read_weights(path), Cut.everything().tag
    own = {untagged(name): value for name, value in found.items() if tag_of(name) == full}
    load_pretrained(module, {**found, **own}, path)


def prepare(
    method: Method,
    model: ElasticModel,
    data: FederatedData,
    fleet: Fleet,
    settings: RoundSettings,
    seeds: Seeds,
) -> Setup:
    """Refuse what cannot run, before anything is trained or written."""
    step("checking what each tier is given")
    if not model.learning_task.classes:
        data = dataclasses.replace(data, num_classes=0)
    aligned = None
    if method.align == "auto":
        check(method, model, data, fleet, settings)  # what cannot be trained cannot be measured
        aligned = fastest_grid(model.costs, method.workload)
        method = dataclasses.replace(method, align=aligned.multiple)
    method, chosen = taken(method, model, lambda: equipped(fleet, method, model, data))
    require(
        chosen is None or not settings.privacy.active, "method.name", "auto",
        "a method by its name: [privacy] asks for settings of [method] that auto does not set, such as "
        "weighting = 'count'",
    )  # fmt: skip
    fleet = equipped(fleet, method, model, data)
    check(method, model, data, fleet, settings)
    try:
        setup = _fitted(method, model, data, fleet, settings, seeds)
    except TooSmallError:
        fleet = able_to_run(fleet, method, model, data, seeds)
        setup = _fitted(method, model, data, fleet, settings, seeds)
        if not fleet.dynamic:
            count = min(settings.clients_per_round, len(setup.clients(0)))
            settled = dataclasses.replace(setup.settings, clients_per_round=count)
            setup = dataclasses.replace(setup, settings=settled)
    check_workers(method, model, data, settings.engine)
    check_together(method, model)
    check_rule(setup)
    if settings.privacy.active:
        check_privacy(setup)
    if settings.secure.active:
        check_masked(setup)
    return dataclasses.replace(setup, chosen=chosen, aligned=aligned)


def check_rule(setup: Setup) -> None:
    """Refuse a rule that compares clients where no tier has any who hold the same: nobody would ever be heard."""
    method = setup.method
    if method.merging.rule == "krum" and not any(
        tiers_alike(method, setup.model, setup.fleet.tiers, setup.start.state, setup.seeds)
    ):
        raise FedtailorError(
            f"merge.rule = 'krum': {method.name} gives each client a piece of its own, and Krum compares those who "
            "hold the same; expected clip, trimmed-mean or median"
        )


def check_masked(setup: Setup) -> None:
    """Refuse what cannot be summed under masks."""
    settings = setup.settings
    if settings.privacy.active:
        raise FedtailorError(
            "[privacy] and [secure]: there is no noise under masks yet; expected one of them"
        )
    asked, least = settings.clients_per_round, settings.secure.threshold
    require(least <= asked, "secure.threshold", least, f"at most clients_per_round = {asked}")
    buffer = settings.asynchronous.buffer
    require(buffer == 0, "asynchronous.buffer", buffer, "0, with [secure]: masks cancel within a round")
    check_secure(setup.method, setup.model, setup.data, setup.fleet, setup.start.state, setup.seeds)


def check_privacy(setup: Setup) -> None:
    """Refuse what cannot be private, and a plan that costs more than it may."""
    settings = setup.settings
    asked = settings.engine.over_selection
    require(asked == 1, "engine.over_selection", asked, "1, with [privacy]: who takes part is drawn")
    buffer = settings.asynchronous.buffer
    require(buffer == 0, "asynchronous.buffer", buffer, "0, with [privacy]: rounds are what is paid for")
    check_private(setup.method, setup.model, setup.data, setup.fleet, setup.start.state, setup.seeds)
    if settings.privacy.hides:
        setup.terms.refuse_beyond(settings.privacy.epsilon, settings.rounds)


def _fitted(
    method: Method,
    model: ElasticModel,
    data: FederatedData,
    fleet: Fleet,
    settings: RoundSettings,
    seeds: Seeds,
) -> Setup:
    """A setup in which a piece fits every tier."""
    settings.stopping.check_tier([tier.name for tier in fleet.tiers])
    method = method.for_fleet(fleet.budgets, model)
    setup = Setup.of(method, model, data, fleet, settings, seeds)
    for tier in fleet.tiers:
        _check_cut(method, "cut_for", method.cut_for(setup.start.state, tier.budget, model))
    if type(method).select is not Method.select:  # what a client holds may be no cut of its budget
        state = method.begin(setup.start.state, model)
        for tier in fleet.tiers:
            client = Client(0, tier.name, tier.budget, 1 if data.remote else int(data.sizes[0]))
            _check_cut(method, "select", method.select(state, client, model, seeds))
    return setup.settled()


def _check_cut(method: Method, hook: str, found: object) -> None:
    """What a method of the user's own returns may be anything."""
    if not isinstance(found, Cut):
        raise FedtailorError(
            f"{type(method).__qualname__}.{hook} returned an object of type {type(found).__name__}: expected a Cut"
        )


def able_to_run(
    fleet: Fleet, method: Method, model: ElasticModel, data: FederatedData, seeds: Seeds
) -> Fleet:
    """What is left of a fleet without devices that no piece fits; refused by the tier's name if nobody said so."""

    def misfit(tier: Tier) -> TooSmallError | None:
        try:
            _fitted(method, model, data, Fleet((tier,)), RoundSettings(evaluate_every=1), seeds)
        except TooSmallError as error:
            return error
        return None

    failed = {tier.name: error for tier in fleet.tiers if (error := misfit(tier)) is not None}
    if failed and (fleet.too_small == "refuse" or len(failed) == len(fleet.tiers)):
        name, error = next(iter(failed.items()))
        advice = "" if len(failed) == len(fleet.tiers) else '; fleet.too_small = "skip" goes on without it'
        clients = ""
        if fleet.macs_range is None and not data.remote:  # of a range, each has a budget of its own
            number = fleet.counts(data.num_clients)[[tier.name for tier in fleet.tiers].index(name)]
            clients = " (1 client)" if number == 1 else f" ({number} clients)"
        raise TooSmallError(f"tier {name!r}{clients}: {error}{advice}") from error
    left_out = [tier for tier in fleet.tiers if tier.name in failed]
    if fleet.macs_range is None or not left_out:
        return fleet.without(left_out) if left_out else fleet
    low, high = (int(bound * MACS_STEPS) for bound in fleet.macs_range)
    while low < high:  # the smallest share of the full model that pays for a piece
        middle = (low + high) // 2
        fits = misfit(Tier("tried", Budget(macs=Fraction(middle, MACS_STEPS)), Fraction(1))) is None
        low, high = (low, middle) if fits else (middle + 1, high)
    return fleet.without(left_out, Fraction(low, MACS_STEPS))


def check(
    method: Method, model: ElasticModel, data: FederatedData, fleet: Fleet, settings: RoundSettings
) -> None:
    """What would fail in the middle of a run fails here, in one sentence."""
    if not data.remote and settings.clients_per_round > data.num_clients:
        raise FedtailorError(
            f"clients_per_round = {settings.clients_per_round}: "
            f"expected at most {data.num_clients}, the number of clients"
        )
    if len(data.test) == 0:
        raise FedtailorError(
            f"{data.name} has no test examples: expected at least 1, to evaluate the tiers on"
        )
    if not data.remote:
        fleet.counts(data.num_clients)
    for tier in fleet.tiers:
        check_honoured(tier.budget, method.honours, method.name)
    if model.statistics and method.local.batch_size == 1:
        raise FedtailorError("training.batch_size = 1: batch norm needs at least 2 examples in a batch")
    if model.statistics and not data.remote and data.sizes.min() < 2:
        client = int(data.sizes.argmin())
        raise FedtailorError(
            f"client {client} has one example: batch norm needs at least 2; raise data.min_examples"
        )
    outputs = [model.groups.counts[group] for group in model.groups.outputs]
    if data.num_classes and outputs and max(outputs) < data.num_classes:
        raise too_few_outputs(max(outputs), data)
    if settings.asynchronous.buffer:
        has_devices = fleet.equipment is not None
        require(has_devices, "asynchronous.buffer", settings.asynchronous.buffer, "fleet.devices with it")
        check_buffered(method)
    check_task(model, data)
    check_loss(model)
    method.check_task(model)


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA, then Apple's MPS, then the CPU."""
    require(isinstance(name, str), "device", name, "auto, cpu, cuda or mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(device for device, there in available.items() if there)
        raise FedtailorError(f"device = {name!r}: not available here; usable: auto, {usable}")
    return torch.device(name)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use ``count`` PyTorch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
