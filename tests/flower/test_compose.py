"""The compose file: every command, option and file in it exists."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

pytest.importorskip("yaml", reason="pre-commit brings it")
pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

import yaml

from fedtailor.cli.main import app
from fedtailor.config import load_config
from fedtailor.fleet.presets import build_fleet
from fedtailor.flower.device_file import FILE, node_table
from fedtailor.flower.keys import write_keys
from fedtailor.flower.link import QUIET, installed
from helpers import slow_if

FOLDER = Path(__file__).parents[2] / "examples" / "flower"
COMPOSE = yaml.safe_load((FOLDER / "compose.yml").read_text(encoding="utf-8"))
COMMANDS: dict[str, list[str]] = {name: each["command"] for name, each in COMPOSE["services"].items()}


def options_of(command: list[str]) -> dict[str, str]:
    pairs = [word.partition("=") for word in command if word.startswith("--")]
    return {name: value for name, _, value in pairs}


def known_options(command: list[str]) -> tuple[set[str], set[str]]:
    """All options of a command, and those that it cannot do without."""
    if command[0] == "fedtailor":
        found: Any = get_command(app).commands[command[1]]  # type: ignore[attr-defined]
        named = [each for each in found.params if each.param_type_name == "option"]
        return {o for each in named for o in each.opts}, {each.opts[0] for each in named if each.required}
    told = subprocess.run([str(installed(command[0])), "--help"], capture_output=True, text=True, check=True)
    return set(re.findall(r"--[a-z][a-z-]*", told.stdout)), set()


def test_there_are_a_link_two_nodes_and_a_server() -> None:
    assert set(COMMANDS) == {"superlink", "register", "node-1", "node-2", "server"}


@pytest.mark.parametrize("service", [slow_if(name, "superlink") for name in COMMANDS])
def test_every_command_and_option_exists(service: str) -> None:
    command = COMMANDS[service]
    assert command[0] in ("fedtailor", "flower-superlink")
    given, (known, needed) = options_of(command), known_options(command)
    assert set(given) <= known
    assert needed <= set(given)


def test_every_file_is_there_or_written_by_the_first_step(tmp_path: Path) -> None:
    text = (FOLDER / "compose.yml").read_text(encoding="utf-8")
    line = re.search(r"fedtailor (flower-keys keys .*)", text)
    assert line is not None
    words = line[1].split()
    hosts = [words[place + 1] for place, word in enumerate(words) if word == "--host"]
    nodes = [words[place + 1] for place, word in enumerate(words) if word == "--node"]
    assert all(
        COMMANDS[name] for name in (*hosts, *nodes)
    )  # services are called as their certificates and keys
    shutil.copytree(FOLDER, tmp_path / "here")
    write_keys(tmp_path / "here" / "keys", hosts, nodes, 1)
    (tmp_path / "here" / "runs").mkdir()
    for service in COMPOSE["services"].values():
        places = {}
        for volume in service.get("volumes", ()):
            outer, inner = volume.split(":")[:2]
            named = outer in COMPOSE["volumes"]
            assert named or (tmp_path / "here" / outer).exists(), volume
            places[inner] = tmp_path / "state" if named else tmp_path / "here" / outer
        for name, value in options_of(service["command"]).items():
            if value.startswith(("keys/", "node-")) or value.endswith(".toml"):
                assert any(f"/fedtailor/{value}".startswith(inner) for inner in places), (name, value)
        for other in service.get("depends_on", {}):
            assert other in COMPOSE["services"]


def test_the_configuration_and_the_devices_belong_together(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(FOLDER / "example.toml")
    tiers = {tier.name for tier in build_fleet(config.fleet).tiers}
    devices = [node_table({FILE: str(FOLDER / f"node-{number}.toml")}) for number in (1, 2)]
    assert {device["tier"] for device in devices} == tiers
    assert len({device["name"] for device in devices}) == config.clients_per_round == 2


def test_nothing_in_a_container_asks_anybody_outside() -> None:
    image = (FOLDER / "Dockerfile").read_text(encoding="utf-8")
    for name, value in QUIET.items():
        if name.startswith("FLWR_") and value in ("0", "1"):
            assert f"{name}={value}" in image
