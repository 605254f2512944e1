"""The page on Python runs as it stands, block after block."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "python.md"


@pytest.mark.slow
def test_the_blocks_of_the_page_on_python_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)
    assert len(blocks) == 5
    known: dict[str, Any] = {"__name__": "page"}
    for number, block in enumerate(blocks):
        exec(compile(block, f"{PAGE.name}, block {number + 1}", "exec"), known)
    shown = capsys.readouterr().out
    assert "<Run: heterofl on own data, 3 rounds; 0.2: accuracy" in shown
    assert (
        "tier 'sensor' (7 clients): no cut fits: macs is limited to 5, but the smallest cut of this" in shown
    )
    assert "needs 19" in shown
    assert " splitmix:base=1/2 " in shown
    assert len(known["frame"]) == 12
    assert (tmp_path / "report.md").is_file()
