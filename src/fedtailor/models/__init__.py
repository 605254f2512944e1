"""The papers' networks as plain PyTorch modules, by name or by the import path of one's own."""

from fedtailor.models import adapted, cnn, lenet, mobilenet, resnet, small, text, vgg, vit  # noqa: F401 (they register)
from fedtailor.models.registry import build_model, model_names

__all__ = ["build_model", "model_names"]
