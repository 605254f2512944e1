"""What tracing finds: groups, units, constraints and readings of undecided code, one small module for each."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elasticity.traced import case
from fedtailor.elasticity import check
from fedtailor.elasticity.check import random_cut
from fedtailor.elasticity.explain import smallest
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.tracing.trace import trace

LABELS = torch.tensor([0, 1, 2])


def widths(module: nn.Module, *inputs: Tensor, **options) -> dict[str, int]:
    model = elastic(module, (*inputs, LABELS), **options)
    return {group: model.groups.counts[group] for group in model.groups.elastic}


class Step(nn.Module):
    """Linear, a step, linear."""

    def __init__(self, step, width: int = 12, after: int = 12) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, width), nn.Linear(after, 3)
        self.step = step

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.step(self.first(x)))


@pytest.mark.parametrize(
    ("step", "after", "units"),
    [
        (F.relu, 12, 12),
        (lambda x: x.view(x.size(0), 3, -1).transpose(1, 2).reshape(x.size(0), -1), 12, 4),
        (lambda x: torch.cat([x, x], 1), 24, 12),
        (lambda x: x[:, ::3], 4, 4),
        (lambda x: x[:, x.shape[1] // 2 :], 6, 6),
        (lambda x: x.unflatten(1, (4, -1)).softmax(1).flatten(1), 12, 3),
        (lambda x: F.glu(x, dim=1), 6, 6),
        (lambda x: x.repeat(1, 2), 24, 12),
        (lambda x: x.repeat_interleave(2, dim=1), 24, 12),
        (lambda x: x.softmax(1), 12, 12),
        (lambda x: (x - x.mean(1, keepdim=True)) / x.var(1, keepdim=True, unbiased=False).sqrt(), 12, 12),
        (lambda x: F.normalize(x), 12, 12),
        (lambda x: x.cumsum(1), 12, 12),
        (lambda x: torch.einsum("bi,bi->bi", x, x), 12, 12),
        (lambda x: torch.stack([x, -x]).sum(0), 12, 12),
        (lambda x: torch.where(x > 0, x, x * 0.1), 12, 12),
        (lambda x: x.unsqueeze(0).expand(2, -1, -1).mean(0), 12, 12),
        (lambda x: torch.zeros_like(x) + x, 12, 12),
        (lambda x: x + x.new_zeros(x.shape), 12, 12),
    ],
)
def test_units_of_one_step(step, after, units):
    assert widths(Step(step, after=after), torch.randn(3, 4)) == {"first": units}


def test_a_deviation_needs_two_channels():
    module = Step(lambda x: (x - x.mean(-1, keepdim=True)) / x.std(-1, keepdim=True))
    model = elastic(module, (torch.randn(3, 4), LABELS))
    assert model.groups.constraint("first").minimum == 2
    assert smallest(model.groups).count("first", 12) == 2


def test_features_that_become_an_image():
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.grow, self.conv = nn.Linear(5, 16 * 4 * 4), nn.Conv2d(16, 2, 3)

        def forward(self, z: Tensor) -> Tensor:
            return self.conv(self.grow(z).view(-1, 16, 4, 4))

    assert widths(Generator(), torch.randn(3, 5)) == {"grow": 16}  # channels shrink, not the image


@pytest.mark.parametrize("batch", [1, 2, 5])
def test_a_graph_that_stands_in_serves_batches_of_every_size(batch):
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.token = nn.Conv2d(1, 6, 3), nn.Parameter(torch.randn(1, 6))
            self.fc = nn.Linear(12, 2)

        def forward(self, x: Tensor) -> Tensor:
            token = self.token.expand(len(x), -1)
            return self.fc(torch.cat([F.adaptive_max_pool2d(self.conv(x), 1).view(-1, 6), token], 1))

    images = torch.randn(4, 1, 5, 5)
    model = elastic(Counting(), (images, torch.zeros(4)))
    assert not model.own_class
    small = model.extract(model.weights(), smallest(model.groups))
    assert small(torch.randn(batch, 1, 5, 5)).shape == (batch, 2)


def test_a_graph_that_fits_one_batch_size_does_not_stand_in():
    class Unrolled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc1, self.fc2, self.other = nn.Linear(4, 6), nn.Linear(6, 2), nn.Linear(4, 5)
            self.last = nn.Linear(5, 2)

        def forward(self, x: Tensor) -> Tensor:
            rows = [self.fc2(F.relu(self.fc1(x[i])).view(6)) for i in range(x.shape[0])]
            return torch.stack(rows) + self.last(F.relu(self.other(x)))

    model = elastic(Unrolled(), (torch.randn(3, 4), LABELS))
    assert model.own_class
    assert model.groups.elastic == ("other",)
    assert "has the literal size 6" in model.groups.fixed["fc1"]


def test_only_a_few_examples_are_run():
    seen = []

    class Watching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.out = nn.Linear(4, 8), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(tuple(x.shape) if type(x) is Tensor else None)
            return self.out(F.relu(self.fc(x)))

    elastic(Watching(), (torch.randn(10_000, 4), torch.zeros(10_000, dtype=torch.long)))
    assert {shape for shape in seen if shape} == {(2, 4)}


def test_the_search_for_the_group_at_fault_takes_bounded_time(monkeypatch):
    this = case("DenseNet")
    traced = trace(this.module, (this.batch[0][:2],), {})
    monkeypatch.setattr(check, "SEARCH_SECONDS", 0.0)
    started = time.monotonic()
    batch = (this.batch[0][:2], this.batch[1][:2])
    found = check.culprit(this.model, traced, check.shaken(this.model), batch)
    assert found.startswith("groups stem")  # none is at fault, and after the first there was no time left
    assert time.monotonic() - started < 5


def test_random_cuts_respect_constraints():
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    model = elastic(module, (torch.randn(3, 4), LABELS), minimum=3, multiple=4)
    counts = {random_cut(model.groups, np.random.default_rng(seed)).count("0", 16) for seed in range(40)}
    assert counts == {4, 8, 12, 16}


class PlainChild(nn.Linear):
    """Inherits everything but its constructor."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs)
        nn.init.orthogonal_(self.weight)


class StandardConv(nn.Conv2d):
    """Weight standardisation: a convolution with a ``forward`` of its own."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        weight = weight / (weight.square().mean((1, 2, 3), keepdim=True) + 1e-5).sqrt()
        return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)


class CenteredNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


def test_children_of_layers():
    class Family(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.depth = StandardConv(3, 8, 3), StandardConv(8, 8, 3, groups=8)
            self.norm, self.fc, self.out = CenteredNorm(8), PlainChild(8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.depth(F.relu(self.conv(x))).mean((2, 3))
            return self.out(torch.tanh(self.fc(self.norm(x))))

    model = elastic(Family(), (torch.randn(3, 3, 8, 8), LABELS))
    assert {group: model.groups.counts[group] for group in model.groups.elastic} == {"conv": 8, "fc": 6}
    assert model.own_class
    small = model.extract(model.weights(), smallest(model.groups))
    assert (small.conv.out_channels, small.depth.groups, small.norm.normalized_shape) == (1, 1, (1,))
    assert type(small.fc) is PlainChild


def test_layers_without_weights_are_looked_into():
    class Comparing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.similarity, self.out = nn.Linear(4, 8), nn.CosineSimilarity(dim=1), nn.Linear(9, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = self.fc(x)
            return self.out(torch.cat([x, self.similarity(x, x.relu()).unsqueeze(1)], 1))

    assert widths(Comparing(), torch.randn(3, 4)) == {"fc": 8}
