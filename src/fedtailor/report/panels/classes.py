"""Which classes are got right, by every method and device class, and what is taken for what."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fedtailor.charts.grouping import Runs, by_setting, round_to, setting_filter
from fedtailor.charts.panel import Chart, Panel, ReportedRun, Row, axis, heat, points


def classes(runs: Runs) -> Panel:
    """Accuracy of every class, and the confusion matrix, of the networks that each tier was given in the end."""
    right: list[Row] = []
    cells: list[Row] = []
    hardest: list[Row] = []
    for setting, methods in by_setting([run for run in runs if run.confusion]).items():
        for variant, each in methods.items():
            for tier, table in _summed(each).items():
                names = each[0].confusion.get("names") or range(len(table))
                at: Row = {"method": variant, **({"setting": setting} if setting else {}), "tier": tier}
                shares = 100 * table / np.maximum(table.sum(1, keepdims=True), 1)
                known = np.flatnonzero(table.sum(1))
                right += [{**at, "class": names[c], "accuracy": round_to(shares[c, c], 4)} for c in known]
                cells += [
                    {**at, "class": names[c], "answer": names[a], "share": round_to(shares[c, a], 4)}
                    for c in known
                    for a in range(len(table))
                ]
                hardest.append({**at, **_hardest(shares, known, names)})
    if not right:
        return Panel("classes", "Which classes it gets right")
    filters = setting_filter(runs)
    label, answer = (
        axis("class", "class", "ordinal", sort=None),
        axis("answer", "answer", "ordinal", sort=None),
    )
    score = axis("accuracy", "accuracy of the class (%)", scale={"zero": False})
    share = axis("share", "of the class (%)", scale={"domain": [0, 100]})
    charts = [
        Chart(
            "class-accuracy", "Accuracy of every class", "Of the test examples of a class the share that was "
            "recognised, at the end of the run, all seeds together.", right, {"classes": points(label, score)},
            ("tier", *filters),
        ),
        Chart(
            "confusion", "What is taken for what", "Each row is a class, each column an answer, in per cent of the "
            "class: the diagonal is right. All seeds together.", cells, {"matrix": heat(answer, label, share)},
            ("method", "tier", *filters),
        ),
    ]  # fmt: skip
    caption = "The class that is hardest for every method and tier, and what it is taken for most often"
    return Panel("classes", "Which classes it gets right", charts=charts, tables=[(caption, hardest)])


def _summed(runs: Sequence[ReportedRun]) -> dict[str, np.ndarray]:
    """Tier -> true class -> answer, over all seeds."""
    tables: dict[str, np.ndarray] = {}
    for run in runs:
        for tier, table in run.confusion["tiers"].items():
            tables[tier] = tables.get(tier, 0) + np.array(table)
    return tables


def _hardest(shares: np.ndarray, known: np.ndarray, names: Sequence[Any]) -> Row:
    worst = min(known, key=lambda label: shares[label, label])
    others = [label for label in range(len(shares)) if label != worst]
    taken = max(others, key=lambda label: shares[worst, label])
    told = f"{names[taken]} ({shares[worst, taken]:.1f} %)" if shares[worst, taken] else ""
    return {"hardest class": names[worst], "recognised": f"{shares[worst, worst]:.1f} %", "taken for": told}
