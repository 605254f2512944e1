"""Your own model, as you wrote it: see what can shrink, take pieces of it, train them together. About a minute.

    python examples/your_own_model.py

The network below knows nothing about fedtailor. It has what real models have: a convolutional stem, a class token and
learned positions, attention with explicit heads, a literal size in a ``view``, a recurrent layer over the tokens,
and an operation that fedtailor has no rule for.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor import FedtailorError, train
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.tracing.rules import Site, function_rule
from fedtailor.elasticity.tracing.units import Numbers


class Attention(nn.Module):
    """Self-attention, written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        qkv = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0], qkv[1], qkv[2]
        weights = (q @ k.transpose(-2, -1) / math.sqrt(k.size(-1))).softmax(dim=-1)
        return self.out((weights @ v).transpose(1, 2).reshape(batch, time, width))


class MyNetwork(nn.Module):
    """Digits of 8 x 8 pixels: convolutions make 16 tokens, which attend to each other and are read one by one."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 24, 3, padding=1), nn.GroupNorm(4, 24), nn.SiLU())
        self.patches = nn.Conv2d(24, width, 2, stride=2)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.randn(1, 17, width) * 0.02)
        self.norm, self.attention = nn.LayerNorm(width), Attention(width, heads=4)
        self.reader = nn.GRU(width, 20, batch_first=True, bidirectional=True)
        self.head = nn.Linear(40 + 24, classes)

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)  # (batch, 24, 8, 8)
        tokens = self.patches(features).flatten(2).transpose(1, 2)  # (batch, 16, width)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), tokens], dim=1) + self.positions
        tokens = tokens + self.attention(self.norm(tokens))
        tokens = tokens + torch.fft.fft(tokens, dim=1).real  # mixes tokens, as FNet does
        read, _ = self.reader(tokens)
        average = F.adaptive_avg_pool2d(features, 1).view(-1, 24)  # a literal size
        return self.head(torch.cat([read[:, 0], average], dim=1))


def main() -> None:
    """Trace, explain, cut, train."""
    torch.manual_seed(0)
    example = (torch.randn(4, 1, 8, 8), torch.tensor([0, 1, 2, 3]))

    print("1. An operation without a rule is refused, with its line and with what would help:\n")
    try:
        elastic(MyNetwork(), example)
    except FedtailorError as error:
        print(f"   {error}\n")

    @function_rule(torch.fft.fft)
    def fourier(site: Site) -> Numbers:
        x = site.operand()
        site.fix_axes(x, [site.argument(2, "dim", -1)], "is mixed by")  # that axis must stay whole ...
        return x.numbers  # ... and the others pass through

    print("2. With a rule for it, the model explains itself:\n")
    module = MyNetwork()
    model = elastic(module, example)
    print("   " + model.explain().replace("\n", "\n   ") + "\n")

    print("3. Pieces are real small networks:\n")
    for width in ("1/4", "1/2", "1"):
        small = model.extract(model.weights(), prefix(model.groups, as_width(width)))
        parameters = sum(parameter.numel() for parameter in small.parameters())
        print(f"   width {width:>3}: {parameters:6,} parameters, output {tuple(small(example[0]).shape)}")

    print("\n4. Twenty clients in three tiers train it together:\n")
    run = train(
        module,
        "digits",
        fleet="a1-b1-c1",
        method="fjord",
        rounds=20,
        training={"lr": 0.05, "momentum": 0.9, "epochs": 2, "batch_size": 16},
    )
    for tier, figures in run.tiers.items():
        print(f"   tier {tier}: {100 * figures['accuracy']:.1f} % of the test digits")


if __name__ == "__main__":
    main()
