"""Files of a run on Flower that are not what was written get a sentence, and nobody is given another's network."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.config import make_config
from fedtailor.engines.flower.ledger import Ledger
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.fleet.roster import Profile, Roster
from fedtailor.flower.server import serve
from fedtailor.methods.registry import get_method
from fedtailor.report.live import look
from fedtailor.report.panels.devices import devices_panel
from fedtailor.run.result import Run
from fedtailor.storage.rows import record_of
from fedtailor.storage.run_folder import CONFIG, RunFolder
from helpers import mlp_model, setup_of, vector_data


def shown() -> dict[str, Any]:
    """What a server writes about its devices."""
    roster = Roster()
    roster.join(Profile("phone", 5))
    return json.loads(json.dumps(Ledger().value(roster, {0: 7}, {8: "no room"})))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    (tmp_path / "devices.json").write_text(json.dumps(shown()), encoding="utf-8")
    found = RunFolder(tmp_path).devices()
    assert found == shown() | {"when": found["when"]}
    assert devices_panel(found).tables[0][1][0]["client"] == "phone"


@pytest.mark.parametrize(
    "damaged",
    [
        {"clients": []},
        shown() | {"when": 5},
        shown() | {"clients": [5]},
        shown() | {"clients": [shown()["clients"][0] | {"client": "x"}]},
        shown() | {"clients": [shown()["clients"][0] | {"last_answer": 5}]},
        shown() | {"tiers": {"1": {"asked": 1}}},
        shown() | {"refused": {"8": 5}},
    ],
)
def test_damaged_devices_are_said(damaged: Any, tmp_path: Path) -> None:
    (tmp_path / "devices.json").write_text(json.dumps(damaged), encoding="utf-8")
    with pytest.raises(CorruptError, match="devices.json is damaged"):
        RunFolder(tmp_path).devices()
    assert "devices.json is damaged" in look(tmp_path)[0]


def test_refusals_are_of_clients_with_numbers() -> None:
    with pytest.raises(ValueError, match="refused_by is dict"):
        record_of('{"round": 1, "refused_by": {"x": {"late": 1}}}', {}, {})


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", '{"run": "../x", "clients": {}, "parts": null}', '{"run": "a", "clients": {"b": "c"}}'],
)
def test_damaged_clients_are_said_before_a_run_goes_on(text: str, tmp_path: Path) -> None:
    config = '[data]\ndataset = "digits"\n'
    (tmp_path / CONFIG).write_text(config, encoding="utf-8")
    (tmp_path / "clients.json").write_text(text, encoding="utf-8")
    with pytest.raises(CorruptError, match="clients.json"):
        serve(None, make_config({"data": {"dataset": "digits"}}), tmp_path)


def test_the_own_network_of_a_client_is_on_its_device(tmp_path: Path) -> None:
    """Loaded on the server, the data is the config's split: its part of that number is somebody else's."""
    setup = setup_of(get_method("fedpa")(), mlp_model(), vector_data())
    run = Run(setup, setup.start.state, (), folder=tmp_path, data_at_hand=False)
    with pytest.raises(FedtailorError, match="pass it, Run.load"):
        run.personal(1)
    (tmp_path / "clients.json").write_text("{}", encoding="utf-8")
    with pytest.raises(FedtailorError, match="client = 1: of a run on Flower.* on its own device"):
        replace(run, data_at_hand=True).personal(1)
