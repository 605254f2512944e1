"""The report and the live page in headless Chromium, as a person would use them: `make test-browser`."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
import time
from itertools import pairwise
from pathlib import Path

import pytest

from fedtailor.charts.panel import Chart, Panel, axis, lying_bars
from fedtailor.report.export import csv_text
from fedtailor.report.folders import read_runs
from fedtailor.report.live import watching
from fedtailor.report.page import page
from fedtailor.report.panels.all_panels import all_panels
from synthetic_runs import write_run, write_runs

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = [
    "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--no-first-run",
]  # fmt: skip
LARGEST_BYTES, LONGEST_SECONDS = 6e6, 2.0
WIDTHS = (390, 1440)
LINES = """element => [...element.childNodes].filter(node => node.nodeType === Node.TEXT_NODE).map(node => {
  const range = document.createRange();
  range.selectNodeContents(node);
  return [...new Set([...range.getClientRects()].map(box => Math.round(box.top)))];
})"""  # the tops of the lines that each text of an element takes


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="pip install 'fedtailor[browser]'")
    found = os.environ.get("FEDTAILOR_BROWSER") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(
            "no browser found: install one (Debian: apt-get install chromium) or name it in FEDTAILOR_BROWSER"
        )
    with playwright.sync_playwright() as started:
        opened = started.chromium.launch(executable_path=found, args=QUIET)
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    """Five methods x 200 rounds x 3 seeds: the panels, and the file."""
    folder = tmp_path_factory.mktemp("synthetic")
    write_runs(folder / "runs")
    panels = all_panels(read_runs([folder / "runs"]))
    file = folder / "report.html"
    file.write_text(page("synthetic", panels), encoding="utf-8")
    return panels, file


class Looking:
    """An open page, with everything that went wrong on it."""

    def __init__(self, browser, url: str, width: int = 1440, scheme: str = "light") -> None:
        self.context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, accept_downloads=True
        )
        self.page, self.problems, self.requests = self.context.new_page(), [], []
        self.page.on("console", self._said)
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        start = time.monotonic()
        self.page.goto(url)
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)
        self.seconds = time.monotonic() - start

    def _said(self, message) -> None:
        if message.type == "error":
            self.problems.append(message.text)

    def lines(self, key: str) -> list[str]:
        """The outlines of what is drawn; names inside a picture change whenever it is drawn anew."""
        marks = self.page.locator(f"figure[data-chart='{key}'] svg .mark-line path")
        return [mark.get_attribute("d") for mark in marks.all()]

    def wait_for_other_lines(self, key: str, before: list[str]) -> None:
        start = time.monotonic()
        while self.lines(key) == before:
            assert time.monotonic() - start < 60, f"{key} stays as it was"
            time.sleep(0.05)

    def __enter__(self) -> Looking:
        return self

    def __exit__(self, *_: object) -> None:
        self.context.close()


def keys(panels) -> list[str]:
    return [chart.key for panel in panels for chart in panel.charts]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_is_drawn_offline_and_fits(browser, report, width, scheme):
    panels, file = report
    with Looking(browser, file.as_uri(), width, scheme) as looking:
        assert looking.problems == []
        assert looking.requests == [file.as_uri()]
        assert {"progress", "width", "pareto", "left-behind", "coverage", "data", "fedrolex"} <= set(
            keys(panels)
        )
        for key in keys(panels):
            marks = looking.page.locator(f"figure[data-chart='{key}'] svg .mark-group path").count()
            assert marks > 0, f"{key} is empty"
            box = looking.page.locator(f"figure[data-chart='{key}'] svg").bounding_box()
            assert box["width"] <= width, f"{key} is wider than the screen"
        assert looking.page.evaluate("document.documentElement.scrollWidth") <= width
        ground = looking.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert ground == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 23, 27)")


@pytest.mark.parametrize("width", WIDTHS)
def test_tables_fit_or_show_that_they_scroll(browser, report, width):
    _, file = report
    with Looking(browser, file.as_uri(), width) as looking:
        for outer in looking.page.locator("section > .scroll").all():
            wide = outer.evaluate("outer => outer.scrollWidth > outer.clientWidth + 1")
            assert wide == outer.evaluate("outer => outer.classList.contains('wide')")
            said = outer.evaluate(
                "outer => getComputedStyle(outer.querySelector('caption'), '::after').content"
            )
            assert wide == ("scroll" in said)
        results = looking.page.locator("#answer .scroll").first
        assert results.evaluate("outer => outer.classList.contains('wide')") == (width < 1000)
        if width < 1000:
            results.evaluate("outer => outer.scrollTo(outer.scrollWidth, 0)")
            looking.page.wait_for_function(
                "document.querySelector('#answer .scroll').classList.contains('end')"
            )
            name = results.locator("tbody td").first.bounding_box()
            assert name["x"] >= results.bounding_box()["x"]  # the method stays in sight


@pytest.mark.parametrize("width", WIDTHS)
def test_names_break_between_their_parts_and_heads_into_two_lines(browser, tmp_path, width):
    names = ["fedavg:width=1/3", "fedavg:only_able=true", "deterministic_algorithms"]
    heads = [
        "network of tier 1/3 (MACs)",
        "rounds to 68.0 %",
        "seeds that reach it alone",
        "parameters of budget",
    ]
    table = [{"method": name, **dict.fromkeys(heads, "13.6 k")} for name in names]
    bars = [{"method": names[0], "layer": f"features.{n}.weight", "never": 60.0 + n} for n in range(4)]
    spec = lying_bars(axis("never", "never trained (%)"), axis("layer", "layer", "nominal"), len(bars))
    chart = Chart("bars", "Bars", "Lying bars.", bars, {"share": spec})
    file = tmp_path / "page.html"
    file.write_text(page("names", [Panel("answer", "Names", charts=[chart], tables=[("Names", table)])]))
    with Looking(browser, file.as_uri(), width) as looking:
        looking.page.locator("figure summary").click()
        for cell in looking.page.locator("td:first-child").all():
            assert {len(part) for part in cell.evaluate(LINES)} == {1}, cell.inner_text()  # no part is broken
        shown = looking.page.locator("section > .scroll")
        tops = [{top for part in head.evaluate(LINES) for top in part} for head in shown.locator("th").all()]
        assert max(map(len, tops)) == (2 if width < 1000 else 1)
        assert any("68.0\u00a0%" in text for text in shown.locator("th").all_text_contents())
        labels = looking.page.locator("figure[data-chart='bars'] .role-axis-label text").all_text_contents()
        assert {row["layer"] for row in bars} <= set(labels)


@pytest.mark.parametrize("width", WIDTHS)
def test_every_device_class_is_seen_and_named(browser, report, width):
    panels, file = report
    (rows,) = (chart.data for panel in panels for chart in panel.charts if chart.key == "left-behind")
    with Looking(browser, file.as_uri(), width, "dark") as looking:
        figure = looking.page.locator("figure[data-chart='left-behind']")
        boxes = [mark.bounding_box() for mark in figure.locator(".mark-symbol.role-mark path").all()]
        names = figure.locator(".mark-text.role-mark text")
        assert len(boxes) == len(rows)
        assert names.all_text_contents() == [row["tier"] for row in rows]
        heights = sorted(box["y"] for box in boxes)
        assert min(b - a for a, b in pairwise(heights)) > 8  # none lies on another
        assert names.first.get_attribute("fill") == "#e6edf3"


def test_the_winner_is_marked_and_a_method_keeps_its_colour(browser, report):
    _, file = report
    with Looking(browser, file.as_uri()) as looking:
        winner = looking.page.locator("#answer tr.winner")
        assert winner.count() == 1
        assert winner.locator("td").first.inner_text() == "fjord"
        colours = {}
        for key in ("progress", "width", "pareto"):
            names = looking.page.locator(
                f"figure[data-chart='{key}'] .role-legend-label text"
            ).all_text_contents()
            symbols = looking.page.locator(f"figure[data-chart='{key}'] .role-legend-symbol path").all()
            for name, symbol in zip(names, symbols, strict=True):
                colours.setdefault(name, set()).add(symbol.get_attribute("fill"))
        assert len(colours) == 5
        assert all(len(each) == 1 for each in colours.values())


def test_it_is_small_and_opens_fast(browser, report):
    _, file = report
    times = []
    for _ in range(3):  # the best of three: another program may have been busy
        with Looking(browser, file.as_uri()) as looking:
            times.append(looking.seconds)
    size = file.stat().st_size
    assert size < LARGEST_BYTES
    assert min(times) < LONGEST_SECONDS


def test_axes_and_filters_switch(browser, report):
    _, file = report
    with Looking(browser, file.as_uri()) as looking:
        figure = looking.page.locator("figure[data-chart='progress']")
        rounds = looking.lines("progress")
        for view, title in (
            ("bytes sent", "bytes sent, down and up"),
            ("FLOPs", "FLOPs of all clients"),
        ):
            before = looking.lines("progress")
            figure.get_by_role("combobox", name="against").select_option(view)
            looking.wait_for_other_lines("progress", before)
            assert title in figure.locator("svg").text_content()
        before = looking.lines("progress")
        figure.get_by_role("combobox", name="against").select_option("rounds")
        looking.wait_for_other_lines("progress", before)
        assert looking.lines("progress") == rounds
        figure.get_by_role("combobox", name="tier").select_option("0.2")
        looking.wait_for_other_lines("progress", rounds)
        assert looking.problems == []


def test_every_csv_is_the_data(browser, report):
    panels, file = report
    with Looking(browser, file.as_uri()) as looking:
        for chart in (chart for panel in panels for chart in panel.charts):
            with looking.page.expect_download() as waiting:
                looking.page.locator(f"figure[data-chart='{chart.key}'] button").click()
            assert waiting.value.suggested_filename == f"{chart.key}.csv"
            text = Path(waiting.value.path()).read_text(encoding="utf-8")
            found = list(csv.DictReader(io.StringIO(text)))
            wanted = list(csv.DictReader(io.StringIO(csv_text(chart.data))))
            assert len(found) == len(chart.data)
            for mine, theirs in zip(found, wanted, strict=True):
                assert list(mine) == list(theirs)
                assert [_number(value) for value in mine.values()] == [
                    _number(value) for value in theirs.values()
                ]


def _number(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_for_assistive_technology(browser, report, width, scheme):
    axe = pytest.importorskip(
        "axe_playwright_python.sync_playwright", reason="pip install 'fedtailor[browser]'"
    )
    _, file = report
    with Looking(browser, file.as_uri(), width, scheme) as looking:
        for summary in looking.page.locator("summary").all():  # tables too
            summary.click()
        found = axe.Axe().run(looking.page).response["violations"]
    serious = [f"{each['id']}: {each['help']}" for each in found if each["impact"] in ("serious", "critical")]
    assert serious == []


def test_the_keyboard_is_enough(browser, report):
    _, file = report
    with Looking(browser, file.as_uri()) as looking:
        looking.page.keyboard.press("Tab")
        assert looking.page.evaluate("document.activeElement.className") == "skip"
        looking.page.locator("figure[data-chart='progress'] select").first.focus()
        looking.page.keyboard.press("ArrowDown")
        looking.page.wait_for_function(
            "document.querySelector(\"figure[data-chart='progress'] svg\").getAttribute('aria-label').includes('bytes')"
        )
        looking.page.locator("figure[data-chart='progress'] summary").focus()
        looking.page.keyboard.press("Enter")
        looking.page.wait_for_selector("figure[data-chart='progress'] details table")


def test_the_live_page_follows_the_folder(browser, tmp_path):
    run = write_run(tmp_path / "run", "fjord", 0.9, 1, rounds=5, finished=False)
    with watching(run) as server, Looking(browser, server.url) as looking:
        looking.page.wait_for_function("document.getElementById('state').textContent.includes('round 5')")
        before = looking.lines("progress")
        rows = (run / "metrics.jsonl").read_text().splitlines()
        last = {**json.loads(rows[-1]), "round": 6}
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(last) + "\n")
        looking.page.wait_for_function("document.getElementById('state').textContent.includes('round 6')")
        looking.page.wait_for_function(
            "before => document.querySelector(\"figure[data-chart='progress'] svg\").innerHTML !== before",
            arg=before,
        )
        assert looking.problems == []
        assert all(url.startswith(server.url) for url in looking.requests)


def test_a_real_comparison(browser, tmp_path, monkeypatch):
    """From the command line to the picture: nothing made up."""
    from fedtailor.report.export import write_report
    from fedtailor.run.interface import run_config
    from fedtailor.sweep.plan import make_plan

    (tmp_path / "real.toml").write_text(
        'name = "real"\nrounds = 3\nclients_per_round = 3\nevaluate_every = 1\n[data]\nclients = 5\nlimit = 100\n'
        '[model]\nname = "cnn"\nchannels = [4, 8]\n[fleet]\nname = "uniform-2"\n'
    )
    methods = "heterofl,fedrolex,splitmix:base=1/2"
    plan = make_plan(tmp_path / "real.toml", methods, 2, [], ["engine.workers=0"], tmp_path / "runs")
    plan.write()
    for run in plan.runs:
        run_config(run.config, run.folder.path)
    write_report([plan.folder], tmp_path / "report.html")
    with Looking(browser, (tmp_path / "report.html").as_uri(), 390, "dark") as looking:
        assert looking.problems == []
        assert looking.page.locator("figure[data-chart] svg").count() >= 7
        assert "splitmix:base=1/2" in looking.page.locator("#answer").inner_text()
