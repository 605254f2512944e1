"""Examples that clients keep back to choose by: scored where they lie, and the choice is that of the run in process."""

from __future__ import annotations

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.config import make_config
from fedtailor.engines.flower.post import Parcel, content_of, parcel_of
from fedtailor.flower.server import serve
from fedtailor.run.interface import run_config
from fedtailor.run.result import Run
from flower.loopback import LoopbackGrid
from flower.test_devices import CONFIG as DEVICES
from flower.test_devices import write_examples
from flower.test_same_bits import CONFIG
from helpers import differing, final_weights, slow_if

CHOOSING = CONFIG.replace("validation = 0", "validation = 0.3").replace("rounds = 3", "rounds = 5")
CHOOSING += "[stopping]\npatience = 1\nrestore_best = true\n"
METHODS = ["heterofl", "apfl", "ofa-fl", "splitmix", "fedrolex", "flado"]


def both(text: str, tmp_path: Path) -> tuple[Run, Run]:
    config = make_config(tomllib.loads(text))
    here = run_config(config, tmp_path / "here", on_notice=lambda _: None)
    nodes = {
        70 + node: {"partition-id": node, "num-partitions": 2, "state": str(tmp_path / f"state{node}")}
        for node in range(2)
    }
    return here, serve(LoopbackGrid(text, nodes), config, tmp_path / "there")


@pytest.mark.parametrize("method", [slow_if(name, *METHODS[1:]) for name in METHODS])
def test_the_choice_is_that_of_the_run_in_process(method: str, tmp_path: Path) -> None:
    here, there = both(CHOOSING.replace("{method}", method), tmp_path)
    assert [record.round for record in here.history] == [record.round for record in there.history]
    for ours, theirs in zip(here.history, there.history, strict=True):
        assert ours.tiers == theirs.tiers
        assert ours.validation is not None
        assert theirs.validation is not None
        assert ours.validation != ours.tiers
        for tier, values in ours.validation.items():
            assert theirs.validation[tier] == pytest.approx(values, rel=1e-6)
    assert not differing(final_weights(tmp_path / "here"), final_weights(tmp_path / "there"))


@pytest.mark.slow
def test_a_run_that_chooses_keeps_examples_back_unless_told_otherwise(tmp_path: Path) -> None:
    text = CHOOSING.replace("{method}", "heterofl").replace("validation = 0.3\n", "")
    text = text.replace("rounds = 5", "rounds = 1").replace("limit = 100", "limit = 200")
    here, there = both(text, tmp_path)
    assert there.history[0].validation is not None
    assert there.data.sizes.tolist() == here.data.sizes.tolist()
    assert there.data.kept_back == here.data.kept_back > 0


def scored(grid: LoopbackGrid) -> list[dict[str, Any]]:
    heads = [parcel_of(message.content).head for message in grid.sent]
    return [head for head in heads if head["ask"] == "measure"]


def devices(tmp_path: Path, **said: dict[str, Any]) -> tuple[str, dict[int, dict[str, Any]]]:
    text = DEVICES.replace("{server}", write_examples(tmp_path / "server.npz", 24, 3))
    text = text.replace("validation = 0", "validation = 0.25").replace("rounds = 2", "rounds = 1")
    nodes = {
        number: {"name": name, "state": str(tmp_path / name), **config}
        for number, (name, config) in enumerate(said.items(), start=7)
    }
    return text.replace("clients_per_round = 3", f"clients_per_round = {len(nodes)}"), nodes


def test_a_device_scores_what_it_can_run_on_examples_of_its_own(tmp_path: Path) -> None:
    """The board is too small for the larger network, and has too few examples to keep any back."""
    text, nodes = devices(
        tmp_path,
        board={"dataset": write_examples(tmp_path / "board.npz", 20, 3), "tier": "0.5"},
        tiny={"dataset": write_examples(tmp_path / "tiny.npz", 2, 2), "tier": "0.5"},
        laptop={"dataset": write_examples(tmp_path / "laptop.npz", 40, 3), "tier": "1"},
    )
    grid = LoopbackGrid(text, nodes)
    run = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run")
    asked = [next(iter(head["scores"].values())) for head in scored(grid)]
    assert sorted(asked) == [[0], [0, 1]]
    assert run.data.kept_back == 15
    assert run.data.sizes.tolist() == [15, 30, 2]  # by their names


def test_scores_that_are_none_are_left_out_and_said(tmp_path: Path) -> None:
    """Three answers in turn that cannot be used: too few numbers, no numbers, and NaN, which spoils nobody's mean."""
    text, nodes = devices(
        tmp_path,
        bad={"dataset": write_examples(tmp_path / "bad.npz", 20, 3), "tier": "1"},
        good={"dataset": write_examples(tmp_path / "good.npz", 40, 3), "tier": "1"},
    )
    text = text.replace("rounds = 1", "rounds = 3")
    wrong: list[Any] = [[{"loss": 1.0}], "much", [{"loss": math.nan, "accuracy": 1.0}] * 2]
    turns = iter(wrong)

    def spoil(reply: Any) -> Any:
        parcel = parcel_of(reply.content)
        if "scores" in parcel.head:
            scores = dict.fromkeys(parcel.head["scores"], next(turns))
            reply.content = content_of(Parcel({**parcel.head, "scores": scores}, parcel.pieces))
        return reply

    grid = LoopbackGrid(text, nodes, {7: spoil})
    run = serve(grid, make_config(tomllib.loads(text)), tmp_path / "run")
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [event["client"] for event in events if event["event"] == "validation refused"] == ["bad", "bad"]
    assert all(math.isfinite(r.validation["1"]["loss"]) for r in run.history if r.validation)
