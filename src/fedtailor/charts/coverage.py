"""Which weights were trained by how many clients, from the records of a run: exact, weight by weight.

A mask is not in the records: where a client held single weights of a layer, the layer counts as held.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedtailor.charts.panel import ReportedRun, Row
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.encoding import cut_from
from fedtailor.elasticity.cutting.names import plain, tagged
from fedtailor.elasticity.cutting.patch import kept_positions
from fedtailor.elasticity.groups import Axis, Extent
from fedtailor.errors import CorruptError

Counts = NDArray[np.int64]  # (outputs, inputs) of one weight

ADDRESS = ("channels", "absent")  # what a cut holds; its other parts are names
BINS = 12  # cells of a map along each axis, at most


def coverage(run: ReportedRun, after: int = 0, until: int | None = None) -> dict[str, Counts]:
    """For every weight: how often each of its (output, input) pairs was trained, over clients and these rounds."""
    try:
        return _counted(run, after, until)
    except (KeyError, IndexError, TypeError, ValueError) as error:  # two files, and one may be damaged
        raise CorruptError(f"{run.folder}: the coverage of its rounds does not fit its setup") from error


def _counted(run: ReportedRun, after: int, until: int | None) -> dict[str, Counts]:
    layers: Mapping[str, Sequence[Mapping[str, Any]]] = run.setup.get("layers", {})
    unit_counts: Mapping[str, int] = run.setup.get("groups", {})
    counts: dict[str, Counts] = {}
    extents = {name: [_extent(axis) for axis in axes] for name, axes in layers.items()}
    for cut, tags, count in _cuts(run, after, until):
        names = [tagged(name, tag) for tag in tags for name in extents] if tags else list(extents)
        for name in names:
            sides = extents[plain(name)]
            if name not in counts:
                counts[name] = np.zeros([side.length for side in sides], dtype=np.int64)
            if plain(name) in cut.absent:
                continue
            # A weight with a tag is a tensor of its own, which is held whole.
            held = [_held(side, Cut() if tags else cut, unit_counts) for side in sides]
            counts[name] += count * np.multiply.outer(held[0], held[1])
    return counts


def _cuts(run: ReportedRun, after: int, until: int | None) -> list[tuple[Cut, tuple[str, ...], int]]:
    """Equal cuts of some rounds together."""
    totals: Counter[tuple[str, tuple[str, ...]]] = Counter()
    for record in run.records:
        if after < record.round and (until is None or record.round <= until):
            for covered in record.coverage:
                held = {name: part for name, part in covered.cut.items() if name in ADDRESS}
                totals[json.dumps(held, sort_keys=True), tuple(covered.tags)] += covered.count
    return [(cut_from(json.loads(held)), tags, count) for (held, tags), count in totals.items()]


def _extent(axis: Mapping[str, Any]) -> Extent:
    return Extent(axis["length"], tuple(Axis(*each) for each in axis["axes"]))


def _held(extent: Extent, cut: Cut, unit_counts: Mapping[str, int]) -> Counts:
    kept = kept_positions(extent, cut, unit_counts)
    held = np.zeros(extent.length, dtype=np.int64)
    held[: kept if isinstance(kept, int) else None] = isinstance(kept, int)
    if not isinstance(kept, int):
        held[kept] = 1
    return held


def trained_so_far(run: ReportedRun, points: int = 20) -> list[Row]:
    """The share of each weight's pairs that some client has trained, at about this many rounds along the way."""
    rounds = [record.round for record in run.records if record.coverage]
    stops = sorted({rounds[-1 - step * len(rounds) // points] for step in range(points)}) if rounds else []
    totals: dict[str, Counts] = {}
    rows: list[Row] = []
    for before, stop in zip([0, *stops], stops, strict=False):
        for name, counts in coverage(run, before, stop).items():
            totals[name] = totals[name] + counts if name in totals else counts
        for name, counts in totals.items():
            share = 100 * float((counts > 0).mean())
            rows.append({"method": run.variant, "rounds": stop, "layer": name, "trained": round(share, 2)})
    return rows


def never_trained(counts: Mapping[str, Counts]) -> dict[str, float]:
    """The share of each weight's pairs that no client ever trained, in per cent."""
    return {name: 100 * float((each == 0).mean()) for name, each in counts.items()}


def map_cells(counts: Mapping[str, Counts]) -> list[Row]:
    """The maps in at most ``BINS`` x ``BINS`` cells: the mean number of clients, and how much was never trained."""
    cells: list[Row] = []
    for name, each in counts.items():
        edges = [
            np.unique(np.linspace(0, length, min(length, BINS) + 1).astype(int)) for length in each.shape
        ]
        for top, bottom in zip(edges[0], edges[0][1:], strict=False):
            for left, right in zip(edges[1], edges[1][1:], strict=False):
                cell = each[top:bottom, left:right]
                cells.append(
                    {
                        "layer": name,
                        "outputs": _range(top, bottom),
                        "inputs": _range(left, right),
                        "output": int(top),
                        "input": int(left),
                        "clients": round(float(cell.mean()), 2),
                        "never": round(100 * float((cell == 0).mean()), 1),
                    }
                )
    return cells


def _range(first: int, end: int) -> str:
    return str(first) if end == first + 1 else f"{first}-{end - 1}"
