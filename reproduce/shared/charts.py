"""Small charts as SVG, without a library: lines and bars, for the figures of the papers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

COLOURS = (
    "#4477aa",
    "#ee6677",
    "#228833",
    "#ccbb44",
    "#66ccee",
    "#aa3377",
    "#bbbbbb",
    "#000000",
    "#ee8866",
    "#44bb99",
)
HEIGHT, LEFT, RIGHT = 280, 60, 480

SHORT = 4  # characters of a number that may stand under a chart

Points = Sequence[tuple[float, float]]


def lines(title: str, series: Mapping[str, Points], top: int = 0, dashed: str = "") -> str:
    """One line for each series; the names stand to the right.

    Series whose names end in ``dashed`` are drawn so, in the colours of the others once more.
    """
    xs = [x for points in series.values() for x, _ in points]
    ys = [y for points in series.values() for _, y in points]
    low, high = min(ys), max(ys)

    def place(x: float, y: float) -> tuple[float, float]:
        across = (x - min(xs)) / ((max(xs) - min(xs)) or 1)
        return LEFT + (RIGHT - LEFT) * across, top + 230 - 195 * (y - low) / ((high - low) or 1)

    parts = [_frame(title, low, high, top)]
    for x in _ticks(xs):
        parts.append(f'<text x="{place(x, low)[0]:.0f}" y="{top + 248}" text-anchor="middle">{x:g}</text>')
    plain = [name for name in series if not dashed or not name.endswith(dashed)]
    again = [name for name in series if name not in plain]
    for number, (name, points) in enumerate(series.items()):
        order = again.index(name) if name in again else plain.index(name)
        colour = COLOURS[order % len(COLOURS)]
        style = ' stroke-dasharray="5 4"' if name in again else ""
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(*point) for point in points))
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{style}/>')
        key = f"{name} - -" if style else name
        parts.append(f'<text x="495" y="{top + 40 + 18 * number}" fill="{colour}">{key}</text>')
    return "\n".join(parts)


def _ticks(xs: Sequence[float]) -> list[float]:
    """Some of the values, where these are short numbers; else round numbers between them.

    >>> _ticks([0.2, 0.4, 1]), _ticks([0.0676, 4.9195, 24.3])
    ([0.2, 0.4, 1], [5.0, 10.0, 15.0, 20.0])
    """
    found = sorted(set(xs))
    if all(len(f"{x:g}") <= SHORT for x in found):
        return found[:: max(1, len(found) // 6)]
    span = found[-1] - found[0]
    unit = 10.0 ** math.floor(math.log10(span / 4))
    step = next(times * unit for times in (1, 2, 5, 10) if span / (times * unit) <= 6)
    return [step * number for number in range(math.ceil(found[0] / step), math.floor(found[-1] / step) + 1)]


def points(title: str, series: Mapping[str, tuple[float, float]], top: int = 0) -> str:
    """One dot for each name; those that no other beats in both, less across and more upwards, are filled."""
    xs, ys = [x for x, _ in series.values()], [y for _, y in series.values()]
    low, high, left, right = min(ys), max(ys), min(xs), max(xs)
    parts = [_frame(title, low, high, top)]
    for step in range(5):
        x, value = LEFT + (RIGHT - LEFT) * step / 4, left + (right - left) * step / 4
        parts.append(f'<text x="{x:.0f}" y="{top + 248}" text-anchor="middle">{value:.4g}</text>')
    for number, (name, (x, y)) in enumerate(series.items()):
        beaten = any(a <= x and b >= y and (a, b) != (x, y) for a, b in series.values())
        across = LEFT + (RIGHT - LEFT) * (x - left) / ((right - left) or 1)
        up = top + 230 - 195 * (y - low) / ((high - low) or 1)
        colour = COLOURS[number % len(COLOURS)]
        fill = "white" if beaten else colour
        parts.append(
            f'<circle cx="{across:.1f}" cy="{up:.1f}" r="5" fill="{fill}" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(f'<text x="{across + 8:.1f}" y="{up - 6:.1f}" font-size="9">{number + 1}</text>')
        place = top + 30 + 14 * number
        parts.append(f'<text x="515" y="{place}" font-size="11" fill="{colour}">{number + 1} {name}</text>')
    return "\n".join(parts)


def bars(title: str, groups: Mapping[str, Mapping[str, float]], top: int = 0) -> str:
    """Bars from zero, side by side in each group; a value that is missing leaves a gap."""
    names = list(dict.fromkeys(name for values in groups.values() for name in values))
    high = max((value for values in groups.values() for value in values.values()), default=1.0)
    parts = [_frame(title, 0.0, high, top)]
    space = (RIGHT - LEFT) / max(1, len(groups))
    size = min(12.0, 1.7 * space / max(map(len, groups), default=1))  # so that no name reaches the next one
    for place, (group, values) in enumerate(groups.items()):
        start = LEFT + space * (place + 0.1)
        parts.append(
            f'<text x="{start + 0.4 * space:.0f}" y="{top + 248}" font-size="{size:.3g}" '
            f'text-anchor="middle">{group}</text>'
        )
        for name, value in values.items():
            number = names.index(name)
            x, height = start + 0.8 * space * number / len(names), 195 * value / (high or 1)
            parts.append(
                f'<rect x="{x:.1f}" y="{top + 230 - height:.1f}" width="{0.7 * space / len(names):.1f}" '
                f'height="{height:.1f}" fill="{COLOURS[number]}"/>'
            )
    for number, name in enumerate(names):
        parts.append(f'<text x="495" y="{top + 40 + 18 * number}" fill="{COLOURS[number]}">{name}</text>')
    return "\n".join(parts)


def _frame(title: str, low: float, high: float, top: int) -> str:
    parts = [f'<text x="{LEFT}" y="{top + 18}">{title}</text>']
    for step in range(5):
        y, value = top + 230 - 195 * step / 4, low + (high - low) * step / 4
        parts.append(f'<line x1="{LEFT}" x2="{RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    return "\n".join(parts)


def write(path: Path, panels: Sequence[str]) -> None:
    """Panels above one another (each drawn at ``top = HEIGHT * place``) as one file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    body = "\n".join(panels)
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 680 {HEIGHT * len(panels)}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n',
        encoding="utf-8",
    )
