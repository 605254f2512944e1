"""The configuration of a run: one TOML file, typed, with overrides; what it does not know it refuses."""

from __future__ import annotations

import dataclasses
import tomllib
import unicodedata
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import TypeAdapter, ValidationError

from fedtailor.anchoring import DEEPEST, Table, anchored, anchored_value
from fedtailor.audit.settings import AuditSettings
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.federated import DataSettings
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet import FleetSettings
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.merging.settings import ServerSettings
from fedtailor.method import SECTIONS, Method, own_settings
from fedtailor.methods.registry import get_method, method_names, stands_in
from fedtailor.objective import ObjectiveSettings
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.secure.settings import SecureSettings
from fedtailor.server.setup import AsynchronousSettings, NormSettings, RoundSettings
from fedtailor.server.stopping import Stopping
from fedtailor.steps import OnNotice
from fedtailor.storage.journal import CheckpointSettings
from fedtailor.storage.run_folder import ReportSettings
from fedtailor.toml_text import as_toml

Settings = Mapping[str, Any]
S = TypeVar("S")

TOO_DEEP = "tables or lists nested far too deep; expected sections of keys"
SHOULD_BE = " should be "  # what pydantic says of an input, or of a fraction's
LONGEST_NAME = 200  # bytes: file systems allow 255, and a comparison adds to it
# What was chosen for the one is of no use to another: an override of the first key drops the others of its section.
CHOICES: dict[str, tuple[str, tuple[str, ...]]] = {
    "data": ("dataset", ("options",)),
    "fleet": ("name", ("tiers", "drop_scale", "devices", "deadline", "trace")),
    "model": ("name", ()),  # all others
    "method": ("name", ()),
    "training": ("optimiser", ("options",)),
    "server": ("optimiser", ("lr", "momentum", "betas", "eps")),
    "merge": ("rule", ("bound", "trim", "attackers")),
}
OTHERS_SAY = {  # keys that other tools have, and what stands for them here
    "learning_rate": "it is called lr", "optimizer": "it is called optimiser", "batch": "it is called batch_size",
    "local_epochs": "it is called epochs", "num_clients": "it is called clients", "num_rounds": "it is called rounds",
}  # fmt: skip


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
    """How many clients take part in a round; by default all that the data has, at most 10."""
    evaluate_every: int | Literal["auto"] = "auto"
    """Rounds between evaluations of every tier; auto: so many that it is below a tenth of the work. The last round is
    always evaluated."""
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
    server: Table = field(default_factory=dict)
    merge: Table = field(default_factory=dict)
    stopping: Stopping = field(default_factory=Stopping)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    norm: NormSettings = field(default_factory=NormSettings)
    asynchronous: AsynchronousSettings = field(default_factory=AsynchronousSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    secure: SecureSettings = field(default_factory=SecureSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)

    def __post_init__(self) -> None:
        expected = f"letters, digits, '-', '_' and '.', at most {LONGEST_NAME} bytes"
        require(_names_a_folder(self.name), "name", self.name, expected)
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
            self.rounds, self.clients_per_round, self.evaluate_every, self.stopping, self.engine, self.norm,
            self.asynchronous, self.privacy, self.secure,
        )  # fmt: skip

    @cached_property
    def built_method(self) -> Method:
        """The method with its settings; what [training], [server] and [merge] leave open is the method's default."""
        return build_method(self.method, self.training, self.rounds, self.server, self.merge)


def build_method(
    table: Settings,
    training: Settings,
    rounds: int | None,
    server: Settings | None = None,
    merge: Settings | None = None,
) -> Method:
    """The method that a table names, with its other entries as settings; ``name`` may be the class itself."""
    name = table["name"]
    method: type[Method] = name if isinstance(name, type) else get_method(str(name))
    settings = {key: value for key, value in table.items() if key != "name"}
    known = own_settings(method)
    for key in settings:
        if key not in known:
            raise unknown(f"setting of method {method.name}", key, known)
    own = {item.name: vars(item.default) for item in dataclasses.fields(method) if item.name in SECTIONS}
    local = validated(LocalTraining, {**own["local"], **training, "rounds": rounds}, "training")
    stepping = validated(ServerSettings, said_over(own["server"], server or {}, "server"), "server")
    merging = validated(MergeSettings, {**own["merging"], **(merge or {})}, "merge")
    if stands_in(method):
        settings["said"] = tuple(server or ())
    return validated(method, {**settings, "local": local, "server": stepping, "merging": merging}, "method")


def said_over(own: Settings, said: Settings, section: str) -> dict[str, Any]:
    """A method's settings of a table with those that are said; another choice is not given what was of the first.

    >>> said_over({"optimiser": "sgd", "momentum": 0.9, "average": 0.5}, {"optimiser": "yogi"}, "server")
    {'optimiser': 'yogi', 'average': 0.5}
    """
    choice, options = CHOICES[section]
    other = said.get(choice, own[choice]) != own[choice]
    return {**{key: value for key, value in own.items() if not (other and key in options)}, **said}


def split_spec(spec: str) -> tuple[str, dict[str, str]]:
    """A method with settings behind colons, as one word; the name may be an import path.

    >>> split_spec("fedavg:width=1/5"), split_spec("my_file.py:Timid:share=0.5")
    (('fedavg', {'width': '1/5'}), ('my_file.py:Timid', {'share': '0.5'}))
    """
    name, *texts = spec.split(":")
    if texts and "=" not in texts[0] and name not in method_names():
        name = f"{name}:{texts.pop(0)}"
    for text in texts:
        if "=" not in text:
            raise FedtailorError(f"method {spec!r}: expected name:key=value, such as fedavg:width=1/5")
    return name, {key: value for key, _, value in (text.partition("=") for text in texts)}


def load_config(
    path: Path | str, overrides: Sequence[str] = (), on_notice: OnNotice = warnings.warn
) -> RunConfig:
    """Read a TOML file and apply overrides such as ``data.alpha=0.1``.

    Paths in the file are relative to the file, those in overrides to the current folder.
    """
    require(isinstance(path, str | Path), "config", path, "the path of a TOML file; make_config takes tables")
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FedtailorError(f"config {path}: no such file; `fedtailor init` writes one") from None
    except IsADirectoryError:
        inside = [file for file in sorted(path.glob("*.toml")) if file.name != "pyproject.toml"]
        found = f", such as {inside[0]}" if inside else "; `fedtailor init` writes one"
        raise FedtailorError(f"config {path} is a folder: expected a TOML file{found}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FedtailorError(f"config {path} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise FedtailorError(f"config {path} is not valid TOML: {error}") from error
    except RecursionError:
        raise FedtailorError(f"config {path}: {TOO_DEEP}") from None
    return make_config(anchored(table, path.parent), overrides, on_notice)


def make_config(
    table: Mapping[str, Any], overrides: Sequence[str] = (), on_notice: OnNotice = warnings.warn
) -> RunConfig:
    """A checked configuration from plain tables; ``on_notice`` is told what an override made useless."""
    merged, changes = _copied(table), [_parsed(override) for override in overrides]
    _drop_what_belonged_to_others(merged, changes, on_notice)
    for change in changes:
        _apply(merged, change)
    clients = _section(merged, "data").get("clients", DataSettings.clients)
    if isinstance(clients, int) and clients >= 1:
        merged.setdefault("clients_per_round", most_per_round(clients))
    return validated(RunConfig, merged, "")


def most_per_round(clients: int) -> int:
    """How many clients take part in a round where nothing is said: all of them, at most 10."""
    return min(clients, RunConfig.clients_per_round)


def _section(table: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = table.get(name)
    return found if isinstance(found, Mapping) else {}


def validated(kind: type[S], table: Mapping[str, Any], path: str) -> S:
    """Build a settings dataclass from a table: unknown keys, wrong types and wrong values are refused by name."""
    _refuse_unknown(kind, table, path)
    try:
        return TypeAdapter(kind).validate_python(dict(table))
    except ValidationError as error:
        raise FedtailorError(_first_problem(error, table, path)) from None


def _refuse_unknown(kind: type[Any], table: Mapping[str, Any], path: str) -> None:
    known = {item.name: item for item in dataclasses.fields(kind)}
    for key, value in table.items():
        if key not in known:
            section = f"[{path}]" if path else "the config"
            meant = f" ({OTHERS_SAY[key]})" if key in OTHERS_SAY else ""
            raise unknown(f"key in {section}", key, known, hint=meant)
        default = known[key].default_factory
        if dataclasses.is_dataclass(default) and isinstance(default, type) and isinstance(value, Mapping):
            _refuse_unknown(default, value, f"{path}.{key}" if path else key)


def _first_problem(error: ValidationError, table: Mapping[str, Any], path: str) -> str:
    problems = error.errors(include_url=False)
    problem = problems[0]
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, FedtailorError):
        return str(cause)
    place, text = problem["loc"], problem["msg"]
    if SHOULD_BE in text and _given(table, place[:-1]) is problem["input"]:
        # A setting of several types has a problem with each of them.
        place = place[:-1]
        kinds = [each["msg"].partition(SHOULD_BE)[2] for each in problems if each["loc"][:-1] == place]
        text = (
            f"input{SHOULD_BE}{' or '.join(dict.fromkeys(kind.partition(',')[0] for kind in kinds if kind))}"
        )
    names = [path, *(part for part in place if isinstance(part, str))]
    return f"{'.'.join(filter(None, names))} = {problem['input']!r}: {text[0].lower()}{text[1:]}"


def _given(table: Any, place: Sequence[Any]) -> Any:
    for part in place:
        table = table.get(part) if isinstance(table, Mapping) else None
    return table


def _copied(table: Mapping[str, Any], depth: int = 0) -> Table:
    if depth > DEEPEST:
        raise FedtailorError(f"config: {TOO_DEEP}")
    return {
        key: _copied(each, depth + 1) if isinstance(each, Mapping) else each for key, each in table.items()
    }


@dataclass(frozen=True)
class _Change:
    """One override: ``a.b=c``."""

    text: str
    keys: tuple[str, ...]
    value: Any


def _parsed(override: str) -> _Change:
    """``a.b=c``: the value is TOML, or a plain string where it is not."""
    key, equals, text = override.partition("=")
    keys = tuple(key.strip().split("."))
    if not equals or not all(keys):
        raise FedtailorError(f"--set {override!r}: expected key=value, such as --set data.alpha=0.1")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text.strip()
    except RecursionError:
        raise FedtailorError(f"--set {override[:80]!r}: {TOO_DEEP}") from None
    return _Change(override, keys, anchored_value(".".join(keys), value, Path()))


def _apply(table: Table, change: _Change) -> None:
    *above, last = change.keys
    for part in above:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise FedtailorError(f"--set {change.text!r}: {part} is a value, not a table")
    table[last] = change.value


def _drop_what_belonged_to_others(table: Table, changes: Sequence[_Change], on_notice: OnNotice) -> None:
    """Where an override chooses another model, method, fleet or data set, the file's options for the first one go."""
    for section, (choice, options) in CHOICES.items():
        chosen = [change.value for change in changes if change.keys == (section, choice)]
        found = table.get(section)
        if not chosen or not isinstance(found, dict) or found.get(choice) == chosen[-1]:
            continue
        gone = [key for key in found if key != choice and (not options or key in options)]
        told = ", ".join(f"{section}.{key} = {as_toml(found.pop(key))}" for key in gone)
        if gone:
            on_notice(f"{section}.{choice} = {chosen[-1]}: dropped {told}, which the config has for another")


def _names_a_folder(name: str) -> bool:
    """Letters of any language with their marks, digits, and what is harmless in a file's name."""
    fine = all(letter in "-_." or unicodedata.category(letter)[0] in "LMN" for letter in name)
    return fine and name.strip("-_.") != "" and name[0] != "." and len(name.encode()) <= LONGEST_NAME


def to_toml(config: RunConfig) -> str:
    """The configuration with every default filled in, as TOML that `fedtailor run` reads back."""
    method = config.built_method
    table = dataclasses.asdict(config)
    settings = {name: getattr(method, name) for name in own_settings(method)}
    table["method"] = {"name": config.method["name"], **settings}
    table["server"] = dict(config.server) if stands_in(method) else dataclasses.asdict(method.server)
    table["merge"] = dataclasses.asdict(method.merging)
    table["training"] = {k: v for k, v in dataclasses.asdict(method.local).items() if k != "rounds"}
    lines = [f"{key} = {as_toml(value)}" for key, value in table.items() if not isinstance(value, dict)]
    for key, section in table.items():
        if isinstance(section, dict):
            lines += ["", f"[{key}]", *(f"{k} = {as_toml(v)}" for k, v in section.items() if v is not None)]
    return "\n".join(lines) + "\n"
