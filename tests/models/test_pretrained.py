"""A pretrained start: weights of an earlier run, from a file or a run's folder."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from fedtailor.config import make_config
from fedtailor.errors import FedtailorError
from fedtailor.run.interface import run_config
from fedtailor.run.setup import prepare_config, start_from


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))


def write(path: Path, module: nn.Module, **more: torch.Tensor) -> Path:
    save_file({**module.state_dict(), **more}, path)
    return path


def test_all_values_are_taken_from_the_file(tmp_path):
    source, target = network(), network()
    start_from(target, write(tmp_path / "a.safetensors", source))
    assert all(
        torch.equal(a, b)
        for a, b in zip(source.state_dict().values(), target.state_dict().values(), strict=True)
    )


def test_statistics_of_the_full_width_are_the_modules_own(tmp_path):
    target, mean = network(), torch.arange(4.0)
    widths = {"1.running_mean@1": mean, "1.running_mean@1/5": torch.zeros(1)}
    start_from(target, write(tmp_path / "a.safetensors", network(), **widths))
    assert torch.equal(target[1].running_mean, mean)


def test_what_does_not_fit_is_refused_by_name(tmp_path):
    file = write(tmp_path / "a.safetensors", nn.Sequential(nn.Linear(3, 5)))
    with pytest.raises(FedtailorError, match=r"'0.weight' is \(5, 3\) there and \(4, 3\) in the model"):
        start_from(network(), file)
    with pytest.raises(FedtailorError, match="it has no '1.weight', which the model needs"):
        start_from(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)), file)
    (tmp_path / "b.safetensors").write_bytes(b"nothing")
    for name in ("b.safetensors", "c.safetensors", ""):
        with pytest.raises(
            FedtailorError, match="cannot be read: .*expected a .safetensors file, or the folder"
        ):
            start_from(network(), tmp_path / name)


def test_a_run_starts_from_the_weights_of_another(tmp_path):
    base = {
        "rounds": 1,
        "clients_per_round": 1,
        "data": {"dataset": "digits", "clients": 2, "limit": 40},
        "model": {"name": "cnn", "channels": [4, 6]},
        "fleet": {"name": "full-2"},
        "method": {"name": "fjord", "widths": "uniform-2"},
        "engine": {"workers": 0},
    }
    first = run_config(make_config(base), tmp_path / "first")
    model = {**base["model"], "weights": str(tmp_path / "first")}
    again = prepare_config(make_config({**base, "model": model})).model.weights()
    for name in again:
        assert torch.equal(again[name], first.state.weights.get(f"{name}@1", first.state.weights[name]))
