"""The devices of a fleet, as a simulated clock sees them: which one a client is, when it is there, how busy it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedtailor.fleet.devices.table import Device, Devices
from fedtailor.fleet.devices.traces import Courses


@dataclass(frozen=True, eq=False)
class Equipment:
    """A table of devices, the tier of each row, and how long a round may take in simulated seconds."""

    devices: Devices
    placed: NDArray[np.int32]  # row -> number of its tier
    deadline: float = math.inf
    courses: Courses = field(default_factory=dict)

    def tiers(self, clients: int) -> NDArray[np.int32]:
        """The tier of every client."""
        return self.placed[self.devices.rows(clients)]

    def device(self, client: int, clients: int) -> Device:
        """What a client is, one of so many."""
        return self.devices.row(int(self.devices.rows(clients)[client]))

    def tier(self, client: int, clients: int) -> int:
        """The number of a client's tier, also of one that is left out."""
        return int(self.placed[self.devices.rows(clients)[client]])

    def is_there(self, device: Device, time: float, draw: np.random.Generator) -> bool:
        """Whether a device can be asked at a time: drawn by how often it is there."""
        share = self._at(device, time)[0]
        return share >= 1 or float(draw.random()) < share

    def slowdown(self, device: Device, time: float) -> float:
        """How many times as long it computes, for what else it has to do."""
        return self._at(device, time)[1]

    def _at(self, device: Device, time: float) -> tuple[float, float]:
        """Availability and load: by its course, where it has one."""
        course = self.courses.get(device.name)
        return (device.availability, 1.0) if course is None else course.at(time)

    def weakest(self, tier: int) -> Device:
        """A device that can do no more than any of a tier."""
        return self.devices.weakest(np.flatnonzero(self.placed == tier))
