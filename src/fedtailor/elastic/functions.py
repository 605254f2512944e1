"""How functions and tensor methods carry channels: element-wise, reshaping, joining, pooling."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedtailor.elastic.groups import Indices
from fedtailor.elastic.layers import fix_axes, operand, spatial
from fedtailor.elastic.rules import Operand, Site, function_rule, layer_rule, plain
from fedtailor.elastic.units import Labels

ELEMENTWISE = (
    "abs add addcdiv addcmul clamp clip cos div dropout elu erf exp float floor gelu half hardsigmoid hardswish "
    "hardtanh leaky_relu log log1p logsigmoid masked_fill maximum minimum mish mul neg pow reciprocal relu relu6 "
    "rsqrt selu sigmoid silu sin softplus softsign sqrt square sub tanh threshold true_divide type_as where "
    "alpha_dropout dropout1d dropout2d dropout3d feature_alpha_dropout"
).split()
OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.pow, operator.neg,
    operator.iadd, operator.isub, operator.imul, operator.itruediv,
)    # fmt: skip


def _variants(*names: str) -> list[Any]:
    """The torch function, the functional, the tensor method and the in-place method of each name."""
    found: list[Any] = []
    for name in names:
        found += [getattr(home, name) for home in (torch, F) if hasattr(home, name)]
        found += [method for method in (name, f"{name}_") if hasattr(Tensor, method)]
    return found


@function_rule(*OPERATORS, *_variants(*ELEMENTWISE))
def elementwise(site: Site) -> Labels:
    """Tensors that meet element by element share their channels, axis by axis."""
    return meet(site, site.operands(), site.output.shape)


def meet(site: Site, operands: Sequence[Operand], shape: Sequence[int]) -> Labels:
    """Tie the axes of broadcast tensors; channels that meet something that cannot shrink cannot either."""
    labels: list[Indices | None] = []
    for dim in range(-len(shape), 0):
        present = [x for x in operands if -dim <= len(x.shape) and x.shape[dim] == shape[dim]]
        labelled = [x.labels[dim] for x in present if x.labels[dim] is not None]
        if labelled and len(labelled) < len(present) and shape[dim] > 1:
            for numbers in labelled:
                site.units.fix(numbers, f"meets something that cannot shrink in {site.place}")
        for other in labelled[1:]:
            site.units.tie(labelled[0], other)    # type: ignore[arg-type, type-var]
        labels.append(labelled[0] if labelled else None)
    return tuple(labels)


@function_rule("contiguous", "detach", "clone", torch.clone, "to", "cpu", "cuda", torch.detach)
def same(site: Site) -> Labels:
    """Nothing moves."""
    return operand(site).labels


@function_rule("size", "dim", "numel", "ndimension", getattr, len, operator.floordiv, operator.mod, math.sqrt, int)
def not_a_tensor(site: Site) -> Any:
    """Sizes and numbers carry no channels; ``x.T`` does."""
    if isinstance(site.output, Tensor):
        x = operand(site)
        if site.args[1:2] == ("T",):
            return x.labels[::-1]
        if site.args[1:2] == ("mT",):
            return (*x.labels[:-2], x.labels[-1], x.labels[-2])
        return site.fix_all(f"reaches {site.place}")
    return None


@function_rule(operator.getitem)
def item(site: Site) -> Any:
    """An entry of a tuple, or a slice of a tensor."""
    source, index = site.args[0], site.args[1]
    if not isinstance(source, Operand):
        chosen = source[index] if isinstance(source, tuple) else None
        if isinstance(chosen, Operand):
            return chosen.labels
        return tuple(part.labels for part in chosen) if isinstance(chosen, tuple) else None
    entries = index if isinstance(index, tuple) else (index,)
    if any(isinstance(entry, Operand | list) for entry in entries):
        return site.fix_all(f"is indexed by a tensor in {site.place}")
    return _slice(site, source, entries)


def _slice(site: Site, x: Operand, entries: Sequence[Any]) -> Labels:
    labels: list[Indices | None] = []
    dim = 0
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    for entry in entries:
        if entry is None:
            labels.append(None)
        elif entry is Ellipsis:
            skipped = x.value.dim() - named
            labels += x.labels[dim : dim + skipped]
            dim += skipped
        else:
            numbers = x.labels[dim]
            if isinstance(entry, slice) and entry != slice(None) and numbers is not None:
                site.units.fix(numbers, f"is sliced by a number in {site.place}")
                numbers = numbers[entry]
            if isinstance(entry, int):
                site.units.fix(numbers, f"is indexed by a number in {site.place}")
            else:
                labels.append(numbers)
            dim += 1
    return (*labels, *x.labels[dim:])


@function_rule(torch.flatten, "flatten", torch.reshape, "reshape", "view", "unflatten", torch.unflatten, "view_as")
def reshape(site: Site) -> Labels:
    """Splits and merges axes; a size that the code gives as a number cannot follow a cut."""
    x = operand(site)
    sizes = _written_sizes(site)
    labels = reshaped(site, x, site.output.shape, sizes)
    for numbers, written in zip(labels, sizes, strict=True):
        if numbers is not None and isinstance(written, int) and written != -1:
            site.units.fix(numbers, f"is reshaped to the literal size {written} in {site.place}; write -1")
    return labels


def _written_sizes(site: Site) -> list[Any]:
    """What the code gives for each output axis: a number, -1, or something computed (``None``)."""
    count = site.output.dim()
    if site.node.target not in (torch.reshape, "reshape", "view"):
        return [None] * count
    written = site.node.args[1:]
    if len(written) == 1 and isinstance(written[0], tuple | list):
        written = tuple(written[0])
    if len(written) != count:
        return [None] * count
    return [None if isinstance(size, fx.Node) else size for size in written]


def reshaped(site: Site, x: Operand, shape: Sequence[int], written: Sequence[Any]) -> Labels:
    """Labels after a reshape: walk both shapes, matching runs of axes with equal products."""
    labels: list[Indices | None] = []
    i = j = 0
    while i < len(x.shape) or j < len(shape):
        i_end, j_end = i + 1, j + 1
        before, after = math.prod(x.shape[i:i_end]), math.prod(shape[j:j_end])
        while before != after:
            if before < after:
                before, i_end = before * x.shape[i_end], i_end + 1
            else:
                after, j_end = after * shape[j_end], j_end + 1
        labels += _regroup(site, x, range(i, min(i_end, len(x.shape))), shape[j:j_end], written[j:j_end])
        i, j = i_end, j_end
    return tuple(labels)


def _regroup(
    site: Site, x: Operand, dims: Sequence[int], shape: Sequence[int], written: Sequence[Any]
) -> list[Indices | None]:
    """One run of axes that becomes another run of the same product."""
    labelled = [dim for dim in dims if x.labels[dim] is not None]
    if len(labelled) != 1:
        fix_axes(site, x, labelled, "is merged with other channels by")
        return [None] * len(shape)
    numbers = x.labels[labelled[0]]
    assert numbers is not None
    spread = numbers.reshape([-1 if dim == labelled[0] else 1 for dim in dims])
    spread = np.broadcast_to(spread, [x.shape[dim] for dim in dims]).reshape(tuple(shape))
    wide = [position for position, size in enumerate(shape) if size > 1]
    if not wide:
        wide = [len(shape) - 1]
    inferred = [position for position in wide if position < len(written) and written[position] == -1]
    carrier = (inferred or wide)[-1]    # inside heads rather than whole heads: the last axis carries the channels
    rows = np.moveaxis(spread, carrier, -1).reshape(-1, shape[carrier])
    if len(rows) > 1:
        site.units.tie(rows[:1], rows)
    return [np.ascontiguousarray(rows[0]) if position == carrier else None for position in range(len(shape))]


@layer_rule(nn.Flatten, nn.Unflatten)
def flatten_layer(site: Site) -> Labels:
    """As the function."""
    labels = reshaped(site, operand(site), site.output.shape, [None] * site.output.dim())
    if isinstance(site.layer, nn.Unflatten):
        for numbers in labels:
            site.units.fix(numbers, f"is reshaped to a literal size by {site.place}")
    return labels


@function_rule("squeeze", "unsqueeze", torch.squeeze, torch.unsqueeze)
def squeeze(site: Site) -> Labels:
    """Axes of size one come and go."""
    x = operand(site)
    if site.output.dim() > x.value.dim():
        at = site.argument(1, "dim") % site.output.dim()
        return (*x.labels[:at], None, *x.labels[at:])
    dims = site.argument(1, "dim")
    chosen = range(x.value.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {d % x.value.dim() for d in chosen if x.shape[d] == 1}
    return tuple(labels for dim, labels in enumerate(x.labels) if dim not in gone)


@function_rule("permute", torch.permute)
def permute(site: Site) -> Labels:
    """Axes in another order."""
    order = site.args[1] if isinstance(site.argument(1, "dims"), tuple | list) else site.args[1:]
    x = operand(site)
    return tuple(x.labels[dim] for dim in (site.kwargs.get("dims") or order))


@function_rule("transpose", torch.transpose, torch.swapaxes, "swapaxes", "t", torch.t)
def transpose(site: Site) -> Labels:
    """Two axes change places."""
    labels = list(operand(site).labels)
    a, b = site.argument(1, "dim0", 0), site.argument(2, "dim1", 1)
    labels[a], labels[b] = labels[b], labels[a]
    return tuple(labels)


@function_rule(torch.cat, torch.concat, torch.concatenate)
def concatenate(site: Site) -> Labels:
    """One axis is the inputs' axes in a row; the others meet."""
    parts: list[Operand] = list(site.argument(0, "tensors"))
    dim = site.argument(1, "dim", 0) % site.output.dim()
    rest = [size for d, size in enumerate(site.output.shape) if d != dim]
    others = [Operand(x.value.flatten(), tuple(n for d, n in enumerate(x.labels) if d != dim)) for x in parts]
    shapes = [torch.empty(rest, device="meta") for _ in parts]
    met = meet(site, [Operand(value, x.labels) for value, x in zip(shapes, others, strict=True)], rest)
    joined = None
    if any(x.labels[dim] is not None for x in parts):
        pieces = []
        for x in parts:
            numbers = x.labels[dim]
            if numbers is None:
                numbers = site.units.fresh(x.shape[dim])
                site.units.fix(numbers, f"is joined with channels in {site.place} and cannot shrink itself")
            pieces.append(numbers)
        joined = np.concatenate(pieces)
    return (*met[:dim], joined, *met[dim:])


@function_rule(torch.chunk, "chunk", torch.split, "split")
def chunk(site: Site) -> Any:
    """Equal pieces of an axis shrink alike, so that every cut splits in the same places."""
    x = operand(site)
    dim = site.argument(2, "dim", 0) % x.value.dim()
    numbers = x.labels[dim]
    if numbers is None:
        return tuple(plain(part) if x.labels == plain(x.value) else _without(x.labels, dim) for part in site.output)
    lengths = {part.shape[dim] for part in site.output}
    by_number = site.node.target in (torch.split, "split") and not isinstance(site.node.args[1], fx.Node)
    if len(lengths) != 1 or by_number:
        site.units.fix(numbers, f"is split at literal places in {site.place}")
        pieces = np.split(numbers, np.cumsum([part.shape[dim] for part in site.output])[:-1])
    else:
        rows = numbers.reshape(len(site.output), -1)
        site.units.tie(rows[:1], rows)
        pieces = list(rows)
    return tuple((*x.labels[:dim], piece, *x.labels[dim + 1 :]) for piece in pieces)


def _without(labels: Labels, dim: int) -> Labels:
    return (*labels[:dim], None, *labels[dim + 1 :])


@function_rule(*_variants("mean", "sum", "amax", "amin", "var", "std", "softmax", "log_softmax", "norm", "max", "argmax"))
def reduction(site: Site) -> Any:
    """Axes that are mixed must stay whole; the others pass through."""
    x = operand(site)
    if not isinstance(site.output, Tensor):
        return site.fix_all(f"is mixed by {site.place}")
    dims = site.argument(1, "dim")
    if dims is None:
        return site.fix_all(f"is mixed by {site.place}")
    mixed = {d % x.value.dim() for d in ([dims] if isinstance(dims, int) else dims)}
    fix_axes(site, x, mixed, "is mixed by")
    if site.output.dim() == x.value.dim():
        return tuple(None if site.output.shape[d] == 1 else labels for d, labels in enumerate(x.labels))
    return tuple(labels for dim, labels in enumerate(x.labels) if dim not in mixed)


def _spatial_function(axes: int | None) -> Any:
    def rule(site: Site) -> Labels:
        return spatial(site, operand(site).value.dim() - 2 if axes is None else axes)

    return rule


for _axes in (1, 2, 3):
    _names = [f"{kind}_pool{_axes}d" for kind in ("max", "avg", "adaptive_avg", "adaptive_max", "lp")]
    function_rule(*(getattr(F, name) for name in _names if hasattr(F, name)))(_spatial_function(_axes))
    function_rule(*(getattr(torch, name) for name in _names if hasattr(torch, name)))(_spatial_function(_axes))
function_rule(F.interpolate)(_spatial_function(None))
