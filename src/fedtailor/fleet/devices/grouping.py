"""Many devices as a few tiers: rows of a table that can do about the same."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fedtailor.fleet.devices.table import Devices

LIKE = ("macs_per_second", "memory", "down", "up")  # what decides which piece a device can train in time
LOOKED_AT = 20_000  # rows that groups are formed from; all others join the nearest
LARGEST = 1e15  # stands for what is not limited


def tiers_of(devices: Devices, most: int) -> tuple[tuple[str, ...], NDArray[np.int32]]:
    """Names of tiers, and which one each row belongs to: a tier for each row, or groups of rows that are alike.

    Rows are compared by the logarithms of their speeds and sizes: twice as fast is as far apart for a sensor as for a
    workstation.
    """
    if len(devices) <= most:
        return devices.names, np.arange(len(devices), dtype=np.int32)
    from sklearn.cluster import KMeans  # takes a second to import

    points = np.log(np.minimum(np.stack([devices.columns[name] for name in LIKE], axis=1), LARGEST))
    step = -(-len(points) // LOOKED_AT)
    groups = KMeans(most, n_init=4, random_state=0).fit(points[::step])
    found = groups.predict(points)
    # Numbered by what their weakest member computes, so that names rise with the devices and no label is chance.
    slowest = [
        devices.columns["macs_per_second"][found == group].min(initial=np.inf) for group in range(most)
    ]
    order = [group for group in np.argsort(slowest, kind="stable") if np.isfinite(slowest[group])]
    place = np.full(most, -1, dtype=np.int32)
    place[order] = np.arange(len(order), dtype=np.int32)
    return tuple(f"group {number}" for number in range(1, len(order) + 1)), place[found]
