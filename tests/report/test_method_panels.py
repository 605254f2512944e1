"""Panels that methods add, drawn from folders of real short runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedtailor
from fedtailor.charts.panel import Panel, ReportedRun, panels_of
from fedtailor.methods.apfl.architectures import UNITS
from fedtailor.methods.apfl.panel import mean_distance
from fedtailor.methods.registry import get_method
from fedtailor.report.folders import read_runs
from helpers import image_data, tiny_cnn

SETTINGS = {
    "flanc": {"widths": [0.5, 1]},
    "flado": {"sketch": 64},
    "apfl": {"warmup": 0, "shrink": 0.5, "search_examples": 4},
    "ofa-fl": {"ratios": [1, 0.3], "trigger": "schedule", "first": 1},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    found = {}
    for name, settings in SETTINGS.items():
        found[name] = tmp_path_factory.mktemp(name) / "run"
        fedtailor.train(
            tiny_cnn(),
            image_data(),
            "flops-0.5-0.9" if name == "flado" else "uniform-2",
            get_method(name)(**settings),
            rounds=2,
            clients_per_round=3,
            engine={"workers": 0},
            folder=found[name],
            report={"client_details": True},  # who holds which classes
        )
    return found


def own_panel(method: str, folder: Path) -> tuple[Panel, ReportedRun]:
    (run,) = read_runs([folder])
    made, *_ = (make([run]) for make in panels_of(method))
    assert made is not None
    return made, run


def test_flanc_shows_every_product_of_bases_and_every_fragment(folders):
    shown, run = own_panel("flanc", folders["flanc"])
    gram, fragments = shown.charts
    tables = {name.partition("/")[2]: table for name, table in run.tables.items() if name.startswith("gram/")}
    assert tables
    assert len(gram.data) == sum(len(table) ** 2 for table in tables.values())
    for record in gram.data:
        entry = tables[record["layer"]][record["row"]][record["column"]]
        assert record["product"] == pytest.approx(entry, abs=1e-4)
    assert {record["width"] for record in fragments.data} == {"1/2", "1"}


def test_flado_shows_the_probabilities_of_every_client_of_a_round(folders):
    shown, run = own_panel("flado", folders["flado"])
    (chart,) = shown.charts
    assert set(chart.views) == {"rounds", "clients"}
    assert {(record["rounds"], record["client"]) for record in chart.data} == {
        (each.round, client) for each in run.records for client in each.reported
    }
    assert all(0 < record["probability"] <= 1 for record in chart.data)


def test_flado_shows_who_trains_what_and_whether_similar_clients_do_alike(folders):
    (run,) = read_runs([folders["flado"]])
    shown = panels_of("flado")[1]([run])
    assert shown is not None
    cells, pairs = shown.charts
    channels = {name.partition("/")[2]: table for name, table in run.tables.items() if "/" in name}
    assert len(cells.data) == sum(len(table) * len(table[0]) for table in channels.values())
    for record in cells.data:
        row = [int(client) for client in run.tables["clients"]].index(record["client"])
        value = channels[record["group"]][row][record["channel"]]
        assert record["probability"] == pytest.approx(value, abs=1e-3)
    moved = sum(len({round(p, 9) for table in channels.values() for p in table[row]}) > 1
                for row in range(len(run.tables["clients"])))  # fmt: skip
    assert moved >= 2
    assert len(pairs.data) == moved * (moved - 1) // 2
    assert all(0 <= record["overlap"] <= 1 and -1 <= record["likeness"] <= 1 for record in pairs.data)


def test_similar_clients_that_choose_alike_are_seen():
    """Two pairs of clients with the same classes and the same channels: the correlation is one."""
    tables = {"clients": [0, 1, 2, 3], "probabilities/a": [[0.9, 0.1], [0.8, 0.2], [0.1, 0.9], [0.2, 0.8]]}
    counts = [[5, 0], [3, 0], [0, 4], [0, 9]]
    rows = [{"client": client, "label_counts": each} for client, each in enumerate(counts)]
    run = ReportedRun("flado", "", 1, "flado", "finished", "", (), {"data": {"rows": rows}}, tables=tables)
    shown = panels_of("flado")[1]([run])
    assert shown is not None
    assert "6 pairs the two have a correlation of +1.00" in shown.charts[1].text
    assert next((r["overlap"], r["likeness"]) for r in shown.charts[1].data) == (1.0, 1.0)


def test_ofa_shows_scores_and_how_many_networks_there_are(folders):
    shown, run = own_panel("ofa-fl", folders["ofa-fl"])
    (chart,) = shown.charts
    assert [record["networks"] for record in chart.data] == [
        len(each.method["supported"]) for each in run.records for _ in each.tiers or ()
    ]
    assert max(record["networks"] for record in chart.data) == 2


def test_apfl_shows_what_every_client_found_beside_one_width_for_all_layers(folders):
    shown, run = own_panel("apfl", folders["apfl"])
    kept, costs = shown.charts
    tiers = {tier["name"]: tier for tier in run.setup["tiers"]}
    found = {
        client: {name.removeprefix(UNITS): units for name, units in told.items() if name.startswith(UNITS)}
        for each in run.records
        for client, told in each.reported.items()
    }
    assert len(found) == 6
    for record in kept.data:
        share = found[record["client"]][record["group"]] / run.setup["groups"][record["group"]]
        assert record["kept"] == pytest.approx(100 * share, abs=0.01)
    assert {record["tier"] for record in kept.data} == {*tiers, "all"}
    for record in costs.data:
        if record["tier"] != "all":
            allowed = tiers[record["tier"]]["params"]
            assert record["parameters"] == allowed or record["network"] == "found"
            assert record["parameters"] <= allowed
    ((_, rows),) = shown.tables
    whole, everyone = rows[-2:]  # the largest tier keeps everything, so its clients are alike
    assert (whole["clients"], whole["distance"], whole["parameters, found"]) == (3, 0, tiers["1"]["params"])
    assert everyone["clients"] == 6


def test_distance_between_architectures():
    found = [{"kept": {"a": 1.0, "b": 0.5}}, {"kept": {"a": 0.7, "b": 0.9}}, {"kept": {"a": 1.0, "b": 0.5}}]
    assert mean_distance(found) == pytest.approx((0.5 + 0 + 0.5) / 3)
    assert mean_distance(found[:1]) is None


@pytest.mark.parametrize("method", SETTINGS)
def test_a_run_with_nothing_to_show_has_no_panel(method):
    empty = ReportedRun("x", "", 1, method, "finished", "nowhere", records=[])
    assert {make([empty]) for make in panels_of(method)} == {None}
