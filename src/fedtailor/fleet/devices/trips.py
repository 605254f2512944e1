"""How long a task takes on a device, and what it costs it: down, compute, up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedtailor.fleet.devices.table import Device

PASSES = (
    3  # ``Method.work`` counts a backward pass as two forward passes; speeds of devices count forward passes
)


@dataclass(frozen=True)
class Load:
    """What a device is asked to do in one task."""

    bytes_down: int
    bytes_up: int
    macs: int  # of all its steps, backward passes included, as ``Method.work`` counts them
    steps: int


@dataclass(frozen=True)
class Trip:
    """The seconds that a task takes on a device, and the energy."""

    down: float
    compute: float
    up: float
    joules: float = 0.0

    @property
    def seconds(self) -> float:
        """All of it, one after the other."""
        return self.down + self.compute + self.up


def trip(device: Device, load: Load, slowdown: float = 1.0) -> Trip:
    """A task on a device; ``slowdown`` is what else it has to do: 2 computes half as fast.

    >>> phone = Device("phone", 1e9, overhead=0.01, down=2e6, up=1e6, latency=0.5, duty=0.5, watts=4, radio_watts=1)
    >>> trip(phone, Load(4_000_000, 1_000_000, 6_000_000_000, 10))
    Trip(down=2.5, compute=4.2, up=1.5, joules=12.4)
    """
    down = device.latency + load.bytes_down / device.down
    up = device.latency + load.bytes_up / device.up
    busy = load.steps * device.overhead + load.macs / PASSES / device.macs_per_second
    compute = busy * slowdown / device.duty
    # While it rests (duty) or does something else (slowdown) it is not this task that takes its energy.
    return Trip(down, compute, up, busy * device.watts + (down + up) * device.radio_watts)


@dataclass(frozen=True)
class Timetable:
    """The ways of a cohort: each client's trip, when the server went on, and who had not arrived by then."""

    trips: Mapping[int, Trip]  # by client
    seconds: float  # from asking to going on
    gone: frozenset[int] = frozenset()  # late ones, and those that were not waited for
    together: bool = True  # whether who is done waits for the others

    @property
    def joules(self) -> float:
        """Of all who were asked, as if none had been told to stop."""
        return sum(each.joules for each in self.trips.values())

    @property
    def idle(self) -> float:
        """Seconds that clients who were done waited for the others, summed."""
        if not self.together:
            return 0.0
        return sum(
            self.seconds - each.seconds for client, each in self.trips.items() if client not in self.gone
        )
