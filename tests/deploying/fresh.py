"""Runs deployed files as a device does, in a process of its own: ``python fresh.py CASES.json``.

Importing fedtailor fails here, but for the classes of its networks where weights are put into one of them.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np


def difference(device: Any, case: dict[str, Any]) -> float:
    """How far the answers of a file are from what was expected."""
    values = np.load(case["values"], allow_pickle=False)
    inputs = [values[name] for name in values.files if name.startswith("input")]
    expected = [values[name] for name in values.files if name.startswith("expected")]
    file = case["file"]
    if file.endswith(".safetensors"):
        module, name, options = case["model"]
        network = device.load_safetensors(file, getattr(importlib.import_module(module), name)(**options))
    else:
        network = device.LOADERS[Path(file).suffix](file)
    answers = network(*inputs)
    assert [each.shape for each in answers] == [each.shape for each in expected]
    return max(float(np.abs(one - other).max()) for one, other in zip(answers, expected, strict=True))


def main() -> None:
    asked = json.loads(Path(sys.argv[1]).read_text())
    sys.path[:0] = asked["path"]
    if asked["without_fedtailor"]:
        sys.modules["fedtailor"] = None  # type: ignore[assignment]
    device = importlib.import_module("device")
    found = [difference(device, case) for case in asked["cases"]]
    heavy = {"fedtailor.deploying", "fedtailor.elasticity", "fedtailor.run"} & set(sys.modules)
    assert not heavy, heavy
    print(json.dumps(found))


if __name__ == "__main__":
    main()
