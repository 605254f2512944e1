"""After which rounds the runs of a comparison are evaluated: all after the same ones, or figures could not be compared.

Where the configuration leaves it open (``evaluate_every = "auto"``), a run that is there already decides; else the one
that can afford the fewest evaluations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedtailor.config import load_config
from fedtailor.run.setup import prepare, prepare_config
from fedtailor.server.setup import Setup
from fedtailor.steps import OnNotice
from fedtailor.storage.run_folder import CONFIG
from fedtailor.sweep.plan import Plan, PlannedRun


def evaluated_alike(plan: Plan, on_notice: OnNotice) -> Plan:
    """The plan with the same ``evaluate_every`` for all runs of a cell of the grid."""
    settled: dict[int, PlannedRun] = {}
    for cell in plan.cells:
        undecided = [run for run in plan.runs if run.cell == cell and run.config.evaluate_every == "auto"]
        if not undecided:
            continue
        every = _of_earlier(undecided) or _affordable(undecided)
        chosen = ", ".join(f"{key}={value}" for key, value in cell)
        times = "round" if every == 1 else f"{every} rounds and at the end"
        when = f"after every {times}" if every < undecided[0].config.rounds else "once, after the last round"
        on_notice(f"all runs{f' of {chosen}' if chosen else ''} are evaluated {when}")
        for run in undecided:
            settled[id(run)] = replace(run, config=replace(run.config, evaluate_every=every))
    return replace(plan, runs=tuple(settled.get(id(run), run) for run in plan.runs))


def _of_earlier(runs: Sequence[PlannedRun]) -> int | None:
    """What runs that have been begun already do."""
    for run in runs:
        file = run.folder.path / CONFIG
        every = load_config(file).evaluate_every if file.is_file() else "auto"
        if every != "auto":
            return every
    return None


def _affordable(runs: Sequence[PlannedRun]) -> int:
    """They share data, model and fleet, which are read once; what differs is the method."""
    base = prepare_config(runs[0].config)
    methods = {(run.variant, run.tier): run for run in reversed(runs)}
    return max(_settled(base, run) for run in methods.values())


def _settled(base: Setup, run: PlannedRun) -> int:
    method, settings = run.config.built_method, run.config.round_settings
    every = prepare(method, base.model, base.data, base.fleet, settings, base.seeds).settings.evaluate_every
    assert every != "auto"
    return every
