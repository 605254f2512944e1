"""Eight nodes that Flower's own simulation engine runs, on Ray: the same app, and the bits of the run in process."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")
pytest.importorskip("ray", reason="the extra fedtailor[flower-simulation] is not installed")

from fedtailor.config import make_config
from fedtailor.flower.link import Link
from fedtailor.flower.local import simulated_link
from fedtailor.flower.submit import submit
from fedtailor.run.interface import run_config
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights


@pytest.mark.slow
def test_simulated_nodes_have_the_bits_of_the_run_in_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # where clients keep what they keep
    text = CONFIG.replace("{method}", "flado").replace("clients = 5", "clients = 8")
    text = text.replace("workers = 0", "workers = 0\nwait = 600")
    said: list[str] = []
    with simulated_link(tmp_path / "link", 8) as link:
        submit(text, tmp_path / "there", Link(link.address, link.authority), said.append)
    assert [line.split()[1] for line in said if line.startswith("round")] == ["1", "2", "3"]
    run_config(make_config(tomllib.loads(text)), tmp_path / "here", on_notice=lambda _: None)
    assert not differing(final_weights(tmp_path / "here"), final_weights(tmp_path / "there"))
    kept = list((tmp_path / ".fedtailor" / "clients").rglob("*.kept"))
    assert kept  # on the machine of the client that kept it, and not with the server
