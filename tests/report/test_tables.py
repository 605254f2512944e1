"""Tables of results in a terminal of 80 columns."""

from __future__ import annotations

import io

from rich.console import Console

from fedtailor.methods.registry import method_names
from fedtailor.report.comparison import comparison_tables
from fedtailor.report.tables import LONGEST_NAME
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
