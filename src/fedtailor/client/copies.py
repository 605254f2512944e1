"""Copies of held weights at a cut that steps come back to: taken and put back by one operation for all tensors."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Where, is_prefix, scatter_index
from fedtailor.elasticity.running.pieces import Weights

MOST_CUTS = 8  # that a client remembers


class Places:
    """Where the tensors of some cuts lie inside what is held, as views to read from and write to."""

    def __init__(self, held: Weights) -> None:
        self.held = held
        self._known: dict[Cut, Weights] = {}

    def at(self, cut: Cut, table: Mapping[str, Where]) -> Weights | None:
        """Views of what a cut keeps a prefix of; None for cuts that are not likely to come again, or not prefixes."""
        if cut not in self._known:
            if cut.width is None or len(self._known) == MOST_CUTS:
                return None
            inside = {name: where for name, where in table.items() if name in self.held}
            if not all(map(is_prefix, inside.values())):
                return None
            with torch.no_grad():
                self._known[cut] = {n: scatter_index(self.held[n], where)[0] for n, where in inside.items()}
        return self._known[cut]


class Copies:
    """Copies at such a cut; with every step they are filled anew."""

    def __init__(self, leaves: Weights, places: Weights) -> None:
        self.leaves = leaves
        names = [name for name in leaves if name in places]
        self._copies: list[Tensor] = [leaves[name] for name in names]
        self._views: list[Tensor] = [places[name] for name in names]

    @torch.no_grad()
    def filled(self) -> Weights:
        """With what is held now."""
        torch._foreach_copy_(self._copies, self._views)
        return self.leaves
