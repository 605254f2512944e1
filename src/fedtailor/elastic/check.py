"""A trace proves itself before it is trusted: random cuts are compared with the masked full module."""

from __future__ import annotations

import time
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.batches import Batch, inputs_of, map_tensors
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.groups import ChannelGroups
from fedtailor.elastic.model import ElasticModel, Weights
from fedtailor.elastic.reference import Reference, tensors_of
from fedtailor.elastic.trace import Traced
from fedtailor.elastic.tracer import copied

TRIALS = 3  # random cuts, as far as ``SECONDS`` allow; always at least one
SECONDS = 0.5
SEARCH_SECONDS = 20.0  # for the group at fault
TOLERANCE = {
    torch.float64: 1e-8,
    torch.float32: 1e-3,
}  # relative to the largest output; looser than the tests


def disagreement(model: ElasticModel, traced: Traced, batch: Batch) -> str:
    """What differs between random small networks and the masked full module, and in which group; empty if nothing."""
    generator = np.random.default_rng(0)
    weights = shaken(model)
    start = time.monotonic()
    for trial in range(TRIALS):
        if trial and time.monotonic() - start > SECONDS:
            break
        cut = random_cut(model.groups, generator)
        problem = compare(model, traced, cut, weights, batch)
        if problem:
            return f"{problem} ({culprit(model, traced, weights, batch)})"
    return ""


def random_cut(groups: ChannelGroups, generator: np.random.Generator) -> Cut:
    """Any allowed number of any units of every elastic group."""
    channels = {}
    for group in groups.elastic:
        width = groups.widths[group]
        count = groups.constraint(group).round_up(int(generator.integers(1, width + 1)), of=width)
        channels[group] = np.sort(generator.choice(width, count, replace=False)).tolist()
    return Cut.of(groups, channels)


def compare(
    model: ElasticModel, traced: Traced, cut: Cut, weights: Mapping[str, Tensor], batch: Batch
) -> str:
    """What differs for one cut; empty if nothing does."""
    args, kwargs = inputs_of(batch)
    patch = model.cut(weights, cut)
    try:
        with torch.no_grad():
            small = model.forward(patch.values, cut, map_tensors(batch, torch.clone))
    except (RuntimeError, ValueError, TypeError, AssertionError, IndexError) as error:
        return f"the small network does not run: {type(error).__name__}: {error}"
    everything = {**weights, **model.constants}
    reference = Reference(traced, model.shell(cut), cut, everything)
    return difference(tensors_of(small), reference(model.module, *copied((args, kwargs))))


def graph_differs(model: ElasticModel, batch: Batch) -> str:
    """Whether the traced graph computes something else than the module itself at full size (a hook, for instance)."""
    weights = shaken(model)
    own = ElasticModel(model.module, model.groups.without_sizes(), model.example)
    full = Cut.everything()
    with torch.no_grad():
        outputs = [
            tensors_of(each.forward(weights, full, map_tensors(batch, torch.clone))) for each in (model, own)
        ]
    problem = difference(*outputs)
    return f"the traced graph is not the module: {problem}" if problem else ""


def difference(mine: list[Tensor], theirs: list[Tensor]) -> str:
    """Where two outputs differ; empty if they are equal but for rounding."""
    if len(mine) != len(theirs):
        return f"it has {len(mine)} outputs instead of {len(theirs)}"
    for a, b in zip(mine, theirs, strict=True):
        if a.shape != b.shape:
            return f"an output has shape {tuple(a.shape)} instead of {tuple(b.shape)}"
        if not b.numel():
            continue
        if not b.is_floating_point() and not b.is_complex():
            if not torch.equal(a, b):
                return "an output of whole numbers differs"
            continue
        bound = TOLERANCE.get(b.dtype, 1e-1) * max(1e-3, float(b.abs().nan_to_num(0, 0, 0).max()))
        if not bool(torch.isclose(a, b, rtol=0, atol=bound, equal_nan=True).all()):
            return (
                f"an output differs by {float((a - b).abs().max()):.3g} (largest: {float(b.abs().max()):.3g})"
            )
    return ""


def culprit(model: ElasticModel, traced: Traced, weights: Mapping[str, Tensor], batch: Batch) -> str:
    """The group whose cut alone shows the problem."""
    start = time.monotonic()
    generator = np.random.default_rng(1)
    for group in model.groups.elastic:
        width = model.groups.widths[group]
        count = model.groups.constraint(group).round_up(max(1, width // 2), of=width)
        if count == width:
            continue
        units = np.sort(generator.choice(width, count, replace=False)).tolist()
        if compare(model, traced, Cut.of(model.groups, {group: units}), weights, batch):
            lies = ", ".join(f"{tensor} axis {dim}" for tensor, dim in model.groups.tensors(group)[:3])
            return f"group {group!r}, which lies on {lies}"
        if time.monotonic() - start > SEARCH_SECONDS:
            break
    return f"groups {', '.join(model.groups.elastic[:5])}"


def shaken(model: ElasticModel) -> Weights:
    """The model's weights with noise: layers that start at zero would hide what is wrong behind them."""
    generator = torch.Generator().manual_seed(0)
    shaken: Weights = {}
    for name, value in model.weights().items():
        if not value.is_floating_point() or name not in model.parameters:
            shaken[name] = value
            continue
        spread = float(value.std()) if value.numel() > 1 else 0.0
        wanted = 0.5 * max(1, value[0].numel()) ** -0.5 if value.dim() > 1 else 0.1
        if spread < 0.01 * wanted:
            noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
            value = value + wanted * noise.to(value)
        shaken[name] = value
    for name in model.statistics:
        if name.endswith("running_mean"):
            noise = torch.randn(shaken[name].shape, generator=generator, dtype=torch.float32)
            shaken[name] = shaken[name] + 0.1 * noise.to(shaken[name])
    return shaken
