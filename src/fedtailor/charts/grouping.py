"""How panels see runs: by setting and method, and numbers as they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.charts.panel import RunRecord

Runs = Sequence[RunRecord]


def by_setting(runs: Runs) -> dict[str, dict[str, list[RunRecord]]]:
    """Setting of the grid -> method -> runs in the order of their seeds."""
    groups: dict[str, dict[str, list[RunRecord]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault(run.setting, {}).setdefault(run.label, [])
    for run in runs:
        groups[run.setting][run.label].append(run)
    order = list(dict.fromkeys(run.label for run in runs))
    return {
        setting: {label: sorted(each[label], key=lambda run: run.seed) for label in order if label in each}
        for setting, each in groups.items()
    }


def of_common_seeds(methods: Mapping[str, Sequence[RunRecord]]) -> dict[str, list[RunRecord]]:
    """The runs of those seeds that every method has, so that they can be paired; empty where there is no such seed."""
    common = set.intersection(*({run.seed for run in each} for each in methods.values()))
    kept = {label: [run for run in each if run.seed in common] for label, each in methods.items()}
    return kept if common else {}


def evaluated_rows(run: RunRecord) -> list[Mapping[str, Any]]:
    """The rows up to the last evaluation: an unfinished run is judged by what it has shown so far."""
    last = max(place for place, row in enumerate(run.rows) if row.get("tiers"))
    return list(run.rows[: last + 1])


def percent(metric: str) -> float:
    """Accuracies are shown in per cent."""
    return 100.0 if metric == "accuracy" else 1.0


def named(metric: str) -> str:
    """For an axis."""
    return "accuracy (%)" if metric == "accuracy" else metric


def round_to(value: float, digits: int = 6) -> float:
    """Six significant digits: enough for a picture, and half the file."""
    return float(f"{value:.{digits}g}")


def setting_filter(runs: Runs) -> tuple[str, ...]:
    """The column of the grid, where there is one."""
    return ("setting",) if any(run.setting for run in runs) else ()


def networks(run: RunRecord) -> Mapping[str, Mapping[str, int]]:
    """What the network costs that each tier was given last: parameters, and multiply-accumulates of a prediction."""
    return next((note["deployed"] for note in reversed(run.notes) if note.get("deployed")), {})
