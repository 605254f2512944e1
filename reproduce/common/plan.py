"""What the common benchmark consists of: tasks, fleets, methods, rates; who is run with more than one seed; ablations.

A cell is a task and a fleet. Rates are found for every method alike, on the first seed and on one fleet; those runs are
that fleet's first seed. A method that is nowhere near the best of a cell is not run with further seeds there; one that
is far behind on every tier of the first fleet is not run on the others.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

from fedtailor.config import load_config
from fedtailor.sweep.plan import under_rules
from reproduce.common.reading import costs_by_tier, course, out_of_reach
from reproduce.shared.figures import ending
from reproduce.shared.papers import Experiment, Figures, Variants
from reproduce.shared.results import Result, Results
from reproduce.shared.tables import Row

HERE = Path(__file__).parent
COMPUTE = (
    HERE / "compute.json"
)  # local steps of every method at equal compute, by ``reproduce.common.compute``

TASKS = ("fashion-mnist", "femnist", "cifar10", "shakespeare")
GRID = dict.fromkeys(TASKS, ("0.03", "0.1", "0.3")) | {
    "cifar10": ("0.1", "0.3", "1.0"),  # with 0.03 nothing learns; 0.3 is the best for most, so one above it
    "shakespeare": ("1.0", "3.0", "10.0"),
}
SEEDS, FIRST = 3, "1"
MARGIN = 3.0  # points: who is further behind the best on every tier, on the first seed, is left at one seed
FAR = 6.0  # points: who is so far behind where rates are found is not run on the task's other fleets
MOST = 2.0  # times the compute of the others: what fewer steps can make up for
KEPT = frozenset({"tailor", "fjord", "fedavg-smallest"})  # run with all seeds in any case


@dataclass(frozen=True)
class Devices:
    """A fleet, and the sizes that methods have to be told for it."""

    name: str  # as ``fleet.name``
    widths: str  # P of methods that train a list of widths
    base: str  # of Split-Mix
    able: str = "1"  # the width that the strongest devices train alone


FLEETS = {
    "uniform": Devices("uniform-5", "uniform-5", "1/5"),
    "few-strong": Devices("two-10-90", "[0.25, 1]", "1/4"),
    "flops": Devices("flops-0.04-0.64", "uniform-10", "1/10", able="1/2"),
}
RATES_FLEET = "uniform"

# What stands where a fleet decides: {smallest} is the width that its smallest device can run.
METHODS = {
    "tailor": "tailor",
    "fedavg-smallest": "fedavg:width={smallest}",
    "fedavg-able": "fedavg:only_able=true:width={able}",
    "fedavg-able-equal": "fedavg:only_able=true:width={able}",
    "heterofl": "heterofl",
    "fjord": "fjord:widths={widths}",
    "fjord-plain": "fjord:distillation=false:widths={widths}",
    "flanc": "flanc:widths={widths}",
    "federated-dropout": "federated-dropout:keep={smallest}",
    "efd": "efd",
    "uniprob": "uniprob",
    "flado": "flado",
    "fedrolex": "fedrolex",
    "splitmix": "splitmix:base={base}",
    "fiarse": "fiarse",
    "fiarse-channels": "fiarse:granularity=channels",
}
# A round of these asks as many as a draw from all clients has of those that take part: so nobody computes more.
ASKED_AS_OFTEN = frozenset({"fedavg-able-equal"})
LEFT_OUT = {  # methods without a row, and why
    "apfl, fedcs, fedpa, feduniform": "clients' own networks, judged by their own examples",
    "depthfl, scalefl, nefl": "they cut blocks, and need exits or chains that these small networks do not have",
    "ofa-fl": "a step runs up to five full networks on every device, nothing near equal compute",
    "hetlora, flexlora": "they train adapters alone",
}
# Parts were tried beside an average of the weights over rounds, which tailor had then: it was shown to bring nothing.
TRIED_WITH = ("server.average=0.9",)
PARTS = {  # of tailor, each switched off or on by itself: method settings, further settings
    "all": ("tailor", ()),
    "without-fleet-widths": ("tailor:widths=uniform-5", ()),
    "without-sandwich": ("tailor:sandwich=false", ()),
    "without-holders": ("tailor:joint_mean=networks", ()),
    "without-momentum": ("tailor", ("server.momentum=0",)),
    "without-average": ("tailor", ("server.average=0",)),
    "with-distillation": ("tailor:distillation=true", ()),
    "with-smallest-share": ("tailor:smallest_share=0.3", ()),
    "with-few-holders": ("tailor:few_holders=0.5", ()),
    "with-more-momentum": ("tailor", ("server.momentum=0.8",)),
    "with-yogi": ("tailor", ("server.optimiser=yogi",)),
    "server-alone": ("fjord:widths={widths}", ("server.momentum=0.5",)),
}
PARTS_OF = (  # cells whose ablations are run: one of each task
    ("fashion-mnist", "few-strong"),
    ("femnist", "uniform"),
    ("cifar10", "uniform"),
    ("shakespeare", "uniform"),
)


@dataclass(frozen=True)
class Cell(Variants):
    """A task on a fleet: the first seed of all methods (unless it is known from rates), all seeds of some."""

    first: bool = True  # whether the first seed is run here
    further: frozenset[str] = frozenset()  # methods that are run with all seeds

    def every(self) -> Iterator[tuple[str, int, list[str]]]:
        for method, seed, settings in super().every():
            if self.first if seed == int(FIRST) else method in self.further:
                yield method, seed, settings


def experiments(results: Results) -> list[Experiment]:
    """All of them, with the runs that results so far lead to: rates, first seeds, further seeds, ablations."""
    cells = [cell(task, fleet, results) for task in TASKS for fleet in FLEETS]
    return [*map(rates, TASKS), *cells, *(parts(task, fleet, results) for task, fleet in PARTS_OF)]


def rates(task: str) -> Variants:
    """One seed of every method at every rate of the grid, on one fleet."""
    tried = {
        f"{method}-{rate}": settings_of(task, RATES_FLEET, method, rate)
        for method in able(task, RATES_FLEET)
        for rate in GRID[task]
    }
    return _runs(f"{task}-rates", task, RATES_FLEET, tried)


def cell(task: str, fleet: str, results: Results) -> Cell:
    """What is to be run of a cell; nothing of a method whose rate is not known yet."""
    name, found = f"{task}-{fleet}", best_rates(task, results)
    methods = {
        method: settings_of(task, fleet, method, found[method])
        for method in tried_on(task, fleet, results)
        if method in found
    }
    first, tried = fleet != RATES_FLEET, results.runs(name)
    # Who goes on is decided once, when all have been tried: rates, and the first seed of this fleet.
    known = len(found) == len(able(task, RATES_FLEET))
    known = known and all(FIRST in tried.get(method, {}) for method in methods if first)
    further = survivors(rows(task, fleet, results)) if known else ()
    config = f"reproduce/common/{task}.toml"
    return Cell(name, config, methods, SEEDS, (), read(task, fleet), True, first, frozenset(further))


def tried_on(task: str, fleet: str, results: Results) -> list[str]:
    """The methods that are run in a cell: those that can, less those that were hopeless where rates were found."""
    methods, known = able(task, fleet), len(best_rates(task, results)) == len(able(task, RATES_FLEET))
    if fleet == RATES_FLEET or not known:
        return methods
    kept = survivors(rows(task, RATES_FLEET, results), FAR)
    return [method for method in methods if method in kept]


def parts(task: str, fleet: str, results: Results) -> Variants:
    """tailor and each of its parts switched off, at the rate of the whole; FjORD with its server for what is left."""
    found = best_rates(task, results).get("tailor")
    widths = FLEETS[fleet].widths
    tried = {
        part: (
            *under_rules(spec.format(widths=widths), _said(task)),
            *_common(task, fleet, spec.partition(":")[0], found),
            *TRIED_WITH,
            *more,
        )
        for part, (spec, more) in PARTS.items()
        if found is not None
    }
    return _runs(f"{task}-{fleet}-parts", task, fleet, tried, SEEDS)


def _runs(name: str, task: str, fleet: str, tried: Mapping[str, tuple[str, ...]], seeds: int = 1) -> Variants:
    config = f"reproduce/common/{task}.toml"
    return Variants(name, config, tried, seeds, (), read(task, fleet), may_fail=True)


def read(task: str, fleet: str) -> tuple[Figures, ...]:
    """What is read from a finished run of a cell."""
    allowed = computed()[f"{task}-{fleet}"]["allowed"]
    return ending, course, costs_by_tier, partial(out_of_reach, allowed=allowed)


@cache
def settings_of(task: str, fleet: str, method: str, rate: str) -> tuple[str, ...]:
    """What a run changes of its task's config."""
    devices = FLEETS[fleet]
    smallest = computed()[f"{task}-{fleet}"]["smallest"]
    spec = METHODS[method].format(
        smallest=smallest, widths=devices.widths, base=devices.base, able=devices.able
    )
    return (*under_rules(spec, _said(task)), *_common(task, fleet, method, rate))


def _common(task: str, fleet: str, method: str, rate: str) -> tuple[str, ...]:
    known = computed()[f"{task}-{fleet}"]["methods"][method]
    common = f"fleet.name={FLEETS[fleet].name}", f"training.lr={rate}", f"training.steps={known['steps']}"
    if method not in ASKED_AS_OFTEN:
        return common
    usual = load_config(HERE / f"{task}.toml").clients_per_round
    return *common, f"clients_per_round={max(1, round(usual / known['often']))}"


def at_equal_compute(task: str, fleet: str, method: str) -> bool:
    """Whether no client computes much more than its budget pays in the rounds in which it would be asked."""
    known = computed()[f"{task}-{fleet}"]["methods"][method]
    return known["times"] <= MOST and (method in ASKED_AS_OFTEN or "often" not in known)


@cache
def _said(task: str) -> Mapping[str, Any]:
    return load_config(HERE / f"{task}.toml").training


@cache
def computed() -> dict[str, Any]:
    """Of every cell the smallest device's width, and of every method its local steps or why it cannot run there."""
    found: dict[str, Any] = json.loads(COMPUTE.read_text(encoding="utf-8"))["cells"]
    return found


def able(task: str, fleet: str) -> list[str]:
    """The methods that can run in a cell."""
    known = computed()[f"{task}-{fleet}"]["methods"]
    return [method for method in METHODS if "steps" in known[method]]


def best_rates(task: str, results: Results) -> dict[str, str]:
    """Of every method whose rates have all been tried the one with the highest mean over tiers."""
    runs = results.runs(f"{task}-rates")
    found = {}
    for method in able(task, RATES_FLEET):
        tried = {rate: runs.get(f"{method}-{rate}", {}).get(FIRST) for rate in GRID[task]}
        scores = {rate: score(run) for rate, run in tried.items() if run is not None}
        if len(scores) == len(tried):
            found[method] = max(scores, key=lambda rate: scores[rate])
    return found


def score(run: Result) -> float:
    """The mean accuracy over tiers; a run that broke down has none."""
    return fmean(run["accuracy"].values()) if "accuracy" in run else 0.0


def rows(task: str, fleet: str, results: Results) -> dict[str, Row]:
    """What is known of a cell: method -> seed -> figures; runs that broke down have no row."""
    found = {method: dict(row) for method, row in results.runs(f"{task}-{fleet}").items()}
    if fleet == RATES_FLEET:
        tried = results.runs(f"{task}-rates")
        for method, rate in best_rates(task, results).items():
            first = tried[f"{method}-{rate}"][FIRST]
            found[method] = {FIRST: first, **found.get(method, {})}
    kept = {method: {s: run for s, run in row.items() if "accuracy" in run} for method, row in found.items()}
    return {method: kept[method] for method in METHODS if kept.get(method)}


def in_reach(run: Result) -> dict[str, float]:
    """The accuracy of the tiers that can run the network that they were evaluated on."""
    beyond = run.get("beyond", ())
    return {tier: value for tier, value in run["accuracy"].items() if tier not in beyond}


def survivors(found: Mapping[str, Row], margin: float = MARGIN) -> set[str]:
    """Who is run further: near the best of a tier on the first seed, or one that the bars are about."""
    firsts = {method: in_reach(row[FIRST]) for method, row in found.items() if FIRST in row}
    tiers = {tier for accuracy in firsts.values() for tier in accuracy}
    best = {tier: max(accuracy.get(tier, 0.0) for accuracy in firsts.values()) for tier in tiers}
    near = {
        method
        for method, accuracy in firsts.items()
        if any(value >= best[tier] - margin for tier, value in accuracy.items())
    }
    return near | KEPT & firsts.keys()
