"""How panels see runs: by setting and method, and numbers as they are shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedtailor.charts.panel import ReportedRun
from fedtailor.record import RoundRecord, headline

Runs = Sequence[ReportedRun]


def by_setting(runs: Runs) -> dict[str, dict[str, list[ReportedRun]]]:
    """Setting of the grid -> method -> runs in the order of their seeds."""
    groups: dict[str, dict[str, list[ReportedRun]]] = {}
    for run in sorted(runs, key=lambda run: run.seed):
        groups.setdefault(run.setting, {}).setdefault(run.variant, [])
    for run in runs:
        groups[run.setting][run.variant].append(run)
    order = list(dict.fromkeys(run.variant for run in runs))
    return {
        setting: {
            variant: sorted(each[variant], key=lambda run: run.seed) for variant in order if variant in each
        }
        for setting, each in groups.items()
    }


def of_common_seeds(methods: Mapping[str, Sequence[ReportedRun]]) -> dict[str, list[ReportedRun]]:
    """The runs of those seeds that every method has, so that they can be paired; empty where there is no such seed."""
    common = set.intersection(*({run.seed for run in each} for each in methods.values()))
    kept = {variant: [run for run in each if run.seed in common] for variant, each in methods.items()}
    return kept if common else {}


def evaluated(run: ReportedRun) -> Sequence[RoundRecord]:
    """The rounds up to the last evaluation: an unfinished run is judged by what it has shown so far."""
    last = max(place for place, record in enumerate(run.records) if record.tiers)
    return run.records[: last + 1]


def judged_by(runs: Runs) -> str | None:
    """The metric that all runs of a report are judged by; None where nothing was evaluated."""
    found = (record.tiers for run in runs for record in run.records if record.tiers)
    return next(map(headline, found), None)


def percent(metric: str) -> float:
    """The factor by which a metric is shown: accuracies are in per cent."""
    return 100.0 if metric.endswith("accuracy") else 1.0


def named(metric: str) -> str:
    """For an axis."""
    return f"{metric} (%)" if percent(metric) > 1 else metric


def round_to(value: float, digits: int = 6) -> float:
    """Six significant digits: enough for a picture, and half the file."""
    return float(f"{value:.{digits}g}")


def setting_filter(runs: Runs) -> tuple[str, ...]:
    """The column of the grid, where there is one."""
    return ("setting",) if any(run.setting for run in runs) else ()


def networks(run: ReportedRun) -> Mapping[str, Mapping[str, int]]:
    """What the network costs that each tier was given last: parameters, and multiply-accumulates of a prediction."""
    return next((record.deployed for record in reversed(run.records) if record.deployed), {})
