"""What ``train`` takes, in every spelling that a config has: names, tables, objects; wrong ones are refused alike."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.config import RunConfig, build_method, most_per_round, said_over, split_spec, validated
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError, require
from fedtailor.fleet import Fleet, FleetSettings, fleet_by_name
from fedtailor.fleet.presets import build_fleet
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.merging.settings import ServerSettings
from fedtailor.method import Method
from fedtailor.methods.auto import Auto
from fedtailor.models import build_model
from fedtailor.objective import Objective
from fedtailor.run.learning import outputs_for
from fedtailor.seeds import Seeds
from fedtailor.server.setup import RoundSettings

ModuleLike = nn.Module | str | Callable[..., nn.Module]
FleetLike = Fleet | str | Mapping[str, Any] | list[Any] | tuple[Any, ...]
MethodLike = Method | type[Method] | str | Mapping[str, Any]
TrainingLike = LocalTraining | Mapping[str, Any] | None
ServerLike = ServerSettings | Mapping[str, Any] | None
MergeLike = MergeSettings | Mapping[str, Any] | None
TABLES = {
    "training": '{"lr": 0.05, "epochs": 2}',
    "server": '{"optimiser": "adam", "lr": 0.01}',
    "merge": '{"rule": "trimmed-mean"}',
}


def run_settings(**given: Any) -> RunConfig:
    """Settings of a run that are no objects, checked as those of a config; what is None has its default."""
    return validated(RunConfig, {key: value for key, value in given.items() if value is not None}, "")


def folder_of(given: Path | str | None) -> Path | None:
    """Where a run is saved, if at all."""
    require(
        given is None or isinstance(given, str | Path), "folder", given, "a path, or None: nothing is saved"
    )
    return None if given is None else Path(given)


def rounds_of(settings: RunConfig, asked: int | None, data: FederatedData) -> RoundSettings:
    """The part that the round loop reads; where nothing was asked, all clients take part, at most 10."""
    rounds = settings.round_settings
    count = most_per_round(data.num_clients)
    return rounds if asked is not None else dataclasses.replace(rounds, clients_per_round=count)


def fleet_of(given: FleetLike) -> Fleet:
    """A fleet by name, by a table of [fleet], or by a list of tiers: ``[{"macs": 2e6, "share": 3}, ...]``."""
    if isinstance(given, Fleet):
        return given
    if isinstance(given, str):
        return fleet_by_name(given)
    if isinstance(given, Mapping):
        return build_fleet(validated(FleetSettings, given, "fleet"))
    if isinstance(given, list | tuple):
        tiers = [_tier(number, entry) for number, entry in enumerate(given)]
        if not tiers:
            raise FedtailorError("fleet.tiers = []: expected at least one tier")
        return build_fleet(validated(FleetSettings, {"tiers": tiers}, "fleet"))
    raise FedtailorError(
        f"fleet = {given!r}: expected a name such as 'uniform-5', a list of tiers such as "
        '[{"macs": 2e6, "share": 3}, {"width": 1}], or a Fleet'
    )


def _tier(number: int, entry: Any) -> dict[str, Any]:
    if isinstance(entry, Mapping):
        return dict(entry)
    if isinstance(entry, Budget):
        return dict(entry.limits)
    raise FedtailorError(
        f'fleet.tiers[{number}] = {entry!r}: expected a table such as {{"width": 0.5, "share": 3}}'
    )


def method_with(
    given: MethodLike,
    training: TrainingLike,
    rounds: int,
    server: ServerLike = None,
    merge: MergeLike = None,
) -> Method:
    """The method that was meant, with settings of [training], [server] and [merge]; mappings leave the others as is."""
    local, stepping, merging = _table(training, "training"), _table(server, "server"), _table(merge, "merge")
    if isinstance(given, Method):
        if isinstance(given, Auto):
            given = dataclasses.replace(given, said=tuple(dict.fromkeys([*given.said, *stepping])))
        return dataclasses.replace(
            given,
            local=validated(LocalTraining, {**vars(given.local), **local, "rounds": rounds}, "training"),
            server=validated(ServerSettings, said_over(vars(given.server), stepping, "server"), "server"),
            merging=validated(MergeSettings, {**vars(given.merging), **merging}, "merge"),
        )
    return build_method(method_table(given), local, rounds, stepping, merging)


def method_table(given: MethodLike) -> dict[str, Any]:
    """A method as the table of a config: its name and its settings; an object is no table."""
    if isinstance(given, str):
        name, settings = split_spec(given)
        return {"name": name, **{key: toml_value(text) for key, text in settings.items()}}
    if isinstance(given, type) and issubclass(given, Method):
        return {"name": given}
    if isinstance(given, Mapping):
        if "name" not in given:
            raise FedtailorError(f"method = {dict(given)!r}: expected a name: see `fedtailor methods`")
        return dict(given)
    raise FedtailorError(
        f"method = {given!r}: expected a name such as 'heterofl', a table such as "
        '{"name": "fedavg", "width": 0.2}, or a method such as fedtailor.HeteroFL()'
    )


def toml_value(text: str) -> Any:
    """A value as TOML reads it; what is no TOML is a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _table(given: Any, name: str) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, LocalTraining | ServerSettings | MergeSettings):
        return dict(vars(given))
    if isinstance(given, Mapping):
        return dict(given)
    raise FedtailorError(f"{name} = {given!r}: expected a table such as {TABLES[name]}")


def module_of(given: ModuleLike, data: FederatedData, seeds: Seeds, objective: Objective) -> nn.Module:
    """The module itself; or, of a model's name, an import path or a function, one with weights drawn from the seed."""
    if isinstance(given, nn.Module):
        return given
    if not (isinstance(given, str) or callable(given)):
        raise FedtailorError(
            f"module = {given!r}: expected an nn.Module, a function or class that builds one, or a model's name"
        )
    inputs = data.example()
    shape = tuple((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]).shape[1:])
    with seeds.scope("model"):
        return build_model(
            given, input_shape=shape, num_classes=outputs_for(data, objective), symbols=data.origin.symbols
        )
