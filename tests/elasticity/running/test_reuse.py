"""Outputs that are used again: the same answers, bit for bit, from fewer layers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.reuse import Reuse
from fedtailor.seeds import Seeds
from helpers import cnn_model, images


class Residual(nn.Module):
    """In-place additions and activations: what a layer put out is overwritten later."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.first, self.norm = nn.Conv2d(8, 12, 3, padding=1), nn.BatchNorm2d(12)
        self.second = nn.Conv2d(12, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        y = self.second(self.relu(self.norm(self.first(x))))
        y += x
        return self.head(self.relu(y).mean((2, 3)))


class Borrowed(nn.Module):
    """The weight of a layer is used before the layer is called: calls alone do not show it."""

    def __init__(self) -> None:
        super().__init__()
        self.early, self.late = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.between, self.head = nn.Conv2d(6, 5, 1), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.early(x)
        scale = self.late.weight.square().mean()
        side = self.between(x * scale)
        return self.head((self.late(x) + side.mean()).mean((2, 3)))


def traced(module: type[nn.Module]) -> ElasticModel:
    with Seeds(3).scope("weights"):
        return elastic(module(), images(2).take(torch.arange(2)))


def counted(model: ElasticModel, monkeypatch) -> list[str]:
    """The convolutions that are really run."""
    ran: list[str] = []
    for path, layer in model.shell(Cut.everything()).named_modules():
        if isinstance(layer, nn.Conv2d):
            run = layer._conv_forward
            watched = lambda x, w, b, path=path, run=run: (ran.append(path), run(x, w, b))[1]  # noqa: E731
            monkeypatch.setattr(layer, "_conv_forward", watched)
    return ran


def weights_at(model: ElasticModel, cut: Cut) -> dict[str, Tensor]:
    return model.cut(model.weights(), cut, set(model.parameters)).values


@pytest.mark.parametrize("make", [cnn_model, lambda: traced(Residual), lambda: traced(Borrowed)])
@pytest.mark.parametrize("mode", ["calibrate", "eval"])
def test_every_network_answers_as_when_it_is_run_whole(make, mode):
    model, batch = make(), images(6).take(torch.arange(6))
    held = set(model.parameters) if mode == "calibrate" else None
    reuse, full = Reuse(model), model.costs.full

    def weights(cut):
        return model.cut(model.weights(), cut, held).values

    for _ in range(2):  # the second time without a comparison
        reuse.record(weights(Cut.everything()), Cut.everything(), batch, mode)
        for place, group in enumerate(model.groups.elastic):
            cut = model.costs.cut((*full[:place], full[place] // 2, *full[place + 1 :]))
            with torch.no_grad():
                whole = model.forward(weights(cut), cut, batch, mode=mode)
            assert torch.equal(reuse.run(weights(cut), cut, batch, mode, [group]), whole)


def test_layers_before_the_first_that_differs_are_not_run(monkeypatch):
    model, batch = traced(Residual), images(6).take(torch.arange(6))
    reuse, everything = Reuse(model), Cut.everything()
    group = model.groups.producers["first"][0]
    place = model.groups.elastic.index(group)
    cut = model.costs.cut(tuple(6 if at == place else n for at, n in enumerate(model.costs.full)))
    reuse.record(weights_at(model, everything), everything, batch, "calibrate")
    reuse.run(weights_at(model, cut), cut, batch, "calibrate", [group])  # compared with a whole run
    ran = counted(model, monkeypatch)
    reuse.run(weights_at(model, cut), cut, batch, "calibrate", [group])
    assert ran == ["first", "second"]


def test_a_module_that_borrows_weights_is_found_out():
    model, batch = traced(Borrowed), images(6).take(torch.arange(6))
    reuse, everything = Reuse(model), Cut.everything()
    reuse.record(weights_at(model, everything), everything, batch, "calibrate")
    group = model.groups.producers["between"][0]
    place = model.groups.elastic.index(group)
    cut = model.costs.cut(tuple(2 if at == place else n for at, n in enumerate(model.costs.full)))
    changed = {**weights_at(model, cut), "late.weight": weights_at(model, cut)["late.weight"] * 3}
    with torch.no_grad():
        whole = model.forward(changed, cut, batch, mode="calibrate")
    assert torch.equal(reuse.run(changed, cut, batch, "calibrate", [group]), whole)
