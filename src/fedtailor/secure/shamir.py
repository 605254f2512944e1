"""Shamir's secret sharing of 32 bytes: any t of n shares tell the secret, fewer tell nothing.

A random polynomial of degree t - 1 over the integers modulo a prime has the secret as its value at 0; share x is its
value at x. (Shamir, "How to share a secret", 1979.)
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

from fedtailor.errors import require

SECRET_BYTES = 32
PRIME = 2**521 - 1  # a Mersenne prime above every secret
SHARE_BYTES = 66


def shares_of(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """A share for each holder, whose number is above 0."""
    require(len(secret) == SECRET_BYTES, "secret", len(secret), f"{SECRET_BYTES} bytes")
    require(1 <= threshold <= len(set(holders)), "threshold", threshold, f"from 1 to {len(set(holders))}")
    require(min(holders) > 0, "holders", min(holders), "numbers above 0: the value at 0 is the secret itself")
    coefficients = [
        int.from_bytes(secret, "little"),
        *(secrets.randbelow(PRIME) for _ in range(threshold - 1)),
    ]
    found = {}
    for holder in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * holder + coefficient) % PRIME
        found[holder] = value.to_bytes(SHARE_BYTES, "little")
    return found


def secret_of(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret, from any ``threshold`` shares: Lagrange's interpolation at 0."""
    require(len(shares) >= threshold, "shares", len(shares), f"at least {threshold}")
    chosen = dict(sorted(shares.items())[:threshold])
    factors = _factors(tuple(chosen))
    total = sum(
        int.from_bytes(share, "little") * factor
        for share, factor in zip(chosen.values(), factors, strict=True)
    )
    total %= PRIME
    require(total < 256**SECRET_BYTES, "shares", len(shares), "shares of one secret of 32 bytes")
    return total.to_bytes(SECRET_BYTES, "little")


@lru_cache(maxsize=8)
def _factors(holders: tuple[int, ...]) -> tuple[int, ...]:
    """By what the share of each is multiplied; a round asks for many secrets from the same holders."""
    found = []
    for holder in holders:
        above = below = 1
        for other in holders:
            if other != holder:
                above, below = above * other % PRIME, below * (other - holder) % PRIME
        found.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(found)
