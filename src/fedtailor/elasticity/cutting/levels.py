"""Masks of single weights: nested ones, for all of which together one byte per weight is enough.

The *level* of a weight says how many times it survived pruning. Mask number k keeps the weights of level k and above,
so every mask lies inside the ones before it, and mask 0 keeps everything. Tensors that are not in the map are never
pruned.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from fedtailor.errors import FedtailorError, require

DEEPEST = 255  # what fits into a byte


@dataclass(frozen=True, eq=False)
class Levels:
    """The level of every weight that can be pruned: uint8 tensors of the shapes of the full model's tensors."""

    maps: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, levels in self.maps.items():
            if levels.dtype != torch.uint8:
                raise FedtailorError(f"levels of {name} are of type {levels.dtype}: expected torch.uint8")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Levels) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    @cached_property
    def digest(self) -> str:
        """Sixteen hexadecimal digits that stand for the whole map."""
        found = hashlib.blake2b(digest_size=8)
        for name, levels in sorted(self.maps.items()):
            found.update(f"{name}{tuple(levels.shape)};".encode())
            found.update(levels.cpu().contiguous().numpy().data)
        return found.hexdigest()

    @cached_property
    def counts(self) -> dict[str, tuple[int, ...]]:
        """For each tensor, how many of its weights mask 0, 1, 2 ... keeps; masks beyond the last keep none."""
        found = {}
        for name, levels in self.maps.items():
            exact = torch.bincount(levels.reshape(-1), minlength=1)
            found[name] = tuple(exact.flip(0).cumsum(0).flip(0).tolist())
        return found

    @property
    def depth(self) -> int:
        """The number of the last mask that keeps anything."""
        return max(len(kept) for kept in self.counts.values()) - 1

    def count(self, name: str, level: int) -> int:
        """How many weights of a tensor a mask keeps."""
        kept = self.counts[name]
        return kept[level] if level < len(kept) else 0

    @property
    def nbytes(self) -> int:
        """What the map takes where it rests and where it travels, without the header."""
        return sum(levels.numel() for levels in self.maps.values())


@dataclass(frozen=True)
class Mask:
    """One of the nested masks: it keeps the weights whose level is at least ``level``."""

    levels: Levels
    level: int

    def __post_init__(self) -> None:
        require(0 <= self.level <= DEEPEST, "level", self.level, f"0 to {DEEPEST}")

    def of(self, name: str) -> Tensor:
        """The mask of one tensor, made when it is asked for: only the levels are kept."""
        return self.levels.maps[name] >= self.level

    def count(self, name: str) -> int:
        """How many weights of a tensor it keeps."""
        return self.levels.count(name, self.level)

    def holds(self, inner: Mask) -> bool:
        """Whether ``inner`` is this mask or a later one of the same map; masks of different maps are not nested."""
        return self.levels == inner.levels and inner.level >= self.level

    @property
    def pruned(self) -> dict[str, int]:
        """How many weights of each tensor it leaves out."""
        return {name: levels.numel() - self.count(name) for name, levels in self.levels.maps.items()}

    def survivors(self, outer: Mask | None = None) -> dict[str, Survivors]:
        """Where its weights lie: in the full tensors, or in what a wider mask has left of them."""
        level = 0 if outer is None else outer.level
        return {name: Survivors(levels, self.level, level) for name, levels in self.levels.maps.items()}


@dataclass(frozen=True, eq=False)
class Survivors:
    """Where the weights of a mask lie in a tensor, in row-major order: an index that is made when it is used.

    With ``outer`` above 0 the tensor has been packed already, and holds the weights of that wider mask alone.
    """

    levels: Tensor
    level: int
    outer: int = 0

    @property
    def positions(self) -> Tensor:
        """One number for each weight, ascending."""
        flat = self.levels.reshape(-1)
        held = flat[flat >= self.outer] if self.outer else flat
        return (held >= self.level).nonzero().reshape(-1)

    def spread(self, packed: Tensor) -> Tensor:
        """The tensor of the full shape with zeros where the mask keeps nothing. Differentiable."""
        dense = torch.zeros(self.levels.numel(), dtype=packed.dtype, device=packed.device)
        return dense.scatter(0, self.positions.to(packed.device), packed).view(self.levels.shape)
