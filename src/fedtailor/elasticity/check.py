"""A trace proves itself before it is trusted: random cuts are compared with the masked full module."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stderr
from io import StringIO
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from fedtailor.data.batches import Batch, inputs_of, map_tensors
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.elasticity.tracing.copies import in_mode, named_tensors
from fedtailor.elasticity.tracing.example import copied
from fedtailor.elasticity.tracing.reference import Reference, tensors_of
from fedtailor.elasticity.tracing.trace import Traced

TRIALS = 4  # random cuts, as far as ``SECONDS`` allow ...
LEAST = 2  # ... but never fewer than two
SECONDS = 0.5
SEARCH_SECONDS = 20.0  # for the group at fault
# Relative to the largest output; the tests are stricter.
TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
FINER = 1e-5  # of what single precision could not tell from rounding, in double precision
NO_NUMBER = "the masked full module computes something that is no number"
RANDOM = ("rand", "randn", "rand_like", "randn_like", "bernoulli", "normal", "uniform")

# What a network of wrong sizes raises when it runs: an assertion of the user's, or PyTorch's own complaints.
FAILURES = (RuntimeError, ValueError, TypeError, AssertionError, LookupError, AttributeError, NameError)


def disagreement(model: ElasticModel, traced: Traced, batch: Batch, other: Batch) -> str:
    """What differs between random small networks and the masked full module, and in which group; empty if nothing.

    A traced graph must also be the module itself at full size, on ``other``, a batch of another size.
    """
    with _still(traced):
        weights = shaken(model)
        problem = _tried(model, traced, weights, batch)
        if problem == NO_NUMBER:  # the module does not bear noise: a logarithm of a parameter, for instance
            weights = model.weights()
            problem = _tried(model, traced, weights, batch)
        if problem:
            return f"{problem} ({culprit(model, traced, weights, batch)})"
        return "" if model.own_class else _graph_differs(model, weights, other, batch)


def _tried(model: ElasticModel, traced: Traced, weights: Weights, batch: Batch) -> str:
    """What differs for some random cuts, as many as the time allows."""
    generator = np.random.default_rng(0)
    start = time.monotonic()
    for trial in range(TRIALS):
        if trial >= LEAST and time.monotonic() - start > SECONDS:
            break
        problem = compare(model, traced, random_cut(model.groups, generator), weights, batch)
        if problem:
            return problem
    return ""


def random_cut(groups: ChannelGroups, generator: np.random.Generator) -> Cut:
    """Any allowed number of any units of every elastic group."""
    channels = {}
    for group in groups.elastic:
        units = groups.counts[group]
        count = groups.constraint(group).round_up(int(generator.integers(1, units + 1)), of=units)
        channels[group] = np.sort(generator.choice(units, count, replace=False)).tolist()
    return Cut.of(groups, channels)


def compare(
    model: ElasticModel, traced: Traced, cut: Cut, weights: Mapping[str, Tensor], batch: Batch
) -> str:
    """What differs for one cut; empty if nothing does."""
    patch = model.cut(weights, cut)
    try:
        with torch.no_grad():
            model.shell(cut)
            small = model.call(patch.values, cut, map_tensors(batch, torch.clone))
    except FAILURES as error:
        return f"the small network does not run: {type(error).__name__}: {error}"
    everything = {**weights, **model.constants}
    reference = Reference(traced, traced.evaluation, model.shell(cut), cut, everything)
    problem = difference(tensors_of(small), reference(model.module, *copied(inputs_of(batch))))
    if problem or traced.training is None:
        return problem
    problem = _differs_in_training(model, traced, cut, everything, batch)
    if problem and all(value.dtype != torch.float64 for value in everything.values()):
        # Norms over two examples make large errors of rounding: only what is left of them in double precision counts.
        problem = _differs_in_training(model, traced, cut, everything, batch, finer=True)
    return f"in training, {problem}" if problem else ""


def _differs_in_training(
    model: ElasticModel, traced: Traced, cut: Cut, everything: Weights, batch: Batch, finer: bool = False
) -> str:
    """What differs where the user's code trains, with PyTorch's layers in evaluation."""
    assert traced.training is not None
    if finer:
        everything = {name: _double(value) for name, value in everything.items()}
        batch = map_tensors(batch, _double)
    values = model.cut(everything, cut).values
    values.update({second: values[first] for second, first in model.groups.ties.items() if first in values})
    shell = in_mode(model.shell(cut), training=True)
    try:
        with torch.no_grad():
            trained = functional_call(shell, values, *copied(inputs_of(batch)), tie_weights=False)
    except FAILURES as error:
        return f"the small network does not run: {type(error).__name__}: {error}"
    reference = Reference(traced, traced.training, model.shell(cut), cut, everything)
    found = reference(model.module, *copied(inputs_of(batch)))
    return difference(tensors_of(trained), found, FINER if finer else None)


def _graph_differs(model: ElasticModel, weights: Weights, *batches: Batch) -> str:
    """Whether the traced graph is something else than the module itself at full size (a hook, for instance).

    The first batch counts that the module itself can run.
    """
    own = ElasticModel(model.module, model.groups.without_sizes(), model.example)
    full = Cut.everything()
    for batch in batches:
        with torch.no_grad():
            try:
                own.shell(full)
                theirs = tensors_of(own.call(weights, full, map_tensors(batch, torch.clone)))
            except FAILURES:
                continue
            try:
                model.shell(full)
                mine = tensors_of(model.call(weights, full, map_tensors(batch, torch.clone)))
            except FAILURES as error:
                return f"the traced graph does not run on another batch: {type(error).__name__}: {error}"
        problem = difference(mine, theirs)
        return f"the traced graph is not the module: {problem}" if problem else ""
    return "the module does not run"


def _double(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value


def difference(mine: list[Tensor], theirs: list[Tensor], tolerance: float | None = None) -> str:
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
        if bool(b.isnan().any()):
            return NO_NUMBER
        allowed = tolerance or TOLERANCE.get(b.dtype, 1e-1)
        bound = allowed * max(1e-3, float(b.abs().nan_to_num(0, 0, 0).max()))
        if not bool(torch.isclose(a, b, rtol=0, atol=bound).all()):
            return (
                f"an output differs by {float((a - b).abs().max()):.3g} (largest: {float(b.abs().max()):.3g})"
            )
    return ""


def culprit(model: ElasticModel, traced: Traced, weights: Mapping[str, Tensor], batch: Batch) -> str:
    """The group whose cut alone shows the problem."""
    start = time.monotonic()
    generator = np.random.default_rng(1)
    for group in model.groups.elastic:
        full = model.groups.counts[group]
        count = model.groups.constraint(group).round_up(max(1, full // 2), of=full)
        if count == full:
            continue
        units = np.sort(generator.choice(full, count, replace=False)).tolist()
        if compare(model, traced, Cut.of(model.groups, {group: units}), weights, batch):
            lies = ", ".join(f"{tensor} axis {dim}" for tensor, dim in model.groups.tensors(group)[:3])
            return f"group {group!r}, which lies on {lies}"
        if time.monotonic() - start > SEARCH_SECONDS:
            break
    return f"groups {', '.join(model.groups.elastic[:5])}"


def shaken(model: ElasticModel) -> Weights:
    """The model's weights, with noise where all entries are alike: layers that start at zero would hide errors.

    Matrices with very small entries are multiplied: scores of attention near zero would hide them, too. All others are
    the module's own.
    """
    generator = torch.Generator().manual_seed(0)
    shaken: Weights = {}
    for name, tensor in named_tensors(model.module).items():
        value = tensor.detach()
        if name in model.constants:
            continue
        if value.is_floating_point() and name in model.parameters:
            spread = float(value.std()) if value.numel() > 1 else 0.0
            wanted = 0.5 * max(1, value[0].numel()) ** -0.5 if value.dim() > 1 else 0.1
            if spread < 0.01 * wanted:
                noise = torch.randn(value.shape, generator=generator, dtype=torch.float32)
                value = value + wanted * noise.to(value)
            elif value.dim() > 1 and spread < wanted:
                value = value * (2 * wanted / spread)
        shaken[name] = value
    for name in model.statistics:
        if name.endswith("running_mean"):
            noise = torch.randn(shaken[name].shape, generator=generator, dtype=torch.float32)
            shaken[name] = shaken[name] + 0.1 * noise.to(shaken[name])
    return shaken


@contextmanager
def _still(traced: Traced) -> Iterator[None]:
    """Without random numbers, and without what graph modules print when a small network does not run."""
    recordings = [traced.evaluation, *([] if traced.training is None else [traced.training])]
    names = [str(node.target) for recording in recordings for node in recording.network.graph.nodes]
    random = any(word in name for name in names for word in (*RANDOM, "dropout"))
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # fused Transformer layers leave padded positions empty
    try:
        with _Still() if random else nullcontext(), redirect_stderr(StringIO()):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


class _Still(TorchFunctionMode):
    """Random functions return constants: a small and a full network cannot draw the same numbers."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if "dropout" in name:
            return args[0]
        out = func(*args, **(kwargs or {}))
        return out.fill_(0.5) if name.rstrip("_") in RANDOM and isinstance(out, Tensor) else out
