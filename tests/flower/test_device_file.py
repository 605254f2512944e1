"""What a device says of itself, measured or written by hand: read in every round, as limits that a server knows."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from commands import call
from fedtailor.errors import FedtailorError
from fedtailor.fleet.bench import Bench, Curve, Point, curve_of, free_memory
from fedtailor.flower.device_file import curve_from, node_table, read_device, settled

CURVE = Curve(overhead=0.01, rate=1e9, batch_size=10)


def test_the_curve_goes_through_what_was_measured() -> None:
    exact = [Point(Fraction(1), macs, CURVE.seconds(macs), 0) for macs in (10**6, 10**7, 10**8)]
    found = curve_of(exact, 10)
    assert found.overhead == pytest.approx(0.01)
    assert found.rate == pytest.approx(1e9)
    assert found.macs(0.11) == pytest.approx(10**7, rel=1e-6)
    bent = [Point(Fraction(1), 10**6, 0.01, 0), Point(Fraction(1), 10**7, 0.2, 0)]
    assert curve_of(bent, 10).overhead == 0.0  # a step that computes nothing takes no negative time
    with pytest.raises(FedtailorError, match="nothing can be said about MACs"):
        curve_of([Point(Fraction(1), 10**6, 0.2, 0), Point(Fraction(1), 10**7, 0.1, 0)], 10)


def test_the_curve_bends_as_the_steps_do() -> None:
    """Wide networks compute faster: no line goes through these, and a step between two of them lies between."""
    steps = [(10**6, 0.02), (10**7, 0.10), (10**8, 0.40)]
    found = curve_of([Point(Fraction(1), macs, seconds, 0) for macs, seconds in steps], 10)
    assert found.steps == tuple((float(macs), seconds) for macs, seconds in steps)
    for macs, seconds in [*steps, (55 * 10**6, 0.25)]:
        assert found.seconds(macs) == pytest.approx(seconds)
        assert found.macs(seconds) == pytest.approx(macs)
    beyond = found.seconds(2 * 10**8)
    assert beyond == pytest.approx(0.40 + 10**9 / found.rate)
    assert found.macs(beyond) == 2 * 10**8
    assert found.seconds(0) == found.overhead
    assert found.macs(found.overhead / 2) == 0


def test_how_far_the_curve_is_off_is_told_by_steps_that_it_has_not_seen() -> None:
    points = [Point(Fraction(1), macs, seconds, 0) for macs, seconds in ((10, 1.0), (20, 3.0), (30, 3.0))]
    found = Bench(tuple(points), curve_of(points, 1), None, ())
    assert found.deviation == pytest.approx(1 / 3)  # 2.0 instead of 3.0
    assert Bench(tuple(points[:2]), found.curve, None, ()).deviation is None


@pytest.mark.parametrize(
    "steps", [5, [5], [[1, 2, 3]], [[1, "x"]], [[2, 1.0], [1, 2.0]], [[1, 2.0], [2, 2.0]], [[0, 1]]]
)
def test_steps_of_a_file_are_pairs_that_rise(steps: Any) -> None:
    numbers = {"overhead": 0.01, "macs_per_second": 1e9, "batch_size": 32}
    with pytest.raises(
        FedtailorError, match="measured.steps = .*: expected pairs of MACs and seconds, both rising"
    ):
        curve_from({**numbers, "steps": steps})
    assert curve_from({**numbers, "steps": [[1, 2], [3, 4.5]]}).steps == ((1.0, 2.0), (3.0, 4.5))


def test_limits_of_time_and_bandwidth_become_those_that_a_server_knows() -> None:
    assert settled({"step_time": "110ms", "memory": "20MB"}, CURVE) == {"memory": "20MB", "macs": "10000000"}
    assert settled({"bandwidth": "1MB", "transfer_time": "30s"}, None) == {"bytes": "15000000"}
    assert settled({"step_time": "3ms"}, None) == {"step_time": "3ms"}  # not measured: the server's own time


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ({"step_time": "5ms"}, "a step takes 10 ms before it computes"),
        ({"step_time": "50%"}, "step_time = '50%': expected a time with its unit"),
        ({"step_time": "1s", "macs": "5M"}, "step_time and macs are two words for one limit"),
        ({"bandwidth": "1MB"}, "bandwidth = '1MB': expected a transfer_time too"),
        ({"transfer_time": "9s"}, "transfer_time = '9s': expected a bandwidth too"),
        (
            {"bandwidth": "1MB", "transfer_time": "abc"},
            "transfer_time = 'abc': expected a time with its unit",
        ),
        ({"bandwidth": "abc", "transfer_time": "9s"}, "bandwidth = 'abc': expected bytes in a second"),
        ({"bandwidth": "2B", "transfer_time": "9ms"}, "transfer_time = '9ms': expected time for more"),
        ({"bandwidth": "1MB", "transfer_time": "9s", "bytes": "1MB"}, "bandwidth and bytes are two words"),
        ({"memory": "lots"}, "memory = 'lots': expected"),
    ],
)
def test_what_cannot_be_is_refused(table: dict[str, Any], expected: str) -> None:
    with pytest.raises(FedtailorError, match=expected):
        settled(table, CURVE)


@pytest.mark.parametrize(
    "rate", [math.inf, math.nan, 10**400, -1, True, "fast"], ids=lambda each: f"{each!r:.8}"
)
def test_a_curve_is_made_of_numbers(rate: Any) -> None:
    with pytest.raises(FedtailorError, match="measured = .* expected numbers of bench-device"):
        curve_from({"overhead": 0.01, "macs_per_second": rate, "batch_size": 32})


def test_a_node_says_what_its_file_says_at_that_moment(tmp_path: Path) -> None:
    file = tmp_path / "phone.toml"
    measured = "[measured]\noverhead = 0.01\nmacs_per_second = 1e9\nbatch_size = 10\n"
    file.write_text(f'name = "phone"\nstep_time = "110ms"\n{measured}')
    node = {"device": str(file), "dataset": "photos/"}
    assert node_table(node) == {"name": "phone", "macs": "10000000", "dataset": "photos/"}
    file.write_text(f'name = "phone"\nstep_time = "60ms"\n{measured}')
    assert node_table(node)["macs"] == "5000000"
    for text, expected in [
        ("names = 1", "unknown key in .*phone.toml 'names': did you mean 'name'"),
        ("name = ", "phone.toml: not valid TOML"),
        ("[measured]\noverhead = -1\n", "measured = .*: expected numbers of bench-device"),
    ]:
        file.write_text(text)
        with pytest.raises(FedtailorError, match=expected):
            node_table(node)
    with pytest.raises(FedtailorError, match="none.toml: cannot be read"):
        node_table({"device": str(tmp_path / "none.toml")})


def test_a_device_is_measured_with_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("fedtailor.fleet.bench.SECONDS", 0.01)
    file = tmp_path / "board.toml"
    file.write_text('name = "board"\ntier = "0.5"\n')
    words = ("cnn", "--batch-size", "4", "--step-time", "9s", "--write", str(file))
    assert call(monkeypatch, "bench-device", *words, "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert [point["width"] for point in told["points"]] == [0.2, 0.4, 0.6, 0.8, 1.0]
    assert all(point["step_seconds"] > 0 for point in told["points"])
    assert int(told["limits"]["macs"]) > told["points"][-1]["macs"]
    table = read_device(file)
    assert (table["name"], table["tier"], table["step_time"]) == (
        "board",
        "0.5",
        "9s",
    )  # what was there stays
    assert table["measured"]["batch_size"] == 4
    assert node_table({"device": str(file)})["macs"] == told["limits"]["macs"]
    free = free_memory(torch.device("cpu"))
    assert free is None or free > 10**6


def test_nothing_is_measured_or_written_for_a_wrong_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    file = tmp_path / "board.toml"
    assert call(monkeypatch, "bench-device", "cnn", "--step-time", "50", "--write", str(file)) == 2
    assert "step_time = '50': expected a time with its unit" in " ".join(capsys.readouterr().err.split())
    assert not file.exists()


def test_the_file_in_the_docs_is_one(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "flower.md").read_text(encoding="utf-8")
    (block,) = (each for each in page.split("```") if "[measured]" in each and "macs_per_second" in each)
    (tmp_path / "phone.toml").write_text(block)
    assert int(node_table({"device": str(tmp_path / "phone.toml")})["macs"]) > 10**7
