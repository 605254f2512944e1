"""When the clients of a round would be done on their own devices: who is in time, and how long the round takes.

Nothing here looks at a real clock: times follow from devices, pieces and examples, so a redone round is the same round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from fedtailor.elasticity.cutting.names import is_tagged, plain
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet.devices.table import Device
from fedtailor.fleet.devices.trips import Load, Timetable, Trip, trip
from fedtailor.messages import Client, Refused, ServerState, Task
from fedtailor.method import Method
from fedtailor.server.setup import Setup

LATE, SURPLUS = "late", "surplus"
NOBODY_SECONDS = 600.0  # until others are looked for, where no device is there


def device_of(setup: Setup, client: int) -> Device:
    """What a client is."""
    assert setup.fleet.equipment is not None
    return setup.fleet.equipment.device(client, setup.data.num_clients)


def trip_of(setup: Setup, task: Task, time: float) -> Trip:
    """How long a task takes that begins at a time since the start of the run."""
    device, equipment = device_of(setup, task.client.id), setup.fleet.equipment
    assert equipment is not None
    return trip(device, load_of(task, setup.method, setup.model), equipment.slowdown(device, time))


def load_of(task: Task, method: Method, model: ElasticModel) -> Load:
    """What a task asks of its device. What comes back is what the lease names, before it was trained."""
    local, examples = method.local, task.client.num_examples
    macs = method.work(task, model).macs * local.examples_for(examples)
    return Load(task.nbytes, _leased_bytes(task, model), macs, local.steps_for(examples))


def _leased_bytes(task: Task, model: ElasticModel) -> int:
    total = 0
    for name in task.lease.names:
        if is_tagged(name) and name in task.patch.values:
            total += task.patch.values[name].nbytes
        else:
            count = 1
            for size in model.shape(plain(name), task.lease.cut):
                count *= size
            total += count * model.dtype(plain(name)).itemsize
    return total


def there(setup: Setup, round: int, time: float, retry: int = 0) -> Callable[[Client], bool] | None:
    """Whether a client can be asked at the moment; None where all can. A retry is another moment."""
    equipment = setup.fleet.equipment
    if equipment is None:
        return None

    def is_there(client: Client) -> bool:
        draw = setup.seeds.numpy("availability", client=client.id, round=round, step=retry or None)
        return equipment.is_there(device_of(setup, client.id), time, draw)

    return is_there


def assigned(setup: Setup, state: ServerState, client: Client, time: float) -> Task:
    """A client's task; one that would be late by itself takes that of a smaller tier for this round.

    Which client has too many examples, or is too busy, for the piece of its tier is known to the client. Where no
    smaller piece is in time either, it keeps its own, and is late.
    """
    method, model = setup.method, setup.model
    task = first = method.assign(state, client, model, setup.seeds)
    equipment = setup.fleet.equipment
    if equipment is None:
        return task
    tiers = setup.fleet.tiers
    place = next(number for number, tier in enumerate(tiers) if tier.name == client.tier)
    needed = trip_of(setup, task, time).seconds
    while needed > equipment.deadline and place > 0:
        place -= 1
        smaller = replace(client, tier=tiers[place].name, budget=tiers[place].budget)
        task = method.assign(state, smaller, model, setup.seeds)
        before, needed = needed, trip_of(setup, task, time).seconds
        if needed >= before:  # a method that gives everyone the same
            break
    return task if needed <= equipment.deadline else first


def timetable(
    setup: Setup, tasks: Sequence[Task], time: float
) -> tuple[Timetable | None, dict[int, Refused]]:
    """The round that begins at a time: it ends when ``clients_per_round`` have answered, or at the deadline.

    With it, those who are late, or were asked beyond that number and not waited for: they need not train. Without
    devices there is no simulated time, and nobody is late by it.
    """
    equipment = setup.fleet.equipment
    if equipment is None:
        return None, {}
    trips = {task.client.id: trip_of(setup, task, time) for task in tasks}
    order = sorted(tasks, key=lambda task: (trips[task.client.id].seconds, task.client.id))
    in_time = [task for task in order if trips[task.client.id].seconds <= equipment.deadline]
    waited_for = in_time[: setup.settings.clients_per_round]
    late, surplus = order[len(in_time) :], in_time[len(waited_for) :]
    gone = {task.client.id: Refused(task.client.id, task.round, LATE) for task in late}
    gone |= {task.client.id: Refused(task.client.id, task.round, SURPLUS) for task in surplus}
    enough = len(waited_for) == setup.settings.clients_per_round
    last = max((trips[task.client.id].seconds for task in waited_for), default=0.0)
    seconds = equipment.deadline if late and not enough else last
    return Timetable(trips, seconds, frozenset(gone)), gone
