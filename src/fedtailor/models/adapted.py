"""A frozen, pretrained network with trained low-rank adapters, made by ``peft``; read from a local folder, offline."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.models.parts import whole
from fedtailor.models.pretrained import load_pretrained, read_weights
from fedtailor.models.registry import build_model, model_names, register

NEEDED = "model 'adapted' needs {}: pip install 'fedtailor[adapters]' ({})"
# What transformers calls its automatic classes, by what the network answers
HEADS = {
    "causal-lm": "AutoModelForCausalLM",
    "masked-lm": "AutoModelForMaskedLM",
    "sequence-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
}
OF_CLASSES = ("sequence-classification", "token-classification")


@dataclass(frozen=True)
class Adapters:
    """Where the frozen network comes from, and the adapters that are put beside its layers."""

    backbone: str
    """A folder that transformers' save_pretrained wrote; or a network by name or import path."""
    head: str = "causal-lm"
    """Of a folder: causal-lm, masked-lm, sequence-classification or token-classification."""
    options: Mapping[str, object] = field(default_factory=dict)
    """Of a network by name: its own options."""
    start: str = ""
    """Of a network by name: the .safetensors file or finished run that its frozen weights are read from."""
    rank: int = 8
    """The full rank R; a device of width w trains ceil(w R) of it."""
    alpha: float = 16.0
    """The factor of an adapter is alpha / R, at every rank."""
    dropout: float = 0.0
    """Of an adapter's input, in training."""
    targets: Sequence[str] = ()
    """Ends of the names of the layers to adapt; empty: what peft takes for such a network."""
    train: Sequence[str] = ()
    """Layers that are trained whole beside the adapters, such as a new classifier."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.rank, int) and self.rank >= 1,
            "model.rank",
            self.rank,
            "a whole number of at least 1",
        )
        require(math.isfinite(self.alpha) and self.alpha > 0, "model.alpha", self.alpha, "a number above 0")
        require(0 <= self.dropout < 1, "model.dropout", self.dropout, "at least 0 and below 1")
        if self.head not in HEADS:
            raise unknown("head (model.head)", self.head, HEADS)


@register("adapted", options=Adapters)
def build_adapted(
    options: Adapters, *, input_shape: tuple[int, ...], num_classes: int, vocabulary: int | None = None
) -> nn.Module:
    """A frozen pretrained network with LoRA adapters, by peft; their rank is what shrinks."""
    whole("num_classes", num_classes)
    try:
        import peft
    except ImportError as error:
        raise FedtailorError(NEEDED.format("peft", error)) from error
    network = _backbone(options, input_shape, num_classes, vocabulary)
    settings = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,
        lora_dropout=options.dropout,
        target_modules=list(options.targets) or None,
        modules_to_save=list(options.train) or None,
    )
    try:
        adapted: nn.Module = peft.get_peft_model(network, settings)
    except ValueError as error:  # peft's word for layers that are not there, or that it cannot choose itself
        raise FedtailorError(f"model.targets = {list(options.targets)!r}: {error}") from error
    return adapted


def _backbone(
    options: Adapters, input_shape: tuple[int, ...], num_classes: int, vocabulary: int | None
) -> nn.Module:
    """The network that is adapted, with the weights that it keeps."""
    folder = Path(options.backbone)
    if (folder / "config.json").is_file():
        return _of_folder(folder, options.head, num_classes)
    if options.backbone not in model_names() and ":" not in options.backbone:
        raise FedtailorError(
            f"model.backbone = {options.backbone!r}: expected a folder with config.json and model.safetensors, as "
            "save_pretrained writes them, or the name or import path of a network"
        )
    own = dict(options.options)
    network = build_model(
        options.backbone, input_shape=input_shape, num_classes=num_classes, symbols=vocabulary, **own
    )
    if options.start:
        load_pretrained(network, read_weights(Path(options.start)), Path(options.start))
    return network


def _of_folder(folder: Path, head: str, num_classes: int) -> nn.Module:
    """The network of a folder; nothing is downloaded, unpickled or run that lies there."""
    try:
        import transformers
    except ImportError as error:
        raise FedtailorError(NEEDED.format("transformers", error)) from error
    kind = getattr(transformers, HEADS[head])
    labels = {"num_labels": num_classes} if head in OF_CLASSES else {}
    try:
        network: nn.Module = kind.from_pretrained(
            folder, local_files_only=True, use_safetensors=True, trust_remote_code=False, **labels
        )
    except (OSError, ValueError) as error:
        raise FedtailorError(f"model.backbone = {str(folder)!r} cannot be read as {head}: {error}") from error
    return network
