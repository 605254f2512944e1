"""``fedtailor.compare``: methods and seeds on the user's own module, data and fleet, under the rules of the command."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from fedtailor.config import build_method
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet import Fleet
from fedtailor.method import Method, own_settings, refuse_measured
from fedtailor.methods.registry import get_method
from fedtailor.progress import showing
from fedtailor.run.arguments import (
    FleetLike,
    MethodLike,
    ModuleLike,
    fleet_of,
    folder_of,
    method_table,
    method_with,
    rounds_of,
    run_settings,
)
from fedtailor.run.given_data import read_once
from fedtailor.run.interface import both, train
from fedtailor.run.making import Learnt, make_setup
from fedtailor.run.result import Run
from fedtailor.run.setup import prepare
from fedtailor.storage.rows import table_in
from fedtailor.storage.run_folder import CALL
from fedtailor.sweep.comparison import Comparison
from fedtailor.sweep.plan import (
    check_preset,
    neutral_settings,
    neutral_training,
    one_per_tier,
    plain_name,
    split_list,
    write_plan,
)
from fedtailor.sweep.telling import told_once

Methods = str | Sequence[MethodLike] | Mapping[str, MethodLike]


def compare(
    module: ModuleLike,
    data: Any,
    fleet: FleetLike = "uniform-5",
    methods: Methods = ("heterofl", "fjord", "fedavg"),
    *,
    seeds: int = 1,
    folder: Path | str | None = None,
    target: float | None = None,
    **settings: Any,
) -> Comparison:
    """Train ``module`` with each method and seed; the result prints as the tables of ``fedtailor compare``.

    ``methods`` are spelt as for ``train`` or as on the command line (``"heterofl,fedavg:width=1/5"``); a dict names
    them. Those that are no objects run under the same rules (training, weighting, no masked loss or label rows) unless
    they say ``preset=paper``; an object is run as it is. All other ``settings`` are those of ``train``; ``seed`` is the
    first of the seeds. A module that is built (a function, a class, a model's name) starts from other weights for each
    seed, an ``nn.Module`` from its own. With a ``folder`` every round is saved, finished runs are skipped and
    interrupted ones go on; ``target`` is the accuracy, in per cent, whose cost is shown.
    """
    known = [name for name in inspect.signature(train).parameters if name not in NOT_SETTINGS]
    for key in settings:
        if key not in known:
            raise unknown("setting of compare", key, known)
    whole = isinstance(seeds, int) and not isinstance(seeds, bool)
    require(whole and seeds >= 1, "seeds", seeds, "a whole number, at least 1")
    devices, first = fleet_of(fleet), settings.pop("seed", 0)
    planned = list(_planned(methods, devices, settings, range(first, first + seeds)))
    place = folder_of(folder)
    if place is not None:
        write_plan(place, place.name, [each.entry for each in planned])
    held = read_once(data)
    with told_once(__file__, sys._getframe(1)):
        settings = {**settings, **_alike(module, held, devices, planned, place, settings)}
        done = list(_done(module, held, devices, planned, place, settings))
    return Comparison([(p.variant, p.seed, p.tier, run) for p, run in done], place, target)


NOT_SETTINGS = ("module", "data", "fleet", "method", "folder", "resume")
COMMON = (
    "rounds",
    "clients_per_round",
    "evaluate_every",
    "stopping",
    "engine",
    "norm",
    "threads",
    "checkpoint",
)
LEARNT = ("task", "loss", "metrics", "validation", "model")


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    variant: str
    seed: int
    tier: str  # of a run for one tier alone (``each``), or ""
    method: Method

    @property
    def title(self) -> str:
        """For people."""
        return f"{self.variant if not self.tier else f'{self.variant} ({self.tier})'}, seed {self.seed}"

    @property
    def folder(self) -> str:
        """Where it is saved."""
        return plain_name(f"{self.variant}{'-' if self.tier else ''}{self.tier}-seed{self.seed}")

    @property
    def entry(self) -> dict[str, Any]:
        """Its line in the plan that lies beside the runs."""
        return {
            "folder": self.folder, "variant": self.variant, "cell": {}, "seed": self.seed, "tier": self.tier
        }  # fmt: skip


def _done(
    module: ModuleLike,
    data: Any,
    fleet: Fleet,
    planned: Sequence[Planned],
    place: Path | None,
    settings: dict[str, Any],
) -> Iterator[tuple[Planned, Run]]:
    """Every run, trained or read."""
    wanted, asked = settings.pop("progress", None), settings.pop("on_round", None)
    for each in planned:
        with showing(each.title, each.method.local.rounds or 0, wanted) as show:
            saved = {} if place is None else {"folder": place / each.folder, "resume": True}
            told = {"on_round": both(show, asked), "progress": False, "seed": each.seed}
            run = train(module, data, fleet, each.method, **{**settings, **told, **saved, "training": None})
        yield each, run


def _alike(
    module: ModuleLike,
    data: Any,
    fleet: Fleet,
    planned: Sequence[Planned],
    place: Path | None,
    settings: Mapping[str, Any],
) -> dict[str, Any]:
    """What all runs share where nothing is said: examples that are kept back to choose by, and when is evaluated.

    A run that is there already decides how often; else the one that can afford the fewest evaluations.
    """
    common = run_settings(**{key: settings.get(key) for key in COMMON}, seed=planned[0].seed)
    learnt = Learnt(**{key: settings[key] for key in LEARNT if key in settings})
    share = max(learnt.share(data, common.stopping, each.method) for each in planned)
    if common.evaluate_every != "auto":
        return {"validation": share}
    for each in planned:
        file = place / each.folder / CALL if place is not None else Path()
        if file.is_file():
            said = table_in(file).get("settings")
            every = said.get("evaluate_every") if isinstance(said, dict) else None
            require(type(every) is int, f"settings.evaluate_every in {file}", every, "a number of rounds")
            return {"validation": share, "evaluate_every": every}
    asked, device = settings.get("clients_per_round"), settings.get("device", "auto")
    learnt = dataclasses.replace(learnt, validation=share)
    base = make_setup(module, data, fleet, planned[0].method, common, asked, learnt, device)
    rounds = rounds_of(common, asked, base.data)
    methods = {each.variant + each.tier: each.method for each in planned}.values()
    found = [prepare(method, base.model, base.data, fleet, rounds, base.seeds) for method in methods]
    return {"validation": share, "evaluate_every": max(int(each.settings.evaluate_every) for each in found)}


def _planned(
    methods: Methods, fleet: Fleet, settings: Mapping[str, Any], seeds: Sequence[int]
) -> Iterator[Planned]:
    """Everything that was asked for, checked before anything runs or is written."""
    variants = _named(methods)
    require(len(variants) > 0, "methods", methods, "at least one, such as ['heterofl', 'fedavg']")
    folders: dict[str, str] = {}
    for variant, given in variants.items():
        other = folders.setdefault(plain_name(variant), variant)
        if other != variant:
            raise FedtailorError(
                f"methods {variant!r} and {other!r} would share a folder: name one otherwise"
            )
        rounds = settings.get("rounds", inspect.signature(train).parameters["rounds"].default)
        training, server, merge = (settings.get(key) for key in ("training", "server", "merge"))
        if isinstance(given, Method):
            made = {"": method_with(given, training, rounds, server, merge)}
        else:
            tables = _per_tier(variant, method_table(given), fleet)
            neutral = {tier: _neutral(table, training, rounds) for tier, table in tables.items()}
            made = {tier: method_with(each, None, rounds, server, merge) for tier, each in neutral.items()}
        for tier, method in made.items():
            refuse_measured(method)
            yield from (Planned(variant, seed, tier, method) for seed in seeds)


def _named(methods: Methods) -> dict[str, MethodLike]:
    """The methods by the names that rows of the table have."""
    if isinstance(methods, str):
        methods = split_list(methods)
    if isinstance(methods, Mapping) and "name" not in methods:
        return dict(methods)
    listed: list[Any] = list(methods) if isinstance(methods, list | tuple) else [methods]
    named: dict[str, MethodLike] = {}
    for given in listed:
        name = _label(given)
        if name in named:
            raise FedtailorError(
                f"methods: {name!r} is there twice; expected every method once, or names of your own: "
                'methods={"this": ..., "that": ...}'
            )
        named[name] = given
    return named


def _label(given: Any) -> str:
    """A method as it is written on the command line, with the settings in which it differs from its default."""
    if isinstance(given, str):
        return given
    if isinstance(given, Method):
        usual = {name: item.default for name, item in own_settings(given).items()}
        settings = {key: getattr(given, key) for key in usual}
        return _spelt(given.name, {key: value for key, value in settings.items() if value != usual[key]})
    table = method_table(given)
    name = table.pop("name")
    return _spelt(name if isinstance(name, str) else name.name, table)


def _spelt(name: str, settings: Mapping[str, Any]) -> str:
    return ":".join([name, *(f"{key}={_word(value)}" for key, value in settings.items())])


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _per_tier(variant: str, table: Mapping[str, Any], fleet: Fleet) -> dict[str, dict[str, Any]]:
    """A setting ``each`` stands for every tier's width: one run for each tier, which together are one row."""
    places = [key for key, value in table.items() if value == "each"]
    widths = one_per_tier(f"{variant}:width=each", fleet.tiers) if places else {"": ""}
    made: dict[str, dict[str, Any]] = {}
    for tier, spec in widths.items():
        width = spec.rpartition("=")[2]
        made[tier] = {**table, **{key: Fraction(width) if width else width for key in places}}
    return made


def _neutral(table: Mapping[str, Any], training: Any, rounds: int) -> Method:
    """The method under the rules of any method, unless it asks for its paper's own (``preset = "paper"``)."""
    settings = {key: value for key, value in table.items() if key != "preset"}
    name = settings["name"]
    method: type[Method] = name if isinstance(name, type) else get_method(str(name))
    said = (
        dict(training) if isinstance(training, Mapping) else dataclasses.asdict(training) if training else {}
    )
    if check_preset(table.get("preset", "neutral")):
        said = {**neutral_training(method, said), **said}
        settings = {**neutral_settings(method), **settings}
    return build_method(settings, said, rounds)
