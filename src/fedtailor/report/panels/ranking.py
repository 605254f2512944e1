"""Which runs figures are made of, and in which order methods are shown: the best first."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from fedtailor.charts.grouping import Runs, by_setting, evaluated
from fedtailor.charts.panel import ReportedRun
from fedtailor.record import headline, less_is_better
from fedtailor.report.targets import Results, last_evaluation, mean_over_tiers


def ended(runs: Runs) -> list[ReportedRun]:
    """The runs that final figures are made of: finished ones, and of methods without such those that there are."""
    finished = {(run.setting, run.variant) for run in runs if run.state == "finished"}
    return [run for run in runs if run.state == "finished" or (run.setting, run.variant) not in finished]


def means(results: Results, metric: str) -> dict[str, float]:
    """Of every method: the mean over tiers at the end, over seeds."""
    return {
        variant: statistics.mean(mean_over_tiers(last_evaluation(records), metric) for records in runs)
        for variant, runs in results.items()
    }


def ranked(results: Results, metric: str) -> list[str]:
    """The methods by their means, the best first; what is no number comes last."""
    sign, found = -1 if less_is_better(metric) else 1, means(results, metric)
    return sorted(found, key=lambda variant: (found[variant] != found[variant], -sign * found[variant]))


def best_first(runs: Runs) -> list[ReportedRun]:
    """The runs in the order in which every panel shows their methods; those that were never evaluated at the end."""
    judged = ended([run for run in runs if any(record.tiers for record in run.records)])
    order: list[str] = []
    for methods in by_setting(judged).values():
        results = {variant: [evaluated(run) for run in each] for variant, each in methods.items()}
        metric = headline(last_evaluation(next(iter(results.values()))[0]))
        order += [variant for variant in ranked(results, metric) if variant not in order]
    return sorted(runs, key=lambda run: _place(order, run.variant))


def _place(order: Sequence[str], variant: str) -> int:
    return order.index(variant) if variant in order else len(order)
