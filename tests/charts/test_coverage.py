"""Which weights were trained, from the records of a run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fedtailor.charts.coverage import coverage, map_cells, never_trained, trained_so_far
from fedtailor.record import Covered, RoundRecord
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from synthetic_runs import WIDTH, write_records, write_run


def test_coverage_counts_every_pair_of_units(tmp_path):
    place = write_run(tmp_path / "one", "heterofl", 0.9, 1, rounds=3)
    (run,) = read_runs([place])
    counts = coverage(run)["conv2.weight"]
    assert counts.shape == (WIDTH, WIDTH)
    assert counts[0, 0] == 3 * 10  # held by all ten clients of three rounds
    assert counts[WIDTH - 1, 0] == counts[0, WIDTH - 1] == 3 * 2  # by those of full width
    assert counts[10, 20] == 3 * 2 * 3  # unit 20 is held by tiers 0.6, 0.8 and 1
    assert set(never_trained(coverage(run)).values()) == {0.0}


def test_the_lockstep_window_leaves_pairs_untouched_and_the_panel_shows_it(tmp_path):
    """FedRolex at a quarter: half of a square layer's weights are never met, however long it runs."""
    place = write_run(tmp_path / "one", "fedrolex", 0.9, 1, rounds=WIDTH)
    records = []
    for round in range(1, WIDTH + 1):
        units = sorted((round + unit) % WIDTH for unit in range(WIDTH // 4))
        text = ",".join(map(str, units))
        coverage_of_round = [Covered(1, {"channels": {"conv1": text, "conv2": text}})]
        records.append(RoundRecord(round, coverage=coverage_of_round))
    write_records(place, records)
    (run,) = read_runs([place])
    never = never_trained(coverage(run))["conv2.weight"]
    assert never == pytest.approx(100 * (1 - (2 * (WIDTH // 4) - 1) / WIDTH))
    rows = [row for row in trained_so_far(run) if row["layer"] == "conv2.weight"]
    assert [row["trained"] for row in rows] == sorted(row["trained"] for row in rows)
    assert rows[-1]["trained"] == pytest.approx(100 - never, abs=0.01)
    found = {each.key: each for each in all_panels([run])}
    assert "fedrolex" in found
    assert found["coverage"].text.startswith("Some weights were never trained by fedrolex: they keep")
    assert not any("seed" in chart.text for chart in found["coverage"].charts)
    again = {each.key: each for each in all_panels([run, replace(run, seed=2)])}
    assert all(chart.text.endswith(" Shown is seed 1 alone.") for chart in again["coverage"].charts)


def test_weights_with_a_tag_are_tensors_of_their_own(tmp_path):
    place = write_run(tmp_path / "one", "splitmix", 0.9, 1, rounds=1)
    covered = Covered(4, {"channels": {"conv1": "0-3"}}, ["base0", "base2"])
    write_records(place, [RoundRecord(1, coverage=[covered])])
    counts = coverage(read_runs([place])[0])
    assert set(counts) == {
        f"{n}@{t}" for n in ("conv1.weight", "conv2.weight", "linear.weight") for t in ("base0", "base2")
    }
    assert (counts["conv2.weight@base2"] == 4).all()


def test_a_tensor_that_a_cut_lacks_is_not_trained_by_it(tmp_path):
    place = write_run(tmp_path / "one", "fedavg", 0.9, 1, rounds=1)
    shallow = Covered(3, {"channels": {}, "tag": "shallow", "absent": ["conv2.weight"]})
    write_records(place, [RoundRecord(1, coverage=[shallow])])
    assert never_trained(coverage(read_runs([place])[0])) == {
        "conv1.weight": 0,
        "conv2.weight": 100,
        "linear.weight": 0,
    }


def test_a_layer_with_a_mask_counts_as_held(tmp_path):
    """The map of a mask is not in the files; a report of such a run is made all the same."""
    place = write_run(tmp_path / "one", "ofa-fl", 0.9, 1, rounds=1)
    masked = [Covered(1, {"channels": {}, "mask": [level, "0123456789ab"]}) for level in (1, 2)]
    write_records(place, [RoundRecord(1, coverage=masked)])
    counts = coverage(read_runs([place])[0])
    assert all((each == 2).all() for each in counts.values())


def test_a_map_has_few_cells_that_cover_everything(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "one", "heterofl", 0.9, 1, rounds=1)])
    counts = coverage(run)["conv2.weight"]
    cells = map_cells({"conv2.weight": counts})
    assert len(cells) == 12 * 12
    assert (cells[0]["clients"], cells[0]["outputs"], cells[0]["never"]) == (10, "0-2", 0)
    assert cells[-1]["clients"] == 2
