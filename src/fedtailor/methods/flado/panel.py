"""Where Flado's clients spend their budget, for a report."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.charts.panel import Chart, Panel, ReportedRun, axis, heat, panel
from fedtailor.methods.uniprob import MEAN


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
