"""Run Flado's evidence piece by piece and write docs/evidence/10 as each run finishes.

    FEDTAILOR_DATA=... python benchmarks/flado_evidence.py [--list] [--seconds N] [piece ...]

Without names all pieces run, one after the other. Call it again after an interruption: finished runs are skipped, begun
ones go on from their last round. Each finished run leaves a small JSON of its course (accuracy, FLOPs and parameters at
every evaluation); ``tables.json`` joins them: cost to reach common targets, and to match each other's best accuracy.
``--seconds`` stops before the first run that would start later than that.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.report.accounting import best, spending, target_table
from fedtailor.server.run_folder import RunFolder

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "runs" / "evidence-10"
EVIDENCE = ROOT / "docs" / "evidence" / "10"
CONFIG = "configs/flado-fashion-mnist-small.toml"

FJORD = "fjord:distillation=false:mean_budget=true:widths=uniform-20"
METHODS = ("flado", "uniprob", "efd", FJORD, "heterofl")
EVERYONE = ("clients_per_round=100", "rounds=30", "evaluate_every=2")


@dataclass(frozen=True)
class Piece:
    """Some methods under the same settings."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()


PIECES = {
    "tenth": Piece(METHODS, (1, 2)),
    "everyone": Piece(METHODS, (1,), EVERYONE),
    "estimators": Piece(
        ("flado:estimator=score", "flado:estimator=surrogate", "flado:alignment_network=full"), (1,)
    ),
}


def command(piece: str, method: str, seed: int) -> list[str]:
    """One run: ``compare`` of a single method with a single seed."""
    name = f"{piece}-{slug(method)}-{seed}"
    settings = [
        part for key in (*PIECES[piece].overrides, f"seed={seed}", f"name={name}") for part in ("--set", key)
    ]
    chosen = ["--methods", method, "--runs", str(RUNS), "--json"]
    return [sys.executable, "-m", "fedtailor", "compare", CONFIG, *chosen, *settings]


def slug(method: str) -> str:
    """The method with its settings as a file name."""
    return "".join(letter if letter.isalnum() else "-" for letter in method.split(":distillation")[0])


def run(piece: str, method: str, seed: int) -> None:
    """Run, or go on with a run, and write its course."""
    name = f"{piece}-{slug(method)}-{seed}"
    target = EVIDENCE / f"{name}.json"
    if target.exists():
        print(f"{name}: done before", flush=True)
        return
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    line = command(piece, method, seed)
    done = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    (folder,) = (path for path in (RUNS / name).iterdir() if path.is_dir() and not path.name.startswith("."))
    rows = RunFolder(folder).rows()
    course = spending(rows)
    result = {
        "command": " ".join(["fedtailor", *line[3:]]).replace(f"{ROOT}/", ""),
        "piece": piece,
        "method": method,
        "seed": seed,
        "seconds": round(sum(row["seconds"] for row in rows), 1),
        "best": best(course).figures(),
        "course": [spent.figures() for spent in course],
    }
    EVIDENCE.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(target)
    print(f"{name}: best {100 * result['best']['value']:.2f} %, {result['seconds']} s", flush=True)


def write_tables() -> None:
    """What finished runs say together, for every piece and seed; estimators are compared with the default."""
    found: dict[str, dict[str, Any]] = defaultdict(dict)
    for piece, settings in PIECES.items():
        for seed in settings.seeds:
            for method in settings.methods:
                folder = RUNS / f"{piece}-{slug(method)}-{seed}"
                if not (EVIDENCE / f"{folder.name}.json").exists() or not folder.is_dir():
                    continue
                (inner,) = (path for path in folder.iterdir() if path.is_dir())
                found[f"{'tenth' if piece == 'estimators' else piece}, seed {seed}"][method] = RunFolder(
                    inner
                ).rows()
    tables = {name: target_table(runs, (0.02, 0.05, 0.1)) for name, runs in found.items()}
    if tables:
        (EVIDENCE / "tables.json").write_text(json.dumps(tables, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Run the pieces that were named, or all."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pieces", nargs="*", choices=[*PIECES, []], metavar="piece", help=", ".join(PIECES))
    parser.add_argument("--list", action="store_true", help="Show the commands and stop.")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    options = parser.parse_args()
    started = time.monotonic()
    for piece in options.pieces or PIECES:
        for seed in PIECES[piece].seeds:
            for method in PIECES[piece].methods:
                if options.list:
                    print(" ".join(command(piece, method, seed)[1:]).replace(f"{ROOT}/", ""))
                elif time.monotonic() - started < options.seconds:
                    run(piece, method, seed)
                    write_tables()


if __name__ == "__main__":
    main()
