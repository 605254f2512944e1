"""Run FLANC's evidence piece by piece and write docs/evidence/9 as each piece finishes.

    FEDTAILOR_DATA=... python benchmarks/flanc_evidence.py [--list] [piece ...]

Without names all pieces run, one after the other. Call it again after an interruption: finished runs are skipped, begun
ones go on from their last round, finished pieces are left alone. Every piece gives a table of all widths with the bytes
that were sent (JSON), every evaluation (CSV), and for FLANC what its bases look like at the end.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedtailor.server.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "evidence-9"
EVIDENCE = ROOT / "docs" / "evidence" / "9"

METHODS = "flanc,heterofl,fjord:widths=uniform-4:distillation=false"
ABLATED = f"{METHODS},flanc:regulariser=off"
FASHION = "flanc-fashion-mnist-small"


@dataclass(frozen=True)
class Piece:
    """One call of ``fedtailor compare``."""

    config: str
    methods: str
    seeds: int
    overrides: tuple[str, ...] = ()

    def command(self, name: str) -> list[str]:
        """The command line; every piece has a folder of its own."""
        settings = [part for key in (*self.overrides, f"name={name}") for part in ("--set", key)]
        chosen = ["--methods", self.methods, "--seeds", str(self.seeds), "--runs", str(RUNS), "--json"]
        start = [sys.executable, "-m", "fedtailor", "compare", f"configs/{self.config}.toml"]
        return [*start, *chosen, *settings]


PIECES = {
    "fashion-dynamic-iid": Piece(FASHION, ABLATED, 2),
    "fashion-dynamic-classes": Piece(FASHION, ABLATED, 2, ("data.partition=classes", "training.lr=0.02")),
    "fashion-static-iid": Piece(FASHION, METHODS, 2, ("fleet.capacity=static",)),
    "fashion-two-25-75": Piece(FASHION, METHODS, 2, ("fleet.name=two-25-75",)),
    "fashion-two-75-25": Piece(FASHION, METHODS, 2, ("fleet.name=two-75-25",)),
    "shakespeare": Piece("flanc-shakespeare-small", "flanc", 1),
}


def run(name: str) -> None:
    """Run a piece, or go on with it, and write what it gives."""
    target = EVIDENCE / f"{name}.json"
    if target.exists():
        print(f"{name}: done before")
        return
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = PIECES[name].command(name)
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    shown = " ".join(["fedtailor", *command[3:]]).replace(f"{ROOT}/", "")
    folders = sorted(file.parent for file in (RUNS / name).glob("*/metrics.jsonl"))
    result = {"command": shown, "methods": result["methods"], "bases": {f.name: bases(f) for f in folders}}
    result["bases"] = {run: found for run, found in result["bases"].items() if found}
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    write_curve(name, folders)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(target)
    print(f"{name}: {time.monotonic() - started:.0f} s")


def bases(folder: Path) -> dict[str, dict[str, float]]:
    """How orthogonal the bases of a run are at its end, and how large the coefficients (figures 5 and 6)."""
    found: dict[str, dict[str, float]] = {}
    for name, table in RunFolder(folder).load_diagnostics().items():
        if name.startswith("gram/"):
            errors = table - torch.eye(len(table))
            lengths = table.diagonal().sqrt()
            cosines = (table / lengths.outer(lengths)).fill_diagonal_(0)
            figures = {"mean_squared_error": errors.square().mean(), "largest_cosine": cosines.abs().max()}
        else:
            figures = {"mean_coefficient": table.mean(), "smallest": table.min(), "largest": table.max()}
        found[name] = {key: float(f"{float(value):.4g}") for key, value in figures.items()}
    return found


def write_curve(name: str, folders: list[Path]) -> None:
    """Every evaluation of every run: one row per round and tier; bytes are those of the round, both ways."""
    with (EVIDENCE / f"{name}.csv").open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["run", "round", "tier", "accuracy", "loss", "perplexity", "bytes_down", "bytes_up"])
        for folder in folders:
            for row in RunFolder(folder).rows():
                for tier, values in (row.get("tiers") or {}).items():
                    figures = (values["accuracy"], values["loss"], math.exp(values["loss"]))
                    shown = [f"{figure:.5g}" for figure in figures]
                    rows.writerow(
                        [folder.name, row["round"], tier, *shown, row["bytes_down"], row["bytes_up"]]
                    )


def main() -> None:
    """Run the pieces that were named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", choices=[*PIECES, []], metavar="piece", help=", ".join(PIECES))
    parser.add_argument("--list", action="store_true", help="Show the commands and stop.")
    options = parser.parse_args()
    for name in options.pieces or PIECES:
        if options.list:
            print(" ".join(PIECES[name].command(name)[1:]))
        else:
            run(name)


if __name__ == "__main__":
    main()
