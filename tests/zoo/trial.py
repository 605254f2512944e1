"""One model of the zoo, from trace to merge: what is measured, and what is found wrong.

build → elastic (traced and checked) → for 1/4, 1/2, 3/4: cut, run, compare, train one step → merge
"""

from __future__ import annotations

import json
import signal
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn import functional as F

from fedtailor.data.batches import Batch, inputs_of, map_tensors, target_of
from fedtailor.elasticity import check, front_door
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.explain import GOOD, elastic_share, gains, remedy
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.tracing.reference import tensors_of
from fedtailor.elasticity.tracing.trace import Traced
from fedtailor.errors import FedtailorError
from fedtailor.merging import holder_mean
from fedtailor.messages import Update
from zoo.entries import Entry
from zoo.masked import KeptChannels, kept_positions, masked_module

WIDTHS = (Fraction(1, 4), Fraction(1, 2), Fraction(3, 4))
SECONDS = 240
RESULTS = Path(__file__).parents[2] / "build" / "zoo"


class TooSlowError(Exception):
    """The model took longer than its time limit."""


@dataclass
class Result:
    """What became of a model: plain values, for the page."""

    model: str
    note: str = ""
    verdict: str = "error"  # passes, in part, refused; wrong, error and too slow are failures of the project
    sentence: str = ""  # why not more
    parameters: int = 0
    share: float = 0.0  # of the parameters that some cut leaves out
    trace_seconds: float = 0.0
    check_seconds: float = 0.0
    own_class: bool = True  # pieces are of the library's class
    masked: bool = True  # they also equal the library's class with masked weights
    kept: dict[str, float] = field(default_factory=dict)  # width -> share of the parameters that is left

    def save(self, digest: str) -> None:
        """Leave it for the page, and for the next run of the same code."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**asdict(self), "digest": digest}, indent=1)
        (RESULTS / f"{self.model.replace('/', '.')}.json").write_text(text + "\n", encoding="utf-8")


def trial(entry: Entry, widths: tuple[Fraction, ...] = WIDTHS, seconds: int = SECONDS) -> Result:
    """Everything that is asked of a model; failures of the model itself are raised."""
    result = Result(entry.key, entry.note)
    torch.manual_seed(0)
    with _limited(seconds), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the libraries
        module, batch = entry.build(), entry.batch()
        result.parameters = sum(parameter.numel() for parameter in module.parameters())
        try:
            model, traced = _elastic(module, batch, result)
        except FedtailorError as refusal:
            result.verdict, result.sentence = "refused", str(refusal)
            return result
        result.share, result.own_class = elastic_share(model), model.own_class
        result.sentence = _wrong(model, traced, batch, widths, result)
    if result.sentence:
        result.verdict = "wrong"
    elif result.share >= GOOD:
        result.verdict = "passes"
    else:
        result.verdict, result.sentence = "in part", _what_stays(model)
    return result


def _elastic(module: Any, batch: Batch, result: Result) -> tuple[ElasticModel, Traced]:
    """As users call it; the trace that the check believed is kept."""
    believed: list[tuple[ElasticModel, Traced]] = []
    checking = 0.0

    def disagreement(model: ElasticModel, traced: Traced, few: Batch, other: Batch) -> str:
        nonlocal checking
        start = time.monotonic()
        problem = check.disagreement(model, traced, few, other)
        checking += time.monotonic() - start
        believed.append((model, traced))
        return problem

    start = time.monotonic()
    with mock.patch.object(front_door, "disagreement", disagreement):
        model = front_door.elastic(module, batch)
    result.check_seconds = checking
    result.trace_seconds = time.monotonic() - start - checking
    return model, next(traced for candidate, traced in believed if candidate is model)


def _wrong(
    model: ElasticModel, traced: Traced, batch: Batch, widths: tuple[Fraction, ...], result: Result
) -> str:
    """What is wrong with the cuts of a model; empty if nothing is."""
    weights, updates = check.shaken(model), []
    for client, width in enumerate(widths):
        cut = prefix(model.groups, width)
        patch = model.cut(weights, cut)
        named = {name: value for name, value in patch.values.items() if name in model.parameters}
        result.kept[str(width)] = sum(value.numel() for value in named.values()) / max(1, result.parameters)
        with check._still(traced):
            problem = check.compare(model, traced, cut, weights, batch)
            mine = _run(model.build(patch).eval(), batch)
            if _masked_differs(model, cut, weights, batch, mine):
                result.masked = False
                problem = problem or _functional_differs(model, patch, batch, mine)
        if problem:
            return f"at width {width}: {problem}"
        updates.append(_trained(model, client, patch, batch))
    merged = holder_mean(weights, updates, model)
    return _merged_differs(model, weights, updates, merged)


def _run(module: torch.nn.Module, batch: Batch) -> list[Tensor]:
    args, kwargs = inputs_of(map_tensors(batch, torch.clone))
    with torch.no_grad():
        return tensors_of(module(*args, **kwargs))


def _functional_differs(model: ElasticModel, patch: Patch, batch: Batch, mine: list[Tensor]) -> str:
    """Whether a piece that stands by itself computes something else than the cut that was checked."""
    with torch.no_grad():
        functional = model.call(
            model.shell(patch.cut), patch.values, patch.cut, map_tensors(batch, torch.clone)
        )
    return check.difference(mine, tensors_of(functional))


def _masked_differs(
    model: ElasticModel, cut: Cut, weights: dict[str, Tensor], batch: Batch, mine: list[Tensor]
) -> str:
    """Whether a piece is neither the masked class itself nor the one whose statistics leave out dropped channels."""
    masked = masked_module(model.module, model.groups, cut, weights)
    if not check.difference(mine, _run(masked, batch)):
        return ""
    with KeptChannels():
        return check.difference(mine, _run(masked, batch))


def _trained(model: ElasticModel, client: int, patch: Patch, batch: Batch) -> Update:
    """One step of SGD on the piece."""
    leaves = {
        name: value.clone().requires_grad_(name in model.trainable) for name, value in patch.values.items()
    }
    outputs = tensors_of(model.forward(leaves, patch.cut, map_tensors(batch, torch.clone), mode="train"))
    _loss(outputs, target_of(batch)).backward()
    moved = [name for name, leaf in leaves.items() if leaf.grad is not None and bool(leaf.grad.any())]
    assert moved, "no weight has a gradient"
    with torch.no_grad():
        for name in moved:
            leaves[name] -= 0.01 * leaves[name].grad
    return Update(
        client, 0, 0, Patch({name: leaf.detach() for name, leaf in leaves.items()}, patch.cut), client + 1
    )


def _loss(outputs: list[Tensor], target: Tensor) -> Tensor:
    scores = [out for out in outputs if out.is_floating_point()]
    fitting = [out for out in scores if out.shape[:-1] == target.shape]
    if fitting:
        return torch.stack([F.cross_entropy(out.flatten(0, -2), target.flatten()) for out in fitting]).sum()
    return torch.stack([out.square().mean() for out in scores]).sum()


def _merged_differs(
    model: ElasticModel, weights: dict[str, Tensor], updates: list[Update], merged: dict[str, Tensor]
) -> str:
    """The weighted mean over the clients that hold a coordinate, worked out position by position."""
    for name, old in weights.items():
        if not old.is_floating_point() or not old.dim():
            continue
        total, weight = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
        for update in updates:
            sent = update.patch.values[name].double()
            extents = model.groups.extents[name]
            kept = [kept_positions(extent, model.groups, update.patch.cut) for extent in extents]
            total = total + update.weight * _laid_out(sent, kept, old.shape)
            weight = weight + update.weight * _laid_out(torch.ones_like(sent), kept, old.shape)
        expected = torch.where(weight > 0, total / weight.clamp(min=1), old.double())
        if not torch.equal(merged[name][weight == 0], old[weight == 0]):
            return f"merging changed what nobody sent in {name}"
        if not torch.allclose(merged[name].double(), expected, rtol=1e-6, atol=1e-9):
            return f"merging {name} is not the mean over those who sent it"
    return ""


def _laid_out(value: Tensor, kept: list[Tensor], shape: torch.Size) -> Tensor:
    """A small tensor between zeros, at its full size."""
    for dim, positions in enumerate(kept):
        if len(positions) < shape[dim]:
            wider = value.new_zeros(*value.shape[:dim], shape[dim], *value.shape[dim + 1 :])
            value = wider.index_copy_(dim, positions, value)
    return value


def _what_stays(model: ElasticModel) -> str:
    """What keeps most of the parameters in every cut, as ``explain`` says it."""
    worst = next(iter(gains(model)), "")
    reason = model.groups.fixed.get(worst, "no rule says which axes of its tensors are channels")
    return f"{worst}: {reason} ({remedy(reason)})"


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    def stop(_signal: int, _frame: Any) -> None:
        raise TooSlowError(f"more than {seconds} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
