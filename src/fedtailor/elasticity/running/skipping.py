"""Networks without some of their layers: a layer that a cut leaves no tensor of is skipped."""

from __future__ import annotations

from typing import Any

from torch import nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import FedtailorError


class Skipped(nn.Module):
    """Stands where a layer was left out: what it is given first, it hands on."""

    def forward(self, first: Any, *_others: Any, **_named: Any) -> Any:
        """The first input."""
        return first


def skipped_layers(module: nn.Module, cut: Cut) -> list[str]:
    """The outermost layers that a cut leaves no tensor of; layers without tensors are never skipped by themselves."""
    if not cut.absent:
        return []
    found: list[str] = []
    for path, layer in module.named_modules():
        names = [f"{path}.{name}" for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and names and not inside and cut.absent.issuperset(names):
            found.append(path)
    return found


def refuse_skipping(cut: Cut) -> None:
    """A graph that stands in for the user's class has no layers to skip."""
    if cut.absent:
        raise FedtailorError(
            f"a cut leaves out {min(cut.absent)}: pieces of this model run the traced graph of its forward, whose "
            "layers cannot be skipped (`explain` says why)"
        )
