"""Where figures go: ``results.json`` beside this file, one for all benchmarks.

    {script: {what was measured: {"command": ..., "versions": ..., "machine": ..., "figures": {...}}}}

Figures are always printed; they are written down with ``--record``, so that trying a benchmark changes no file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fedtailor.storage.files import replace_file

FILE = Path(__file__).with_name("results.json")
SETTINGS = ("OMP_NUM_THREADS",)  # of the environment: they change what is measured


def add_option(parser: argparse.ArgumentParser) -> None:
    """The option that all benchmarks share."""
    parser.add_argument(
        "--record",
        nargs="?",
        const="",
        metavar="NAME",
        help="write the figures into benchmarks/results.json; NAME tells apart figures of unlike conditions",
    )


def report(name: str, figures: Any, options: argparse.Namespace, prefix: str = "") -> None:
    """Show what was measured and, if asked to, write it down; ``prefix`` stood before the command."""
    print(json.dumps(figures, indent=1), flush=True)
    if options.record is None:
        return
    script = Path(sys.argv[0]).resolve().relative_to(FILE.parent).with_suffix("").as_posix()
    settings = [f"{key}={os.environ[key]}" for key in SETTINGS if key in os.environ]
    words = [*settings, *prefix.split(), "python", f"benchmarks/{script}.py", *sys.argv[1:]]
    every = json.loads(FILE.read_text(encoding="utf-8")) if FILE.exists() else {}
    every.setdefault(script, {})[f"{name}, {options.record}" if options.record else name] = {
        "command": shlex.join(words),
        "versions": versions(),
        "machine": machine(),
        "figures": figures,
    }
    replace_file(FILE, [f"{json.dumps(every, indent=1)}\n".encode()])


def versions() -> str:
    """Of what was measured."""
    packages = ", ".join(f"{package} {metadata.version(package)}" for package in ("fedtailor", "torch"))
    return f"{packages}, python {platform.python_version()}"


def machine() -> str:
    """What it was measured on, and how busy that was."""
    cores = len(os.sched_getaffinity(0))
    return f"{platform.machine()}, {cores} {'core' if cores == 1 else 'cores'}, load {os.getloadavg()[0]:.1f}"
