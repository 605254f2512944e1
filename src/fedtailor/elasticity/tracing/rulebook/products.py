"""How products of tensors carry channels: an axis that is summed over is the same on both sides."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rulebook.functions import meet
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule
from fedtailor.elasticity.tracing.units import Numbers


@function_rule(
    torch.matmul,
    "matmul",
    operator.matmul,
    torch.bmm,
    "bmm",
    torch.mm,
    "mm",
    torch.mv,
    "mv",
    torch.dot,
    "dot",
)
def matmul(site: Site) -> Numbers:
    """(..., n, k) times (..., k, m)."""
    a, b = site.operands()
    return _matmul(site, a, b)


def _matmul(site: Site, a: Operand, b: Operand) -> Numbers:
    vector = b.value.dim() == 1
    site.join(a.numbers[-1], b.numbers[-1 if vector else -2], "is multiplied with what cannot shrink in")
    site.mark("masked")
    rows = a.numbers[-2:-1]
    columns = () if vector else b.numbers[-1:]
    left = Operand(a.value.sum(dim=tuple(range(-min(2, a.value.dim()), 0))), a.numbers[:-2])
    right = Operand(b.value.sum(dim=tuple(range(-min(2, b.value.dim()), 0))), b.numbers[:-2])
    batch = site.output.shape[: site.output.dim() - len(rows) - len(columns)]
    return (*meet(site, [left, right], batch), *rows, *columns)


@function_rule(torch.addmm, "addmm", torch.baddbmm, "baddbmm", torch.addbmm)
def added_product(site: Site) -> Numbers:
    """Something plus a product."""
    added, a, b = site.operands()[:3]
    if site.output.dim() != a.value.dim():  # addbmm sums over the batch, which never shrinks
        a, b = (Operand(x.value[0], x.numbers[1:]) for x in (a, b))
    product = Operand(site.output, _matmul(site, a, b))
    return meet(site, [added, product], site.output.shape)


@function_rule(torch.outer, "outer")
def outer(site: Site) -> Numbers:
    """Every entry of one vector times every entry of the other."""
    a, b = site.operands()
    return (a.numbers[0], b.numbers[0])


@function_rule(torch.einsum)
def einsum(site: Site) -> Numbers:
    """Axes with the same letter are the same; letters that the output lacks are summed over."""
    operands = site.operands()
    inputs, outputs = _letters(site.args[0], [x.value.dim() for x in operands], site.output.dim())
    found: dict[str, list[Indices | None]] = {}
    for letters, x in zip(inputs, operands, strict=True):
        for letter, numbers, size in zip(letters, x.numbers, x.shape, strict=True):
            if size > 1 or numbers is not None:
                found.setdefault(letter, []).append(numbers)
    for letter, several in found.items():
        first = next((numbers for numbers in several if numbers is not None), None)
        for numbers in several:
            site.join(
                first, numbers, "is multiplied with what cannot shrink in"
            ) if first is not numbers else None
        found[letter] = [first]
    if any(numbers[0] is not None and letter not in outputs for letter, numbers in found.items()):
        site.mark("masked")
    return tuple(found.get(letter, [None])[0] for letter in outputs)


def _letters(equation: str, dims: Sequence[int], out: int) -> tuple[list[list[str]], list[str]]:
    """The letter of every axis of every operand and of the output; an ellipsis gets numbered letters of its own.

    >>> _letters("...ij,jk->...ik", [3, 2], 3)
    ([['...-1', 'i', 'j'], ['j', 'k']], ['...-1', 'i', 'k'])
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    parts = left.split(",")
    if not arrow:  # implicit: letters that occur once, in alphabetical order
        right = "..." * ("..." in left) + "".join(
            sorted(c for c in set(left) - set(",.") if left.count(c) == 1)
        )
    return [_expand(part, dim) for part, dim in zip(parts, dims, strict=True)], _expand(right, out)


def _expand(part: str, dim: int) -> list[str]:
    before, dots, after = part.partition("...")
    hidden = dim - len(before) - len(after) if dots else 0
    return [*before, *(f"...{index - hidden}" for index in range(hidden)), *after]
