"""Record the golden runs for this kind of machine: ``PYTHONPATH=tests python -m golden.record``; say in the commit why.

Sums per tensor are those of the machine that recorded first; further machines only add their hashes. ``--anew`` throws
everything away, for a change that is meant to move the bits.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from golden.runs import NETWORKS, RUNS, golden_run, machine_key

FILE = Path(__file__).with_name("recorded.json")


def main() -> None:
    """Run everything once and add what is not there yet."""
    torch.set_num_threads(1)
    known: dict[str, Any] = {} if "--anew" in sys.argv else json.loads(FILE.read_text(encoding="utf-8"))
    for name in RUNS:
        for kind in NETWORKS:
            outcome = golden_run(name, kind)
            entry = known.setdefault(f"{name}/{kind}", {"hashes": {}, "sums": outcome.sums})
            entry["hashes"][machine_key()] = [outcome.weights_hash, outcome.rows_hash]
            print(name, kind, *entry["hashes"][machine_key()])
    FILE.write_text(as_text(known), encoding="utf-8")


def as_text(known: dict[str, Any]) -> str:
    """One line per tensor, so that a change shows what moved."""
    lines = []
    for run, entry in sorted(known.items()):
        hashes = json.dumps(entry["hashes"], sort_keys=True)
        sums = ",\n".join(
            f"   {json.dumps(n)}: [{a:.8g}, {b:.8g}]" for n, (a, b) in sorted(entry["sums"].items())
        )
        lines.append(f' {json.dumps(run)}: {{\n  "hashes": {hashes},\n  "sums": {{\n{sums}\n  }}\n }}')
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    main()
