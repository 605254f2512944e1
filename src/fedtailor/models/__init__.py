"""The papers' networks as plain PyTorch modules, by name or by the import path of one's own."""

from fedtailor.models import (  # noqa: F401 (they register)
    adapted,
    cnn,
    lenet,
    llama,
    mobilenet,
    resnet,
    small,
    text,
    vgg,
    vit,
)
from fedtailor.models.registry import build_model, model_names

__all__ = ["build_model", "model_names"]
