"""A run as it lies in its folder, built again: from its config, or from the call of ``train`` and what is at hand."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.config import load_config
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.method import Method
from fedtailor.run import call
from fedtailor.run.arguments import MethodLike, ModuleLike, method_with, module_of
from fedtailor.run.describing import Origin, fingerprint_of
from fedtailor.run.given_data import federated
from fedtailor.run.setup import pick_device, prepare_config
from fedtailor.seeds import Seeds
from fedtailor.server.setup import Setup
from fedtailor.storage.checkpoint import Checkpoint
from fedtailor.storage.fingerprint import Fingerprint
from fedtailor.storage.rows import table_in
from fedtailor.storage.run_folder import CALL, CONFIG, ENVIRONMENT, RunFolder
from fedtailor.storage.saved import read_end


@dataclass(frozen=True)
class Loaded:
    """What a folder holds; ``data_at_hand`` says whether the clients' data is there to be asked."""

    setup: Setup
    origin: Origin
    end: Checkpoint  # at the best round, where the run ends with that
    last: Checkpoint
    data_at_hand: bool = True


@dataclass(frozen=True)
class AtHand:
    """What the user has, of what words cannot say."""

    module: ModuleLike | None = None
    data: Any = None
    method: MethodLike | None = None
    device: str = "auto"


def load(folder: Path, hand: AtHand) -> Loaded:
    """The run in a folder; what cannot be built again, and is not at hand, is named."""
    if not folder.is_dir():
        raise FedtailorError(f"{folder}: no such run folder")
    if (folder / CONFIG).is_file():
        config = load_config(folder / CONFIG)
        if any(each is not None for each in (hand.module, hand.data, hand.method)):
            raise FedtailorError(
                f"{folder}: its {CONFIG} says what its module, data and method are; expected Run.load(folder) alone"
            )
        config = config if hand.device == "auto" else replace(config, device=hand.device)
        setup, origin, there = prepare_config(config), Origin(config.threads, config), True
    elif (folder / CALL).is_file():
        words = table_in(folder / CALL)
        threads = table_in(folder / ENVIRONMENT).get("threads", 1)
        origin = Origin(threads, call=words)
        setup, there = _from_call(folder, words, hand)
    else:
        raise FedtailorError(
            f"{folder}: neither {CONFIG} nor {CALL} there; expected the folder of a run. One that Python started "
            "before there was such a file is returned by train, called again with resume=True"
        )
    last, saved = read_end(folder, setup.device)
    _refuse_another_model(folder, saved, fingerprint_of(setup, origin), there)
    restored = setup.settings.stopping.restore_best
    end = read_end(folder, setup.device, best=True)[0] if restored else last
    return Loaded(setup, origin, end, last, there)


def _from_call(folder: Path, words: call.Words, hand: AtHand) -> tuple[Setup, bool]:
    seeds, device = Seeds(words["seed"]), pick_device(hand.device)
    given = hand.data if hand.data is not None else words["data"]
    data = call.stand_in(words)
    if given is None and words["examples"]["prepared"] and data.train.preparation is None:
        raise FedtailorError(
            f"{folder}: its data was prepared for the model in a way that words do not say; pass the data, "
            "from Python: Run.load(folder, data=...)"
        )
    if given is not None:
        data = federated(given, seeds, call.objective_of(words).task).with_validation(
            words["validation"], seeds
        )
    data = data.to(device)
    method = _method(folder, words, hand)
    model = _model(folder, words, hand, data, seeds)
    fleet = call.fleet_of(words)
    if method.align == "auto":
        method = replace(method, align=RunFolder(folder).setup().get("aligned", 1))
    method = method.for_fleet(fleet.budgets, model)
    setup = Setup.of(method, model, data, fleet, call.rounds_of(words), seeds).settled()
    return setup, given is not None


def _method(folder: Path, words: call.Words, hand: AtHand) -> Method:
    if hand.method is not None:
        rounds = words["settings"]["rounds"]
        return method_with(hand.method, words["training"], rounds, words.get("server"), words.get("merge"))
    try:
        return call.method_of(words)
    except FedtailorError as error:
        raise FedtailorError(f"{folder}: {error}") from error


def _model(folder: Path, words: call.Words, hand: AtHand, data: FederatedData, seeds: Seeds) -> ElasticModel:
    """The module that is at hand, or one from where the folder says that its class lies, traced."""
    if hand.module is not None:
        return _traced(hand.module, words, data, seeds)
    advice = "pass the module, with any weights: Run.load(folder, module=Net(...))"
    if words["module"] is None:
        raise FedtailorError(f"{folder}: only its module knows of which layers it is made; {advice}")
    try:
        return _traced(words["module"], words, data, seeds)
    except FedtailorError as error:
        raise FedtailorError(f"{folder}: {error}; {advice}") from error


def _traced(module: ModuleLike, words: call.Words, data: FederatedData, seeds: Seeds) -> ElasticModel:
    objective = call.objective_of(words)
    built = module_of(module, data, seeds, objective).to(data.train.device)
    return elastic(built, data.example(), objective=objective, **words.get("model", {}))


def _refuse_another_model(folder: Path, saved: Fingerprint, now: Fingerprint, there: bool) -> None:
    """Weights fit the module that they were trained in; other data is said, because statistics are measured on it."""
    if saved["model.tensors"] != now["model.tensors"]:
        raise FedtailorError(
            f"{folder}: the module has other tensors than the one that was trained; expected the same sizes: "
            "Run.load(folder, module=Net(...))"
        )
    if there and saved["data.examples"] != now["data.examples"]:
        warnings.warn(f"{folder}: the data is not what the run was trained on", stacklevel=4)
