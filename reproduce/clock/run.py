"""What a clock says of methods: 200 unequal devices, a deadline, rounds and merging that waits for nobody.

    FEDTAILOR_DATA=... python -m reproduce.clock.run [--list] [--draw] [experiment ...]

Without names all experiments run. Call it again after an interruption: what is in results.json or finished below
runs/clock is not repeated. Each run says which simulated time had passed when the mean over classes of devices reached
an accuracy, and who took part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

from fedtailor.report.targets import mean_over_tiers, simulated_until
from fedtailor.storage.run_folder import RunFolder
from reproduce.clock import tables
from reproduce.shared import charts
from reproduce.shared.figures import accuracies, ending, percent
from reproduce.shared.papers import Experiment, Paper
from reproduce.shared.results import Result, Results

CONFIG = "reproduce/clock/fashion-mnist-devices.toml"
METHODS = {  # and what tables and figure call them
    "heterofl": "HeteroFL",
    "fjord:distillation=false:widths=fleet": "FjORD",
    "flanc:widths=fleet": "FLANC",
    "fedavg:width=3/16": "FedAvg, smallest width",
    "fedavg:only_able=true": "FedAvg, able devices alone",
}
# As many answers as the rounds merge: a buffer of half a cohort, twice as often.
BUFFERED = ("asynchronous.buffer=10", "rounds=200", "evaluate_every=20")
TARGETS = (0.6, 0.65, 0.7, 0.75, 0.8)
MINUTE = 60.0
LATE = (
    3  # evaluations at the end, whose mean is the accuracy of a class: single ones differ by several points
)


def on_the_clock(folder: RunFolder) -> Result:
    """Simulated minutes, energy and waiting; minutes to common targets; the share of tasks that was merged by class."""
    records = folder.records()
    times = [seconds / MINUTE for seconds in simulated_until(records)]
    course = [
        (round(time, 3), percent(mean_over_tiers(record.tiers, "accuracy")))
        for record, time in zip(records, times, strict=True)
        if record.tiers
    ]
    classes: dict[str, Counter[str]] = {}
    for record in records:
        for name, spent in (record.simulated.by_class if record.simulated else {}).items():
            classes.setdefault(name, Counter()).update(spent)
    reached = {
        f"{100 * target:g}": next((time for time, value in course if value >= 100 * target), None)
        for target in TARGETS
    }
    simulated = [record.simulated for record in records if record.simulated]
    late = [accuracies(record.tiers) for record in records if record.tiers][-LATE:]
    return {
        "simulated": {
            "minutes": round(times[-1], 2),
            "kilojoules": round(sum(each.joules for each in simulated) / 1000, 2),
            "waiting_hours": round(sum(each.idle for each in simulated) / 3600, 2),
            "minutes_to_reach": reached,
            "course": course,
            "by_class": {name: round(fmean(each[name] for each in late), 2) for name in late[-1]},
            "asked": {name: each["asked"] for name, each in classes.items()},
            "merged": {name: round(each["answered"] / each["asked"], 3) for name, each in classes.items()},
        }
    }


READ = (ending, on_the_clock)
EXPERIMENTS = (
    Experiment("rounds", CONFIG, tuple(METHODS), 3, figures=READ),
    Experiment("buffered", CONFIG, tuple(METHODS), 3, BUFFERED, READ),
)


def draw(results: Results, folder: Path) -> None:
    """Accuracy over simulated time, rounds and buffered, the mean over seeds; and the tables of the page."""
    panels: list[str] = []
    for experiment in EXPERIMENTS:
        runs = results.runs(experiment.name)
        rows = {title: runs[method] for method, title in METHODS.items() if runs.get(method)}
        series = {method: _points(row) for method, row in rows.items()}
        if series:
            for name, table in (("Minutes", tables.times(rows)), ("Classes", tables.classes(rows))):
                print("\n".join(["", f"## {experiment.name}: {name.lower()}", "", *table]))
            title = f"{experiment.name}: accuracy (mean over classes of devices, %) over simulated minutes"
            panels.append(charts.lines(title, series, charts.HEIGHT * len(panels)))
    if panels:
        charts.write(folder / "simulated-time.svg", panels)


def _points(seeds: Mapping[str, Result]) -> list[tuple[float, float]]:
    """The mean course over seeds, by evaluation."""
    courses = [run["simulated"]["course"] for run in seeds.values()]
    return [
        (fmean(time for time, _ in each), fmean(value for _, value in each))
        for each in zip(*courses, strict=False)
    ]


if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS, draw).main()
