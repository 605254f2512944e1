"""docs/zoo.md, made from what ``make test-zoo`` left in ``build/zoo``: one JSON file per model.

Fails where the zoo falls short of what the project promises: a wrong network, or fewer than 95 % of the models that
shrink as a whole.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PROMISED = 0.95  # of the models
ENOUGH = 0.9  # of the parameters
LIBRARIES = ("torchvision", "timm", "transformers")
VERDICTS = ("passes", "in part", "refused", "wrong", "error", "too slow")
Row = dict[str, Any]

INTRODUCTION = """\
# The zoo: which models shrink

<!-- made by tools/zoo_page.py from the results of `make test-zoo` -->

`make test-zoo` builds models of torchvision, timm and Hugging Face transformers as their libraries build them, with
random weights: the smallest member of a family, on small pictures or with a tiny configuration, because it is
constructions that are tested. Each is traced and checked as `fedtailor.elastic` does it, cut at 1/4, 1/2 and 3/4, and
each cut is run, compared with the masked full model, trained one step and merged with the others. fedtailor itself
depends on none of these libraries.

- *passes*: right at all three widths, and at least 90 % of the parameters are elastic;
- *in part*: right at all three widths, but more than 10 % of the parameters stay in every cut;
- *refused*: `fedtailor.elastic` says why, and nothing was cut;
- *wrong*: a cut computes something else than the masked full model. There must be none.

Every cut is compared with the traced reference that [the check](your-own-model.md#what-happens) uses. *By mask too*: it
also equals the library's own class with zeros in the dropped channels, which knows nothing of the trace. Where that is
not said, the class computes across channels in a way that no mask expresses (a mean over channels that it writes out,
a scale that it works out from a size).
"""


def main() -> None:
    """Write the page, and say whether the promise is kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, default=ROOT / "build" / "zoo")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "zoo.md")
    options = parser.parse_args()
    rows = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(options.results.glob("*.json"))]
    if not rows:
        sys.exit(f"no results in {options.results}: run `make test-zoo` first")
    missing = without_result(rows)
    options.page.write_text(page(rows, missing), encoding="utf-8")
    print(f"{options.page.name}: {summary(rows)}")
    problem = shortfall(rows) or (f"no result yet for {', '.join(missing)}" if missing else "")
    if problem:
        sys.exit(problem)


def without_result(rows: Sequence[Row]) -> list[str]:
    """Models of the catalogue that a run which was stopped has not come to."""
    sys.path.insert(0, str(ROOT / "tests"))
    catalogue = importlib.import_module("zoo.catalogue").CATALOGUE
    return [name for name in catalogue if name not in {row["model"] for row in rows}]


def page(rows: Sequence[Row], missing: Sequence[str] = ()) -> str:
    """The page as text: the same results give the same page."""
    parts = [INTRODUCTION, counts(rows)]
    for library in LIBRARIES:
        own = [row for row in rows if row["model"].startswith(f"{library}/")]
        if own:
            parts.append(f"## {library}\n\n{table(own)}")
    rest = [row for row in rows if row["verdict"] != "passes"]
    if rest:
        lines = [f"- `{row['model']}`, {row['verdict']}: {plain(row['sentence'])}" for row in rest]
        parts.append("## What does not pass, in its own words\n\n" + "\n".join(lines) + "\n")
    if missing:
        names = ", ".join(f"`{name}`" for name in missing)
        parts.append(
            f"## Without a result\n\nThe run was stopped before it came to these {len(missing)} models of the "
            f"catalogue: {names}.\n"
        )
    return "\n".join(parts)


def summary(rows: Sequence[Row]) -> str:
    """One line with the counts."""
    found = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in VERDICTS}
    return f"{len(rows)} models: " + ", ".join(f"{n} {verdict}" for verdict, n in found.items() if n)


def counts(rows: Sequence[Row]) -> str:
    """The counts per library, and how long tracing took."""
    lines = ["| | models | passes | in part | refused | wrong or failing |", "|---|---|---|---|---|---|"]
    for name in (*LIBRARIES, "all"):
        own = [row for row in rows if name == "all" or row["model"].startswith(f"{name}/")]
        found = [sum(row["verdict"] == verdict for row in own) for verdict in VERDICTS]
        lines.append(f"| {name} | {len(own)} | {' | '.join(map(str, found[:3]))} | {sum(found[3:])} |")
    traced = sorted(row["trace_seconds"] for row in rows if row["share"])
    passed = sum(row["verdict"] == "passes" for row in rows)
    masked = sum(row["masked"] for row in rows if row["share"])
    text = (
        f"\n{passed} of {len(rows)} models pass ({passed / len(rows):.1%}); {masked} of the {len(traced)} that are cut "
        "also equal their class with a mask."
    )
    if traced:
        text += (
            f" Tracing took {traced[len(traced) // 2]:.1f} s in the median and {traced[-1]:.1f} s at most, on a "
            "machine that did other work beside it; the check comes on top of that.\n"
        )
    return "\n".join(lines) + "\n" + text


def table(rows: Sequence[Row]) -> str:
    """A row for each model."""
    lines = [
        "| model | parameters | elastic | left at 1/4 | trace | check | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in sorted(rows, key=lambda row: row["model"].lower()):
        note = f", {row['note']}" if "=" in row["note"] else ""
        name = f"`{row['model'].partition('/')[2]}`{note}"
        if row["share"]:
            quarter = f"{row['kept'].get('1/4', 0):.0%}" if row["kept"] else ""
            cells = [
                f"{row['share']:.1%}",
                quarter,
                f"{row['trace_seconds']:.1f} s",
                f"{row['check_seconds']:.1f} s",
            ]
        else:
            cells = ["", "", "", ""]
        verdict = row["verdict"] + (", by mask too" if row["masked"] and row["share"] else "")
        lines.append(f"| {name} | {row['parameters'] / 1e6:.2f} M | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines) + "\n"


def plain(sentence: str) -> str:
    """A sentence that Markdown leaves alone."""
    text = " ".join(sentence.split())
    return text.replace("<", "&lt;").replace("*", "\\*").replace("_", "\\_").replace("[", "\\[")


def shortfall(rows: Sequence[Row]) -> str:
    """What keeps the zoo from its promise; empty if nothing does."""
    wrong = [row["model"] for row in rows if row["verdict"] in VERDICTS[3:]]
    if wrong:
        return f"wrong networks or failures: {', '.join(wrong)}"
    passed = sum(row["verdict"] == "passes" for row in rows)
    if passed < PROMISED * len(rows):
        return f"{passed} of {len(rows)} models pass: expected at least {PROMISED:.0%}"
    return ""


if __name__ == "__main__":
    main()
