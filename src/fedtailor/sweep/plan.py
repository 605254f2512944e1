"""Which runs a comparison consists of: methods x seeds x grid, one folder each; a plan is plain data.

Runs of one seed and one cell of the grid share everything but the method: split, fleet, cohorts, starting weights.
"""

from __future__ import annotations

import itertools
import json
import tomllib
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from fedtailor.client.local_training import LocalTraining
from fedtailor.config import RunConfig, load_config, split_spec, to_toml
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet import Tier
from fedtailor.fleet.presets import build_fleet
from fedtailor.method import Method, refuse_measured
from fedtailor.methods.registry import get_method
from fedtailor.run.auto.rules import is_said
from fedtailor.run.choosing import USUAL_SHARE, chooses
from fedtailor.steps import OnNotice
from fedtailor.storage.files import replace_file
from fedtailor.storage.run_folder import COMPARISON, CONFIG, RunFolder
from fedtailor.toml_text import as_toml

PRESETS = ("neutral", "paper")

Cell = tuple[tuple[str, str], ...]  # the grid's settings of a run: (("data.alpha", "0.5"),)


@dataclass(frozen=True)
class PlannedRun:
    """One run of a comparison and where it lives."""

    variant: str  # the method as it was asked for: fedavg:width=1/5
    cell: Cell
    seed: int
    tier: str  # of a run for one tier alone (``each``), or ""
    config: RunConfig
    folder: RunFolder

    @property
    def title(self) -> str:
        """For people: ``heterofl, seed 3, data.alpha=0.5``."""
        name = self.variant if not self.tier else f"{self.variant} ({self.tier})"
        return ", ".join([name, f"seed {self.seed}", *(f"{key}={value}" for key, value in self.cell)])


@dataclass(frozen=True)
class Plan:
    """A comparison before it runs."""

    base: RunConfig
    folder: Path
    variants: tuple[str, ...]
    cells: tuple[Cell, ...]
    seeds: tuple[int, ...]
    runs: tuple[PlannedRun, ...]

    def write(self) -> None:
        """Leave the plan beside the runs, so that a report knows what belongs together."""
        runs = [
            {
                "folder": str(run.folder.path.relative_to(self.folder)),
                "variant": run.variant,
                "cell": dict(run.cell),
                "seed": run.seed,
                "tier": run.tier,
            }
            for run in self.runs
        ]
        write_plan(self.folder, self.base.name, runs)


def write_plan(folder: Path, name: str, runs: Sequence[Mapping[str, Any]]) -> None:
    """Write which runs a folder holds and what each is called."""
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"name": name, "runs": list(runs)}, indent=2) + "\n"
    replace_file(folder / COMPARISON, [text.encode()])


def make_plan(
    config: Path,
    methods: str,
    seeds: int,
    grid: Sequence[str],
    overrides: Sequence[str],
    runs: Path,
    on_notice: OnNotice = warnings.warn,
) -> Plan:
    """Check everything that was asked for, before anything runs or is written."""
    require(seeds >= 1, "--seeds", seeds, "at least 1")
    variants = split_list(methods)
    require(len(variants) > 0, "--methods", methods, "at least one name, such as heterofl,fedavg")
    require(len(set(variants)) == len(variants), "--methods", methods, "every method once")
    base = load_config(config, overrides, on_notice)
    folder = runs / base.name
    cells = grid_cells(grid)
    numbers = tuple(base.seed + number for number in range(seeds))
    planned = []
    for cell, variant, seed in itertools.product(cells, variants, numbers):
        settings = [*overrides, *(f"{key}={value}" for key, value in cell)]
        common = load_config(config, settings, _told_already)
        for tier, spec in one_per_tier(variant, build_fleet(common.fleet).tiers).items():
            rules = method_overrides(spec, seed, common)
            chosen = load_config(config, [*settings, *rules], _told_already)
            refuse_measured(chosen.built_method)
            path = folder.joinpath(*_cell_folder(cell)) / chosen.name
            planned.append(PlannedRun(variant, cell, seed, tier, chosen, RunFolder(path)))
    plan = Plan(base, folder, tuple(variants), cells, numbers, tuple(_chosen_alike(planned)))
    _refuse_shared_folders(plan)
    return plan


def _chosen_alike(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Where any run chooses by validation examples, all keep them back: every method trains on the same examples."""
    if not any(run.config.data.validation == "auto" and chooses(run.config) for run in planned):
        return list(planned)
    return [replace(run, config=_with_share(run.config)) for run in planned]


def _with_share(config: RunConfig) -> RunConfig:
    if config.data.validation != "auto":
        return config
    return replace(config, data=replace(config.data, validation=USUAL_SHARE))


def _told_already(text: str) -> None:
    """What overrides made useless is the same for all runs."""


def split_list(text: str) -> list[str]:
    """Parts between commas; commas inside brackets and quotes belong to a part.

    >>> split_list("heterofl, fedavg:width=1/5"), split_list("[4, 8],[16, 32]")
    (['heterofl', 'fedavg:width=1/5'], ['[4, 8]', '[16, 32]'])
    """
    parts, depth, quoted, start = [], 0, "", 0
    for place, character in enumerate(text):
        if quoted:
            quoted = "" if character == quoted else quoted
        elif character in "\"'":
            quoted = character
        elif character in "[{":
            depth += 1
        elif character in "]}":
            depth -= 1
        elif character == "," and depth == 0:
            parts.append(text[start:place])
            start = place + 1
    return [part.strip() for part in [*parts, text[start:]] if part.strip()]


def grid_cells(grid: Sequence[str]) -> tuple[Cell, ...]:
    """All combinations of the grid's values; without a grid one empty cell.

    >>> grid_cells(["data.alpha=0.1,1"])
    ((('data.alpha', '0.1'),), (('data.alpha', '1'),))
    """
    axes: dict[str, list[str]] = {}
    for text in grid:
        key, equals, values = text.partition("=")
        listed, key = split_list(values), key.strip()
        require(bool(equals and key and listed), "--grid", text, "key=value,value, such as data.alpha=0.1,1")
        require(len(set(listed)) == len(listed), "--grid", text, "every value once")
        require(key not in axes, "--grid", key, "every key once")
        taken = key in ("seed", "name") or key.split(".")[0] == "method"
        require(
            not taken, "--grid", key, "another key: seeds are --seeds, methods and their settings --methods"
        )
        axes[key] = listed
    return tuple(tuple(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))


def one_per_tier(spec: str, tiers: Sequence[Tier]) -> dict[str, str]:
    """A setting ``each`` stands for every tier's width: one run for each tier, which together are one row."""
    if not any(setting.endswith("=each") for setting in spec.split(":")[1:]):
        return {"": spec}
    if any(tier.budget.width is None for tier in tiers):
        raise FedtailorError(
            f"--methods {spec!r}: each needs a fleet whose tiers have widths, such as uniform-5"
        )
    return {tier.name: spec.replace("=each", f"={tier.budget.width}") for tier in tiers}


def method_overrides(spec: str, seed: int, common: RunConfig) -> list[str]:
    """``fedavg:width=1/5`` as config overrides; settings of the file's own method are dropped with it.

    Where neither the config nor the variant says otherwise, rules are those of any method (``preset=neutral``), so that
    methods are compared and not their presets; ``preset=paper`` takes the method's own.
    """
    return [
        *under_rules(spec, common.training),
        f"seed={seed}",
        f'name="{plain_name(spec)}-seed{seed}"',
    ]


def under_rules(spec: str, training: Collection[str]) -> list[str]:
    """A method as config overrides, with the rules that it is compared under; ``training``: what the config says."""
    name, settings = split_spec(spec)
    rules: dict[str, Any] = {}
    if check_preset(settings.pop("preset", "neutral")):
        method = get_method(name)
        rules = neutral_training(method, training)
        own = {key: as_toml(value) for key, value in neutral_settings(method).items()}
        settings = {**own, **settings}
    pairs = "".join(f", {key} = {_value(value)}" for key, value in settings.items())
    return [
        *(f"training.{key}={as_toml(value)}" for key, value in rules.items()),
        f'method={{name = "{name}"{pairs}}}',
    ]


def neutral_training(method: type[Method], said: Collection[str]) -> dict[str, Any]:
    """What the method's preset of local training changes and nobody speaks of, as it is for any method."""
    preset, plain = next(f for f in fields(method) if f.name == "local").default, LocalTraining()
    names = [item.name for item in fields(LocalTraining) if item.name not in said]
    changed = [name for name in names if getattr(preset, name) != getattr(plain, name)]
    return {name: getattr(plain, name) for name in changed}


def neutral_settings(method: type[Method]) -> dict[str, Any]:
    """The method's rules as they are for any method: its switches off. Norm policies stay: methods depend on theirs."""
    usual = {item.name: item.default for item in fields(Method)}
    return {name: usual.get(name, False) for name in method.rules if name not in ("norm", "align")}


def check_preset(preset: object) -> bool:
    """Whether rules are those of any method."""
    if preset not in PRESETS:
        raise unknown("preset", preset, PRESETS)
    return preset == "neutral"


def is_same(run: PlannedRun) -> bool:
    """Whether the folder holds this run. How many processes work changes no result and is not compared."""
    there = load_config(run.folder.path / CONFIG)
    if run.config.evaluate_every == "auto":  # what is there has settled it
        there = replace(there, evaluate_every="auto")
    chosen = run.folder.setup().get("chosen", {})
    if run.config.method["name"] == "auto" and is_said(chosen.get("why", "")):  # by the same rules
        taken = there.built_method
        if taken.server == replace(run.config, method=there.method).built_method.server:
            there = replace(there, server=run.config.server)
        there = replace(there, method={"name": "auto", "align": taken.align})
    return _comparable(there) == _comparable(run.config)


def _comparable(config: RunConfig) -> str:
    return to_toml(replace(config, engine=replace(config.engine, workers="auto")))


def _value(text: str) -> str:
    """A setting as TOML: numbers and booleans as they are, everything else as a string."""
    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return f'"{text}"'
    return text


def plain_name(text: str) -> str:
    """A text as the name of a folder."""
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in text)


def _cell_folder(cell: Cell) -> tuple[str, ...]:
    return tuple(plain_name(f"{key}-{value}") for key, value in cell)


def _refuse_shared_folders(plan: Plan) -> None:
    """``a:b=1/2`` and ``a:b=1-2`` are one name: two runs must not share it."""
    places: dict[Path, str] = {}
    for run in plan.runs:
        other = places.setdefault(run.folder.path, run.title)
        if other != run.title:
            raise FedtailorError(
                f"{run.title!r} and {other!r} would share {run.folder.path}: write one of them another way"
            )
