"""Tables of results in a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from fedtailor.charts.terminal import LONGEST_NAME, Titled, Words, lines_of, plain_table
from fedtailor.methods.registry import method_names
from fedtailor.report.comparison import comparison_tables
from fedtailor.storage.run_folder import RunFolder
from synthetic_runs import write_run


def test_names_of_methods_are_never_broken(tmp_path):
    assert max(map(len, method_names())) <= LONGEST_NAME
    folders = [write_run(tmp_path / str(seed), "fjord", 0.9, seed, rounds=20) for seed in (1, 2)]
    seeds = [RunFolder(folder).records() for folder in folders]
    names = ["fedavg:width=1/5", "heterofl:norm=averaged", "x" * LONGEST_NAME]
    console = Console(width=80, record=True, file=io.StringIO())
    for part in comparison_tables("title", dict.fromkeys(["federated-dropout", *names], seeds)):
        console.print(part)
    text = console.export_text()
    firsts = [line.split()[0] for line in text.splitlines() if line.strip()]
    for name in names:
        assert firsts.count(name) == 4  # scores, costs, differences, differences by tier
    assert text.count("±") >= 5 * len(names)
    assert "…" not in text


def test_a_number_stays_with_its_unit_and_an_indented_line_goes_on_below_its_first_word():
    text = "  it exceeds 9.0 times its own deviation over the seeds (95 % interval, paired t), 36 seeds"
    for width in range(20, 90):
        lines = lines_of(text, width)
        assert max(map(len, lines)) <= width
        assert all(line.startswith("  ") for line in lines)
        assert "95 % " in "".join(f"{line} \n" for line in lines)
        assert any("36 seeds" in line for line in lines)
        assert " ".join(" ".join(lines).split()) == text.strip()


def test_titles_and_captions_are_as_wide_as_the_terminal_and_a_blank_line_follows():
    table = plain_table()
    table.add_column("a")
    table.add_row("1")
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(Titled("a title that is longer than its table", table, "a caption that is longer, too"))
    console.print(Words("next"))
    assert console.export_text().splitlines() == [
        "a title that is longer than its table", "a", "─", "1", "a caption that is longer, too", "", "next",
    ]  # fmt: skip
