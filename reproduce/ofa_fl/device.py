"""What a device gains from its sub-network: the size of its file, how long that takes to load, and one forward pass."""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fedtailor.data.batches import inputs_of
from fedtailor.run.interface import resume
from fedtailor.storage.run_folder import RunFolder
from fedtailor.storage.sparse_file import load_sparse
from reproduce.shared.results import Result

PASSES = 41  # of which the median counts
BATCH = 32


def device(folder: RunFolder) -> Result:
    """For every tier: bytes of the file, and milliseconds of loading it and of a pass, one thread, taken in turns.

    Networks of single weights are stored as surviving values and one bit per weight; what runs is dense. Where a
    network is all linear layers, ``sparse_pass_ms`` is the same pass with compressed rows instead.
    """
    run, threads = resume(folder.path), torch.get_num_threads()
    (images,), _ = inputs_of(run.data.test.take(torch.arange(BATCH)))
    masked = "density" in (run.method.honours or ())
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory() as place:
            known = {}
            for tier in run.fleet.tiers:
                path, module = Path(place) / f"{tier.name}.safetensors", run.submodel(tier.budget).eval()
                if masked:
                    run.save_sparse(path, tier.budget)
                else:
                    save_file(module.state_dict(), path)
                known[tier.name] = (path, module)
            return {"device": _measured(known, images, load_sparse if masked else load_file, masked)}
    finally:
        torch.set_num_threads(threads)


def _measured(
    known: dict[str, tuple[Path, nn.Module]],
    images: torch.Tensor,
    load: Callable[[Path], object],
    masked: bool,
) -> Result:
    """Tiers in turns, so that what else the machine does falls on all of them."""
    sparse = {tier: _compressed(module) if masked else None for tier, (_, module) in known.items()}
    spent: dict[str, dict[str, list[float]]] = {tier: {} for tier in known}
    with torch.inference_mode():
        for _ in range(PASSES):
            for tier, (path, module) in known.items():
                other = sparse[tier]
                jobs: dict[str, Callable[[], object]] = {
                    "load_ms": lambda path=path: load(path),  # type: ignore[misc]
                    "pass_ms": lambda module=module: module(images),  # type: ignore[misc]
                }
                if other is not None:
                    jobs["sparse_pass_ms"] = lambda other=other: other(images)  # type: ignore[misc]
                for name, job in jobs.items():
                    begun = time.perf_counter()
                    job()
                    spent[tier].setdefault(name, []).append(1000 * (time.perf_counter() - begun))
    return {
        tier: {
            "file_bytes": path.stat().st_size,
            **{name: round(median(each), 3) for name, each in spent[tier].items()},
        }
        for tier, (path, _) in known.items()
    }


class _CompressedLinear(nn.Module):
    """A linear layer that multiplies by compressed rows."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.rows, self.bias = layer.weight.detach().to_sparse_csr(), layer.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As the layer that it stands for."""
        return (self.rows @ x.T).T + self.bias


def _compressed(module: nn.Module) -> nn.Module | None:
    """The network with compressed rows; nothing if it has weights of another kind."""
    if any(parameter.dim() > 2 for parameter in module.parameters()):
        return None
    compressed = copy.deepcopy(module)
    for name, layer in list(compressed.named_modules()):
        if isinstance(layer, nn.Linear):
            parent, _, own = name.rpartition(".")
            setattr(compressed.get_submodule(parent), own, _CompressedLinear(layer))
    return compressed
