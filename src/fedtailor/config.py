"""The configuration of a run: one TOML file, typed, with overrides; what it does not know it refuses."""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedtailor.client.sgd import LocalTraining
from fedtailor.data.federated import DataSettings
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet import FleetSettings
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.objective import ObjectiveSettings
from fedtailor.server.setup import RoundSettings
from fedtailor.server.stopping import Stopping
from fedtailor.storage.journal import CheckpointSettings

Table = dict[str, Any]
S = TypeVar("S")


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides the result of a run."""

    name: str = "run"
    """The run's folder below runs/."""
    seed: int = 0
    """The root of all randomness: the same seed gives the same result, bit for bit."""
    rounds: int = 20
    """Federated rounds."""
    clients_per_round: int = 10
    """How many clients take part in a round."""
    evaluate_every: int = 5
    """Rounds between evaluations of every tier; the last round is always evaluated."""
    device: str = "auto"
    """auto, cpu, cuda or mps."""
    threads: int = 1
    """PyTorch threads per client; part of the result, because sums in another order differ in the last bits."""
    data: DataSettings = field(default_factory=DataSettings)
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    model: Table = field(default_factory=lambda: {"name": "cnn"})
    fleet: FleetSettings = field(default_factory=FleetSettings)
    method: Table = field(default_factory=lambda: {"name": "heterofl"})
    training: Table = field(default_factory=dict)
    stopping: Stopping = field(default_factory=Stopping)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)

    def __post_init__(self) -> None:
        allowed = self.name.replace("-", "").replace("_", "").replace(".", "")
        fine = bool(allowed) and allowed.isascii() and allowed.isalnum() and not self.name.startswith(".")
        require(fine and len(self.name) <= 100, "name", self.name, "letters, digits, '-', '_' and '.'")
        require(self.threads >= 1, "threads", self.threads, "at least 1")
        require(
            self.device in ("auto", "cpu", "cuda", "mps"), "device", self.device, "auto, cpu, cuda or mps"
        )
        require("name" in self.model, "model", self.model, "a name: see `fedtailor profile --help`")
        require("name" in self.method, "method", self.method, "a name: see `fedtailor methods`")
        self.round_settings  # noqa: B018  (each checks itself when it is made)
        self.built_method  # noqa: B018

    @property
    def round_settings(self) -> RoundSettings:
        """The part that the round loop reads."""
        return RoundSettings(
            self.rounds, self.clients_per_round, self.evaluate_every, self.stopping, self.engine
        )

    @cached_property
    def built_method(self) -> Method:
        """The method with its settings; what [training] does not say is the method's own default."""
        method = get_method(str(self.method["name"]))
        settings = {key: value for key, value in self.method.items() if key != "name"}
        known = {item.name: item for item in dataclasses.fields(method) if item.name != "local"}
        for key in settings:
            if key not in known:
                raise unknown(f"setting of method {method.name}", key, known)
        local = validated(
            LocalTraining, {**_own_defaults(method), **self.training, "rounds": self.rounds}, "training"
        )
        return validated(method, {**settings, "local": local}, "method")


def load_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file and apply overrides such as ``data.alpha=0.1``."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FedtailorError(f"config {path}: no such file; `fedtailor init` writes one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FedtailorError(f"config {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise FedtailorError(f"config {path} is not valid TOML: {error}") from error
    return make_config(table, overrides)


def make_config(table: Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """A checked configuration from plain tables."""
    merged = _copied(table)
    for override in overrides:
        _apply(merged, override)
    return validated(RunConfig, merged, "")


def validated(kind: type[S], table: Mapping[str, Any], path: str) -> S:
    """Build a settings dataclass from a table: unknown keys, wrong types and wrong values are refused by name."""
    _refuse_unknown(kind, table, path)
    try:
        return TypeAdapter(kind).validate_python(dict(table))
    except ValidationError as error:
        raise FedtailorError(_first_problem(error, path)) from None


def _own_defaults(method: type[Method]) -> Table:
    local = next(item for item in dataclasses.fields(method) if item.name == "local").default
    return {item.name: getattr(local, item.name) for item in dataclasses.fields(LocalTraining)}


def _refuse_unknown(kind: type[Any], table: Mapping[str, Any], path: str) -> None:
    known = {item.name: item for item in dataclasses.fields(kind)}
    for key, value in table.items():
        if key not in known:
            section = f"[{path}]" if path else "the config"
            raise unknown(f"key in {section}", key, known)
        default = known[key].default_factory
        if dataclasses.is_dataclass(default) and isinstance(default, type) and isinstance(value, Mapping):
            _refuse_unknown(default, value, f"{path}.{key}" if path else key)


def _first_problem(error: ValidationError, path: str) -> str:
    problem = error.errors(include_url=False)[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, FedtailorError):
        return str(cause)
    setting = ".".join(
        str(part) for part in ([path] if path else []) + [p for p in problem["loc"] if isinstance(p, str)]
    )
    return f"{setting} = {problem['input']!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}"


def _copied(table: Mapping[str, Any]) -> Table:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in table.items()}


def _apply(table: Table, override: str) -> None:
    """``a.b=c``: the value is TOML, or a plain string where it is not."""
    key, equals, text = override.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts):
        raise FedtailorError(f"--set {override!r}: expected key=value, such as --set data.alpha=0.1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise FedtailorError(f"--set {override!r}: {part} is a value, not a table")
    table[parts[-1]] = value


def to_toml(config: RunConfig) -> str:
    """The configuration with every default filled in, as TOML that `fedtailor run` reads back."""
    method = config.built_method
    table = dataclasses.asdict(config)
    settings = {
        item.name: getattr(method, item.name) for item in dataclasses.fields(method) if item.name != "local"
    }
    table["method"] = {"name": config.method["name"], **settings}
    table["training"] = {k: v for k, v in dataclasses.asdict(method.local).items() if k != "rounds"}
    lines = [f"{key} = {as_toml(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, section in table.items():
        if isinstance(section, dict):
            lines += ["", f"[{key}]", *(f"{k} = {as_toml(v)}" for k, v in section.items() if v is not None)]
    return "\n".join(lines) + "\n"


def as_toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{json.dumps(key)} = {as_toml(entry)}" for key, entry in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(entry) for entry in value) + "]"
    if isinstance(value, Fraction):
        return json.dumps(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value)  # TOML writes strings, numbers and booleans as JSON does
