"""The one merge rule: every coordinate is the weighted mean over the clients that sent it.

    w'[c] = sum_i a_i * w_i[c] / sum_i a_i   over the clients i that hold coordinate c;   w'[c] = w[c] if none does

Sums run in float64 and in the order of client ids, with one division and one cast at the end, so the result does not
depend on the order in which updates arrived, and one client's own bits come back unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.patch import WHOLE, Where, scatter_index
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.messages import Update

Parts = Sequence[tuple[Where | None, Tensor, float]]

SHORT = (torch.float32, torch.float16, torch.bfloat16)  # at most 24 bits of the 53 that float64 has
EXACT = 2**29  # times a whole number of so many bits less, their products are exact


def by_samples(update: Update) -> float:
    """FedAvg's weight: the number of examples."""
    return update.weight


def by_count(update: Update) -> float:  # noqa: ARG001
    """HeteroFL's weight: every client counts the same."""
    return 1.0


WEIGHTINGS: dict[str, Callable[[Update], float]] = {"samples": by_samples, "count": by_count}


def holder_mean(
    weights: Mapping[str, Tensor],
    updates: Sequence[Update],
    model: ElasticModel,
    weight: Callable[[Update], float] = by_samples,
) -> Weights:
    """Merge updates into the global weights; coordinates that nobody sent keep their bits."""
    return {**weights, **{name: mean for name, mean, _ in each_mean(weights, updates, model, weight)}}


def each_mean(
    weights: Mapping[str, Tensor],
    updates: Sequence[Update],
    model: ElasticModel,
    weight: Callable[[Update], float],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Name after name the merged tensor, and which of its coordinates somebody sent."""
    # An update of weight zero is left out: adding 0.0 would turn a lone -0.0 into 0.0, and 0 * inf is NaN.
    ordered = sorted((update for update in updates if weight(update) > 0), key=lambda update: update.client)
    tables = [model.table(update.patch.cut) for update in ordered]
    if _is_one_table(ordered, weight):
        yield from _mean_of_rows(weights, ordered, tables[0], weight)
        return
    for name in sorted({name for update in ordered for name in update.patch.values}):
        parts = [
            (table.get(name), update.patch.values[name], weight(update))
            for update, table in zip(ordered, tables, strict=True)
            if name in update.patch.values
        ]
        yield name, *mean_and_holders(weights.get(name), parts)


def _is_one_table(ordered: Sequence[Update], weight: Callable[[Update], float]) -> bool:
    """Whether all came as rows of one form, whose products with their weights are exact, as they are in a sum."""
    first = ordered[0].patch if ordered else None
    if first is None or first.row is None or first.row.dtype not in SHORT:
        return False
    form = [(name, value.shape, value.dtype) for name, value in first.values.items()]
    return all(
        update.patch.row is not None
        and update.patch.cut is first.cut
        and [(name, value.shape, value.dtype) for name, value in update.patch.values.items()] == form
        and _is_exact(weight(update))
        for update in ordered
    )


def _mean_of_rows(
    weights: Mapping[str, Tensor],
    ordered: Sequence[Update],
    table: Mapping[str, Where],
    weight: Callable[[Update], float],
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same sums, of all tensors at once."""
    first = ordered[0].patch
    rows = [update.patch.row for update in ordered if update.patch.row is not None]
    total, _ = _empty(rows[0].shape, rows[0].device)
    for row, update in zip(rows, ordered, strict=True):
        total.add_(row, alpha=weight(update))
    share = sum(map(weight, ordered))
    for (name, value), (start, stop) in sorted(zip(first.values.items(), first.runs, strict=True)):
        old, where = weights.get(name), table.get(name)
        sums, held = _empty(value.shape if old is None else old.shape, value.device)
        add_at(sums, where, total[start:stop].view(value.shape))
        add_at(held, where, share)
        yield name, *_mean(old, sums, held, value.dtype)


def _is_exact(share: float) -> bool:
    """Whether the product of a short number and this weight has no rounding."""
    return 0 < share <= EXACT and share == int(share)


def mean_over_holders(old: Tensor | None, parts: Parts) -> Tensor:
    """One tensor: ``parts`` are (where, values, weight above 0); without ``where``, values fill the whole tensor."""
    return mean_and_holders(old, parts)[0]


def mean_and_holders(old: Tensor | None, parts: Parts) -> tuple[Tensor, Tensor]:
    """The same, and which coordinates have a holder."""
    first = parts[0][1]
    dtype, shape = first.dtype, old.shape if old is not None else first.shape
    total, weight = _empty(shape, first.device)
    views: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}  # clients of one piece have one place
    # Where products have no rounding, it is the same whether they are rounded before they are added.
    exact = dtype in SHORT and all(_is_exact(share) for _, _, share in parts)
    for where, values, share in parts:
        if id(where) not in views:
            views[id(where)] = _place(total, where)
        view, mesh = views[id(where)]
        if exact and not mesh:
            view.add_(values, alpha=share)
        else:
            _add(view, mesh, values.to(torch.float64, copy=True).mul_(share))
    for where, share in _shares(parts):
        add_at(weight, where, share)
    return _mean(old, total, weight, dtype, parts)


def _empty(shape: Sequence[int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Sums of values and of weights before anything is added.

    Minus zero is the neutral element of floating-point addition: it keeps the sign of a lone client's -0.0.
    """
    return (
        torch.full(shape, -0.0, dtype=torch.float64, device=device),
        torch.zeros(shape, dtype=torch.float64, device=device),
    )


def _mean(
    old: Tensor | None, total: Tensor, weight: Tensor, dtype: torch.dtype, parts: Parts = ()
) -> tuple[Tensor, Tensor]:
    """What sums come to, and which coordinates have a holder; other types than short ones need their ``parts``."""
    held = weight > 0
    mean = total / torch.where(held, weight, 1.0)
    merged = mean.to(dtype) if dtype.is_floating_point else mean.round().to(dtype)
    if dtype == torch.float64 or not dtype.is_floating_point:
        merged = _keep_lone_values(merged, parts)
    return (torch.where(held, merged, old) if old is not None else merged), held


def _shares(parts: Parts) -> list[tuple[Where | None, float]]:
    """What is added to the weight of each place: once for all clients of a piece, where sums are exact in any order."""
    if not all(float(share).is_integer() for _, _, share in parts):
        return [(where, share) for where, _, share in parts]
    places = {id(where): where for where, _, _ in parts}
    sums = dict.fromkeys(places, 0.0)
    for where, _, share in parts:
        sums[id(where)] += share
    return [(where, sums[place]) for place, where in places.items()]


def _keep_lone_values(merged: Tensor, parts: Parts) -> Tensor:
    """Float32 survives multiplying and dividing in float64; wider types need their lone holder's value itself."""
    raw = torch.full_like(merged, -0.0 if merged.dtype.is_floating_point else 0)
    holders = torch.zeros(merged.shape, dtype=torch.int32, device=merged.device)
    for where, values, _share in parts:
        add_at(raw, where, values)
        add_at(holders, where, 1)
    return torch.where(holders == 1, raw, merged)


def add_at(tensor: Tensor, where: Where | None, values: Tensor | float) -> None:
    """Add values at an index, or to the whole tensor."""
    _add(*_place(tensor, where), values)


def _place(tensor: Tensor, where: Where | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    return scatter_index(tensor, where if where is not None else (WHOLE,) * tensor.dim())


def _add(view: Tensor, mesh: tuple[Tensor, ...], values: Tensor | float) -> None:
    if mesh:
        view[mesh] = view[mesh] + values
    else:
        view.add_(values)
