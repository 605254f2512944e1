"""A sparse network as a small file: surviving values, and one bit per weight that says where they belong.

The file is in the safetensors format. A tensor ``w`` of which a mask left out weights is there as two: ``w``, its
surviving values in one row, and ``w.mask``, the bits of the mask in row-major order, eight to a byte, the first in the
highest bit. The metadata entry ``shapes`` has the full shapes of these tensors, as JSON, and ``inputs`` what has to be
done to raw inputs. All other tensors are there as they are. ``docs/methods/ofa-fl.md`` shows how to read it without
fedtailor.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.storage.files import replace_file

FORMAT = "fedtailor-sparse-1"
MASK = ".mask"


def save_sparse(
    path: Path | str,
    patch: Patch,
    ties: dict[str, str] | None = None,
    inputs: Mapping[str, Any] | None = None,
) -> None:
    """Write the file of a patch, all of it or nothing; see ``sparse_bytes``."""
    replace_file(Path(path), [sparse_bytes(patch, ties, inputs)])


def sparse_bytes(
    patch: Patch,
    ties: Mapping[str, str] | None = None,
    inputs: Mapping[str, Any] | None = None,
    keywords: Sequence[str] = (),
) -> bytes:
    """The values of a patch and where its mask puts them; ``ties`` are the second names of shared tensors.

    ``inputs`` says how raw inputs become what the network sees (``FederatedData.inputs``), ``keywords`` which of them
    the network is given by name, behind the others.
    """
    values = {name: value.detach().cpu().contiguous() for name, value in patch.values.items()}
    shapes: dict[str, list[int]] = {}
    if (mask := patch.cut.sparse) is not None:
        for name in mask.levels.maps:
            kept = mask.of(name).cpu()
            values[f"{name}{MASK}"] = torch.from_numpy(np.packbits(kept.numpy()))
            shapes[name] = list(kept.shape)
    metadata = {"format": FORMAT, "shapes": json.dumps(shapes), "ties": json.dumps(dict(ties or {}))}
    metadata |= {"inputs": json.dumps(inputs or {}), "keywords": json.dumps(list(keywords))}
    return save(values, metadata=metadata)


def inputs_in(path: Path | str) -> dict[str, Any]:
    """What a file says of raw inputs."""
    with safe_open(path, framework="pt") as file:
        return _table(path, {"inputs": "{}", **(file.metadata() or {})}, "inputs")


def load_sparse(path: Path | str) -> dict[str, Tensor]:
    """The state dict of a file: dense tensors, with zeros where the mask left weights out."""
    weights, masks = load_sparse_parts(path)
    for name, kept in masks.items():
        weights[name] = torch.zeros(kept.shape, dtype=weights[name].dtype).masked_scatter_(
            kept, weights[name]
        )
    return weights


def load_sparse_parts(path: Path | str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Tensors, the masked ones in one row, and the masks by name; for whoever trains on with the same mask."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (it is no dict)
    except (OSError, SafetensorError) as error:
        raise CorruptError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") != FORMAT:
        raise FedtailorError(f"{path}: format {metadata.get('format')!r}; expected {FORMAT!r}")
    masks = {
        name: _mask(path, name, found.pop(f"{name}{MASK}", None), shape, found.get(name))
        for name, shape in _table(path, metadata, "shapes").items()
    }
    ties = _table(path, metadata, "ties")
    if not all(isinstance(first, str) and first in found for first in ties.values()):
        raise CorruptError(f"{path}: its ties name tensors that are not there")
    found |= {second: found[first] for second, first in ties.items()}
    return found, masks


def _table(path: Path | str, metadata: Mapping[str, str], key: str) -> dict[str, Any]:
    """A table in a file's metadata."""
    try:
        found = json.loads(metadata.get(key, ""))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise CorruptError(f"{path}: {key} in its metadata is no table")
    return found


def _mask(
    path: Path | str, name: str, packed: Tensor | None, shape: list[int], values: Tensor | None
) -> Tensor:
    """The mask of one tensor, if it is whole and counts as many weights as there are values."""
    whole = isinstance(shape, list) and all(type(length) is int and length >= 0 for length in shape)
    size = math.prod(shape) if whole else -1
    if (
        size < 0
        or packed is None
        or values is None
        or packed.dtype != torch.uint8
        or len(packed) != -(-size // 8)
    ):
        raise CorruptError(f"{path}: {name} lacks its values or a mask of {size} bits")
    kept = torch.from_numpy(np.unpackbits(packed.numpy(), count=size).astype(bool)).view(shape)
    if values.shape != (int(kept.sum()),):
        raise CorruptError(f"{path}: {name} has {tuple(values.shape)} values for {int(kept.sum())} weights")
    return kept
