"""What is trained: networks, examples and rounds, the same for fedtailor, its limit and its peers. Needs PyTorch alone.

Pixels and letters are random: no step takes longer for it, and no data set is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

CLASSES = 10
LETTERS, WINDOW = 80, 40

Build = Callable[[float], nn.Module]  # the network of a width, as a plain small module


@dataclass(frozen=True)
class Workload:
    """Rounds in which some clients train one epoch each."""

    about: str
    build: Build
    inputs: Callable[[int, torch.Generator], Tensor]
    classes: int
    clients: int
    examples: int  # of each client
    cohort: int
    batch: int
    widths: tuple[float, ...] = (1.0,)  # tiers: clients have them in turn
    nested: bool = False  # every step trains one of the widths up to the client's own, as in FjORD
    adamw: bool = False

    def data(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels of all clients, one client after the other."""
        generator = torch.Generator().manual_seed(0)
        count = self.clients * self.examples
        labels = torch.randint(self.classes, (count,), generator=generator)
        return self.inputs(count, generator), labels

    def client(self, round: int, place: int) -> int:
        """Who is in a place of a round's cohort: other rounds have other clients, whose examples no cache has."""
        return (round * self.cohort + place) % self.clients

    def part(self, columns: Sequence[Tensor], client: int) -> list[Tensor]:
        """One client's examples."""
        start = client * self.examples
        return [column[start : start + self.examples] for column in columns]


def scaled(channels: int, width: float) -> int:
    """How many channels a width leaves, rounded up as fedtailor does."""
    return -(-round(channels * width * 1000) // 1000)


def convolutions(width: float) -> nn.Module:
    """5 x 5 convolutions of 16 and 32 channels and a layer of 128, for pictures of 28 x 28."""
    a, b, c = (scaled(channels, width) for channels in (16, 32, 128))
    return nn.Sequential(
        nn.Conv2d(1, a, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(a, b, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(16 * b, c), nn.ReLU(), nn.Linear(c, CLASSES),
    )  # fmt: skip


def perceptron(width: float) -> nn.Module:
    """One hidden layer of 32."""
    hidden = scaled(32, width)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))


class Residual(nn.Module):
    """Two convolutions and a way past them."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.BatchNorm2d(outputs),
        )  # fmt: skip
        past = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))
        self.past = nn.Identity() if inputs == outputs and stride == 1 else past

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.convolutions(x) + self.past(x))


def residuals(width: float, base: int = 16) -> nn.Module:
    """ResNet-18 for pictures of 32 x 32, with a quarter of its channels unless told otherwise."""
    a, b, c, d = (scaled(base * times, width) for times in (1, 2, 4, 8))
    return nn.Sequential(
        nn.Conv2d(3, a, 3, 1, 1, bias=False), nn.BatchNorm2d(a), nn.ReLU(),
        Residual(a, a, 1), Residual(a, a, 1), Residual(a, b, 2), Residual(b, b, 1),
        Residual(b, c, 2), Residual(c, c, 1), Residual(c, d, 2), Residual(d, d, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(d, CLASSES),
    )  # fmt: skip


class Letters(nn.Module):
    """The next letter after 40, by an LSTM."""

    def __init__(self, width: float) -> None:
        super().__init__()
        hidden = scaled(64, width)
        self.embedding, self.lstm = nn.Embedding(LETTERS, 8), nn.LSTM(8, hidden, batch_first=True)
        self.out = nn.Linear(hidden, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        found, _ = self.lstm(self.embedding(x))
        answer: Tensor = self.out(found[:, -1])
        return answer


class Attending(nn.Module):
    """The same by a Transformer of two blocks."""

    def __init__(self, width: float) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 32)
        self.position = nn.Parameter(torch.randn(WINDOW, 32) / 50)
        layer = nn.TransformerEncoderLayer(
            32, 4, scaled(64, width), dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(32, LETTERS)

    def forward(self, x: Tensor) -> Tensor:
        answer: Tensor = self.out(self.blocks(self.embedding(x) + self.position).mean(1))
        return answer


def _pictures(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, 1, 28, 28, generator=generator)


def _colours(count: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, 3, 32, 32, generator=generator)


def _texts(count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(LETTERS, (count, WINDOW), generator=generator)


TIERS = (0.2, 0.4, 0.6, 0.8, 1.0)
WORKLOADS = {
    "W1": Workload(
        "CNN, FedAvg, 10 of 100 clients x 600", convolutions, _pictures, CLASSES, 100, 600, 10, 32
    ),
    # Two clients of each tier in every round, so that all rounds are the same work.
    "W2": Workload(
        "CNN, HeteroFL in five tiers, 10 clients x 600", convolutions, _pictures, CLASSES, 10, 600, 10, 32, TIERS
    ),
    "W3": Workload(
        "ResNet-18 at a quarter, FjORD in five tiers, 10 clients x 160", residuals, _colours, CLASSES, 10, 160, 10, 32,
        TIERS, nested=True,
    ),
    "W4": Workload(
        "MLP of 32, FedAvg, 100 of 1,000 clients x 60", perceptron, _pictures, CLASSES, 1000, 60, 100, 16
    ),
    "W5": Workload("LSTM, FedAvg, 10 of 50 clients x 320", Letters, _texts, LETTERS, 50, 320, 10, 32),
    "W7": Workload(
        "Transformer, AdamW, FedAvg, 10 of 50 clients x 320", Attending, _texts, LETTERS, 50, 320, 10, 32, adamw=True
    ),
}  # fmt: skip
RATE = 0.05
ADAMW_RATE = 0.001
