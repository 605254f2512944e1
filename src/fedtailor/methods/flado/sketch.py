"""A fast Johnson-Lindenstrauss transform: millions of numbers become a thousand that keep angles and lengths.

J = P H D (Ailon and Chazelle, 2006): D flips signs at random, H is the orthonormal Walsh-Hadamard matrix, P is sparse
with Gaussian entries. H is applied in place, in digits of six bits, and is never there as a matrix. Two sketches can be
compared only if both were made by the same J, so its seed belongs to every sketch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedtailor.errors import FedtailorError, require

DIGIT = 6  # bits of the index that one pass over the data transforms: 64 numbers with 64
CHUNK = 1 << 16  # numbers that are transformed at once: small enough for a processor's cache
ENTRIES = 1 << 17  # of P that are expected in all, at least one in a row


@dataclass(frozen=True)
class Transform:
    """J for vectors of ``size`` numbers, with ``rows`` numbers in a sketch; all of it follows from the seed.

    >>> sketch = Transform(size=1000, rows=256, seed=1)
    >>> sketch([torch.ones(1000)]).norm().item() / 1000 ** 0.5    # lengths stay, roughly
    0.97...
    """

    size: int
    rows: int
    seed: int

    def __post_init__(self) -> None:
        require(self.size >= 1, "size of a sketched vector", self.size, "at least 1")
        require(self.rows >= 1, "numbers in a sketch", self.rows, "at least 1")

    @property
    def padded(self) -> int:
        """The next power of two: what H is made for."""
        return 1 << max(0, self.size - 1).bit_length()

    @property
    def density(self) -> float:
        """q, the share of P's entries that are not zero: a sketch of more numbers needs fewer in each row."""
        return min(1.0, max(ENTRIES / self.rows, 1.0) / self.padded)

    def __call__(self, parts: Iterable[Tensor]) -> Tensor:
        """J z for the vector z that consists of the numbers of these tensors, one after the other."""
        vector, filled = None, 0
        for part in parts:
            if vector is None:
                vector = torch.zeros(self.padded, dtype=part.dtype)
            vector[filled : filled + part.numel()].copy_(part.detach().reshape(-1))
            filled += part.numel()
        if vector is None or filled != self.size:
            raise FedtailorError(
                f"a vector of {filled} numbers: expected {self.size}, as the transform was made"
            )
        hadamard_(self._flip_(vector))
        rows, columns, values = self._entries
        return torch.zeros(self.rows, dtype=vector.dtype).index_add_(
            0, rows, vector[columns].mul_(values.to(vector.dtype))
        )

    def adjoint(self, sketch: Tensor) -> Tensor:
        """The transposed transform: from a sketch back to a vector, D H P^T y."""
        require(sketch.shape == (self.rows,), "shape of a sketch", tuple(sketch.shape), f"({self.rows},)")
        rows, columns, values = self._entries
        vector = torch.zeros(self.padded, dtype=sketch.dtype)
        vector.index_add_(0, columns, sketch[rows].mul_(values.to(sketch.dtype)))
        return self._flip_(hadamard_(vector))[: self.size]

    def _flip_(self, vector: Tensor) -> Tensor:
        """D: flip signs in place; behind ``size`` there is nothing to flip."""
        for start in range(0, self.size, CHUNK):
            bits = np.unpackbits(self._signs[start // 8 : (start + CHUNK) // 8])
            part = vector[start : min(start + CHUNK, self.size)]
            part.mul_(torch.from_numpy(1 - 2 * bits[: len(part)].astype(np.float32)))
        return vector

    @cached_property
    def _signs(self) -> NDArray[np.uint8]:
        return np.frombuffer(self._generator(0).bytes(-(-self.size // 8)), dtype=np.uint8)

    @cached_property
    def _entries(self) -> tuple[Tensor, Tensor, Tensor]:
        """P as rows, columns and values; columns are drawn with replacement unless all of them are wanted."""
        generator, dense = self._generator(1), self.density == 1
        counts = generator.binomial(self.padded, self.density, size=self.rows)
        total = int(counts.sum())
        columns = (
            np.tile(np.arange(self.padded), self.rows)
            if dense
            else generator.integers(self.padded, size=total)
        )
        values = generator.standard_normal(total, dtype=np.float32) / math.sqrt(self.density * self.rows)
        rows = np.repeat(np.arange(self.rows), counts)
        return torch.from_numpy(rows), torch.from_numpy(columns), torch.from_numpy(values.astype(np.float32))

    def _generator(self, part: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, part])


def hadamard_(vector: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform in place, O(d log d); twice is the identity.

    >>> hadamard_(torch.tensor([1.0, 0.0, 0.0, 0.0]))
    tensor([0.5000, 0.5000, 0.5000, 0.5000])
    """
    size = vector.numel()
    require(size > 0 and size & (size - 1) == 0, "length of the vector", size, "a power of two")
    require(
        vector.dim() == 1 and vector.is_contiguous(), "vector", tuple(vector.shape), "one contiguous axis"
    )
    inner, bits = 1, size.bit_length() - 1
    while bits:
        digit = min(DIGIT, bits)
        _transform_middle(vector.view(-1, 1 << digit, inner), _small_hadamard(digit, vector.dtype))
        inner, bits = inner << digit, bits - digit
    return vector


def _transform_middle(blocks: Tensor, matrix: Tensor) -> None:
    """Multiply the middle axis by a small symmetric matrix, in place and in pieces that fit into the cache."""
    outer, radix, inner = blocks.shape
    if inner == 1:
        for rows in blocks.view(outer, radix).split(max(1, CHUNK // radix)):
            rows.copy_(rows @ matrix)
    elif radix * inner <= CHUNK:
        for part in blocks.split(max(1, CHUNK // (radix * inner))):
            part.copy_(matrix @ part)
    else:
        for block in blocks:
            for columns in block.split(max(1, CHUNK // radix), dim=1):
                columns.copy_(matrix @ columns)


@lru_cache(maxsize=32)
def _small_hadamard(digit: int, dtype: torch.dtype) -> Any:
    matrix = torch.ones(1, 1, dtype=dtype)
    for _ in range(digit):
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix / math.sqrt(1 << digit)


def cosine(one: Tensor, other: Tensor) -> float:
    """The cosine of the angle between two sketches; 0 where one of them has no direction."""
    scale = float(one.norm()) * float(other.norm())
    return float(one @ other) / scale if scale > 0 else 0.0
