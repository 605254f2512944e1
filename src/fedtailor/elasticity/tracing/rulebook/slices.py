"""How channels pass through indexing: entries of tuples, slices, assignments."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rulebook.functions import meet, variants
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, lookup
from fedtailor.elasticity.tracing.units import Numbers

Path = tuple[Any, ...]


@function_rule(operator.getitem)
def item(site: Site) -> Any:
    """An entry of a tuple, or a slice of a tensor."""
    source, index = site.args[0], site.args[1]
    if not isinstance(source, Operand):
        return _numbers_of(source[index])
    entries = index if isinstance(index, tuple) else (index,)
    if any(isinstance(entry, Operand | list) for entry in entries):
        return _picked(site, source, entries)
    raw = site.node.args[1]
    paths = (
        [("args", 1, position) for position in range(len(entries))]
        if isinstance(raw, tuple)
        else [("args", 1)]
    )
    return sliced(site, source, entries, paths)


def _numbers_of(value: Any) -> Any:
    if isinstance(value, Operand):
        return value.numbers
    if isinstance(value, dict):
        return {key: _numbers_of(entry) for key, entry in value.items()}
    return tuple(_numbers_of(entry) for entry in value) if isinstance(value, tuple | list) else None


def _picked(site: Site, x: Operand, entries: Sequence[Any]) -> Any:
    """Indexed by a tensor or a list: the indexed axes stay whole; channels on the others pass if they stay last."""
    for entry in entries:
        if isinstance(entry, Operand):  # its own axes become axes of the output
            site.fix_axes(entry, range(entry.value.dim()), "is an index in")
    simple = (
        all(entry == slice(None) for entry in entries if isinstance(entry, slice)) and Ellipsis not in entries
    )
    first = [position for position, entry in enumerate(entries) if not isinstance(entry, slice)]
    if not simple or first != list(range(len(first))) or None in entries:
        return site.fix_all(f"is indexed by a tensor in {site.description}")
    site.fix_axes(x, first, "is indexed by a tensor in")
    rest = x.numbers[len(first) :]
    return (*(None,) * (site.output.dim() - len(rest)), *rest)


def sliced(site: Site, x: Operand, entries: Sequence[Any], paths: Sequence[Path]) -> Numbers:
    """The unit numbers of ``x[entries]``; bounds that cut through channels follow the cut."""
    numbers: list[Indices | None] = []
    dim = 0
    named = sum(entry is not None and entry is not Ellipsis for entry in entries)
    for entry, path in zip(entries, paths, strict=True):
        if entry is None:
            numbers.append(None)
        elif entry is Ellipsis:
            skipped = x.value.dim() - named
            numbers += x.numbers[dim : dim + skipped]
            dim += skipped
        else:
            if isinstance(entry, slice):
                numbers.append(_slice(site, x.numbers[dim], entry, path))
            elif entry not in (0, -1) or not _only_measured(site.node):
                site.units.fix(x.numbers[dim], f"is indexed by a number in {site.description}")
            dim += 1
    return (*numbers, *x.numbers[dim:])


def _only_measured(node: fx.Node) -> bool:
    """Whether the code asks a value for its shape and nothing else: any channel would do."""
    measures = [user for user in node.users if user.target in ("size", "dim") or user.target is getattr]
    return len(measures) == len(node.users) and all(
        user.target is not getattr or user.args[1] in ("shape", "device", "dtype") for user in measures
    )


def _slice(site: Site, numbers: Indices | None, entry: slice, path: Path) -> Indices | None:
    if numbers is None or entry == slice(None):
        return numbers
    step = entry.step or 1
    start, stop, _ = entry.indices(len(numbers))
    if step > 1 and len(numbers) % step == 0 and stop == len(numbers) and start < step:
        blocks = numbers.reshape(-1, step)  # every second channel: neighbours stay together
        site.units.tie(blocks[:, :1], blocks)
        return numbers[entry]
    if step != 1:
        site.units.fix(numbers, f"is sliced by numbers in {site.description}")
    for side, bound in (("start", start), ("stop", stop)):
        if not 0 < bound < len(numbers):
            continue
        written = lookup(site.node, (*path, side))
        if isinstance(written, int) and written > 0:
            site.sized((*path, side), numbers[:bound])
        else:  # computed, such as half of the channels: equal parts shrink alike
            part = math.gcd(bound, len(numbers))
            rows = numbers.reshape(-1, part)
            site.units.tie(rows[:1], rows)
            site.units.fix(numbers if part == 1 else None, f"is sliced by numbers in {site.description}")
    return numbers[entry]


@function_rule("aten::slice")
def slice_exported(site: Site) -> Numbers:
    """A slice of one axis."""
    x = site.operand()
    dim = x.dim(site.argument(1, "dim", 0))
    entry = slice(
        *(site.argument(position, name) for position, name in enumerate(("start", "end", "step"), start=2))
    )
    numbers = x.numbers[dim]
    if numbers is not None and entry.indices(len(numbers)) != (0, len(numbers), 1):
        site.units.fix(numbers, f"is sliced by numbers in {site.description}")
        numbers = numbers[entry]
    return (*x.numbers[:dim], numbers, *x.numbers[dim + 1 :])


@function_rule(operator.setitem)
def set_item(site: Site) -> Any:
    """``x[...] = y``: what is written meets what it replaces; slices must leave channels whole."""
    x, index = site.args[0], site.args[1]
    entries = index if isinstance(index, tuple) else (index,)
    if any(isinstance(entry, Operand | list) for entry in entries):
        return site.fix_all(f"is written through a tensor in {site.description}")
    paths = [("args", 1, position) for position in range(len(entries))]
    raw = site.node.args[1]
    target = Operand(
        x.value[index], sliced(site, x, entries, paths if isinstance(raw, tuple) else [("args", 1)])
    )
    if isinstance(site.args[2], Operand):
        meet(site, [target, site.args[2]], target.shape)
    return None


def _along(position: int, name: str, what: str) -> Callable[[Site], Any]:
    """A rule for functions that pick from one axis, which must stay whole; the others pass."""

    def rule(site: Site) -> Any:
        x = site.operand()
        dim = x.dim(site.argument(position, name, 0))
        for other in site.operands():
            site.fix_axes(other, (d for d in range(other.value.dim()) if other is not x or d == dim), what)
        kept = tuple(None if d == dim else numbers for d, numbers in enumerate(x.numbers))
        return kept if site.output.dim() == x.value.dim() else (*kept[:dim], *kept[dim + 1 :])

    return rule


@function_rule(*variants("gather", "take_along_dim"))
def gathered(site: Site) -> Numbers:
    """Positions on one axis are picked, which must stay whole; the other axes of table and positions are the same."""
    x, index = site.operand(), site.argument(2, "index", site.argument(1, "indices"))
    dim = x.dim(site.argument(1, "dim", site.argument(2, "dim")))
    site.fix_axes(x, (dim,), "is picked from by")
    numbers: list[Indices | None] = []
    for d, (mine, theirs) in enumerate(zip(x.numbers, index.numbers, strict=True)):
        if d != dim and x.shape[d] == index.shape[d]:
            site.join(mine, theirs, "is picked from by")
        elif d != dim:
            site.fix_axes(x, (d,), "is picked from by")
            site.fix_axes(index, (d,), "is a place in")
        numbers.append(theirs)
    return tuple(numbers)


function_rule(*variants("index_select", "select"))(_along(1, "dim", "is picked from by"))
function_rule(*variants("narrow"))(_along(1, "dim", "is cut at a number by"))


@function_rule(*variants("tril", "triu"))
def triangle(site: Site) -> Numbers:
    """Entries are kept by their position on the last two axes."""
    x = site.operand()
    site.fix_axes(x, (-1, -2), "is masked by place in")
    return x.numbers
