"""When devices are there and how busy they are, over the time of day or of a run: piecewise constant, and repeated.

    device,from,to,availability,load
    phone,0h,7h,0.9,1          # at night on the charger
    phone,7h,24h,0.1,2

Times of a device begin at 0 and follow one another without gaps; after the last one they begin anew.
"""

from __future__ import annotations

import csv
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet.devices.quantities import PLAIN, quantity, seconds

HEADER = ("device", "from", "to", "availability", "load")


@dataclass(frozen=True)
class Course:
    """One device's pieces: where each ends, how often the device is there, how many times as long it computes."""

    ends: tuple[float, ...]
    availability: tuple[float, ...]
    load: tuple[float, ...]

    def at(self, time: float) -> tuple[float, float]:
        """Availability and load at a time since the start of the run."""
        place = bisect_right(self.ends, time % self.ends[-1])
        return self.availability[place], self.load[place]


Courses = Mapping[str, Course]  # by the name of the device


def read_courses(path: Path, known: Sequence[str]) -> Courses:
    """The courses of a CSV file; those of devices that are not there, gaps and overlaps are refused by line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(enumerate(csv.reader(file), start=1))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise FedtailorError(f"fleet.trace = {str(path)!r} cannot be read: {error}") from error
    header = [cell.strip() for cell in lines[0][1]] if lines else []
    require(tuple(header) == HEADER, f"header of {path.name}", ",".join(header), ",".join(HEADER))
    return courses_of(((number, cells) for number, cells in lines[1:] if cells), known, path.name)


def courses_of(lines: Iterable[tuple[int, Sequence[str]]], known: Sequence[str], where: str) -> Courses:
    """Courses of numbered lines."""
    pieces: dict[str, list[tuple[float, float, float]]] = {}
    for number, cells in lines:
        at = f"{where}, line {number}"
        require(len(cells) == len(HEADER), at, ",".join(cells), f"{len(HEADER)} cells: {','.join(HEADER)}")
        name, *texts = (cell.strip() for cell in cells)
        if name not in known:
            raise unknown("device", name, known, hint=f" (in {at})")
        begin, end = (seconds(f"{at}: {key}", text) for key, text in zip(HEADER[1:3], texts[:2], strict=True))
        there = quantity(f"{at}: availability", texts[2], PLAIN, "a share from 0 to 1")
        require(there <= 1, f"{at}: availability", texts[2], "a share from 0 to 1")
        load = quantity(f"{at}: load", texts[3], PLAIN, "at least 1: how many times as long it computes")
        require(load >= 1, f"{at}: load", texts[3], "at least 1: how many times as long it computes")
        before = pieces.setdefault(name, [])
        reached = before[-1][0] if before else 0.0
        if begin != reached or end <= begin:
            raise FedtailorError(
                f"{at}: {name} from {texts[0]} to {texts[1]}: expected a time that begins at {reached:g} s, where "
                "the one before ends, and ends later; a trace has no gaps and no overlaps"
            )
        before.append((end, there, load))
    return {name: Course(*zip(*each, strict=True)) for name, each in pieces.items()}
