"""Which runs belong together: those that differ in nothing but the seed. Others have short names for what differs."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtailor.charts.grouping import judged_by
from fedtailor.charts.panel import ReportedRun
from fedtailor.report.amounts import short, short_name

CHANGES_NOTHING = (
    "name", "seed", "engine.workers", "checkpoint.every", "checkpoint.keep", "report.client_details",
)  # fmt: skip
TOLD_FIRST = ("rounds", "model.name", "data.dataset", "data", "model", "fleet", "clients_per_round", "method")
LEAST_TOLD = 2
NETWORK = "network"  # its shapes, where no setting says that they differ
LONGEST_VALUE = 20  # characters

Settings = Mapping[str, str]  # of a run, by name, without what changes no result
Alike = tuple[frozenset[tuple[str, str]], str]  # settings and network: equal for runs that belong together


def settings_of(run: ReportedRun) -> dict[str, str]:
    """All that a run was told, as text; a run whose folder does not say is like no other."""
    told = flat(run.config) or {"folder": run.folder}
    # Where no evaluation may end the run, it does not matter how often there is one; the last round has one anyway.
    watched = told.get("stopping.patience", "0") != "0"
    ignored = CHANGES_NOTHING if watched else (*CHANGES_NOTHING, "evaluate_every")
    return {key: value for key, value in told.items() if key not in ignored}


def alike(run: ReportedRun) -> Alike:
    """What two runs must share to be two seeds of one thing."""
    network = {key: run.setup.get(key) for key in ("groups", "layers")}
    return frozenset(settings_of(run).items()), json.dumps(network, sort_keys=True)


def called(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
    """The runs under the names of what they are, each seed once; scores of other data or metrics are settings apart."""
    groups: dict[Alike, list[ReportedRun]] = {}
    for run in runs:
        groups.setdefault(alike(run), []).append(run)
    apart = _settings_apart([group[0] for group in groups.values()])
    same_name: dict[tuple[str, str], list[list[ReportedRun]]] = {}
    for group, where in zip(groups.values(), apart, strict=True):
        cell = next((run.setting for run in group if run.setting), "")
        # What a comparison calls these runs; the method, where none does.
        base = next((run.variant for run in group if run.variant), short_name(group[0].method))
        named = [replace(run, variant=base, setting=", ".join(filter(None, (where, cell)))) for run in group]
        same_name.setdefault((named[0].setting, base), []).append(list(_once(named)))
    labels: dict[Alike, str] = {}
    for each in same_name.values():
        labels |= zip(map(alike, (group[0] for group in each)), _labels([g[0] for g in each]), strict=True)
    found = {alike(group[0]): group for each in same_name.values() for group in each}
    return [replace(run, variant=labels[key]) for key in groups for run in found[key]]


def _once(group: Sequence[ReportedRun]) -> Iterator[ReportedRun]:
    """Every seed once: the run that came furthest; the others are told as its repeats."""
    seeds: dict[int, list[ReportedRun]] = {}
    for run in group:
        seeds.setdefault(run.seed, []).append(run)
    for each in seeds.values():
        furthest = max(each, key=lambda run: (run.state == "finished", run.records[-1].round))
        yield replace(furthest, repeats=tuple(run.folder for run in each if run is not furthest))


def _settings_apart(runs: Sequence[ReportedRun]) -> list[str]:
    """Of each run its data and its metric, where the report has several: such scores are never ranked together."""
    found = [(dataset_of(run), judged_by([run]) or "") for run in runs]
    several = len({data for data, _ in found}) > 1
    metrics = {data: {metric for other, metric in found if other == data and metric} for data, _ in found}
    return [
        ", ".join(filter(None, (data if several else "", metric if len(metrics[data]) > 1 else "")))
        for data, metric in found
    ]


def dataset_of(run: ReportedRun) -> str:
    """The name of the data."""
    described = run.setup.get("data", {}).get("dataset")
    return str(described or run.config.get("data", {}).get("dataset", ""))


def differing(runs: Sequence[ReportedRun]) -> list[str]:
    """The settings in which these runs differ, those that say most first; the network itself last."""
    each = [settings_of(run) for run in runs]
    keys = list(dict.fromkeys(key for settings in each for key in settings))
    found = [key for key in keys if len({settings.get(key) for settings in each}) > 1]
    found.sort(key=lambda key: (_weight(key), not all(key in settings for settings in each)))
    return [*found, *([NETWORK] if len({alike(run)[1] for run in runs}) > 1 else [])]


def _weight(key: str) -> int:
    """How late a key is told: keys and tables that decide much come first."""
    named = [name for name in (key, key.partition(".")[0]) if name in TOLD_FIRST]
    return TOLD_FIRST.index(named[0]) if named else len(TOLD_FIRST)


def value_of(run: ReportedRun, key: str) -> str:
    """A setting as it is shown."""
    if key == NETWORK:
        tiers = run.setup.get("tiers") or [{}]
        return f"{short(tiers[-1].get('params', 0))} parameters"
    return settings_of(run).get(key, "none")


def short_key(key: str, keys: Sequence[str]) -> str:
    """The last word of a key that says enough among these.

    >>> short_key("data.alpha", ["data.alpha"]), short_key("model.name", []), short_key("a.lr", ["a.lr", "b.lr"])
    ('alpha', 'model', 'a.lr')
    """
    above, _, last = key.rpartition(".")
    word = above if last == "name" and above else last
    clash = any(other != key and other.rpartition(".")[2] == last and last != "name" for other in keys)
    return key if clash else word


def _labels(runs: Sequence[ReportedRun]) -> list[str]:
    """Names for runs of one method that differ: what tells them apart, and at least two of the things that differ."""
    if len(runs) == 1:
        return [runs[0].variant]
    keys = differing(runs)
    told: list[str] = []
    for key in keys:
        if _kinds(runs, [*told, key]) > _kinds(runs, told):
            told.append(key)
    told += [key for key in keys if key not in told][: max(0, LEAST_TOLD - len(told))]
    labels = [" ".join([run.variant, *_parts(run, told)]) for run in runs]
    return [
        label if labels.count(label) == 1 else f"{label} #{labels[:place].count(label) + 1}"
        for place, label in enumerate(labels)
    ]


def _parts(run: ReportedRun, keys: Sequence[str]) -> Iterator[str]:
    """``rounds=6``, ``610 parameters``; what a run was not told at all is left out."""
    for key in keys:
        value = value_of(run, key)
        cut = value if len(value) <= LONGEST_VALUE else value[: LONGEST_VALUE - 1] + "…"
        if key == NETWORK:
            yield cut
        elif key in settings_of(run):
            yield f"{short_key(key, keys)}={cut}"


def _kinds(runs: Sequence[ReportedRun], keys: Sequence[str]) -> int:
    return len({tuple(value_of(run, key) for key in keys) for run in runs})


def flat(table: Mapping[str, Any], above: str = "") -> dict[str, str]:
    """Nested settings as ``data.alpha -> 0.5``."""
    found: dict[str, str] = {}
    for key, value in table.items():
        name = f"{above}{key}"
        found.update(flat(value, f"{name}.") if isinstance(value, Mapping) else {name: str(value)})
    return found
