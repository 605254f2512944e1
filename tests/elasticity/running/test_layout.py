"""Channels-last where code allows it; strided 1 x 1 convolutions run on kept pixels, clear of an error of oneDNN."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fedtailor
from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.running.layout import Layouts, takes_channels_last, to_run
from fedtailor.elasticity.running.strided import OnKeptPixels, leave_out_pixels_first
from fedtailor.methods.uniprob import UniProb
from fedtailor.models import build_model
from fedtailor.seeds import Seeds
from helpers import client, cnn_model

TRAIN_NARROW_SHORTCUTS = """
import torch
from torch import Tensor, nn
from fedtailor.client import training
import fedtailor
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.front_door import elastic
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.models import build_model
from fedtailor.seeds import Seeds
from helpers import client

torch.set_num_threads(1)
data = Examples.of(torch.randn(16, 3, 8, 8), torch.arange(16) % 10)
network = build_model("resnet18", input_shape=(3, 8, 8), num_classes=10, stem=20, widths=[20, 40, 80, 160])
model = elastic(network, data.take(torch.arange(2)))
method = FjORD(LocalTraining(batch_size=4, epochs=3))
for width in ("1/5", "1"):
    task = method.assign(method.init(model), client(0, width, 16), model, Seeds(0))
    training.train(method, task, data, model)
held = [torch.randn(size) for size in range(1, 2000)]
"""


def resnet(stem: int):
    widths = [stem, 2 * stem, 4 * stem, 8 * stem]
    network = build_model("resnet18", input_shape=(3, 8, 8), num_classes=10, stem=stem, widths=widths)
    return elastic(network, (torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)))


class OwnConvolution(nn.Conv2d):
    """Of somebody's own: what its forward does is not known."""


def shortcut(kind: type[nn.Conv2d], channels: int = 80) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, channels, 3), nn.ReLU(), kind(channels, 20, 1, stride=2), nn.Flatten(), nn.LazyLinear(10)
    )


def test_strided_pointwise_convolutions_run_on_kept_pixels():
    model = resnet(80)
    assert (len(model.strided), Layouts(model).pointwise) == (3, [])
    assert all(
        type(layer) is not OnKeptPixels for layer in model.module.modules()
    )  # the user's own is untouched
    for width in (1, Fraction(1, 5), Fraction(1, 16)):
        assert Layouts(model).at(prefix(model.groups, Fraction(width))) == torch.channels_last
    deployed = model.build(model.cut(model.weights(), prefix(model.groups, Fraction(1, 16))))
    assert all(type(layer) is not OnKeptPixels for layer in deployed.modules())
    assert Layouts(cnn_model()).at(Cut.everything()) == torch.channels_last


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("shape", [(2, 6, 9, 8), (6, 7, 7)])
def test_on_kept_pixels_is_the_same_convolution(shape, groups):
    torch.manual_seed(0)
    plain = nn.Conv2d(6, 4, 1, stride=(2, 3), groups=groups).double()
    images = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = plain(images)
    (wanted,) = torch.autograd.grad(expected.square().sum(), images)
    assert list(leave_out_pixels_first(plain)) == [""]
    found = plain(images)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(torch.autograd.grad(found.square().sum(), images)[0], wanted)


def test_narrow_strided_pointwise_convolutions_that_stay_as_they_are_keep_the_ordinary_layout():
    network = shortcut(OwnConvolution)
    network(torch.zeros(1, 3, 9, 9))
    model = elastic(network, (torch.randn(2, 3, 9, 9), torch.arange(2)))
    layouts = Layouts(model)
    assert (model.strided, layouts.pointwise) == ({}, ["2.weight"])
    assert layouts.at(prefix(model.groups, Fraction(1, 5))) == torch.channels_last  # 16 channels: one vector
    assert layouts.at(prefix(model.groups, Fraction(1, 16))) == torch.contiguous_format


class WeightAlone(nn.Module):
    """Its strided convolution is never called: PyTorch's function is, with the layer's weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.short, self.last = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 8, 1, stride=2), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.conv2d(self.first(x).relu(), self.short.weight, stride=2).mean((2, 3)))


def test_a_layer_whose_weight_is_used_without_it_keeps_the_ordinary_layout():
    model = elastic(WeightAlone(), (torch.randn(2, 3, 9, 9), torch.arange(2)))
    assert Layouts(model).pointwise == ["short.weight"]
    assert Layouts(model).at(Cut.everything()) == torch.contiguous_format


def test_what_a_step_gathers_is_laid_out_whether_it_is_a_prefix_or_listed():
    model, method = resnet(80), UniProb(LocalTraining(batch_size=4))
    task = method.assign(method.init(model), client(0, "1/2", 16), model, Seeds(0))
    steps = LocalSteps(method, method.prepare(task, None, model), model)
    listed = method.step_cuts(steps.task, 0, model)[0]
    for cut in (listed, prefix(model.groups, Fraction(1, 2))):
        assert Layouts(model).at(cut) == torch.channels_last
        leaves = steps._leaves(cut)
        convolutions = [leaf for leaf in leaves.values() if leaf.dim() == 4]
        assert len(convolutions) == 20
        assert all(leaf.is_contiguous(memory_format=torch.channels_last) for leaf in convolutions)


def test_one_input_channel_is_laid_out_by_its_strides():
    """Contiguous in both layouts by PyTorch's own word, and yet slow in one of them."""
    model, method = cnn_model(), UniProb(LocalTraining(batch_size=4))
    task = method.assign(method.init(model), client(0, "1/2", 16), model, Seeds(0))
    steps = LocalSteps(method, method.prepare(task, None, model), model)
    leaves = steps._leaves(method.step_cuts(steps.task, 0, model)[0])
    first = next(leaf for leaf in leaves.values() if leaf.dim() == 4)
    assert first.shape[1] == 1
    assert first.stride(1) == 1


def test_what_only_runs_is_channels_last_at_every_width_and_computes_the_same():
    model = resnet(16)
    patch = model.cut(model.weights(), prefix(model.groups, Fraction(1, 4)))
    ready = to_run(model, patch)
    stem = next(value for value in ready.values.values() if value.dim() == 4)
    assert stem.stride()[1] == 1
    pictures = torch.randn(4, 3, 8, 8)
    outputs = [model.forward(each.values, each.cut, (pictures, None)) for each in (patch, ready)]
    assert outputs[1].is_contiguous()
    torch.testing.assert_close(*outputs)
    assert all(value.is_contiguous() for value in patch.values.values())


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc to check its heap")
def test_narrow_shortcuts_train_without_harm_to_the_heap():
    environment = {**os.environ, "MALLOC_CHECK_": "3", "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_NARROW_SHORTCUTS], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]


class Viewed(nn.Module):
    """Feature maps flattened by ``view``, which needs them in the ordinary layout."""

    def __init__(self, literal: bool) -> None:
        super().__init__()
        self.conv, self.fc, self.literal = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8 * 4 * 4, 3), literal

    def forward(self, x: Tensor) -> Tensor:
        x = torch.max_pool2d(torch.relu(self.conv(x)), 2)
        return self.fc(x.view(-1, 8 * 4 * 4) if self.literal else x.view(x.size(0), -1))


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("method", ["heterofl", "fedavg"])
def test_networks_that_view_feature_maps_train(
    literal: bool, method: str, capsys: pytest.CaptureFixture[str]
) -> None:
    x, y = torch.randn(48, 3, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(48) % 3
    run = fedtailor.train(Viewed(literal), (x, y), fleet="uniform-2", method=method, rounds=1, progress=False)
    assert not takes_channels_last(run.model)
    assert "Traceback" not in capsys.readouterr().err
    flat = Viewed(literal).eval()
    flat.load_state_dict({name: run.state.weights[name] for name in flat.state_dict()})
    output = run.model.forward(run.state.weights, Cut.everything(), (x, y))
    assert torch.allclose(output, flat(x), atol=1e-5)
