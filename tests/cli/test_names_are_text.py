"""Names of tiers, clients and methods are shown as they are: no markup, no escape sequence, no formula, no HTML."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from commands import SMALL, call
from fedtailor.charts.panel import Panel
from fedtailor.charts.terminal import Titled, Words, plain_table
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.progress import progress_bars
from fedtailor.report.export import csv_text, markdown
from fedtailor.run.arguments import fleet_of

NASTY = [
    "[/red]",
    "[bold]x[/bold]",
    "[link=https://example.org]x[/link]",
    "\x1b[31mred\x1b[0m",
    "a\rb",
    "\x07",
]
SHOWN = [
    "[/red]",
    "[bold]x[/bold]",
    "[link=https://example.org]x[/link]",
    "\\x1b[31mred\\x1b[0m",
    "a\\rb",
    "\\x07",
]


@pytest.mark.parametrize(("name", "shown"), list(zip(NASTY, SHOWN, strict=True)))
def test_tables_and_sentences_show_names_as_they_are(name, shown):
    table = plain_table()
    table.add_column(name)
    table.add_row(name)
    out = io.StringIO()
    console = Console(file=out, width=200, force_terminal=True, color_system=None)
    console.print(Titled(name, table, name))
    console.print(Words(name))
    assert out.getvalue().count(shown) == 5
    assert "\x1b[31m" not in out.getvalue()


def test_a_tier_called_like_markup_does_not_end_a_run(tmp_path, monkeypatch, capfd):
    text = (
        SMALL.format(name="markup", rounds=1).replace("clients = 5", "clients = 5").replace("[method]", FLEET)
    )
    (tmp_path / "markup.toml").write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert call(monkeypatch, "run", "markup.toml") == 0
    told = capfd.readouterr()
    assert "[/red]" in told.out
    assert "tier [/red]:" in told.err


FLEET = """[fleet]
tiers = [{ name = "[/red]", width = 0.5, share = 1 }, { name = "[bold]", width = 1, share = 1 }]
[method]"""


@pytest.mark.parametrize("name", ["x" * 101, "", "\x1b[31m", "a\nb"])
def test_names_of_tiers_that_cannot_be_shown_are_refused(name):
    tier = fleet_of([{"name": "a", "width": 1, "share": 1}]).tiers[0]
    with pytest.raises(FedtailorError, match="name of a tier"):
        Fleet((Tier(name, tier.budget, tier.share),))


@pytest.mark.parametrize(
    ("cell", "written"),
    [
        ("=1+1", "'=1+1"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("+cmd|' /C calc'!A0", "'+cmd|' /C calc'!A0"),
        ("-2+3+cmd|' /C calc'!A0", "'-2+3+cmd|' /C calc'!A0"),
        ("\t=1", "'\t=1"),
        ("-1.5 ± 0.3", "-1.5 ± 0.3"),
        ("plain", "plain"),
        (-2.5, "-2.5"),
    ],
)
def test_cells_of_a_table_are_no_formulas(cell, written):
    assert csv_text([{"client": cell}]).splitlines()[1].strip('"') == written


def test_markdown_holds_no_html():
    rows = [{"client": "<script>alert(1)</script>", "line": "a\nb|c"}]
    panel = Panel("x", "Title", "a <b>word</b>", tables=[("<i>", rows)], facts=())
    text = markdown("<h1>", [panel])
    assert "<" not in text
    assert "&lt;script&gt;" in text
    assert "a b\\|c" in text


def test_bars_of_progress_take_no_markup(monkeypatch):
    monkeypatch.setattr(
        "fedtailor.progress.messages", Console(file=io.StringIO(), force_terminal=True, width=100)
    )
    bars = progress_bars()
    bars.add_task("[/red]", total=1, state="[/bold]")
    out = io.StringIO()
    Console(file=out, width=100).print(bars.get_renderable())
    assert "[/red]" in out.getvalue()
    assert "[/bold]" in out.getvalue()
