"""What a run takes on the devices themselves: simulated hours, energy, who waits, and how each class fares."""

from __future__ import annotations

import statistics
from collections import Counter

from fedtailor.charts.grouping import Runs, by_setting, named, percent, round_to
from fedtailor.charts.panel import Panel, ReportedRun, Row
from fedtailor.record import Simulated, headline
from fedtailor.report.amounts import short
from fedtailor.report.targets import Records, is_simulated, last_evaluation

HOUR = 3600.0
TOTALS = "Means over seeds: simulated time of all rounds, energy of all devices, hours that clients waited for others"
CLASSES = (
    "Means over seeds. Asked: tasks for each device of the class; answered: the share of them that was merged; a task: "
    "down, training and up"
)


def on_devices(runs: Runs) -> Panel:
    """Simulated time and energy, in all and by class of devices; nothing for runs without a clock."""
    totals: list[Row] = []
    classes: list[Row] = []
    for setting, methods in by_setting([run for run in runs if is_simulated(run.records)]).items():
        at: Row = {"setting": setting} if setting else {}
        for variant, each in methods.items():
            spent = [_total(run.records) for run in each]
            mean = {
                name: statistics.mean(getattr(one, name) for one in spent)
                for name in ("seconds", "joules", "idle")
            }
            totals.append(
                {
                    "method": variant, **at,
                    "hours": f"{mean['seconds'] / HOUR:.3g}",
                    "energy": f"{short(mean['joules'])}J",
                    "waiting, hours": f"{mean['idle'] / HOUR:.3g}",
                }
            )  # fmt: skip
            classes += [{"method": variant, **at, **row} for row in _classes(each)]
    tables = [(TOTALS, totals), (CLASSES, classes)] if totals else []
    return Panel("on-devices", "On the devices, in simulated time", tables=tables)


def _total(records: Records) -> Simulated:
    return sum((record.simulated for record in records if record.simulated), Simulated())


def _classes(runs: Runs) -> list[Row]:
    """One row per class of devices, as the fleet orders them."""
    sums = [_by_class(run) for run in runs]
    counts = {tier["name"]: tier.get("clients") for tier in runs[0].setup.get("tiers", ())}
    rows = []
    for name in counts or sums[0]:
        found = [each.get(name, Counter()) for each in sums]
        asked = statistics.mean(each["asked"] for each in found)
        tasks = max(1e-9, asked)
        size = counts.get(name)
        row: Row = {"class": name}
        row["asked"] = f"{asked / size:.3g}" if size else f"{asked:.3g} tasks"
        row["answered"] = f"{100 * statistics.mean(each['answered'] for each in found) / tasks:.0f} %"
        row["seconds of a task"] = f"{statistics.mean(each['seconds'] for each in found) / tasks:.3g}"
        row["of it training"] = f"{statistics.mean(each['compute'] for each in found) / tasks:.3g}"
        row["joules of a task"] = f"{statistics.mean(each['joules'] for each in found) / tasks:.3g}"
        row["bytes down, all"] = short(statistics.mean(each["bytes_down"] for each in found))
        rows.append({**row, **_score(runs, name)})
    return rows


def _score(runs: Runs, name: str) -> Row:
    ends = [last_evaluation(run.records) for run in runs if any(record.tiers for record in run.records)]
    if not ends or any(name not in end for end in ends):
        return {}
    metric = headline(ends[0])
    return {named(metric): round_to(percent(metric) * statistics.mean(end[name][metric] for end in ends), 4)}


def _by_class(run: ReportedRun) -> dict[str, Counter[str]]:
    found: dict[str, Counter[str]] = {}
    for record in run.records:
        for name, spent in (record.simulated.by_class if record.simulated else {}).items():
            found.setdefault(name, Counter()).update(spent)
    return found
