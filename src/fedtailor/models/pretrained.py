"""A pretrained start: the values of a network from a file of an earlier run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedtailor.errors import FedtailorError


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors in a ``.safetensors`` file, or in the folder of a finished run."""
    file = path / "weights.safetensors" if path.is_dir() else path
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise FedtailorError(
            f"model.weights = {str(path)!r} cannot be read: {error}; "
            "expected a .safetensors file, or the folder of a finished run"
        ) from error


def load_pretrained(module: nn.Module, found: Mapping[str, Tensor], path: Path) -> None:
    """Set all values of ``module`` to those of their names that were found at ``path``; others are left alone.

    What is frozen may be missing, all of it: a run does not save what it does not train.
    """
    wanted = module.state_dict(keep_vars=True)
    frozen = {name for name, _ in module.named_parameters() if not wanted[name].requires_grad}
    if not frozen & found.keys():
        wanted = {name: value for name, value in wanted.items() if name not in frozen}
    stored = {
        id(value): name for name, value in wanted.items() if name in found
    }  # tied tensors are stored once
    for name, value in wanted.items():
        source = found.get(stored.get(id(value), name))
        if source is None:
            raise FedtailorError(f"model.weights = {str(path)!r}: it has no {name!r}, which the model needs")
        if source.shape != value.shape:
            raise FedtailorError(
                f"model.weights = {str(path)!r}: {name!r} is {tuple(source.shape)} there and "
                f"{tuple(value.shape)} in the model"
            )
        value.data.copy_(source)
