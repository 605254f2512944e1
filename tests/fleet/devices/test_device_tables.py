"""Tables of devices: what people write, what is refused, who is who, and groups of rows that are alike."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from fedtailor.errors import FedtailorError
from fedtailor.fleet.devices.grouping import tiers_of
from fedtailor.fleet.devices.reading import built_in_sources, read_devices
from fedtailor.fleet.devices.traces import read_courses
from fedtailor.fleet.presets import FleetSettings, build_fleet
from fedtailor.seeds import Seeds

PHONE = {"name": "phone", "macs_per_second": "2G", "down": "4MB", "up": "1MB", "latency": "50ms", "share": 3}
BOARD = {"name": "board", "macs_per_second": 5e7, "memory": "100MB"}


def test_units_and_defaults():
    phone, board = (read_devices([PHONE, BOARD]).row(number) for number in range(2))
    assert (phone.macs_per_second, phone.down, phone.up, phone.latency) == (2e9, 4e6, 1e6, 0.05)
    assert (board.memory, board.down, board.availability, board.duty) == (1e8, float("inf"), 1, 1)


def test_every_built_in_device_has_a_source():
    assert set(built_in_sources()) == set(read_devices("built-in").names)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"macs_per_second": -1},
            "macs_per_second of device 'device 0' = -1: expected MACs in a second above 0",
        ),
        (
            {"name": "a", "macs_per_second": 1, "up": 0},
            "up of device 'a' = 0: expected bytes in a second above 0",
        ),
        ({"name": "a"}, "macs_per_second of device 'a' = None: expected"),
        ({"macs_per_second": "2X"}, "= '2X': expected MACs in a second"),
        ({"macs_per_second": 1, "duty": 1.5}, "duty of device 'device 0' = 1.5: expected a share above 0"),
        ({"macs_per_second": 1, "latency": "-5ms"}, "latency of device 'device 0' = '-5ms'"),
        ({"macs_per_second": "nan"}, "= 'nan': expected"),
        ({"macs_per_second": 1, "speed": 2}, "unknown key of fleet.devices[0] 'speed'"),
        ({"macs_per_second": 1, "name": ""}, "name in fleet.devices = ''"),
        ("phone", "fleet.devices[0] = 'phone': expected a table"),
    ],
)
def test_what_cannot_be_is_refused_by_the_name_of_the_device(row, message):
    with pytest.raises(FedtailorError) as error:
        read_devices([row])
    assert message in str(error.value)


def test_files(tmp_path):
    (tmp_path / "d.csv").write_text(
        "name,macs_per_second,up\nphone,2G,1MB\nboard,50000000,\n", encoding="utf-8"
    )
    (tmp_path / "d.toml").write_text(
        '[[devices]]\nname = "phone"\nmacs_per_second = "2G"\nup = "1MB"\n'
        '[[devices]]\nname = "board"\nmacs_per_second = 5e7\n', encoding="utf-8",
    )  # fmt: skip
    one, other = (read_devices(str(tmp_path / f"d.{kind}")) for kind in ("csv", "toml"))
    assert one.names == other.names
    assert [one.row(n) for n in range(2)] == [other.row(n) for n in range(2)]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("d.csv", "", "no column macs_per_second"),
        ("d.csv", "macs_per_second\n", "has no rows"),
        ("d.csv", "macs_per_second,up\n1\n", "line 2: 1 cells; expected 2"),
        ("d.csv", "macs_per_second,speed\n1,2\n", "unknown column of d.csv 'speed'"),
        ("d.csv", "name,macs_per_second\na,0\n", "macs_per_second of device 'a' = '0'"),
        ("d.toml", "devices = 3", "has no [[devices]]"),
        ("d.toml", "a = ", "not valid TOML"),
        ("d.txt", "", "expected a .toml file"),
    ],
)
def test_files_that_are_no_tables(tmp_path, name, text, message):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(FedtailorError) as error:
        read_devices(str(tmp_path / name))
    assert message in str(error.value)


def test_clients_are_devices_by_their_shares():
    devices = read_devices([PHONE, BOARD])
    assert devices.rows(8).tolist() == [0] * 6 + [1] * 2
    assert devices.rows(5).tolist() == [0] * 4 + [1]


def test_many_devices_are_grouped_and_the_weakest_speaks_for_its_group(tmp_path):
    speeds = np.concatenate([np.full(300, 1e7), np.full(300, 1e9), np.full(400, 1e11)])
    speeds *= np.random.default_rng(0).uniform(0.9, 1.1, speeds.size)
    (tmp_path / "d.csv").write_text("macs_per_second\n" + "\n".join(map(str, speeds)), encoding="utf-8")
    devices = read_devices(str(tmp_path / "d.csv"))
    names, placed = tiers_of(devices, 3)
    assert names == ("group 1", "group 2", "group 3")
    assert np.bincount(placed).tolist() == [300, 300, 400]
    assert devices.weakest(np.flatnonzero(placed == 1)).macs_per_second == speeds[300:600].min()


def test_a_million_devices_are_cheap():
    tracemalloc.start()
    began = time.process_time()
    fleet = build_fleet(FleetSettings(devices="built-in"))
    population = fleet.capacity(np.full(10**6, 60), 0, Seeds(0))
    seconds, (_, most) = time.process_time() - began, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert population[10**6 - 1].tier == "workstation"
    assert sum(fleet.counts(10**6)) == 10**6
    assert seconds < 5
    assert most < 2**28


TRACE = "device,from,to,availability,load\n"


def test_courses_repeat(tmp_path):
    (tmp_path / "t.csv").write_text(f"{TRACE}phone,0h,7h,0.9,1\nphone,7h,24h,0.1,2\n", encoding="utf-8")
    course = read_courses(tmp_path / "t.csv", ["phone", "board"])["phone"]
    assert course.at(0) == (0.9, 1)
    assert course.at(7 * 3600) == course.at(23.9 * 3600) == (0.1, 2)
    assert course.at(25 * 3600) == (0.9, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("phone,0h,7h,0.9,1\nphone,8h,24h,0.1,2\n", "line 3: phone from 8h to 24h: expected a time that begins"),
        ("phone,1h,7h,0.9,1\n", "begins at 0 s"),
        ("phone,0h,7h,0.9,1\nphone,6h,9h,1,1\n", "no gaps and no overlaps"),
        ("tablet,0h,7h,0.9,1\n", "unknown device 'tablet'"),
        ("phone,0h,7h,1.9,1\n", "line 2: availability = '1.9': expected a share from 0 to 1"),
        ("phone,0h,7h,0.9,0.5\n", "line 2: load = '0.5': expected at least 1"),
        ("phone,0h,7h,0.9\n", "line 2 = 'phone,0h,7h,0.9': expected 5 cells"),
    ],
)  # fmt: skip
def test_traces_with_gaps_and_nonsense(tmp_path, text, message):
    (tmp_path / "t.csv").write_text(TRACE + text, encoding="utf-8")
    with pytest.raises(FedtailorError) as error:
        read_courses(tmp_path / "t.csv", ["phone"])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"deadline": "3s"}, "fleet.deadline = '3s': expected a table of fleet.devices with it"),
        ({"devices": "built-in", "deadline": "0s"}, "fleet.deadline = '0s': expected a time above 0"),
        ({"devices": "built-in", "deadline": "soon"}, "fleet.deadline = 'soon': expected a time such as"),
        ({"devices": "built-in", "capacity": "dynamic"}, "fleet.capacity = 'dynamic': expected static"),
        ({"devices": "built-in", "tiers": [{"width": 1}]}, "expected none beside fleet.devices"),
        ({"devices": "built-in", "trace": "no.csv"}, "fleet.trace = 'no.csv' cannot be read"),
        ({"devices": "built-in", "most_tiers": 0}, "fleet.most_tiers = 0: expected at least 1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(FedtailorError) as error:
        FleetSettings(**settings)
    assert message in str(error.value)
