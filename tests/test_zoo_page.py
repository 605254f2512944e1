"""The page of the zoo (``make test-zoo``): the same results give the same page, and a broken promise is told."""

from __future__ import annotations

from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[1] / "tools"


@pytest.fixture
def zoo_page(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    import zoo_page

    return zoo_page


def row(model: str, verdict: str = "passes", share: float = 1.0, sentence: str = "") -> dict:
    return {
        "model": model, "note": "", "verdict": verdict, "sentence": sentence, "parameters": 1_230_000, "share": share,
        "trace_seconds": 0.44, "check_seconds": 0.25, "own_class": True, "masked": True, "kept": {"1/4": 0.08},
    }  # fmt: skip


def test_the_page_counts_and_quotes(zoo_page):
    rows = [
        row("timm/b", "in part", 0.5, "stem: has the literal size 8 in 'view' (view) at b_c.py:3"),
        row("timm/a"),
        row("torchvision/c", "refused", 0.0, "no rule says how channels pass through 'fft'"),
    ]
    page = zoo_page.page(rows)
    assert page == zoo_page.page(rows)
    assert "| timm | 2 | 1 | 1 | 0 | 0 |" in page
    assert "| all | 3 | 1 | 1 | 1 | 0 |" in page
    assert "| `a` | 1.23 M | 100.0% | 8% | 0.4 s | 0.2 s | passes, by mask too |" in page
    assert "| `c` | 1.23 M |  |  |  |  | refused |" in page
    assert "- `timm/b`, in part: stem: has the literal size 8 in 'view' (view) at b\\_c.py:3" in page
    assert page.index("`a`") < page.index("`b`")


def test_a_promise_that_is_not_kept_is_told(zoo_page):
    good = [row(f"timm/{number}") for number in range(19)]
    assert zoo_page.shortfall([*good, row("timm/x", "in part", 0.5, "why")]) == ""
    assert zoo_page.shortfall(
        [*good[1:], row("timm/x", "refused", 0, "why"), row("timm/y", "in part", 0.1, "why")]
    ) == ("18 of 20 models pass: expected at least 95%")
    assert (
        zoo_page.shortfall([*good, row("timm/x", "wrong", 1, "differs")])
        == "wrong networks or failures: timm/x"
    )
