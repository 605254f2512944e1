"""What a person adds to a trace: channels that stay whole, and layers that shrink together.

``trace.py`` applies it after the last rule, to the same unit numbers (``units.py``) that the rules tie and fix.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.units import Units
from fedtailor.errors import FedtailorError, unknown


@dataclass(frozen=True)
class Annotations:
    """What a person says about a module that tracing cannot know."""

    keep: Sequence[str] = ()  # layers whose channels stay, tensors that stay whole; ``*``: any part of a name
    tie: Sequence[tuple[str, str]] = ()  # pairs of layers whose output channels shrink together
    heads: str = (
        "auto"  # of channels that are split into heads: their "count" shrinks, or the "dimension" of each
    )


def annotate(units: Units, annotations: Annotations, module: nn.Module) -> None:
    """Fix and tie the unit numbers that the annotations name."""
    for pattern in annotations.keep:
        kept = [
            numbers
            for (tensor, dim), numbers in units.axes.items()
            if _stays(pattern, tensor, dim, units.producers)
        ]
        kept += [numbers for layer, numbers in units.producers.items() if _below(pattern, layer)]
        if not kept:
            layers = {name for name, _ in module.named_modules() if name}
            raise unknown("layer to keep", pattern, layers | {tensor for tensor, _ in units.axes})
        for numbers in kept:
            units.fix(numbers, f"is kept whole, as {pattern!r} asks")
    for pair in annotations.tie:
        first, second = (_output_axis(units, name) for name in pair)
        if len(first) != len(second):
            raise FedtailorError(
                f"tie {pair}: {len(first)} and {len(second)} channels cannot shrink together"
            )
        units.tie(first, second)


def _below(pattern: str, name: str) -> bool:
    """Whether a name, or a part that it lies in, is meant by a pattern."""
    return any(fnmatchcase(part, pattern) for part in (name, *_parents(name)))


def _parents(name: str) -> list[str]:
    return [name[:end] for end, letter in enumerate(name) if letter == "."]


def _stays(pattern: str, tensor: str, dim: int, producers: Mapping[str, Indices]) -> bool:
    """Whether an axis is kept: every axis of a tensor that is named, and of layers that only pass channels on.

    The columns of a layer that makes channels belong to the layer before it.
    """
    if fnmatchcase(tensor, pattern):
        return True
    owner = tensor.rpartition(".")[0]
    makes = any(part in producers for part in (owner, *_parents(owner)))
    return bool(owner) and _below(pattern, owner) and (not makes or dim == 0)


def _output_axis(units: Units, name: str) -> Indices:
    if name in units.producers:
        return units.producers[name]
    if (name, 0) in units.axes:
        return units.axes[name, 0]
    raise unknown(
        "layer to tie", name, {*units.producers, *(tensor for tensor, dim in units.axes if not dim)}
    )
