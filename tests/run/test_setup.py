"""From a configuration to round 1 everything is built once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from torch import nn

import fedtailor
from fedtailor.config import RunConfig, make_config
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.run import given_data, making, setup
from fedtailor.run.interface import resume, run_config
from helpers import image_data, tiny_cnn

CONFIG = {
    "rounds": 1, "clients_per_round": 2, "data": {"clients": 4, "limit": 60}, "fleet": {"name": "uniform-2"},
    "model": {"name": "cnn", "channels": [4, 8]}, "engine": {"workers": 0},
}  # fmt: skip


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often the first state, the trace of the model and the split of the data were made."""
    counted: Counter[str] = Counter()

    def count(name: str, *places: Any) -> None:
        original = getattr(places[0], name)

        def wrapper(*given: Any, **named: Any) -> Any:
            counted[name] += 1
            return original(*given, **named)

        for place in places:
            monkeypatch.setattr(place, name, wrapper)

    count("init", HeteroFL)
    count("elastic", setup, making)
    count("federate", setup, given_data)
    count("build_model", setup)
    count("load_dataset", setup, given_data)
    return counted


ONCE = {"init": 1, "elastic": 1, "federate": 1, "build_model": 1, "load_dataset": 1}


def test_a_configuration_is_built_once(built, tmp_path):
    run_config(make_config(CONFIG), tmp_path / "run")
    assert built == ONCE


def test_a_run_that_goes_on_is_built_once(built, tmp_path):
    run_config(make_config(CONFIG), tmp_path / "run")
    built.clear()
    resume(tmp_path / "run")
    assert built == ONCE


@pytest.mark.parametrize("saved", [False, True])
def test_a_run_from_python_is_built_once(built, tmp_path, saved):
    settings: dict[str, Any] = {"rounds": 1, "clients_per_round": 2, "engine": {"workers": 0}}
    folder = tmp_path / "run" if saved else None
    fedtailor.train(tiny_cnn(), image_data(), "uniform-2", "heterofl", folder=folder, **settings)
    assert built == {"init": 1, "elastic": 1}
    built.clear()
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.ReLU(), nn.Linear(10, 10))
    fedtailor.train(module, "digits", "uniform-2", "heterofl", **settings)
    assert built == {"init": 1, "elastic": 1, "federate": 1, "load_dataset": 1}


def test_the_method_of_a_configuration_is_one_object():
    config = make_config(CONFIG)
    assert config.built_method is config.built_method
    assert config == make_config(CONFIG)
    assert isinstance(config, RunConfig)


@pytest.mark.parametrize("heads", [2, "count"])
def test_heads_are_the_networks_as_a_number_and_a_wish_as_a_word(heads, tmp_path):
    model = {"name": "vit", "embedding": 16, "hidden": 16, "depth": 1, "heads": heads}
    run = run_config(make_config({**CONFIG, "model": model}), tmp_path / "run")
    counts = {layer.heads for layer in run.model.module.modules() if hasattr(layer, "heads")}
    assert counts == {heads if heads == 2 else 4}
