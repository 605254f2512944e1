"""What a report says, from run folders alone."""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from fedtailor.charts.panel import Panel, ReportedRun, panel, panels_of
from fedtailor.errors import FedtailorError
from fedtailor.methods import fedrolex
from fedtailor.record import RoundRecord, Spent
from fedtailor.report import export
from fedtailor.report.folders import read_runs
from fedtailor.report.page import page, require_charts
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.report.panels.answer import answer
from fedtailor.report.panels.costs import pareto
from fedtailor.storage.run_folder import COMPARISON
from synthetic_runs import METHODS, TIERS, write_records, write_run, write_runs


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    write_runs(place, rounds=30, seeds=3)
    return place


@pytest.fixture(scope="module")
def panels(folder):
    return {each.key: each for each in all_panels(read_runs([folder]))}


def chart(panels, panel, place=0):
    return panels[panel].charts[place]


def test_runs_are_called_by_method_and_seed(folder):
    runs = read_runs([folder])
    assert len(runs) == 15
    assert {run.variant for run in runs} == set(METHODS)
    assert {run.state for run in runs} == {"finished"}
    assert read_runs([folder / "fjord-seed1", folder / "fjord-seed2"])[1].seed == 2


def test_runs_of_one_method_are_told_apart_by_what_differs(tmp_path):
    for alpha in ("0.1", "5"):
        place = write_run(tmp_path / f"fjord-{alpha}", "fjord", 0.9, 1, 3)
        text = (place / "config.toml").read_text().replace("alpha = 0.5", f"alpha = {alpha}")
        (place / "config.toml").write_text(text)
    assert [run.variant for run in read_runs([tmp_path])] == ["fjord alpha=0.1", "fjord alpha=5"]


@pytest.mark.parametrize("key", ["variant", "label"], ids=["now", "earlier"])
def test_a_plan_says_how_its_runs_are_called(tmp_path, key):
    write_run(tmp_path / "fjord-seed1", "fjord", 0.9, 1, 3)
    runs = [{"folder": "fjord-seed1", key: "fjord:distillation=false", "cell": {}, "seed": 1, "tier": ""}]
    (tmp_path / COMPARISON).write_text(json.dumps({"name": "some", "runs": runs}))
    assert [run.variant for run in read_runs([tmp_path])] == ["fjord:distillation=false"]


def test_the_answer_names_the_best_its_cost_and_its_noise(panels):
    text = panels["answer"].text
    assert re.search(r"(Best|Highest) accuracy over all device classes.*: fjord", text)
    assert " sends least" in text
    assert "With 3 seeds" in text
    (_, results), (_, costs), (_, differences) = panels["answer"].tables
    best_first = sorted(METHODS, key=METHODS.get, reverse=True)
    assert [(row["method"], row["place"]) for row in results] == [
        (m, n + 1) for n, m in enumerate(best_first)
    ]
    assert [row["method"] for row in costs] == best_first
    assert {row["verdict"] for row in differences} <= {"larger than noise", "cannot be told with 3 seeds"}


def test_the_curve_is_the_mean_over_seeds(folder, panels):
    runs = [run for run in read_runs([folder]) if run.variant == "fjord"]
    scores = [100 * run.records[9].tiers["0.4"]["accuracy"] for run in runs]
    wanted = {"method": "fjord", "tier": "0.4", "rounds": 10}
    (found,) = [r for r in chart(panels, "progress").data if all(r[k] == v for k, v in wanted.items())]
    assert found["score"] == pytest.approx(np.mean(scores), rel=1e-5)
    assert (found["low"], found["high"]) == pytest.approx((min(scores), max(scores)), rel=1e-5)
    assert found["bytes"] == 10 * 800_000
    assert found["FLOPs"] == pytest.approx(10 * 2 * 70 * 400_000)
    assert set(chart(panels, "progress").views) == {"rounds", "bytes sent", "FLOPs"}


def test_who_is_beaten_in_both_is_not_on_the_front(folder):
    panels = {each.key: each for each in all_panels(read_runs([folder]), 45)}
    found = {record["method"]: record for record in chart(panels, "pareto").data}
    assert found["fedavg"]["on the front"] == "yes"
    assert found["splitmix"]["on the front"] == "no"


def test_who_is_left_behind_is_the_distance_from_worst_to_best_class(panels):
    records = [record for record in chart(panels, "left-behind").data if record["method"] == "heterofl"]
    scores = [record["score"] for record in records]
    assert len(records) == len(TIERS)
    assert records[0]["gap"] == pytest.approx(max(scores) - min(scores), abs=1e-4)


def test_a_method_adds_its_panel_beside_its_code(tmp_path):
    assert fedrolex.trained_over_rounds in panels_of("fedrolex")

    @panel("own-method")
    def mine(runs):
        return Panel("mine", "Mine", f"{len(runs)} runs, {runs[0].records[-1].method['gram']}")

    place = write_run(tmp_path / "one", "own-method", 0.9, 1, rounds=1)
    write_records(place, [RoundRecord(1, method={"gram": [1.0]})])
    texts = [each.text for each in all_panels(read_runs([place])) if each.key == "mine"]
    assert texts == ["1 runs, [1.0]"]
    assert "mine" not in [
        each.key for each in all_panels(read_runs([write_run(tmp_path / "two", "fjord", 0.9, 1, 1)]))
    ]


def test_a_run_that_has_not_finished_says_so(tmp_path):
    write_run(tmp_path / "one", "fjord", 0.9, 1, rounds=5, finished=False)
    found = {each.key: each for each in all_panels(read_runs([tmp_path]))}
    assert "1 of 1 runs are not finished" in found["answer"].text
    assert found["provenance"].tables[0][1][0]["state"] == "interrupted"


def test_the_page_holds_everything_and_asks_for_nothing(panels):
    text = page("a <b> title", list(panels.values()))
    assert "a &lt;b&gt; title" in text
    assert "vegaEmbed" in text
    outside = text.replace("https://vega.github.io", "").replace("http://www.w3.org", "")
    assert "<script src" not in outside
    assert '<link rel="stylesheet"' not in outside
    data = text.split('id="charts">')[1].split("</script>")[0]
    assert set(json.loads(data)) == {chart.key for each in panels.values() for chart in each.charts}


def test_data_cannot_end_its_script_element(tmp_path):
    place = write_run(tmp_path / "one", "fjord", 0.9, 1, 2)
    text = (place / "config.toml").read_text().replace('"fjord"', '"</script><script>alert(1)</script>"')
    (place / "config.toml").write_text(text)
    assert "</script><script>alert" not in page("x", all_panels(read_runs([place])))


def test_markdown_csv_and_png(panels, tmp_path):
    text = export.markdown("title", list(panels.values()))
    assert "| fjord |" in text
    files = export.write_csv(list(panels.values()), tmp_path / "csv")
    assert tmp_path / "csv/progress.csv" in files
    rows = list(csv.DictReader(io.StringIO((tmp_path / "csv/progress.csv").read_text())))
    assert len(rows) == len(chart(panels, "progress").data)
    picture = export.png(chart(panels, "left-behind"))
    assert picture.startswith(b"\x89PNG")


def test_without_the_library_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "vl_convert", None)
    with pytest.raises(FedtailorError, match=r"fedtailor\[report\]"):
        require_charts()


def test_a_folder_without_runs_is_refused_by_name(tmp_path):
    with pytest.raises(FedtailorError, match="no run there"):
        read_runs([tmp_path])


def one_round(variant: str, seed: int, tiers: dict[str, tuple[int, float]]) -> ReportedRun:
    """A run of one round; for each tier the MACs of its network and its accuracy."""
    record = RoundRecord(
        1,
        training=Spent(1, 1, 1),
        tiers={tier: {"loss": 1.0, "accuracy": accuracy} for tier, (_, accuracy) in tiers.items()},
        deployed={tier: {"params": 1, "macs": macs} for tier, (macs, _) in tiers.items()},
        seconds=1.0,
    )
    return ReportedRun(variant, "", seed, f"{variant}-{seed}", "finished", "x", [record])


def test_the_answer_says_when_a_small_device_is_given_a_large_network():
    def run(variant, macs, small, large):
        return one_round(variant, 1, {"0.2": (macs[0], small), "1": (macs[1], large)})

    runs = [run("whole", (1000, 1000), 0.9, 0.9), run("cut", (100, 1000), 0.8, 0.95)]
    found = answer(runs, None)
    assert (
        "Highest on the smallest devices (tier 0.2) in one seed: whole, 90.0 %; too few to tell it from cut. Its "
        "network there takes 1 k MACs; the best of the smallest ones, that of cut with 100, has 80.0 %."
    ) in found.text
    assert "Highest on the largest devices (tier 1) in one seed: cut, 95.0 %; too few to tell" in found.text
    assert [row["network of tier 0.2 (MACs)"] for row in found.tables[1][1]] == ["1 k", "100"]


def verdicts(*last: float) -> list[str]:
    """The sentences about two methods over as many seeds; the first is at 90 %, the other at ``last``."""
    pairs = [("good", 0.9 + n / 1000) for n in range(len(last))] + [("other", value) for value in last]
    runs = [one_round(v, n % len(last), {"s": (1, x), "l": (1, x)}) for n, (v, x) in enumerate(pairs)]
    panel = answer(runs, None)
    assert len({"?" in str(row["place"]) for row in panel.tables[0][1]}) == 1
    assert ("?" in str(panel.tables[0][1][0]["place"])) == ("question mark" in panel.tables[0][0])
    return panel.text.split("\n")[:3]


def test_what_cannot_be_told_is_said_where_the_best_is_named():
    assert verdicts(0.5, 0.501, 0.5021) == [
        "Best accuracy over all device classes: good, 90.1 %.",
        "Best on the smallest devices (tier s): good, 90.1 %.",
        "Best on the largest devices (tier l): good, 90.1 %.",
    ]
    assert verdicts(0.5, 0.8) == [
        "Highest accuracy over all device classes in these 2 seeds: good, 90.1 %; too few to tell it from other.",
        "Highest on the smallest devices (tier s) in these 2 seeds: good, 90.1 %; too few to tell it from other.",
        "Highest on the largest devices (tier l) in these 2 seeds: good, 90.1 %; too few to tell it from other.",
    ]
    assert (
        "in these 5 seeds: good, 90.2 %; within the noise of other."
        in verdicts(0.8, 0.95, 0.9, 0.85, 0.95)[0]
    )


def test_a_report_names_the_method_whose_differences_say_how_many_seeds_it_takes(panels):
    assert (
        "At the spread of the differences from fjord seen here (median of 4), telling"
        in panels["answer"].text
    )


def test_a_run_that_stands_alone_is_compared_with_nothing(tmp_path):
    write_run(tmp_path / "one", "fjord", 0.9, 1, rounds=30)
    found = {each.key: each for each in all_panels(read_runs([tmp_path]))}
    text = found["answer"].text
    assert text.split("\n")[0].startswith("fjord: accuracy ")
    assert "On the smallest devices (tier 0.2): " in text
    assert not any(word in text for word in ("Best", "Highest", "least"))
    assert "pareto" not in found
    asked = {each.key: each for each in all_panels(read_runs([tmp_path]), 30)}
    assert "fjord reached 30.0 % with 9.6 MB sent and 672 M FLOPs." in asked["answer"].text
    assert "pareto" not in asked
    assert "fjord did not reach 99.0 %." in answer(read_runs([tmp_path]), 99).text


def test_amounts_have_units_that_fit_them():
    runs = [one_round(name, 1, {"1": (1, value)}) for name, value in (("a", 0.8), ("b", 0.7))]
    runs = [
        replace(run, records=[replace(run.records[0], training=Spent(700, 100, 143_000))]) for run in runs
    ]
    panel = pareto(runs, 60)
    row = panel.tables[0][1][0]
    assert (row["rounds"], row["FLOPs"], row["parameters sent"]) == ("1", "286 k", "200")
    assert row["more FLOPs"] == "+0"
    assert "numbers of four bytes, down and up" in panel.tables[0][0]
    svg = require_charts().vegalite_to_svg(
        {**panel.charts[0].views["both"], "data": {"values": panel.charts[0].data}}
    )
    assert re.search(r">28\d\.?\d*k<", svg)


def test_differences_are_of_the_same_seeds_however_many_each_method_has():
    """Two seeds each, of which only seed 2 is common: pairing by place would compare 2 with 1 and 3 with 2."""

    def run(variant, seed, accuracy):
        return one_round(variant, seed, {"1": (1, accuracy)})

    runs = [run("a", 2, 0.8), run("a", 3, 0.9), run("b", 1, 0.1), run("b", 2, 0.75)]
    found = answer(runs, None)
    (difference,) = found.tables[2][1]
    assert difference["accuracy against a"].startswith("-5.0")
    assert "Differences are of the seeds that all methods have." in found.text
    assert [line["best accuracy (%)"] for line in pareto(runs, None).tables[0][1]] == [80, 75]

    apart = answer([run("a", 1, 0.8), run("b", 2, 0.7)], None)
    assert "The methods share no seed: differences are not judged." in apart.text
    assert len(apart.tables) == 2


@pytest.mark.parametrize("names", [("0.2", "1", "phone"), ("board", "phone", "laptop")])
def test_runs_of_different_fleets_are_reported_as_far_as_they_can_be_compared(tmp_path, names):
    """Device classes that only some runs have: no error, and words about those that all of them share."""
    write_run(tmp_path / "one", "fjord", 0.9, 1, 10)
    other = write_run(tmp_path / "other", "heterofl", 0.92, 1, 10)
    rows = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        if "tiers" in row:
            row["tiers"] = dict(zip(names, row["tiers"].values(), strict=False))
            row["deployed"] = dict(zip(names, row.get("deployed", {}).values(), strict=False))
    (other / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = next(each.text for each in all_panels(read_runs([tmp_path])) if each.key == "answer")
    assert ("smallest devices (tier 0.2)" in text) == ("0.2" in names)
    assert ("share no device class" in text) == ("0.2" not in names)
