"""How channels move when axes do: reshaping, permuting, joining, splitting, repeating, padding."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rulebook.functions import meet, variants
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, layer_rule, lookup
from fedtailor.elasticity.tracing.units import Numbers

Path = tuple[Any, ...]
Written = list[tuple[Any, Path | None]]  # per output axis: what the code gives for its size, and where


@function_rule(
    "reshape",
    torch.reshape,
    "view",
    "unflatten",
    torch.unflatten,
    "flatten",
    torch.flatten,
    "view_as",
    "reshape_as",
)
def reshape(site: Site) -> Numbers:
    """Splits and merges axes; a size that the code gives as a number must follow the cut."""
    x = site.operand()
    if not isinstance(site.output, Tensor) or site.output.dtype != x.value.dtype:  # x.view(torch.int32)
        return site.fix_all(f"reaches {site.description}")  # type: ignore[no-any-return]
    written = _written_sizes(site)
    numbers = reshaped(site, x, site.output.shape, [size for size, _ in written])
    for axis, (size, path) in zip(numbers, written, strict=True):
        if path is not None and (isinstance(size, fx.Node) or size != -1):
            site.sized(path, axis)
    given = site.written(1, "shape")[0]
    for axis, place in zip(numbers, site.findings.places.get(given, ()), strict=False):
        if place is not None and lookup(*place) != -1:
            site.sized(place[1], axis, place[0])
    return numbers


def _written_sizes(site: Site) -> Written:
    """What the code gives for each output axis: a number, -1, something computed (a node), or nothing (None)."""
    count = site.output.dim()
    nothing: Written = [(None, None)] * count
    name = getattr(site.node.target, "__name__", site.node.target)
    name = name.partition(".")[0] if isinstance(name, str) else ""
    if name == "unflatten":
        given, path = site.written(2, "sizes")
        first = site.operand().dim(site.argument(1, "dim"))
        sizes = list(given) if isinstance(given, tuple | list) else []
        entries: Written = [(size, (*path, index)) for index, size in enumerate(sizes)]
        return [*nothing[:first], *entries, *nothing[first + len(entries) :]]
    if name not in ("reshape", "view"):
        return nothing
    given, path = site.written(1, "shape" if name == "reshape" else "size")
    if isinstance(given, tuple | list):
        entries = [(size, (*path, index)) for index, size in enumerate(given)]
    else:
        entries = [(size, ("args", index)) for index, size in enumerate(site.node.args) if index]
    return entries if len(entries) == count else nothing


@layer_rule(nn.Flatten)
def flatten_layer(site: Site) -> Numbers:
    """As the function."""
    return reshaped(site, site.operand(), site.output.shape, [None] * site.output.dim())


@layer_rule(nn.Unflatten)
def unflatten_layer(site: Site) -> Numbers:
    """As the function; the layer holds the sizes."""
    sizes = site.layer.unflattened_size
    if not isinstance(site.layer.dim, int) or not all(isinstance(size, int) for size in sizes):
        return site.fix_all(f"is reshaped by name in {site.description}")  # type: ignore[no-any-return]
    first = site.operand().dim(site.layer.dim)
    written = [*(None,) * first, *sizes, *(None,) * (site.output.dim() - first - len(sizes))]
    numbers = reshaped(site, site.operand(), site.output.shape, written)
    for index, size in enumerate(sizes):
        if size != -1:
            site.follow("unflattened_size", numbers[first + index], index)
    return numbers


def reshaped(site: Site, x: Operand, shape: Sequence[int], written: Sequence[Any]) -> Numbers:
    """The numbers after a reshape: walk both shapes, matching runs of axes with equal products."""
    numbers: list[Indices | None] = []
    i = j = 0
    while i < len(x.shape) or j < len(shape):
        i_end, j_end = min(i + 1, len(x.shape)), min(j + 1, len(shape))
        before, after = math.prod(x.shape[i:i_end]), math.prod(shape[j:j_end])
        while before != after:
            if before < after:
                before, i_end = before * x.shape[i_end], i_end + 1
            else:
                after, j_end = after * shape[j_end], j_end + 1
        numbers += _regroup(site, x, range(i, i_end), shape[j:j_end], written[j:j_end])
        i, j = i_end, j_end
    return tuple(numbers)


def _regroup(
    site: Site, x: Operand, dims: Sequence[int], shape: Sequence[int], written: Sequence[Any]
) -> list[Indices | None]:
    """One run of axes that becomes another run of the same product."""
    numbered = [dim for dim in dims if x.numbers[dim] is not None]
    if (
        len(numbered) > 1
    ):  # heads of keys, each repeated for several queries: the copies are no channels of their own
        own = [dim for dim in numbered if int(x.numbers[dim][0]) not in site.units.copies]  # type: ignore[index]
        numbered = own or numbered[:1]
    if len(numbered) != 1 or not shape:
        site.fix_axes(x, numbered, "is merged with other channels by")
        return [None] * len(shape)
    numbers = x.numbers[numbered[0]]
    assert numbers is not None
    spread = numbers.reshape([-1 if dim == numbered[0] else 1 for dim in dims])
    spread = np.broadcast_to(spread, [x.shape[dim] for dim in dims]).reshape(tuple(shape))
    exact = _varying(spread)
    carrier = _carrier(site, shape, written) if exact is None else exact
    rows = np.moveaxis(spread, carrier, -1).reshape(-1, shape[carrier])
    if len(rows) > 1 and exact is None:
        site.units.tie(rows[:1], rows)
    return [np.ascontiguousarray(rows[0]) if position == carrier else None for position in range(len(shape))]


def _varying(spread: Indices) -> int | None:
    """The axis along which alone units differ: channels that were flattened come back to their own axis."""
    varying = [
        dim for dim, size in enumerate(spread.shape) if size > 1 and (np.diff(spread, axis=dim) != 0).any()
    ]
    return varying[0] if len(varying) == 1 and spread.ndim > 1 else None


def _carrier(site: Site, shape: Sequence[int], written: Sequence[Any]) -> int:
    """Which of several axes shrinks: the one the code leaves open (-1), then one it computes, then the last.

    The last axis means that heads stay and each of them shrinks. Where the code says nothing, it is what the same layer
    does elsewhere, and tracing tries the first one too (features that become an image) and keeps what lets more of the
    model shrink. A person may choose which of heads (the last axis but one) and their dimension (the last) it is;
    queries, keys and values may stand before them.
    """
    wide = [position for position, size in enumerate(shape) if size > 1] or [len(shape) - 1]
    if site.findings.heads != "auto" and (len(wide) == 2 or (len(wide) == 3 and shape[wide[0]] == 3)):
        return wide[-2 if site.findings.heads == "count" else -1]
    inferred = [position for position in wide if written[position] == -1]
    computed = [p for p in wide if isinstance(written[p], fx.Node) and not site.constant(written[p])]
    # A size that comes from no channels is that of the batch or of space, perhaps times heads: another axis is meant.
    of_channels = [position for position in computed if site.findings.sources.get(written[position])]
    if not inferred and not of_channels and len(wide) > len(computed) > 0:
        wide, computed = [position for position in wide if position not in computed], []
    two, layer = len(wide) == 2, tuple(site.node.meta.get("nn_module_stack") or ())
    if not inferred and not computed and len(wide) > 1:
        site.findings.undecided[site.node] = None
        usual = site.findings.usual.get(layer, -1) if two else -1
        return wide[0 if site.node in site.findings.front else usual]
    chosen = (inferred or computed or wide)[-1]
    if two:  # keys are split like the queries of the same layer
        site.findings.usual.setdefault(layer, wide.index(chosen))
    return chosen


@function_rule(*variants("squeeze", "unsqueeze"))
def squeeze(site: Site) -> Numbers:
    """Axes of size one come and go."""
    x = site.operand()
    if site.output.dim() > x.value.dim():
        at = site.argument(1, "dim") % site.output.dim()
        return (*x.numbers[:at], None, *x.numbers[at:])
    dims = site.argument(1, "dim")
    chosen = range(x.value.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    gone = {x.dim(d) for d in chosen if x.shape[d] == 1}
    return tuple(numbers for dim, numbers in enumerate(x.numbers) if dim not in gone)


@function_rule("permute", torch.permute)
def permute(site: Site) -> Numbers:
    """Axes in another order."""
    order = site.argument(1, "dims")
    x = site.operand()
    return tuple(x.numbers[dim] for dim in (order if isinstance(order, tuple | list) else site.args[1:]))


@function_rule(*variants("transpose", "swapaxes", "swapdims", "t"))
def transpose(site: Site) -> Numbers:
    """Two axes are swapped."""
    numbers = list(site.operand().numbers)
    if len(numbers) > 1:
        a = site.argument(1, "dim0", site.kwargs.get("axis0", 0))
        b = site.argument(2, "dim1", site.kwargs.get("axis1", 1))
        numbers[a], numbers[b] = numbers[b], numbers[a]
    return tuple(numbers)


@function_rule(*variants("movedim", "moveaxis"))
def move(site: Site) -> Numbers:
    """Some axes go elsewhere, the others keep their order."""
    x = site.operand()
    order = torch.movedim(
        torch.empty(tuple(range(2, 2 + x.value.dim())), device="meta"), *site.args[1:], **site.kwargs
    )
    return tuple(x.numbers[size - 2] for size in order.shape)


@function_rule(torch.cat, torch.concat, torch.concatenate, torch.hstack, torch.vstack)
def concatenate(site: Site) -> Numbers:
    """One axis is the inputs' axes in a row; the others meet."""
    parts: list[Operand] = [x for x in site.argument(0, "tensors") if x.value.dim() == site.output.dim()]
    named = getattr(site.node.target, "__name__", "")
    default = {"hstack": min(1, site.output.dim() - 1)}.get(named, 0)
    dim = site.kwargs.get("axis", site.argument(1, "dim", default)) % site.output.dim()
    rest = [size for d, size in enumerate(site.output.shape) if d != dim]
    blank = torch.empty(rest, device="meta")
    met = meet(site, [Operand(blank, (*x.numbers[:dim], *x.numbers[dim + 1 :])) for x in parts], rest)
    if all(x.numbers[dim] is None for x in parts):
        return (*met[:dim], None, *met[dim:])
    pieces = []
    for x in parts:
        numbers = x.numbers[dim]
        if numbers is None:
            numbers = site.units.fresh(x.shape[dim])
            site.units.fix(numbers, f"is joined with channels in {site.description} and cannot shrink itself")
        pieces.append(numbers)
    return (*met[:dim], np.concatenate(pieces), *met[dim:])


@function_rule(torch.stack)
def stack(site: Site) -> Numbers:
    """A new axis; the others meet."""
    parts: list[Operand] = list(site.argument(0, "tensors"))
    dim = site.argument(1, "dim", 0) % site.output.dim()
    met = meet(site, parts, parts[0].shape)
    return (*met[:dim], None, *met[dim:])


@function_rule(*variants("unbind"))
def unbind(site: Site) -> Any:
    """One piece for every position of an axis, which must stay whole."""
    x = site.operand()
    dim = x.dim(site.argument(1, "dim", 0))
    site.fix_axes(x, (dim,), "is taken apart by")
    return ((*x.numbers[:dim], *x.numbers[dim + 1 :]),) * len(site.output)


@function_rule(*variants("chunk", "split", "tensor_split", "split_with_sizes"), "unsafe_chunk")
def split(site: Site) -> Any:
    """Equal pieces shrink alike, so that every cut splits at the same channels; others must be given as sizes."""
    x = site.operand()
    dim = x.dim(site.argument(2, "dim", 0))
    numbers = x.numbers[dim]
    lengths = [part.shape[dim] for part in site.output]
    if numbers is None:
        return (x.numbers,) * len(lengths)
    pieces = np.split(numbers, np.cumsum(lengths)[:-1])
    by_count = getattr(site.node.target, "__name__", site.node.target) in (
        "chunk",
        "unsafe_chunk",
        "tensor_split",
    )
    written, path = site.written(
        1, "split_size_or_sections" if site.node.target is torch.split else "split_size"
    )
    if len(set(lengths)) == 1 and not isinstance(written, tuple | list):
        rows = numbers.reshape(len(lengths), -1)
        site.units.tie(rows[:1], rows)
        if not by_count:
            site.sized(path, rows[0])
    elif isinstance(written, tuple | list) and not by_count:
        for index, piece in enumerate(pieces):
            site.sized((*path, index), piece)
    else:
        site.units.fix(numbers, f"is split into unequal pieces in {site.description}")
    return tuple((*x.numbers[:dim], piece, *x.numbers[dim + 1 :]) for piece in pieces)


@function_rule("expand", torch.broadcast_to, "broadcast_to", "expand_as", "aten::expand")
def expand(site: Site) -> Numbers:
    """Axes of size one are repeated: copies are alike, so such an axis may turn out to be channels."""
    x = site.operand()
    new = site.output.dim() - x.value.dim()
    given, path = site.written(1, "size")
    listed = isinstance(given, tuple | list)
    numbers: list[Indices | None] = []
    for dim, size in enumerate(site.output.shape):
        held = dim >= new and x.shape[dim - new] == size
        axis = x.numbers[dim - new] if held else site.units.copied(size)
        numbers.append(axis if size > 1 else None)
        step = (*path, dim) if listed else ("args", 1 + dim)
        if (listed and dim < len(given)) or 1 + dim < len(site.node.args):
            written = given[dim] if listed else site.node.args[1 + dim]
            if isinstance(written, fx.Node) or written != -1:
                site.sized(step, numbers[-1])
    return tuple(numbers)


@function_rule("repeat", torch.tile, "tile")
def repeat(site: Site) -> Numbers:
    """Whole axes one after the other."""
    x = site.operand()
    numbers: list[Indices | None] = []
    for dim, size in enumerate(site.output.shape, start=x.value.dim() - site.output.dim()):
        axis = x.numbers[dim] if dim >= 0 else None
        numbers.append(None if axis is None else np.tile(axis, size // len(axis)))
    return tuple(numbers)


@function_rule(*variants("repeat_interleave"))
def repeat_interleave(site: Site) -> Any:
    """Every position several times in a row."""
    x, times, dim = site.operand(), site.argument(1, "repeats"), site.argument(2, "dim")
    if not isinstance(times, int) or dim is None:
        return site.fix_all(f"reaches {site.description}")
    axis = x.numbers[dim]
    numbers = list(x.numbers)
    numbers[dim] = None if axis is None else np.repeat(axis, times)
    return tuple(numbers)


@function_rule(F.pad, torch._C._nn.pad, "aten::pad", "aten::constant_pad_nd")
def pad(site: Site) -> Numbers:
    """New positions at the ends; zeros next to channels are channels of their own (ResNet's option A)."""
    x = site.operand()
    numbers = list(x.numbers)
    given, path = site.written(1, "pad")
    sizes = list(site.argument(1, "pad"))
    constant = site.argument(2, "mode", "constant") == "constant" and not site.argument(3, "value")
    for pair in range(len(sizes) // 2):
        before, after = sizes[2 * pair : 2 * pair + 2]
        dim = x.value.dim() - 1 - pair
        axis = numbers[dim]
        if axis is None or not (before or after):
            continue
        if not constant or before < 0 or after < 0 or not isinstance(given, tuple | list):
            site.units.fix(axis, f"is padded by {site.description}")
            numbers[dim] = None
            continue
        front, back = site.units.fresh(before), site.units.fresh(after)
        site.sized((*path, 2 * pair), front)
        site.sized((*path, 2 * pair + 1), back)
        numbers[dim] = np.concatenate([front, axis, back])
    return tuple(numbers)
