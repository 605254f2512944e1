"""Shared by all tests: one PyTorch thread, property tests that are the same on every machine."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedtailor",
    deadline=None,  # a loaded machine is no bug
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fedtailor")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def evidence(request: pytest.FixtureRequest) -> Callable[[str, dict[str, Any]], None]:
    """Write measured figures, with the command that made them, into the folder that FEDTAILOR_EVIDENCE names."""

    def write(name: str, figures: dict[str, Any]) -> None:
        if "FEDTAILOR_EVIDENCE" not in os.environ:
            return
        folder = Path(os.environ["FEDTAILOR_EVIDENCE"])
        folder.mkdir(parents=True, exist_ok=True)
        test = request.node.nodeid
        machine = f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
        report = {**figures, "command": f"FEDTAILOR_EVIDENCE={folder} pytest '{test}'", "machine": machine}
        (folder / f"{name}.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")

    return write
