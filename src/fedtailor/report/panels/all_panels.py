"""The report as a list of panels, those of methods among them."""

from __future__ import annotations

from fedtailor.charts.grouping import Runs
from fedtailor.charts.panel import Panel, panels_of
from fedtailor.report.panels.about import about
from fedtailor.report.panels.answer import answer
from fedtailor.report.panels.background import covered, data, provenance
from fedtailor.report.panels.classes import classes
from fedtailor.report.panels.costs import pareto
from fedtailor.report.panels.devices import devices
from fedtailor.report.panels.fairness import fairness
from fedtailor.report.panels.on_devices import on_devices
from fedtailor.report.panels.ranking import best_first, ended
from fedtailor.report.panels.refused import refused
from fedtailor.report.panels.scores import left_behind, progress, widths


def all_panels(runs: Runs, per_cent: float | None = None) -> list[Panel]:
    """The report, from the answer to the details."""
    runs = best_first(runs)
    evaluated = [run for run in runs if any(record.tiers for record in run.records)]
    panels: list[Panel] = [about(runs)]
    if evaluated:
        at_end = ended(evaluated)
        panels += [answer(evaluated, per_cent), progress(evaluated), widths(at_end)]
        panels += [pareto(at_end, per_cent), left_behind(at_end), classes(at_end)]
    panels += [on_devices(runs), devices(runs), refused(runs), fairness(runs), covered(runs), data(runs)]
    for method in dict.fromkeys(run.method for run in runs):
        own = [make([run for run in runs if run.method == method]) for make in panels_of(method)]
        panels += [each for each in own if each is not None]
    panels.append(provenance(runs))
    return [each for each in panels if each.charts or each.tables or each.text or each.facts]
