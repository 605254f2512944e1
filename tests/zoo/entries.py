"""What an entry of the catalogue is: how a model of a library is built, and the batch that it is traced with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from fedtailor.data.batches import Batch

CLASSES = 10
EXAMPLES = 2


@dataclass(frozen=True)
class Entry:
    """A model as its library builds it, with random weights."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    note: str = ""  # how it is smaller than the library's own

    @property
    def key(self) -> str:
        return f"{self.library}/{self.name}"


def images(size: int, channels: int = 3) -> Callable[[], Batch]:
    """Pictures with a class each."""
    return lambda: (torch.randn(EXAMPLES, channels, size, size), torch.arange(EXAMPLES))


def declare_operators() -> None:
    """torchvision built for CUDA does not load beside PyTorch for CPUs, unless these two operators exist.

    Only detection uses them.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}", "(Tensor a, Tensor b, float c) -> Tensor")
