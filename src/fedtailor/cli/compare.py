"""``fedtailor compare``: methods, seeds and a grid of settings on the same data, fleet and budgets."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import Progress

from fedtailor.cli.grouping import grouped
from fedtailor.cli.output import (
    JsonOption,
    RoundProgress,
    SetOption,
    TargetOption,
    console,
    load_torch,
    messages,
    notice,
    print_json,
    progress_bars,
    stoppable,
)
from fedtailor.cli.report import OverwriteOption
from fedtailor.errors import FedtailorError, LockedError, counted, require

if TYPE_CHECKING:
    from fedtailor.record import RoundRecord
    from fedtailor.sweep.plan import Plan, PlannedRun

AGAIN = "the same command"


@dataclass(frozen=True)
class Which:
    """Which runs a comparison consists of."""

    config: Annotated[Path, typer.Argument(help="A TOML file; its [method] is replaced by --methods.")]
    methods: Annotated[
        str,
        typer.Option(
            help="Names with settings behind colons, e.g. heterofl,fedavg:width=1/5; "
            "efd:global_width=each runs one model per tier and joins them into one row; "
            "heterofl:preset=paper takes the paper's own training and rules."
        ),
    ]
    seeds: Annotated[int, typer.Option(help="Repeat every method with this many seeds.")] = 1
    grid: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=V,V", help="Repeat all of it for these values of a key. Repeatable."),
    ] = None
    overrides: SetOption = None
    runs: Annotated[Path, typer.Option(help="The folder that holds all runs.")] = Path("runs")

    def plan(self) -> Plan:
        """The runs, checked."""
        from fedtailor.sweep.evaluations import evaluated_alike
        from fedtailor.sweep.plan import make_plan

        grid, overrides = self.grid or [], self.overrides or []
        plan = make_plan(self.config, self.methods, self.seeds, grid, overrides, self.runs, notice)
        return evaluated_alike(plan, notice)


@grouped
def compare(
    which: Which,
    jobs: Annotated[
        int | None, typer.Option(help="Runs at a time, each in its own process; default: one per core.")
    ] = None,
    target: TargetOption = None,
    report: Annotated[
        Path | None,
        typer.Option(help="Write a report too, e.g. report.html; charts need the extra `report`."),
    ] = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compare methods: each run has its own folder, finished ones are skipped, interrupted ones go on."""
    from fedtailor.report.export import Format, check_place, format_of, write_report

    require(jobs is None or jobs >= 1, "--jobs", jobs, "at least 1")
    form: Format = "html"
    if report is not None:
        form = format_of(None, report)
        check_place(report, form, overwrite)
    load_torch()
    plan = which.plan()
    missing = _missing(plan)
    if missing:
        _say_what_the_data_is(plan)
        _say_who_gets_less(plan)
        _do(plan, missing, jobs)
    if report is not None:
        write_report([plan.folder], report, target, form)
    _show(plan, target, report, as_json)


def _say_what_the_data_is(plan: Plan) -> None:
    """Once for all runs, where the data is the user's own."""
    from fedtailor.data.own import looks_like_path
    from fedtailor.objective import TASKS
    from fedtailor.run.setup import read_data

    if looks_like_path(plan.base.data.dataset):
        read_data(plan.base, TASKS.get(plan.base.objective.task), notice)


def _say_who_gets_less(plan: Plan) -> None:
    """Once for each method that trains none of the widths that tiers may have."""
    from fedtailor.fleet.presets import build_fleet
    from fedtailor.sweep.results import narrower_of

    said: dict[str, None] = {}
    for run in plan.runs:
        budgets = {tier.name: tier.budget.width for tier in build_fleet(run.config.fleet).tiers}
        tiers = {name: width for name, width in budgets.items() if width is not None}
        said[narrower_of(run.variant, run.config.built_method, tiers)] = None
    for sentence in filter(None, said):
        notice(sentence)


def _show(plan: Plan, target: float | None, report: Path | None, as_json: bool) -> None:
    from fedtailor.charts.terminal import Words
    from fedtailor.report.comparison import (
        comparison_data,
        comparison_tables,
        gains_and_losses,
        unequal_in_words,
    )
    from fedtailor.report.fairness import fairness_data
    from fedtailor.sweep.results import group_known, group_results

    results, known = group_results(plan.runs), group_known(plan.runs)
    rules = plan_rules(plan, any(each.statistics for each in known.values()))
    if as_json:
        cells = [
            {
                "grid": dict(cell),
                **comparison_data(each, target, known[cell].guess),
                "fairness": fairness_data(each, known[cell].allowed, known[cell].narrower),
                "validation_examples": known[cell].kept_back,
            }
            for cell, each in results.items()
        ]
        rest = {"cells": cells} if len(cells) > 1 else {}
        print_json({"folder": str(plan.folder), **cells[0], "unequal_rules": rules, **rest})
        return
    rounds, repeated = counted(plan.base.rounds, "round"), counted(len(plan.seeds), "seed")
    for cell, each in results.items():
        chosen = "".join(f", {key}={value}" for key, value in cell)
        title = f"{plan.base.name}: {plan.base.data.dataset}, {rounds}, {repeated}{chosen}"
        for part in comparison_tables(title, each, target, known[cell]):
            console.print(part)
        for part in unequal_in_words(each, known[cell]):
            console.print(part)
    for sentence in rules:
        console.print(Words(sentence))
    console.print(f"Files: {plan.folder}/", markup=False, soft_wrap=True)
    if report is not None:
        console.print(f"Report: {report}", markup=False, soft_wrap=True)
    for cell, each in results.items():  # the end: what devices gain and lose with the first method
        console.print()
        if cell:
            console.print(", ".join(f"{key}={value}" for key, value in cell), markup=False)
        for sentence in gains_and_losses(each, known[cell].allowed):
            console.print(Words(sentence))


def plan_rules(plan: Plan, statistics: bool = True) -> list[str]:
    """Where the methods of a comparison were not run under the same rules; ``statistics``: whether norm is one."""
    from fedtailor.report.rules import unequal_rules

    first = {run.variant: run for run in reversed(plan.runs)}
    return unequal_rules({v: tomllib.loads(_rules_of(first[v])) for v in plan.variants}, statistics)


def _rules_of(run: PlannedRun) -> str:
    """The config of a run; where its method was taken by rules, that of what was taken."""
    from fedtailor.config import to_toml
    from fedtailor.storage.run_folder import CONFIG

    if "chosen" in run.folder.setup():
        return (run.folder.path / CONFIG).read_text(encoding="utf-8")
    return to_toml(run.config)


def _missing(plan: Plan) -> list[PlannedRun]:
    """What is left to do; a folder says by itself whether its run is finished."""
    from fedtailor.storage.files import in_use
    from fedtailor.sweep.plan import is_same

    missing = []
    for run in plan.runs:
        there = run.folder.path.exists()
        if there and not is_same(run):
            raise FedtailorError(
                f"{run.folder.path} holds a run of another configuration: "
                "choose another name (--set name=...) or remove it"
            )
        if there and run.folder.finished:
            messages.print(f"{run.title}: finished before, skipped", markup=False)
            continue
        if there and in_use(run.folder.path):
            raise LockedError(f"{run.folder.path} is in use by another run: nothing was changed")
        if there:
            messages.print(f"{run.title}: interrupted before, going on", markup=False)
        missing.append(run)
    return missing


def _do(plan: Plan, missing: Sequence[PlannedRun], jobs: int | None) -> None:
    from fedtailor.sweep.pool import jobs_for, run_all

    plan.write()
    count = jobs_for(missing, jobs)
    if count == 1:
        for run in missing:
            _do_here(run)
        return
    bars = progress_bars()
    with bars or nullcontext():
        shown = Shown(bars, len(plan.runs), len(plan.runs) - len(missing))
        finished = run_all(missing, count, shown.record, shown.state)
    if not finished:
        messages.print(f"Stopped; every finished round is saved. Go on with:  {AGAIN}", markup=False)
        raise typer.Exit(130)


def _do_here(run: PlannedRun) -> None:
    """One run in this process, which may use workers of its own."""
    from fedtailor.run.interface import resume, run_config

    path = run.folder.path
    shown = RoundProgress(run.title, run.config.rounds, earlier=run.folder.earlier_records())
    with stoppable(path, AGAIN), shown as progress:
        if path.exists():
            resume(path, on_round=progress, on_notice=notice)
        else:
            run_config(run.config, path, progress, lambda _told_already: None)


class Shown:
    """Progress of many runs: those that are running, and how many are done."""

    def __init__(self, bars: Progress | None, runs: int, done: int) -> None:
        self.bars, self.runs, self.done = bars, runs, done
        self.each: dict[str, RoundProgress] = {}
        self.total = bars.add_task("all runs", total=runs, completed=done, state="") if bars else None

    def record(self, run: PlannedRun, record: RoundRecord) -> None:
        """A round of a run has ended."""
        self.each[run.title](record)

    def state(self, run: PlannedRun, state: str) -> None:
        """A run has started or ended."""
        if state == "started":
            self.each[run.title] = RoundProgress(run.title, run.config.rounds, self.bars)
            return
        self.each.pop(run.title).remove()
        self.done += state == "finished"
        messages.print(f"{run.title}: {state} ({self.done} of {self.runs} runs done)", markup=False)
        if self.bars is not None and self.total is not None:
            self.bars.update(self.total, completed=self.done)
