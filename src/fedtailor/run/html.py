"""A run in a notebook: a small table of its tiers, and a chart that is drawn without any script."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from fedtailor.charts.grouping import percent
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.record import RoundRecord, headline
from fedtailor.report.amounts import short
from fedtailor.report.tables import shown

WIDTH, HEIGHT, MARGIN, RIGHT = 420, 180, 44, 90  # pixels of the chart
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")  # told apart by the colour-blind
ROOM = "padding:2px 8px"  # of a cell; where no style sheet gives any, columns would touch

Points = list[tuple[int, float]]


def run_html(title: str, costs: Mapping[str, Cost], history: Sequence[RoundRecord]) -> str:
    """The table and the chart; before the first evaluation, only the title."""
    seen = [record for record in history if record.tiers]
    if not seen or not costs:
        return f"<p><b>{escape(title)}</b>: not evaluated yet</p>"
    end = seen[-1].tiers or {}
    metric = headline(end)
    rows = [
        [
            tier,
            f"{cost.params:,}",
            short(cost.macs),
            *(shown(name, value) for name, value in end[tier].items()),
        ]
        for tier, cost in costs.items()
    ]
    heads = ["tier", "parameters", "MACs", *next(iter(end.values()))]
    lines = {
        tier: [(each.round, each.tiers[tier][metric]) for each in seen if each.tiers and tier in each.tiers]
        for tier in costs
    }
    return f"<div><b>{escape(title)}</b>{table_html(heads, rows)}{_chart(metric, lines)}</div>"


def table_html(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of texts; the first column names the row."""
    above = "".join(f'<th style="{ROOM}">{escape(head)}</th>' for head in heads)
    body = "".join(
        f'<tr><th style="{ROOM};text-align:left">{escape(row[0])}</th>'
        + "".join(f'<td style="{ROOM};text-align:right">{escape(cell)}</td>' for cell in row[1:])
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{above}</tr></thead><tbody>{body}</tbody></table>"


def _chart(metric: str, lines: Mapping[str, Points]) -> str:
    """The metric over rounds, a line for each tier and its name at the end of it."""
    values = [value for points in lines.values() for _, value in points if value == value]
    if not values:
        return ""
    rounds = [number for points in lines.values() for number, _ in points]
    low, high = min(values), max(values)
    low, high = (low - 0.5, high + 0.5) if low == high else (low, high)
    first, last = min(rounds), max(rounds)

    def place(number: int, value: float) -> tuple[float, float]:
        across = (number - first) / max(1, last - first)
        up = (value - low) / (high - low)
        return MARGIN + across * (WIDTH - MARGIN - RIGHT), HEIGHT - 24 - up * (HEIGHT - 44)

    parts = [_axis(metric, (low, high), (first, last))]
    labels = _apart({tier: place(*points[-1])[1] for tier, points in lines.items()})
    for number, (tier, points) in enumerate(lines.items()):
        colour, places = COLOURS[number % len(COLOURS)], [place(*point) for point in points]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{colour}"/>' for x, y in places]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 8}" y="{labels[tier] + 4:.1f}" fill="{colour}" font-size="11">'
            f"{escape(tier)}</text>"
        )
    told = f"{metric} of each tier over rounds {first} to {last}"
    return (
        f'<svg role="img" aria-label="{escape(told)}" width="{WIDTH}" height="{HEIGHT}" '
        f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">{"".join(parts)}</svg>'
    )


def _axis(metric: str, values: tuple[float, float], rounds: tuple[int, int]) -> str:
    (low, high), (first, last) = values, rounds
    factor, bottom, right = percent(metric), HEIGHT - 24, WIDTH - RIGHT
    unit = " in %" if factor > 1 else ""
    last_label = (
        "" if last == first else f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="end">{last}</text>'
    )
    return (
        '<g font-size="11" fill="currentColor" stroke="none">'
        f'<path d="M{MARGIN} 16V{bottom}H{right}" fill="none" stroke="currentColor" stroke-opacity="0.5"/>'
        f'<text x="{MARGIN - 4}" y="{bottom}" text-anchor="end">{factor * low:.3g}</text>'
        f'<text x="{MARGIN - 4}" y="24" text-anchor="end">{factor * high:.3g}</text>'
        f'<text x="{MARGIN}" y="11">{escape(metric)}{unit}</text>'
        f'<text x="{MARGIN}" y="{HEIGHT - 8}">round {first}</text>{last_label}</g>'
    )


def _apart(wanted: Mapping[str, float], least: float = 12) -> dict[str, float]:
    """Heights of labels that do not cover each other, near where they are wanted."""
    placed: dict[str, float] = {}
    above = float("-inf")
    for tier in sorted(wanted, key=lambda name: wanted[name]):
        above = placed[tier] = max(wanted[tier], above + least)
    over = max(0.0, above - (HEIGHT - 20))
    return {tier: height - over for tier, height in placed.items()}
