"""The classification families of torchvision, the smallest member of each."""

from __future__ import annotations

from typing import Any

from torch import nn

from zoo.entries import CLASSES, Entry, declare_operators, images

MAXVIT: dict[str, Any] = {  # maxvit_t takes nothing below 224 pixels
    "input_size": (64, 64), "stem_channels": 16, "partition_size": 2, "block_channels": [16, 32, 48, 64],
    "block_layers": [1, 1, 1, 1], "head_dim": 8, "stochastic_depth_prob": 0.1,
}  # fmt: skip
MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "alexnet": (64, {}),
    "convnext_tiny": (32, {}),
    "densenet121": (32, {}),
    "efficientnet_b0": (32, {}),
    "efficientnet_v2_s": (32, {}),
    "googlenet": (64, {"aux_logits": False, "init_weights": False}),
    "inception_v3": (96, {"aux_logits": False, "init_weights": False}),
    "MaxVit": (64, MAXVIT),
    "mnasnet0_5": (32, {}),
    "mobilenet_v2": (32, {}),
    "mobilenet_v3_large": (32, {}),
    "mobilenet_v3_small": (32, {}),
    "regnet_x_400mf": (32, {}),
    "regnet_y_400mf": (32, {}),
    "resnet18": (32, {}),
    "resnet50": (32, {}),
    "resnext50_32x4d": (32, {}),
    "shufflenet_v2_x0_5": (32, {}),
    "squeezenet1_1": (64, {}),
    "swin_t": (32, {}),
    "swin_v2_t": (32, {}),
    "vgg11": (32, {}),
    "vit_b_32": (64, {"image_size": 64}),
    "wide_resnet50_2": (32, {}),
}


def _entry(name: str, size: int, options: dict[str, Any]) -> Entry:
    def build() -> nn.Module:
        declare_operators()
        import torchvision

        make = getattr(torchvision.models, name)  # a function, or a class where no function makes a small one
        module: nn.Module = make(num_classes=CLASSES, **options)
        return module

    return Entry("torchvision", name, build, images(size))


ENTRIES = [_entry(name, size, options) for name, (size, options) in MODELS.items()]
