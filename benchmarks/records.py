"""What the evidence scripts share: where results lie, how a file of results is written, and the command line."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedtailor.config import RunConfig
from fedtailor.run.interface import resume, run_config
from fedtailor.run.result import Run

ROOT = Path(__file__).parents[1]
EVIDENCE = ROOT / "docs" / "evidence"
FIGURES = ROOT / "docs" / "figures"

Result = dict[str, Any]


def runs_of(issue: str) -> Path:
    """The folder of the runs behind ``docs/evidence/<issue>``."""
    return ROOT / "runs" / f"evidence-{issue}"


def write(target: Path, result: Result) -> None:
    """Write a result as a whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    part.replace(target)


def read(files: Iterable[Path]) -> list[Result]:
    """The results that are there."""
    return [json.loads(file.read_text(encoding="utf-8")) for file in files if file.exists()]


def compare_line(config: str, methods: str, runs: Path, settings: Sequence[str], seeds: int = 1) -> list[str]:
    """A call of ``fedtailor compare``."""
    overrides = [part for setting in settings for part in ("--set", setting)]
    chosen = ["--methods", methods, "--seeds", str(seeds), "--runs", str(runs), "--json"]
    return [sys.executable, "-m", "fedtailor", "compare", f"configs/{config}.toml", *chosen, *overrides]


def shown(line: Sequence[str]) -> str:
    """The call as a person would type it."""
    return " ".join(["fedtailor", *line[3:]]).replace(f"{ROOT}/", "")


def call(line: Sequence[str]) -> Result:
    """Run a comparison, or go on with it; what it prints. The script ends where the comparison fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(line, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    found: Result = json.loads(done.stdout)
    return found


def run_or_resume(config: RunConfig, folder: Path) -> Run:
    """The finished run of a folder."""
    return resume(folder) if folder.exists() else run_config(config, folder)


def arguments(doc: str | None, pieces: Iterable[str]) -> argparse.ArgumentParser:
    """The options of every script: pieces by name, and ``--list``."""
    names = list(pieces)
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="*", choices=[*names, []], metavar="piece", help=", ".join(names))
    parser.add_argument("--list", action="store_true", help="Show the runs and stop.")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="Start nothing later than after so many seconds."
    )
    return parser
