"""What a run on Flower is made of, without Flower: profiles, memories on disk, apps as folders, addresses."""

from __future__ import annotations

import ast
import os
import signal
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor
from commands import call
from fedtailor.cli.flower import Where
from fedtailor.config import make_config
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.engines.flower.memory import Cupboard
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.fleet.roster import Profile, Roster
from fedtailor.flower.app_folder import write_app
from fedtailor.flower.link import Link
from fedtailor.seeds import Seeds
from fedtailor.storage.interrupt import SIGNALS


def test_flower_is_named_in_two_files_alone() -> None:
    root = Path(fedtailor.__file__).parent
    found = set()
    texts = {file: file.read_text(encoding="utf-8") for file in root.rglob("*.py")}
    for file, text in texts.items():
        for node in ast.walk(ast.parse(text)) if "flwr" in text else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "flwr" for name in names):
                found.add(str(file.relative_to(root)))
                assert all(name in ("flwr.app", "flwr.clientapp", "flwr.serverapp") for name in names)
    assert found == {"engines/flower/post.py", "flower/apps.py"}


def test_a_profile_is_what_was_sent() -> None:
    profile = Profile("phone-17", 300, 20, "0.5", Budget(macs="5M", memory="20MB"))
    assert Profile.of(profile.value()) == profile


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (7, "profile = 7: expected a table"),
        ({"name": "../x", "examples": 3}, "name = '../x'"),
        ({"name": "a", "examples": True}, "examples = True"),
        ({"name": "a", "examples": 0}, "examples = 0"),
        ({"name": "a", "examples": 10**15}, "examples = 1000000000000000"),
        ({"name": "a", "examples": 3, "admin": 1}, "unknown field of a profile 'admin'"),
        ({"name": "a", "examples": 3, "limits": {"width": "1"}}, "unknown limit 'width'"),
        ({"name": "a", "examples": 3, "limits": {"macs": 5}}, "limits = {'macs': 5}"),
        ({"name": "a", "examples": 3, "limits": {"macs": "-5M"}}, "macs = '-5M'"),
        ({"name": "a", "examples": 3, "tier": 5}, "tier = 5"),
    ],
)
def test_profiles_that_cannot_be_are_refused(value: Any, expected: str) -> None:
    with pytest.raises(FedtailorError) as refused:
        Profile.of(value)
    assert expected in str(refused.value)


def test_numbers_belong_to_names_whatever_the_order() -> None:
    first = Roster()
    assert [first.join(Profile(name, 5, tier="1")) for name in ("b", "a", "b", "c")] == [0, 1, 0, 2]
    again = Roster(first.numbers)
    assert [again.join(Profile(name, 5, tier="1")) for name in ("c", "a")] == [2, 1]
    assert again.present == {1, 2}


def test_the_population_is_who_is_there_with_its_own_limits() -> None:
    fleet, roster = fleet_by_name("uniform-2"), Roster()
    roster.join(Profile("small", 5, tier="0.5"))
    roster.join(Profile("own", 7, budget=Budget(macs="5M")))
    roster.join(Profile("large", 9, tier="1"))
    roster.leave(2)
    there = list(roster.population(fleet, 0, Seeds(0)))
    assert [(client.id, client.tier, client.num_examples) for client in there] == [
        (0, "0.5", 5),
        (1, "0.5", 7),
    ]
    assert there[1].budget == Budget(macs="5M")
    roster.join(Profile("nobody", 5))
    with pytest.raises(FedtailorError, match="client nobody names neither a tier nor a limit"):
        roster.population(fleet, 0, Seeds(0))


def test_parts_of_a_split_have_the_tiers_of_a_simulation() -> None:
    fleet, roster = fleet_by_name("uniform-2"), Roster(split=4)
    for part in (0, 3):
        roster.join(Profile(str(part), 10))
    everyone = fleet.capacity(roster.sizes, 0, Seeds(0))
    assert list(roster.population(fleet, 0, Seeds(0))) == [everyone[0], everyone[3]]
    with pytest.raises(FedtailorError, match="name = '4': expected the number of a part, 0 to 3"):
        roster.join(Profile("4", 10))


def test_memories_of_the_last_rounds_are_kept(tmp_path: Path) -> None:
    cupboard = Cupboard(tmp_path / "client")
    for round in range(5):
        cupboard.put((round, "train"), {"p": torch.full((2,), float(round))}, keep=2)
    assert cupboard.get((2, "train")) is None
    found = cupboard.get((3, "train"))
    assert found is not None
    assert torch.equal(found["p"], torch.tensor([3.0, 3.0]))
    (tmp_path / "client" / "round-00000004-train.kept").write_bytes(b"half a fi")
    assert cupboard.get((4, "train")) is None


def test_an_app_holds_a_configuration_that_can_be_read(tmp_path: Path) -> None:
    write_app(tmp_path / "My App")
    project = tomllib.loads((tmp_path / "My App" / "pyproject.toml").read_text(encoding="utf-8"))
    app = project["tool"]["flwr"]["app"]
    assert app["components"]["serverapp"] == "my_app.app:server"
    config = tomllib.loads(app["config"]["config"])
    assert config["model"]["name"] == "my_app.model:build"
    assert config["name"] == "my-app"  # and not the name of the run that ``fedtailor init`` writes
    assert make_config({**config, "model": {"name": "cnn"}}).rounds == 5
    with pytest.raises(FedtailorError, match="is not empty"):
        write_app(tmp_path / "My App")
    odd = 'name = "a"\n[data]\ndataset = "C:\\\\new\\\\"\n'
    write_app(tmp_path / "odd", odd)
    project = tomllib.loads((tmp_path / "odd" / "pyproject.toml").read_text(encoding="utf-8"))
    assert project["tool"]["flwr"]["app"]["config"]["config"] == odd


@pytest.mark.parametrize("address", ["localhost", "http://here:8000", ":8000", "here:"])
def test_addresses_that_are_none_are_refused(address: str) -> None:
    with pytest.raises(FedtailorError, match="--superlink"):
        Link(address)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--engine", "flowers"), "unknown engine (--engine) 'flowers': did you mean 'flower'?"),
        (("--superlink", "here:8000"), "belong to --engine flower"),
        (("--engine", "flower"), "expected --superlink HOST:PORT"),
        (("--engine", "flower", "--superlink", "here"), "--superlink = 'here': expected host:port"),
        (("--engine", "flower", "--superlink", "here:1", "--json"), "belong to runs on this machine"),
    ],
)
def test_where_a_run_goes_is_asked_before_it_goes(
    words: tuple[str, ...], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text('[data]\ndataset = "digits"\n', encoding="utf-8")
    assert call(monkeypatch, "run", "c.toml", *words) == 2
    assert expected in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "runs").exists()


def test_a_run_is_stopped_by_what_batch_systems_send(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """As by Ctrl-C: the SuperLink is told, and nothing is left behind."""
    (tmp_path / "c.toml").write_text('[data]\ndataset = "digits"\n', encoding="utf-8")
    before = {number: signal.getsignal(number) for number in SIGNALS}

    def stopped(*_given: object, **_options: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)

    monkeypatch.setattr("fedtailor.flower.submit.submit", stopped)
    words = ("--runs", str(tmp_path), "--engine", "flower", "--superlink", "here:1")
    try:
        assert call(monkeypatch, "run", str(tmp_path / "c.toml"), *words) == 130
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "Stopped before the first round" in capsys.readouterr().err


def test_a_run_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "run").mkdir()
    assert (
        call(monkeypatch, "resume", str(tmp_path / "run"), "--engine", "flower", "--superlink", "here:1") == 2
    )
    assert "did not run on Flower" in capsys.readouterr().err
    (tmp_path / "run" / "clients.json").write_text("{}", encoding="utf-8")
    assert call(monkeypatch, "resume", str(tmp_path / "run")) == 2
    assert "ran on Flower: say where" in capsys.readouterr().err


def test_the_command_to_go_on_with_is_whole() -> None:
    where = Where("flower", "here:8000", Path("ca.crt"))
    assert where.options == "--engine flower --superlink here:8000 --root-certificates ca.crt"
    assert (
        Where("flower", "here:8000", insecure=True).options
        == "--engine flower --superlink here:8000 --insecure"
    )
