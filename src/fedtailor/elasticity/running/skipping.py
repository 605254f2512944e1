"""Networks without some of their layers: a layer that a cut leaves no tensor of is skipped."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import FedtailorError, unknown


class Skipped(nn.Module):
    """Stands where a layer was left out: what it is given first, it hands on."""

    def forward(self, first: Any, *_others: Any, **_named: Any) -> Any:
        """The first input."""
        return first


def skipped_layers(module: nn.Module, cut: Cut) -> list[str]:
    """The outermost layers that a cut leaves no tensor of; layers without tensors are never skipped by themselves."""
    if not cut.absent:
        return []
    _refuse_parts(module, cut)
    found: list[str] = []
    for path, layer in module.named_modules():
        names = [f"{path}.{name}" for name, _ in (*layer.named_parameters(), *layer.named_buffers())]
        inside = any(path.startswith(f"{outer}.") for outer in found)
        if path and names and not inside and cut.absent.issuperset(names):
            found.append(path)
    return found


def _refuse_parts(module: nn.Module, cut: Cut) -> None:
    """A name that the module does not have, or a layer of which only some tensors are left out, makes no network."""
    known: set[str] = set()
    for path, layer in module.named_modules():
        tensors = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        own = {f"{path}.{name}".removeprefix(".") for name, _ in tensors}
        gone, known = own & cut.absent, known | own
        if gone and gone != own:
            raise FedtailorError(
                f"a cut leaves out {min(gone)} and keeps {min(own - gone)}: a layer is left out whole, or not at all"
            )
    if odd := cut.absent - known:
        raise unknown("tensor to leave out", min(odd), known)


def under(path: str, layers: Collection[str]) -> bool:
    """Whether a layer is one of these, or lies inside one."""
    return any(path == layer or path.startswith(f"{layer}.") for layer in layers)


def refuse_skipping(cut: Cut) -> None:
    """A graph that stands in for the user's class has no layers to skip."""
    if cut.absent:
        raise FedtailorError(
            f"a cut leaves out {min(cut.absent)}: pieces of this model run the traced graph of its forward, whose "
            "layers cannot be skipped (`explain` says why)"
        )
