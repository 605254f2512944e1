"""What a run takes on the devices themselves: simulated time, energy, who waits, and how each class fares."""

from __future__ import annotations

import statistics
from collections import Counter

from fedtailor.charts.grouping import Runs, by_setting, named, percent, round_to
from fedtailor.charts.panel import Panel, ReportedRun, Row
from fedtailor.record import Simulated, headline
from fedtailor.report.amounts import duration, energy, size
from fedtailor.report.targets import Records, is_simulated, last_evaluation

TOTALS = "Means over seeds: simulated time of all rounds, energy of all devices, how long all clients waited for others"
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
                    "time": duration(mean["seconds"]),
                    "energy": energy(mean["joules"]),
                    "waiting": duration(mean["idle"]),
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
        devices = counts.get(name)
        row: Row = {"class": name}
        row["asked"] = f"{asked / devices:.3g}" if devices else f"{asked:.3g} tasks"
        row["answered"] = f"{100 * statistics.mean(each['answered'] for each in found) / tasks:.0f} %"
        row["a task"] = duration(statistics.mean(each["seconds"] for each in found) / tasks)
        row["of it training"] = duration(statistics.mean(each["compute"] for each in found) / tasks)
        row["energy of a task"] = energy(statistics.mean(each["joules"] for each in found) / tasks)
        row["sent to all"] = size(statistics.mean(each["bytes_down"] for each in found))
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
