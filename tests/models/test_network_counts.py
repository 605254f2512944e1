"""The networks have exactly the sizes that the papers print; counted on the meta device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedtailor.models import build_model

CIFAR = (3, 32, 32)
MNIST = (1, 28, 28)
FIFTHS = (1, 2, 3, 4, 5)


def on_meta(name: str, input_shape: tuple[int, ...], num_classes: int, **options: Any) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, input_shape=input_shape, num_classes=num_classes, **options)


def parameters(name: str, input_shape: tuple[int, ...], num_classes: int, **options: Any) -> int:
    module = on_meta(name, input_shape, num_classes, **options)
    return sum(parameter.numel() for parameter in module.parameters())


def macs(module: nn.Module, input_shape: tuple[int, ...], kinds: tuple[type, ...]) -> int:
    """Multiply-accumulates of one example in layers of ``kinds``, one more per bias addition."""
    counts = []

    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        per_output = layer.weight[0].numel() + (layer.bias is not None)
        counts.append(output.numel() * per_output)

    for layer in module.modules():
        if isinstance(layer, kinds):
            layer.register_forward_hook(count)
    module.eval()(torch.zeros(1, *input_shape, device="meta"))
    return sum(counts)


def part(fifths: int, width: int) -> int:
    """The width ceil(p K) at p = fifths / 5."""
    return -(-fifths * width // 5)


@pytest.mark.parametrize(
    ("name", "input_shape", "num_classes", "expected"),
    [
        ("cnn", MNIST, 10, 1_556_874),
        ("heterofl-resnet", CIFAR, 10, 9_622_090),
        ("preresnet18", CIFAR, 10, 11_172_170),
        ("resnet18", CIFAR, 10, 11_173_962),
        ("resnet50", CIFAR, 10, 23_520_842),
        ("mobilenetv2", CIFAR, 10, 2_236_682),
        ("mobilenetv2", CIFAR, 1000, 3_504_872),  # strides do not matter: torchvision's count
        ("vgg9", CIFAR, 10, 1_525_450),
        ("lenet5", MNIST, 10, 225_738),
        ("femnist-cnn", MNIST, 62, 25_182),
        ("mnist-cnn", MNIST, 10, 21_840),
        ("flanc-cnn", MNIST, 10, 284_810),
        ("mlp", MNIST, 10, 199_210),
        ("char-lstm", (80,), 86, 214_534),
    ],
)
def test_parameters_at_full_width(
    name: str, input_shape: tuple[int, ...], num_classes: int, expected: int
) -> None:
    assert parameters(name, input_shape, num_classes) == expected


@pytest.mark.parametrize(
    ("quarters", "resnet", "cnn"),
    [(1, 710_826, 44_042), (2, 2_809_866, 105_866), (3, 6_298_986, 186_122), (4, 11_173_962, 284_810)],
)
def test_flanc_dense_widths(quarters: int, resnet: int, cnn: int) -> None:
    widths = [quarters * width // 4 for width in (64, 128, 256, 512)]
    assert parameters("resnet18", CIFAR, 10, widths=widths) == resnet
    assert parameters("flanc-cnn", MNIST, 10, channels=[32 * quarters, 32 * quarters]) == cnn


def test_options_for_flanc() -> None:
    plain = parameters("resnet18", CIFAR, 10)
    assert parameters("resnet18", CIFAR, 10, project=True) == plain + 64 * 64 + 2 * 64
    narrow = [16, 32, 64, 128]  # has a projection anyway
    expected = parameters("resnet18", CIFAR, 10, widths=narrow)
    assert parameters("resnet18", CIFAR, 10, widths=narrow, project=True) == expected
    small = parameters("flanc-cnn", (1, 14, 14), 10, channels=[64, 64], stem=32)
    assert parameters("flanc-cnn", MNIST, 10, channels=[64, 64], stem=32, shrink=2) == small


@pytest.mark.parametrize(
    ("divisor", "cnn", "resnet"),
    [(1, 1557, 9622), (2, 391, 2409), (4, 99, 604), (8, 25, 152), (16, 6.6, 38)],
)
def test_heterofl_levels_in_thousands(divisor: int, cnn: float, resnet: float) -> None:
    widths = [width // divisor for width in (64, 128, 256, 512)]
    decimals = 1 if divisor == 16 else 0
    assert round(parameters("cnn", MNIST, 10, channels=widths) / 1000, decimals) == cnn
    count = parameters("heterofl-resnet", CIFAR, 10, widths=widths, stem=widths[0])
    assert round(count / 1000) == resnet


@pytest.mark.parametrize(
    ("fifths", "thousands"), list(zip(FIFTHS, (12.4, 40.2, 82.2, 141.9, 214.5), strict=True))
)
def test_fjord_lstm_parameters(fifths: int, thousands: float) -> None:
    count = parameters("char-lstm", (80,), 86, hidden=part(fifths, 128))
    assert round(count / 1000, 1) == thousands


@pytest.mark.parametrize(
    ("fifths", "expected"), list(zip(FIFTHS, (47_038, 119_614, 217_790, 341_566, 490_942), strict=True))
)
def test_fjord_femnist_macs(fifths: int, expected: int) -> None:
    module = on_meta("femnist-cnn", MNIST, 62, channels=[part(fifths, 10), part(fifths, 20)])
    assert macs(module, MNIST, (nn.Conv2d, nn.Linear)) == expected


@pytest.mark.parametrize(
    ("fifths", "millions"), list(zip(FIFTHS, (23.1, 91.1, 203.0, 360.4, 555.4), strict=True))
)
def test_fjord_resnet_macs(fifths: int, millions: float) -> None:
    widths = [part(fifths, width) for width in (64, 128, 256, 512)]
    module = on_meta("resnet18", CIFAR, 10, widths=widths, stem=widths[0])
    assert round(macs(module, CIFAR, (nn.Conv2d, nn.Linear)) / 1e6, 1) == millions


def test_vgg9_conv_macs() -> None:
    assert round(macs(on_meta("vgg9", CIFAR, 10), CIFAR, (nn.Conv2d,)) / 1e6, 1) == 133.2


def test_lenet5_for_svhn_is_not_padded() -> None:
    module = on_meta("lenet5", CIFAR, 10, padding=0)
    assert sum(parameter.numel() for parameter in module.parameters()) == 227_338
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    assert [layer.padding for layer in convolutions] == [(0, 0)] * 3


@pytest.mark.parametrize(("width", "expected"), [(0.5, 1_968_680), (0.75, 2_636_424), (1.4, 6_108_776)])
def test_mobilenet_width_is_rounded_as_in_torchvision(width: float, expected: int) -> None:
    assert parameters("mobilenetv2", CIFAR, 1000, width=width) == expected


def test_the_last_convolution_of_mobilenet_can_be_narrower() -> None:
    fewer = 1280 - 128  # features, each with 80 weights, scale, shift and 10 weights of the classifier
    whole, narrow = (parameters("mobilenetv2", CIFAR, 10, width=0.25, last=last) for last in (1280, 128))
    assert whole - narrow == fewer * (80 + 2 + 10)


def test_mobilenet_halves_the_image_three_times() -> None:
    module = on_meta("mobilenetv2", CIFAR, 10)
    before_pool = module.features[:-1]
    assert before_pool(torch.zeros(2, *CIFAR, device="meta")).shape == (2, 1280, 4, 4)
