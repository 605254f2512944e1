"""The report as a designer sees it: what stands on top, what is marked, what axes and colours say."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from fedtailor.charts.panel import ROUNDS, Panel, ReportedRun, axis, heat, lines
from fedtailor.record import RoundRecord, Spent
from fedtailor.report import export, page
from fedtailor.report.folders import read_runs
from fedtailor.report.panels.all_panels import all_panels
from fedtailor.report.panels.scores import widths
from synthetic_runs import write_records, write_run, write_runs

METHODS = {"fedavg": 0.7, "fjord": 0.95, "heterofl": 0.8}


@pytest.fixture(scope="module")
def panels(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    write_runs(folder, rounds=20, seeds=2, methods=METHODS)
    return all_panels(read_runs([folder]))


def texts_of(spec, rows) -> list[str]:
    """All words of a picture."""
    svg = page.require_charts().vegalite_to_svg({**spec, "data": {"values": rows}})
    return re.findall(r"<text[^>]*>([^<]*)</text>", svg)


def test_data_fleet_rounds_and_seeds_stand_on_top(panels):
    facts = dict(panels[0].facts)
    assert facts["Compared"] == "3 methods, 6 runs"
    assert facts["Data"].startswith("synthetic: 20 clients, ")
    assert facts["Fleet"] == "5 tiers of 4 clients each, 0.2 to 1"
    assert facts["Rounds"] == "20"
    assert facts["Seeds"] == "1, 2"
    assert "- Fleet: 5 tiers of 4 clients each" in export.markdown("some", panels)


def test_the_facts_are_in_the_header_and_the_winner_is_marked(monkeypatch, panels):
    monkeypatch.setattr(page, "_library", lambda: "")  # 0.9 MB that nothing here reads
    text = page.page("some", panels)
    header, main = text.split("</header>")
    assert "<dt>Fleet</dt><dd>5 tiers of 4 clients each, 0.2 to 1</dd>" in header
    (winner,) = re.findall(r'<tr class="winner">\s*<td>([^<]*)</td>', main)
    assert winner == "fjord"


def test_what_a_tier_cannot_run_stands_in_brackets(tmp_path):
    place = write_run(tmp_path / "run", "fjord", 0.9, 1, rounds=1)
    (run,) = read_runs([place])
    record = replace(run.records[0], deployed={tier: {"macs": 50} for tier in run.records[0].tiers})
    setup = {
        "tiers": [{"name": tier, "allowed": {"macs": 10 if tier == "0.2" else 99}} for tier in record.tiers]
    }
    panel = next(e for e in all_panels([replace(run, records=[record], setup=setup)]) if e.key == "answer")
    caption, (row,) = panel.tables[0]
    assert caption.endswith("; (in brackets): more than the tier can run")
    assert [name for name, text in row.items() if str(text).startswith("(")] == ["tier 0.2"]


def test_methods_have_one_order_in_all_panels_the_best_first(panels):
    best_first = sorted(METHODS, key=METHODS.get, reverse=True)
    found = {each.key: each for each in panels}
    assert [row["method"] for row in found["answer"].tables[0][1]] == best_first
    for key in ("progress", "width", "left-behind"):
        rows = found[key].charts[0].data
        assert list(dict.fromkeys(row["method"] for row in rows)) == best_first, key


@pytest.mark.parametrize(
    ("rounds", "ticks"),
    [([5, 6], ["5", "6"]), ([1, 2, 3], ["1", "2", "3"]), ([4], ["4"]), (range(10, 101, 10), None)],
)
def test_rounds_on_axes_are_whole(rounds, ticks):
    rows = [{"method": "a", "rounds": round, "score": round} for round in rounds]
    words = texts_of(lines(ROUNDS, axis("score", "score")), rows)
    shown = words[: words.index("rounds")]
    assert shown == (ticks or [str(round) for round in rounds])


def test_legends_look_like_the_lines_also_where_a_band_is_pale():
    rows = [
        {"method": method, "rounds": round, "score": round, "low": 0, "high": 9}
        for method in ("a", "b")
        for round in (1, 2)
    ]
    spec = export.with_series(lines(ROUNDS, axis("score", "score"), low="low", high="high"), rows)
    svg = page.require_charts().vegalite_to_svg({**spec, "data": {"values": rows}})
    symbols = [part.split("/>")[0] for part in svg.split("mark-symbol role-legend-symbol")[1:]]
    assert len(symbols) == 2  # one legend, which shows colour and dashes
    assert len({re.search(r'stroke="([^"]*)"', each)[1] for each in symbols}) == 2
    assert ["stroke-dasharray" in each for each in symbols] == [True, True]
    assert not any('opacity="0.18"' in each for each in symbols)


def test_a_run_with_one_evaluation_draws_points_beside_others_and_words_alone(tmp_path):
    for seed in (1, 2):
        place = write_run(tmp_path / f"{seed}", "fjord", 0.9, seed, rounds=1)
        score = {"1": {"loss": 1.0, "accuracy": 0.5 + seed / 10}}
        write_records(place, [RoundRecord(1, training=Spent(1, 1, 1), tiers=score)])
    alone = next(each for each in all_panels(read_runs([tmp_path])) if each.key == "progress")
    assert alone.charts == ()
    assert alone.text.startswith("Every run was evaluated once, after its last round")
    (tmp_path / "2" / "weights.safetensors").unlink()
    running = next(each for each in all_panels(read_runs([tmp_path])) if each.key == "progress")
    assert running.text == "There is one evaluation so far; a second one begins the chart."
    write_run(tmp_path / "other", "heterofl", 0.9, 1, rounds=2)
    (chart,) = next(each.charts for each in all_panels(read_runs([tmp_path])) if each.key == "progress")
    rows = [row for row in chart.data if row["tier"] == "all" and row["method"] == "fjord"]
    svg = page.require_charts().vegalite_to_svg({**chart.views["rounds"], "data": {"values": rows}})
    points = svg.split("mark-symbol role-mark")[1].split("</g>")[0]
    assert points.count("<path") == 1
    assert svg.count("mark-rule role-mark") == 1  # from the worst to the best seed


def test_widths_of_the_fleet_stand_on_the_axis():
    scores = {"c": 0.125, "b": 0.25, "a": 1.0}
    record = RoundRecord(1, tiers={tier: {"accuracy": width} for tier, width in scores.items()})
    setup = {"tiers": [{"name": tier, "width": width} for tier, width in scores.items()]}
    (chart,) = widths([ReportedRun("fjord", "", 1, "fjord", "finished", "x", [record], setup)]).charts
    words = texts_of({**chart.views["width"], "width": 600}, chart.data)
    assert words[:3] == ["0.125", "0.25", "1"]


def test_long_curves_are_not_a_string_of_marks():
    rows = [{"method": "a", "rounds": round, "score": round} for round in range(100)]
    svg = page.require_charts().vegalite_to_svg(
        {**lines(ROUNDS, axis("score", "s")), "data": {"values": rows}}
    )
    assert svg.split("mark-symbol role-mark")[1].split("</g>")[0].count("<path") == 1


def test_nothing_is_quiet_on_a_map(panels):
    spec = heat(axis("a", "a"), axis("b", "b"), axis("n", "n"))
    assert spec["encoding"]["color"]["scale"] == {"domainMin": 0}
    for each in panels:
        for chart in each.charts:
            assert "viridis" not in str(chart.views), chart.key


def test_bars_stand_for_methods_that_have_something_to_show(tmp_path):
    """Bars of height zero would only push those of others off their labels."""
    for method in ("fjord", "fedavg"):
        write_run(tmp_path / method, method, 0.9, 1, rounds=4)
    whole, narrow = read_runs([tmp_path / "fjord", tmp_path / "fedavg"])
    without = [replace(r, coverage=[c for c in r.coverage if c.cut["channels"]]) for r in narrow.records]
    panel = next(e for e in all_panels([whole, replace(narrow, records=without)]) if e.key == "coverage")
    never = next(chart for chart in panel.charts if chart.key == "never-trained")
    assert {row["method"] for row in never.data} == {"fedavg"}
    assert panel.text.endswith("Every weight was trained at least once by fjord.")


def test_a_number_stays_with_its_unit_on_a_narrow_page(monkeypatch):
    monkeypatch.setattr(page, "_library", lambda: "")
    assert "12.8\u00a0%, 5\u00a0seeds" in page.page("some", [Panel("x", "X", "12.8 %, 5 seeds")])


def test_a_panel_of_facts_is_no_section(monkeypatch):
    monkeypatch.setattr(page, "_library", lambda: "")
    text = page.page("some", [Panel("about", "About", facts=[("Data", "<b>")]), Panel("x", "X", "words")])
    assert "&lt;b&gt;" in text
    assert '<section id="about"' not in text
    assert '<section id="x"' in text
