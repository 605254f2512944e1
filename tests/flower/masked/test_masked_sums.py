"""Rounds under masks on Flower: the sums of the run in process, of updates that nobody but their clients has seen."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")
pytest.importorskip("cryptography", reason="the extra fedtailor[secure] is not installed")

from fedtailor.audit.keys import new_key
from fedtailor.config import make_config
from fedtailor.run.interface import run_config
from fedtailor.secure.protocol import rows_digest
from flower.loopback import LoopbackGrid
from flower.masked.runs import CONFIG, SHORT, Watched, events, here, nodes, row, there
from flower.test_same_bits import config_of
from helpers import differing, final_weights

# Methods that can, with the settings that they need; 3 of 5 clients, a network with channels.
METHODS = {
    "depthfl": "", "fedavg": "", "fjord": 'norm = "averaged"', "flanc": "", "scalefl": 'norm = "averaged"',
    "federated-dropout": 'norm = "averaged"\nmask = "round"', "fedrolex": 'norm = "averaged"\nlabel_rows = false',
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_every_method_has_the_sums_of_the_run_in_process(name: str, tmp_path: Path) -> None:
    text = config_of(name).replace("[training]", f"{METHODS[name]}\n[training]") + "[secure]\nthreshold = 2\n"
    weights = there(text, tmp_path, LoopbackGrid(text, nodes(tmp_path)))
    before, after = here(text)
    assert not differing(after, weights)
    assert differing(before, weights)


def test_same_bits_and_nothing_in_clear(tmp_path: Path) -> None:
    """Every answer of a client is public keys, sealed shares, words that look like noise, or shares at the end."""
    grid = Watched(CONFIG, nodes(tmp_path))
    weights = there(CONFIG, tmp_path, grid)
    run_config(make_config(tomllib.loads(CONFIG)), tmp_path / "here", on_notice=lambda _: None)
    assert not differing(final_weights(tmp_path / "here"), weights)
    assert row(tmp_path)["privacy"]["rested"] == {}
    assert not events(tmp_path)
    answers = [(node, parcel) for node, parcel in grid.heard if "clients" not in parcel.head or parcel.pieces]
    assert len(answers) == 2 * 4 * 3  # rounds, steps, nodes
    for node, parcel in answers:
        for told in parcel.head.get("told", {}).values():
            assert set(told) <= {"keys", "shares", "opening"}
        for answer in parcel.head.get("answers", []):
            assert set(answer["metrics"]) <= {"examples"}
            assert "weight" not in answer
        for frame in parcel.pieces.values():
            assert len(frame) <= 4 * (
                sum(value.numel() for value in weights.values()) + 4
            )  # a weight for each class
            seen = np.bincount(np.frombuffer(frame, np.uint8), minlength=256)
            assert stats.chisquare(seen).pvalue > 1e-6, (
                node
            )  # of a plain row, first bytes are nearly all alike
    assert not list(tmp_path.glob("state*/**/secrets-*"))


@pytest.mark.slow
def test_a_signed_log_has_the_digests_of_the_words_that_clients_sent(tmp_path: Path) -> None:
    new_key(tmp_path / "key.pem")
    text = f'{SHORT}[audit]\nkey = "{tmp_path / "key.pem"}"\n'
    grid = Watched(text, nodes(tmp_path))
    there(text, tmp_path, grid)
    lines = (tmp_path / "there" / "audit.jsonl").read_text().splitlines()
    (told,) = [entry["updates"] for line in lines if "updates" in (entry := json.loads(line)["entry"])]
    for _, parcel in grid.heard:
        for answer in parcel.head.get("answers", []):
            words = np.frombuffer(parcel.pieces[answer["piece"]], "<u4")
            inner = 1 + 64 * 4 + 4 + 4 * 10 + 10  # of a hidden layer of 4, and a weight
            rows = {"0.5+1": words[:inner], "1": words[inner:]}
            assert told[str(answer["update"][0])] == rows_digest({n: rows[n] for n in answer["classes"]})
    assert len(told) == 6


@pytest.mark.slow
def test_a_device_with_limits_of_its_own_is_not_taken_in(tmp_path: Path) -> None:
    """Masks cancel among those who hold the same; the others hold a round without it."""
    text = SHORT.replace("clients_per_round = 6", "clients_per_round = 4")
    said = [{"tier": "0.5"}, {"tier": "0.5"}, {"tier": "1"}, {"tier": "1"}, {"macs": "5M"}]
    devices = {
        n: {**each, "name": f"device-{n}", "dataset": "digits", "state": str(tmp_path / f"state{n}")}
        for n, each in enumerate(said)
    }
    there(text, tmp_path, LoopbackGrid(text, devices))
    lines = map(json.loads, (tmp_path / "there" / "events.jsonl").read_text().splitlines())
    joined = {each["client"] for each in lines if each["event"] == "joined"}
    assert joined == {f"device-{n}" for n in range(4)}
    refused = json.loads((tmp_path / "there" / "devices.json").read_text())["refused"]
    assert "client device-4 has limits of its own" in refused["4"]
    assert row(tmp_path)["privacy"]["rested"] == {}
