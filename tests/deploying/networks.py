"""Small networks of the kinds that are deployed, each with inputs; and finished runs of them, without training."""

from __future__ import annotations

from typing import Any

import torch
from plain_encoder import CLASSES, LENGTH, SYMBOLS, Encoder
from torch import nn

import fedtailor
from fedtailor.data import Examples, FederatedData, ImagePreparation
from fedtailor.models import build_model
from odd_networks import adapted, deep

PIXELS = ImagePreparation(mean=(0.4,), std=(0.2,))


def cnn() -> nn.Module:
    return build_model("cnn", input_shape=(1, 8, 8), num_classes=CLASSES, channels=[8, 8])


def wide() -> nn.Module:
    """Weights that count: 370,000."""
    return build_model("cnn", input_shape=(1, 8, 8), num_classes=CLASSES, channels=[64, 128, 256])


def resnet() -> nn.Module:
    return build_model(
        "heterofl-resnet", input_shape=(1, 8, 8), num_classes=CLASSES, widths=[8, 8, 8, 8], stem=8
    )


def mobilenet() -> nn.Module:
    return build_model("mobilenetv2", input_shape=(1, 8, 8), num_classes=CLASSES, width=0.25, last=16)


def lstm() -> nn.Module:
    return build_model("char-lstm", input_shape=(LENGTH,), num_classes=SYMBOLS, hidden=8)


def vit() -> nn.Module:
    return build_model("vit", input_shape=(1, 8, 8), num_classes=CLASSES, embedding=16, hidden=24, depth=1)


def with_adapter() -> nn.Module:
    return adapted((1, 8, 8), CLASSES)


def with_ends() -> nn.Module:
    return deep((1, 8, 8), CLASSES)


BUILDERS: dict[str, Any] = {
    "cnn": cnn, "resnet": resnet, "mobilenet": mobilenet, "lstm": lstm, "vit": vit, "bert": Encoder,
}  # fmt: skip


def pictures(count: int = 40) -> FederatedData:
    """Bytes that fedtailor normalises."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(count) % CLASSES
    pixels = torch.randint(0, 90, (count, 1, 8, 8), generator=generator) + 40 * labels.view(-1, 1, 1, 1)
    examples = Examples.of(pixels.to(torch.uint8), labels, preparation=PIXELS)
    return FederatedData.from_examples(examples, examples, clients=4, num_classes=CLASSES)


def texts(masked: bool, count: int = 40) -> FederatedData:
    """Tokens, and where there are such if ``masked``."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, SYMBOLS, (count, LENGTH), generator=generator)
    there = (torch.arange(LENGTH) < 2 + torch.arange(count).view(-1, 1) % 4).long()
    classes = CLASSES if masked else SYMBOLS
    labels = tokens[:, 0] % classes
    examples = Examples.of(tokens, there, labels) if masked else Examples.of(tokens, labels)
    return FederatedData.from_examples(examples, examples, clients=4, num_classes=classes)


def data_for(name: str) -> FederatedData:
    return texts(name == "bert") if name in ("lstm", "bert") else pictures()


def finished(name: str, method: Any = "fjord", fleet: Any = "uniform-2", **settings: Any) -> fedtailor.Run:
    """One round over four clients: weights that are nobody's start, norms that have seen data."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = {**BUILDERS, "wide": wide, "adapted": with_adapter, "deep": with_ends}[name]()
    options = {"rounds": 1, "clients_per_round": 4, "engine": {"workers": 0}, "progress": False, **settings}
    return fedtailor.train(module, data_for(name), fleet, method, **options)
