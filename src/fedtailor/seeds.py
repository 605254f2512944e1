"""Randomness that is derived from (run, purpose, round, client, step) and never drawn from a global generator."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class Seeds:
    """The root of all randomness of one run.

    Two calls with the same arguments give the same numbers, in any process and in any order, so neither
    a checkpoint nor a message has to carry the state of a generator.

    >>> Seeds(1).for_("cohort", round=3) == Seeds(1).for_("cohort", round=3)
    True
    >>> Seeds(1).for_("cohort", round=3) == Seeds(1).for_("cohort", round=4)
    False
    """

    root: int

    def for_(
        self, purpose: str, *, client: int | None = None, round: int | None = None, step: int | None = None
    ) -> int:
        """A 63-bit seed for one purpose; give ``client``, ``round`` and ``step`` where the draw differs by them."""
        text = f"{self.root}|{purpose}|{round}|{client}|{step}"
        digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "little") >> 1

    def numpy(
        self, purpose: str, *, client: int | None = None, round: int | None = None, step: int | None = None
    ) -> np.random.Generator:
        """A NumPy generator for one purpose."""
        return np.random.default_rng(self.for_(purpose, client=client, round=round, step=step))

    def torch(
        self, purpose: str, *, client: int | None = None, round: int | None = None, step: int | None = None
    ) -> torch.Generator:
        """A CPU PyTorch generator for one purpose."""
        generator = torch.Generator()
        generator.manual_seed(self.for_(purpose, client=client, round=round, step=step))
        return generator

    @contextmanager
    def scope(
        self, purpose: str, *, client: int | None = None, round: int | None = None, step: int | None = None
    ) -> Iterator[None]:
        """Seed PyTorch's global generator inside the block and restore it after.

        The only place where the global generator is touched: layers such as dropout draw from nothing else.
        """
        with torch.random.fork_rng(devices=[]):
            seed = self.for_(purpose, client=client, round=round, step=step)
            # Without an accelerator, torch.manual_seed notes for each kind of one who called, with the stack as text:
            # that takes longer than a step of a small network.
            if torch.accelerator.is_available():
                torch.manual_seed(seed)
            else:
                torch.default_generator.manual_seed(seed)
            yield
