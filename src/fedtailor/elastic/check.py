"""A trace proves itself before it is trusted: random cuts are compared with the masked full module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedtailor.elastic.cut import Cut
from fedtailor.elastic.groups import Extent
from fedtailor.elastic.model import ElasticModel
from fedtailor.elastic.patch import Where, kept_positions, scatter_index, where_of
from fedtailor.errors import FedtailorError

TRIALS = 2
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}    # relative to the largest output; looser than the tests


def check_trace(model: ElasticModel) -> None:
    """Refuse a trace whose cuts do not compute what the masked module computes."""
    generator = np.random.default_rng(0)
    for trial in range(TRIALS):
        cut = random_cut(model, generator)
        problem = disagreement(model, cut)
        if problem:
            names = ", ".join(cut.channels)
            raise FedtailorError(
                f"{type(model.module).__name__}: the trace is wrong for a random cut (trial {trial}) of {names}: "
                f"{problem}. Please register a rule for the layer that mixes these channels"
            )


def random_cut(model: ElasticModel, generator: np.random.Generator) -> Cut:
    """Any number of any units of every elastic group, at least one."""
    groups = model.groups
    channels = {}
    for group in groups.elastic:
        width = groups.widths[group]
        count = int(generator.integers(1, width + 1))
        channels[group] = np.sort(generator.choice(width, count, replace=False)).tolist()
    return Cut.of(groups, channels)


def disagreement(model: ElasticModel, cut: Cut) -> str:
    """What differs between the small network and the masked full one; empty if nothing does."""
    weights = model.weights()
    try:
        with torch.no_grad():
            small = model.forward(model.cut(weights, cut).values, cut, model.example)
            full = masked_forward(model, weights, cut)
    except (RuntimeError, ValueError, TypeError) as error:
        return f"the small network does not run: {error}"
    for mine, theirs in zip(_tensors(small), _tensors(full), strict=True):
        if mine.shape != theirs.shape:
            return f"an output has shape {tuple(mine.shape)} instead of {tuple(theirs.shape)}"
        bound = TOLERANCE.get(theirs.dtype, 1e-1) * max(1.0, float(theirs.abs().max()))
        if not bool(((mine - theirs).abs() <= bound).all()):
            return f"an output differs by {float((mine - theirs).abs().max()):.3g}"
    return ""


def masked_forward(model: ElasticModel, weights: Mapping[str, Tensor], cut: Cut) -> Any:
    """The full module with everything into and out of dropped channels set to zero.

    Layers that normalise over channels see the kept ones only: they are the one thing a mask cannot express.
    """
    masked = {}
    for name, value in weights.items():
        keep = torch.zeros_like(value, dtype=torch.bool)
        where = where_of(model.groups.extents[name], cut, model.groups.widths)
        _fill(keep, where)
        masked[name] = torch.where(keep, value, torch.zeros((), dtype=value.dtype))
    small = model.extract(weights, cut)
    replace = {
        path: _kept_norm(model, layer, path, cut)
        for path, layer in small.named_modules()
        if isinstance(layer, nn.GroupNorm | nn.LayerNorm | nn.RMSNorm)
    }
    return model.forward(masked, Cut.everything(), model.example, replace=replace)


def _fill(keep: Tensor, where: Where) -> None:
    view, mesh = scatter_index(keep, where)
    if mesh:
        view[mesh] = True
    else:
        view.fill_(True)


def _kept_norm(model: ElasticModel, small: nn.Module, path: str, cut: Cut) -> Any:
    """The small norm on the kept channels, its output put back between zeros."""
    sizes = [size for size in model.groups.sizes if size.layer == path and size.attribute != "num_groups"]
    over_channels = isinstance(small, nn.GroupNorm)
    entries = 0 if over_channels else len(small.normalized_shape)    # type: ignore[arg-type]

    def forward(x: Tensor) -> Tensor:
        kept_input, masks = x, []
        for size in sizes:
            dim = 1 if over_channels else x.dim() - entries + (size.index or 0)
            positions = _positions(size.extent, cut, model)
            kept_input = kept_input.index_select(dim, positions)
            masks.append((dim, positions))
        output = small(kept_input)
        for dim, positions in reversed(masks):
            shape = list(output.shape)
            shape[dim] = x.shape[dim]
            output = torch.zeros(shape, dtype=output.dtype).index_copy(dim, positions, output)
        return output

    return forward


def _positions(extent: Extent, cut: Cut, model: ElasticModel) -> Tensor:
    kept = kept_positions(extent, cut, model.groups.widths)
    return torch.arange(kept) if isinstance(kept, int) else torch.from_numpy(kept)


def _tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
