"""The masked full module: what a cut must compute, worked out without cutting anything.

Weights into and out of dropped channels are zero and every layer has its full size. Three things a mask cannot express
are computed as the small network would (``rules.Mode``): statistics over channels, products of two activations, and
numbers that the code derives from sizes, such as the scale of attention. ``trace.py`` says which channels belong
together; ``../check.py`` compares random cuts with this module before it believes so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.example import inputs_by_name
from fedtailor.elasticity.tracing.recorder import FACTORIES
from fedtailor.elasticity.tracing.rules import Operand
from fedtailor.elasticity.tracing.trace import Recording, Traced

ATTENTION = "scaled_dot_product_attention"


class Reference:
    """Runs the traced graph at full size with masked weights."""

    def __init__(
        self, traced: Traced, recording: Recording, small: nn.Module, cut: Cut, weights: Mapping[str, Tensor]
    ) -> None:
        """``small`` is the shell at the sizes of ``cut``; ``weights`` are full and may lack second names."""
        self.traced = traced
        self.recording = recording
        self.small = small
        self.dropped = traced.solution.dropped(cut.channels)
        self.weights = weights
        room = dict([*recording.network.named_parameters(), *recording.network.named_buffers()])
        self.full = {name: self._masked(name, value, room.get(name)) for name, value in weights.items()}
        self.values: dict[fx.Node, Any] = {}  # of the masked full module
        # Of the small network: sizes and what follows from them; tensors as empty ones of the small shape.
        self.small_values: dict[fx.Node, Any] = {}

    @torch.no_grad()
    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """All tensors of the output, in order."""
        leaves = iter(tree_leaves((args, dict(kwargs))))
        by_name = inputs_by_name(module, args, kwargs)
        for node in self.recording.network.graph.nodes:
            if node.op == "output":
                return [
                    v
                    for v in tree_leaves(fx.node.map_arg(node.args, self._gathered))
                    if isinstance(v, Tensor)
                ]
            if node.op == "placeholder":
                default = node.args[0] if node.args else None
                exported = str(node.target) not in by_name and not node.args
                self.values[node] = next(leaves) if exported else by_name.get(str(node.target), default)
            else:
                self.values[node] = self._run(node)
        raise AssertionError("a graph ends with its output")

    def _value(self, node: fx.Node) -> Any:
        return self.values[node]

    def _run(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return self._attribute(node)
        known, mode = self.recording.known.get(node), self.traced.findings.modes.get(node)
        if not any(isinstance(leaf, Operand) for leaf in tree_leaves(known)) and node.op != "call_module":
            return self._both(node)
        if mode == "small":
            return self._map(self._call(node, self._gathered), known, self._spread)
        if mode == "masked":
            return self._call(node, self._silenced)
        value = self._call(node, self._arithmetic if mode == "arithmetic" else self._value)
        return self._map(value, known, self._calmed)

    def _both(self, node: fx.Node) -> Any:
        """What the code computes from sizes, as the small network and as the full module have it."""
        value = self._call(node, self._value)
        try:
            self.small_values[node] = self._call(node, self._small_value)
        except (RuntimeError, NotImplementedError):
            self.small_values[node] = value  # it needs the values of tensors, and here they are empty
        return value

    def _attribute(self, node: fx.Node) -> Any:
        name = str(node.target)
        if name in self.recording.sizes:
            self.small_values[node] = int(self._kept(self.recording.sizes[name]).sum())
        first = self.traced.groups.ties.get(name, name)
        return self.full[first] if first in self.full else attrgetter(name)(self.recording.network)

    def _call(self, node: fx.Node, of: Callable[[fx.Node], Any]) -> Any:
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), of)
        if node.op == "call_module":
            return self._layer(node, args, kwargs, small=of == self._gathered)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        if ATTENTION in str(node.target) and kwargs.get("scale") is None and len(args) < 8:
            query: Operand = self.recording.known[node.args[0]]  # type: ignore[index]
            kwargs = {**kwargs, "scale": 1 / math.sqrt(self._shape(query)[-1])}
        if node.target in FACTORIES and kwargs.get("device") is None:
            kwargs = {**kwargs, "device": self._device()}
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _layer(self, node: fx.Node, args: Any, kwargs: Any, small: bool) -> Any:
        path = str(node.target)
        owner = self.small if small else self.recording.network
        layer = owner.get_submodule(path)
        ties = self.traced.groups.ties
        names = [name for name, _ in [*layer.named_parameters(), *layer.named_buffers()]]
        firsts = {name: ties.get(f"{path}.{name}", f"{path}.{name}") for name in names}
        held = {name: self._cut(first) if small else self.full[first] for name, first in firsts.items()}
        if isinstance(layer, nn.MultiheadAttention):
            held = self._rescaled(layer, held, self.recording.known[node.args[0]])  # type: ignore[index]
        return functional_call(layer, held, args, kwargs, tie_weights=False)

    def _rescaled(
        self, layer: nn.MultiheadAttention, held: dict[str, Tensor], query: Operand
    ) -> dict[str, Tensor]:
        """Queries multiplied so that scores are divided by the root of the kept head size."""
        factor = math.sqrt(layer.embed_dim / self._shape(query)[-1])
        scaled = dict(held)
        for name in ("in_proj_weight", "in_proj_bias", "q_proj_weight"):
            if name in held:
                scaled[name] = held[name].clone()
                scaled[name][: layer.embed_dim] *= factor
        return scaled

    # What a node hands on, as the different modes want it

    def _small_value(self, node: fx.Node) -> Any:
        """As the small network has it."""
        if node in self.small_values:
            return self.small_values[node]
        known = self.recording.known.get(node)
        return self._map(
            self.values[node], known, lambda x, held: x.new_empty(self._shape(held), device="meta")
        )

    def _arithmetic(self, node: fx.Node) -> Any:
        """Tensors of the full module, sizes of the small network."""
        return self.small_values.get(node, self.values[node])

    def _silenced(self, node: fx.Node) -> Any:
        """Tensors with zeros in dropped channels, sizes of the small network."""
        if node in self.small_values:
            return self.small_values[node]
        return self._map(self.values[node], self.recording.known.get(node), self._zeroed)

    def _gathered(self, node: fx.Node) -> Any:
        """The kept channels of tensors, sizes of the small network."""
        if node in self.small_values:
            return self.small_values[node]
        return self._map(self.values[node], self.recording.known.get(node), self._picked)

    def _picked(self, x: Tensor, known: Operand) -> Tensor:
        for dim, numbers in enumerate(known.numbers):
            if numbers is not None:
                x = x.index_select(dim, self._positions(numbers).to(x.device))
        return x

    def _zeroed(self, x: Tensor, known: Operand) -> Tensor:
        for dim, numbers in enumerate(known.numbers):
            if numbers is not None and not self._kept(numbers).all():
                x = x.index_fill(dim, torch.from_numpy(np.flatnonzero(~self._kept(numbers))).to(x.device), 0)
        return x

    def _calmed(self, x: Tensor, known: Operand) -> Tensor:
        """Zeros where a dropped channel is no number (0 / 0): the zeros of the next weights would not silence it."""
        if not x.is_floating_point() or bool(x.sum().isfinite()):
            return x
        return self._zeroed(x, known)

    def _spread(self, x: Tensor, known: Operand) -> Tensor:
        """A small result between zeros."""
        for dim, numbers in enumerate(known.numbers):
            if numbers is not None and x.shape[dim] != len(numbers):
                shape = list(x.shape)
                shape[dim] = len(numbers)
                x = x.new_zeros(shape).index_copy(dim, self._positions(numbers).to(x.device), x)
        return x

    def _map(self, value: Any, known: Any, function: Callable[[Tensor, Operand], Tensor]) -> Any:
        """Apply to every tensor and what is known about it."""
        if isinstance(value, Tensor):
            return function(value, known) if isinstance(known, Operand) else value
        if isinstance(value, dict):
            return {key: self._map(entry, known[key], function) for key, entry in value.items()}
        if (
            isinstance(value, tuple | list)
            and isinstance(known, tuple | list)
            and not isinstance(value, torch.Size)
        ):
            parts = [self._map(entry, held, function) for entry, held in zip(value, known, strict=True)]
            if all(new is old for new, old in zip(parts, value, strict=True)):
                return value
            return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
        return value

    # Channels

    def _kept(self, numbers: Indices) -> np.ndarray[Any, np.dtype[np.bool_]]:
        return self.traced.solution.kept(numbers, self.dropped)

    def _positions(self, numbers: Indices) -> Tensor:
        return torch.from_numpy(np.flatnonzero(self._kept(numbers)))

    def _shape(self, known: Operand) -> list[int]:
        pairs = zip(known.shape, known.numbers, strict=True)
        return [size if numbers is None else int(self._kept(numbers).sum()) for size, numbers in pairs]

    def _axes(self, name: str, value: Tensor) -> list[tuple[int, Tensor, Tensor]]:
        """The axes of a tensor that lose positions: which remain and which go."""
        found = []
        for dim in range(value.dim()):
            numbers = self.traced.units.axes.get((name, dim))
            kept = None if numbers is None else self._kept(numbers)
            if kept is not None and not kept.all():
                found.append(
                    (dim, torch.from_numpy(np.flatnonzero(kept)), torch.from_numpy(np.flatnonzero(~kept)))
                )
        return found

    def _masked(self, name: str, value: Tensor, room: Tensor | None) -> Tensor:
        """The value with zeros in dropped channels, written into ``room`` (fresh memory is dear)."""
        fits = room is not None and room.dtype == value.dtype
        masked = room.detach().copy_(value) if room is not None and fits else value.clone()
        for dim, _, gone in self._axes(name, value):
            masked.index_fill_(dim, gone.to(value.device), 0)
        return masked

    def _cut(self, name: str) -> Tensor:
        value = self.weights[name]
        for dim, kept, _ in self._axes(name, value):
            value = value.index_select(dim, kept.to(value.device))
        return value

    def _device(self) -> torch.device:
        return next(iter(self.full.values())).device


def tensors_of(output: Any) -> list[Tensor]:
    """All tensors of an output, in order."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
