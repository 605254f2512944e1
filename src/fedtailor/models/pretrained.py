"""A pretrained start: the values of a network from a file of an earlier run."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from fedtailor.errors import FedtailorError


def load_pretrained(module: nn.Module, path: Path) -> None:
    """Set all values of ``module`` to those in a ``.safetensors`` file, or in the folder of a finished run.

    A run may keep normalisation statistics for every width apart (``bn1.running_mean@1/5``): those of the full width
    are the module's own. Tensors of other widths are left alone.
    """
    file = path / "weights.safetensors" if path.is_dir() else path
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise FedtailorError(
            f"model.weights = {str(path)!r} cannot be read: {error}; "
            "expected a .safetensors file, or the folder of a finished run"
        ) from error
    wanted = module.state_dict(keep_vars=True)
    stored = {
        id(value): name for name, value in wanted.items() if name in found
    }  # tied tensors are stored once
    for name, value in wanted.items():
        source = found.get(f"{name}@1", found.get(stored.get(id(value), name)))
        if source is None:
            raise FedtailorError(f"model.weights = {str(path)!r}: it has no {name!r}, which the model needs")
        if source.shape != value.shape:
            raise FedtailorError(
                f"model.weights = {str(path)!r}: {name!r} is {tuple(source.shape)} there and "
                f"{tuple(value.shape)} in the model"
            )
        value.data.copy_(source)
