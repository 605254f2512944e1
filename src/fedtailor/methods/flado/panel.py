"""Where Flado's clients spend their budget, for a report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, islice

import numpy as np

from fedtailor.charts.panel import Chart, Panel, ReportedRun, Row, axis, heat, panel, points
from fedtailor.methods.flado.probabilities import CLIENTS, TABLE
from fedtailor.methods.uniprob import MEAN

MOST_PAIRS = 1000  # of clients in a chart
SAME = 1e-9  # numbers that deviate by no more are one number


@panel("flado")
def probabilities_over_rounds(runs: Sequence[ReportedRun]) -> Panel | None:
    """The paper's figure of activation probabilities: which groups a budget is spent on."""
    rows = [
        {
            "method": run.variant,
            "client": client,
            "rounds": record.round,
            "group": name.removeprefix(MEAN),
            "probability": round(value, 4),
        }
        for run in {run.variant: run for run in reversed(runs)}.values()  # one seed of each variant
        for record in run.records
        for client, values in record.reported.items()
        for name, value in values.items()
        if name.startswith(MEAN)
    ]
    if not rows:
        return None
    colour = axis("probability", "mean probability", aggregate="mean", scale={"domain": [0, 1]})
    by_round = heat(axis("rounds", "rounds", "ordinal"), axis("group", "channel group", "nominal"), colour)
    by_client = heat(axis("client", "client", "ordinal"), axis("group", "channel group", "nominal"), colour)
    text = (
        "Mean probability of the channels of a group, over the clients of a round or over the rounds of a client. "
        "Where all groups have one colour, alignment found nothing to prefer. One seed."
    )
    views = {"rounds": by_round, "clients": by_client}
    chart = Chart("flado", "Where clients spend their budget", text, rows, views, ("method",))
    return Panel("flado", "Flado: activation probabilities", charts=[chart])


@panel("flado")
def probabilities_at_the_end(runs: Sequence[ReportedRun]) -> Panel | None:
    """Which channels each client has come to train, and whether clients of similar data choose similar ones."""
    shown = [run for run in {run.variant: run for run in reversed(runs)}.values() if CLIENTS in run.tables]
    cells = [row for run in shown for row in _cells(run)]
    if not cells:
        return None
    colour = axis("probability", "probability", scale={"domain": [0, 1]})
    view = heat(axis("channel", "channel", "ordinal"), axis("client", "client", "ordinal"), colour)
    text = "One cell per client and channel at the end of a run, one seed. One colour everywhere: nothing was decided."
    charts = [
        Chart("flado-channels", "Who trains what", text, cells, {"channels": view}, ("method", "group"))
    ]
    pairs = [row for run in shown for row in _pairs(run)]
    if pairs:
        across = axis("overlap", "share of examples whose classes both have")
        up = axis("likeness", "correlation of their probabilities")
        told = (
            "One mark per pair of clients. If alignment finds what a client's data need, clients with the same classes "
            f"choose alike: marks rise to the right. {_correlated(pairs)}"
        )
        charts.append(
            Chart(
                "flado-likeness",
                "Similar data, similar channels?",
                told,
                pairs,
                {"pairs": points(across, up)},
            )
        )
    return Panel("flado-channels", "Flado: the channels of each client", charts=charts)


def _cells(run: ReportedRun) -> Iterator[Row]:
    for name, table in run.tables.items():
        if name.startswith(TABLE):
            for client, row in zip(run.tables[CLIENTS], table, strict=True):
                for channel, value in enumerate(row):
                    yield {
                        "method": run.variant, "group": name.removeprefix(TABLE), "client": int(client),
                        "channel": channel, "probability": round(value, 3),
                    }  # fmt: skip


def _pairs(run: ReportedRun) -> Iterator[Row]:
    """Of each pair of clients how much their labels overlap, and how much their probabilities go together."""
    labels = {
        int(row["client"]): np.array(row["label_counts"]) / max(1, sum(row["label_counts"]))
        for row in run.setup.get("data", {}).get("rows", ())
        if row.get("label_counts")
    }
    groups = [np.array(table) for name, table in run.tables.items() if name.startswith(TABLE)]
    everyone = zip(map(int, run.tables[CLIENTS]), np.concatenate(groups, axis=1), strict=True)
    known = [(client, row) for client, row in everyone if client in labels and row.std() > SAME]
    for (one, first), (two, second) in islice(combinations(known, 2), MOST_PAIRS):
        overlap = float(np.minimum(labels[one], labels[two]).sum())
        likeness = float(np.corrcoef(first, second)[0, 1])
        yield {"method": run.variant, "overlap": round(overlap, 3), "likeness": round(likeness, 3)}


def _correlated(pairs: Sequence[Row]) -> str:
    across, up = ([row[name] for row in pairs] for name in ("overlap", "likeness"))
    if min(np.std(across), np.std(up)) <= SAME:
        return ""
    return f"Over {len(pairs)} pairs the two have a correlation of {np.corrcoef(across, up)[0, 1]:+.2f}."
