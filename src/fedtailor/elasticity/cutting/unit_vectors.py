"""One number per channel unit, laid out along the axes of tensors: probabilities, gates, factors.

All units of all elastic groups stand in one vector, group after group. A layer *reads* the units on the input axis of
its weights and *makes* those on the feature axis of its output: a gate of zero on all that reads a unit drops it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import kept_positions
from fedtailor.elasticity.groups import ChannelGroups, Extent, Indices

Vector = NDArray[np.float64]


@dataclass(frozen=True)
class Place:
    """Where units lie: an axis of a tensor, and the unit at each of its positions (``UnitMap.total``: none)."""

    tensor: str
    dim: int
    extent: Extent
    units: Tensor


class UnitMap:
    """The units of a model in one vector, and where its tensors and layers hold them."""

    def __init__(self, groups: ChannelGroups, module: nn.Module) -> None:
        self.groups = groups
        self.slices: dict[str, slice] = {}
        start = 0
        for group in groups.elastic:
            self.slices[group] = slice(start, start + groups.counts[group])
            start += groups.counts[group]
        self.total = start
        layers = dict(module.named_modules())
        self.reads = [
            place
            for path, layer in layers.items()
            for name, dim in _read_axes(layer)
            if (place := self._place(f"{path}.{name}" if path else name, dim)) is not None
        ]
        self.makes: dict[str, tuple[Place, int, int]] = {}  # layer -> place, output axis, how often repeated
        for path in groups.producers:
            for name, dim, output, times in _made_axis(layers[path]):
                place = self._place(f"{path}.{name}" if path else name, dim)
                if place is not None:
                    self.makes[path] = (place, output, times)

    def by_group(self, vector: Vector) -> dict[str, Vector]:
        """The parts of a vector of all units, by group."""
        return {group: vector[part] for group, part in self.slices.items()}

    def on(self, place: Place, cut: Cut) -> Tensor:
        """The units on an axis at a cut; ``total`` where none lies."""
        kept = kept_positions(place.extent, cut, self.groups.counts)
        return place.units[:kept] if isinstance(kept, int) else place.units[torch.from_numpy(kept)]

    def along(self, values: Tensor, place: Place, cut: Cut) -> Tensor:
        """The values of the units on an axis at a cut, and 1 where no unit lies. Differentiable."""
        return torch.cat([values, values.new_ones(1)])[self.on(place, cut)]

    def gated(self, weights: Mapping[str, Tensor], values: Tensor, cut: Cut) -> dict[str, Tensor]:
        """The weights of a cut with everything that reads unit j multiplied by value j. Differentiable."""
        gated = dict(weights)
        for place in self.reads:
            if place.tensor in gated:
                weight = gated[place.tensor]
                shape = [1] * weight.dim()
                shape[place.dim] = -1
                gated[place.tensor] = weight * self.along(values, place, cut).view(shape).to(weight.dtype)
        return gated

    def on_outputs(self, values: Tensor, cut: Cut) -> dict[str, Tensor]:
        """For each layer that makes units the factors of its output at a cut, shaped to be multiplied with it.

        A layer whose output axis is not known gets the mean over the groups that it makes.
        """
        factors = {}
        for layer, made in self.groups.producers.items():
            parts = [values[self.slices[group]] for group in made if group in self.slices]
            if not parts:
                continue
            if layer in self.makes:
                place, output, times = self.makes[layer]
                along = self.along(values, place, cut).repeat(times)
                factors[layer] = along.view(-1, *(1,) * (-output - 1))
            else:
                factors[layer] = torch.cat(parts).mean()
        return factors

    def made_by(self, tensor: str) -> Place | None:
        """The axis of a tensor on which the units lie that it makes, rather than reads."""
        read = {place.dim for place in self.reads if place.tensor == tensor}
        dims = [dim for dim in range(len(self.groups.extents[tensor])) if dim not in read]
        places = (self._place(tensor, dim) for dim in dims)
        return next((place for place in places if place is not None), None)

    def _place(self, tensor: str, dim: int) -> Place | None:
        extents = self.groups.extents.get(self.groups.ties.get(tensor, tensor), ())
        if dim >= len(extents):
            return None
        units = self._units(extents[dim])
        if (units == self.total).all():
            return None
        return Place(self.groups.ties.get(tensor, tensor), dim, extents[dim], torch.from_numpy(units))

    def _units(self, extent: Extent) -> Indices:
        units = np.full(extent.length, self.total, dtype=np.int64)
        for axis in extent.axes:
            if axis.group in self.slices:
                count = self.groups.counts[axis.group]
                own = np.repeat(np.arange(count) + self.slices[axis.group].start, axis.repeat)
                units[axis.positions(range(count))] = np.tile(own, axis.blocks)
        return units


def _read_axes(layer: nn.Module) -> Iterator[tuple[str, int]]:
    """The axes of a layer's weights along which it reads its input."""
    if isinstance(layer, _ConvTransposeNd):
        yield "weight", 0
    elif isinstance(layer, nn.Linear | _ConvNd):
        yield "weight", 1
    elif isinstance(layer, nn.Bilinear):
        yield from (("weight", 1), ("weight", 2))
    elif isinstance(layer, nn.RNNBase | nn.RNNCellBase | nn.MultiheadAttention):
        wanted = (
            "weight_ih",
            "weight_hh",
            "in_proj_weight",
            "q_proj_weight",
            "k_proj_weight",
            "v_proj_weight",
        )
        yield from ((name, 1) for name, _ in layer.named_parameters(recurse=False) if name.startswith(wanted))


def _made_axis(layer: nn.Module) -> Iterator[tuple[str, int, int, int]]:
    """The axis of a weight that holds the units of a layer's output: tensor, axis, output axis, repetitions."""
    if isinstance(layer, _ConvNd):
        transposed = isinstance(layer, _ConvTransposeNd)
        if not transposed or layer.groups == 1:
            yield "weight", int(transposed), -1 - len(layer.kernel_size), 1
    elif isinstance(layer, nn.Linear | nn.Bilinear):
        yield "weight", 0, -1, 1
    elif isinstance(layer, nn.Embedding | nn.EmbeddingBag):
        yield "weight", 1, -1, 1
    elif isinstance(layer, nn.RNNBase):
        yield "weight_hh_l0", 1, -1, 1 + layer.bidirectional
    elif isinstance(layer, nn.RNNCellBase):
        yield "weight_hh", 1, -1, 1
    elif isinstance(layer, nn.MultiheadAttention):
        yield "out_proj.weight", 0, -1, 1
