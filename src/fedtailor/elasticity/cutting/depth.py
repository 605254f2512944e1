"""Depth as a cut: where a network may end, which blocks follow each other, and what a shallow piece does without.

A shallow piece is a cut like any other: the tensors of layers that it leaves out are ``absent``. There are two kinds:

- the first blocks and an exit (DepthFL, ScaleFL): ``ending``, ``ending_at_any_of``;
- any blocks of a residual chain, in their order (NeFL): ``without_blocks``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from fedtailor.elasticity.cutting.cut import Cut

END = "end"  # the name of the module's own end among its exits


@dataclass(frozen=True)
class Exit:
    """A place where a network may end."""

    name: str  # the block behind which it leaves; ``END``: where the module ends by itself
    depth: Fraction  # the share of blocks that run before it
    absent: frozenset[str] = (
        frozenset()
    )  # what a network that ends here alone does without, other exits included


@dataclass(frozen=True)
class Chain:
    """Blocks of one container, in the order in which they run: a stage of a ResNet, the layers of a Transformer."""

    name: str
    blocks: tuple[str, ...]
    spare: tuple[
        str, ...
    ]  # those that a piece may leave out: what they hand on is shaped as what they are given


def ending(cut: Cut, at: Exit) -> Cut:
    """The same cut of a network that ends at an exit, which is the only one that it has."""
    return _shallow(cut, at.absent, at.depth)


def ending_at_any_of(cut: Cut, exits: Sequence[Exit]) -> Cut:
    """The same cut of a network with some of its exits, the deepest last: it holds what any of them needs."""
    return _shallow(cut, frozenset.intersection(*(each.absent for each in exits)), exits[-1].depth)


def without_blocks(
    cut: Cut, chains: Iterable[Chain], left_out: Collection[str], tensors: Iterable[str]
) -> Cut:
    """The same cut without some blocks; ``tensors`` are the names of all tensors of the model."""
    if not left_out:
        return replace(cut, depth=Fraction(1))
    blocks = [block for chain in chains for block in chain.blocks]
    prefixes = tuple(f"{block}." for block in left_out)
    gone = frozenset(name for name in tensors if name.startswith(prefixes))
    return _shallow(cut, gone, Fraction(len(blocks) - len(left_out), max(1, len(blocks))))


def _shallow(cut: Cut, absent: frozenset[str], depth: Fraction) -> Cut:
    return replace(cut, absent=cut.absent | absent, depth=depth, tag=f"{cut.tag}x{depth}")


def first_blocks(chain: Chain, count: int) -> tuple[str, ...]:
    """The blocks of a chain less those that it keeps beyond ``count``: the last spare ones are left out first.

    >>> chain = Chain("stage", ("a", "b", "c"), spare=("b", "c"))
    >>> first_blocks(chain, 2), first_blocks(chain, 0)
    (('a', 'b'), ('a',))
    """
    most = len(chain.blocks) - count
    gone = set(chain.spare[max(0, len(chain.spare) - most) :]) if most > 0 else set()
    return tuple(block for block in chain.blocks if block not in gone)
