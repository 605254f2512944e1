"""Networks put together at random: whatever the blocks, a piece is the masked full module."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from elasticity.oracle import kept_statistics, masked_module
from elasticity.traced import close, run
from fedtailor.elasticity.check import random_cut, shaken
from fedtailor.elasticity.front_door import elastic


class Residual(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(width, inner, 3, padding=1), nn.Conv2d(inner, width, 1)
        self.bn = nn.BatchNorm2d(inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.two(F.relu(self.bn(self.one(x))))


class Dense(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, inner, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, F.relu(self.conv(x))], dim=1)


class Gate(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, 2 * inner, 1)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.conv(x).chunk(2, dim=1)
        return value * torch.sigmoid(gate)


class Depthwise(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.depth, self.point = (
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.Conv2d(width, inner, 1),
        )
        self.norm = nn.GroupNorm(1, inner)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.point(self.depth(x)))


class Excite(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.up(F.relu(self.down(x.mean((2, 3))))))[:, :, None, None]


class ChannelsLast(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.gelu(self.up(self.norm(x.permute(0, 2, 3, 1)))))
        return x + (y * self.scale).permute(0, 3, 1, 2)


class Recurrent(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gru = nn.GRU(width, inner, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, _ = x.shape
        output, _ = self.gru(x.flatten(2).transpose(1, 2))
        return output.transpose(1, 2).reshape(batch, -1, height, x.shape[3])


class Twice(nn.Module):
    """The same layer two times in a row."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.enter, self.shared = nn.Conv2d(width, inner, 1), nn.Conv2d(inner, inner, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.shared(torch.tanh(self.shared(x)))


BLOCKS = (Residual, Dense, Gate, Depthwise, Excite, ChannelsLast, Recurrent, Twice)


class Network(nn.Module):
    def __init__(self, blocks: list[tuple[type[nn.Module], int]], flat: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 6, 3, padding=1)
        self.blocks = nn.ModuleList()
        images, width, self.flat = torch.zeros(1, 6, 4, 4), 6, flat
        for block, inner in blocks:
            self.blocks.append(block(width, inner))
            width = self.blocks[-1].eval()(images).shape[1]
            images = torch.zeros(1, width, 4, 4)
        self.head = nn.Linear(width * 16 if flat else width, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(torch.flatten(x, 1) if self.flat else x.amax((2, 3)))


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.sampled_from(BLOCKS), st.integers(2, 7)), min_size=1, max_size=5),
    st.booleans(),
    st.integers(0, 10**6),
)
def test_random_networks(blocks, flat, seed):
    torch.manual_seed(seed)
    module = Network(blocks, flat).double()
    batch = (torch.randn(3, 2, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2]))
    model = elastic(module, batch)
    assert model.own_class
    with torch.no_grad():
        for name, value in shaken(model).items():
            dict([*module.named_parameters(), *module.named_buffers()])[name].copy_(value)
        cut = random_cut(model.groups, np.random.default_rng(seed))
        small, masked = model.extract(model.weights(), cut), masked_module(module, model.groups, cut, "")
        for training in (False, True):
            mine = run(small.train(training), batch)
            with kept_statistics():
                theirs = run(masked.train(training), batch)
            close(mine, theirs, 1e-10)
