"""Run the comparisons behind docs/methods piece by piece, and write docs/evidence as each piece finishes.

    FEDTAILOR_DATA=... python benchmarks/evidence.py [--list] [piece ...]

Without names all pieces run, one after the other, each on all cores. Call it again after an interruption: finished runs
are skipped, begun ones go on from their last round, finished pieces are left alone. Pieces of one experiment share
their runs. Of FjORD's, `centralised-mnist` is the authors' notebook, `isolated-mnist` the paper's figure 3, the others
its federated tables on data that fits here; `channels-*` sets beside it all methods that choose channels otherwise.
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

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "evidence"
EVIDENCE = ROOT / "docs" / "evidence"

METHODS = "fjord,fjord:distillation=false,heterofl,fedavg:width=1/5"
CHANNELS = f"{METHODS},efd,federated-dropout,uniprob,fedrolex,fedrolex:phase=independent,splitmix:base=1/5"
UNSCALED = (
    "heterofl:scaler=false,uniprob:inverted_scaling=false"  # what scaling does where nothing normalises
)
ISOLATED = ",".join(f"fedavg:width={width}" for width in ("1/5", "2/5", "3/5", "4/5", "1"))


@dataclass(frozen=True)
class Piece:
    """One call of ``fedtailor compare``."""

    issue: int  # the folder of the results
    experiment: str  # the folder of the runs: the same runs may serve several pieces
    config: str
    methods: str
    seeds: int
    overrides: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The command line."""
        settings = [part for key in (*self.overrides, f"name={self.experiment}") for part in ("--set", key)]
        chosen = ["--methods", self.methods, "--seeds", str(self.seeds), "--runs", str(RUNS), "--json"]
        return [
            sys.executable,
            "-m",
            "fedtailor",
            "compare",
            f"configs/{self.config}.toml",
            *chosen,
            *settings,
        ]


CENTRAL, FASHION, FEMNIST = "fjord-centralised-mnist", "fjord-fashion-mnist-small", "fjord-femnist-small"
SKEWED = ("data.partition=dirichlet",)
PIECES = {
    "centralised-mnist": Piece(8, "centralised-mnist", CENTRAL, "fjord:distillation=false", 3),
    "fashion-iid": Piece(8, "fashion-iid", FASHION, METHODS, 2),
    "fashion-dirichlet": Piece(8, "fashion-dirichlet", FASHION, METHODS, 2, SKEWED),
    "channels-iid": Piece(13, "fashion-iid", FASHION, f"{CHANNELS},{UNSCALED}", 2),
    "channels-dirichlet": Piece(13, "fashion-dirichlet", FASHION, CHANNELS, 2, SKEWED),
    "femnist-writers": Piece(8, "femnist-writers", FEMNIST, METHODS, 2, ("rounds=100", "evaluate_every=10")),
    "fashion-uniform-10": Piece(
        8, "fashion-uniform-10", FASHION, "fjord:widths=uniform-10", 1, ("fleet.name=uniform-10",)
    ),
    "fashion-drop-scale": Piece(8, "fashion-drop-scale", FASHION, "fjord", 1, ("fleet.drop_scale=0.5",)),
    "fashion-random-drop": Piece(8, "fashion-random-drop", FASHION, "fjord:random_drop=0.25", 1),
    "shakespeare": Piece(8, "shakespeare", "fjord-shakespeare-small", "fjord", 1),
    "isolated-mnist": Piece(8, "centralised-mnist", CENTRAL, f"{ISOLATED},fjord", 3),
}


def run(name: str) -> None:
    """Run a piece, or go on with it, and write what it gives."""
    piece = PIECES[name]
    target = EVIDENCE / str(piece.issue) / f"{name}.json"
    if target.exists():
        print(f"{name}: done before")
        return
    started = time.monotonic()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = piece.command()
    done = subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    result: dict[str, Any] = json.loads(done.stdout)
    shown = ["fedtailor", *command[3:]]
    result = {"command": " ".join(shown).replace(f"{ROOT}/", ""), "methods": result["methods"]}
    target.parent.mkdir(parents=True, exist_ok=True)
    write_curve(RUNS / piece.experiment, target.with_suffix(".csv"))
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    part.replace(target)
    print(f"{name}: {time.monotonic() - started:.0f} s")


def write_curve(runs: Path, target: Path) -> None:
    """Every evaluation of every run: one row per round and tier."""
    with target.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["run", "round", "tier", "accuracy", "loss", "perplexity"])
        for file in sorted(runs.glob("*/metrics.jsonl")):
            for line in file.read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                for tier, values in (row.get("tiers") or {}).items():
                    figures = (values["accuracy"], values["loss"], math.exp(values["loss"]))
                    rows.writerow(
                        [file.parent.name, row["round"], tier, *(f"{figure:.5g}" for figure in figures)]
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
            print(" ".join(PIECES[name].command()[1:]))
        else:
            run(name)


if __name__ == "__main__":
    main()
