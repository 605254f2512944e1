"""The shell: one copy of the user's module without weights, whose layer sizes are set to the cut at hand.

A functional call takes the weights from outside, but layers also carry sizes as attributes (``groups``,
``normalized_shape``, ``num_features``). The shell lies on the ``meta`` device, so it costs no memory, and setting a few
numbers before a call makes one shell serve every cut.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import kept_positions
from fedtailor.elasticity.groups import ChannelGroups, Size
from fedtailor.elasticity.running.skipping import Skipped, refuse_skipping, skipped_layers, under
from fedtailor.elasticity.running.strided import leave_out_pixels_first
from fedtailor.elasticity.tracing.rewrite import SizedGraph
from fedtailor.errors import FedtailorError

Mode = Literal["train", "eval", "calibrate"]
# Where a layer keeps a tensor, its name there, and what lies there (at rest, or of those who have a seat)
Place = tuple[dict[str, Any], str, Any]
Scale = Mapping[str, "float | Tensor"]
Replacement = Mapping[str, Callable[..., Any]]


@dataclass
class Seat:
    """Weights that stay in the shell for all steps of a client."""

    weights: Mapping[str, Tensor]
    cut: Cut
    places: list[Place]
    ready: bool = True  # whether the shell was last set for them, and not for something in between
    scale: dict[str, float | Tensor] = field(default_factory=dict)  # by which outputs are multiplied for now
    hooks: list[RemovableHandle] = field(default_factory=list)


class Shell:
    """A module without weights, resized in place to one cut after the other."""

    def __init__(self, module: nn.Module, groups: ChannelGroups) -> None:
        self.module = module
        self.groups = groups
        self.strided = leave_out_pixels_first(module)
        self.norms = {path: layer for path, layer in self.module.named_modules() if tracks_statistics(layer)}
        self._momenta = {path: layer.momentum for path, layer in self.norms.items()}
        self._cut = Cut.everything()
        self._skipped: dict[str, nn.Module] = {}
        self._mode: Mode | None = None  # which every layer is set to
        self._places: dict[str, Place] = {}  # of tensors, with what lies there at rest
        self._seat: Seat | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Without the places: a copy's layers have places of their own."""
        if self._seat is not None:
            raise FedtailorError(
                "a model that trains a client holds its weights: expected a copy before or after"
            )
        return {**self.__dict__, "_places": {}}

    def fit(self, cut: Cut, mode: Mode, held: Collection[str]) -> nn.Module:
        """The shell at the sizes of ``cut``; norms without statistics in ``held`` use those of the batch."""
        if self._seat is not None:
            self._seat.ready = mode == "train" and self.seats(held, cut)
            if not self._seat.ready:
                self._multiply_nothing()
        if cut != self._cut:
            self._skip_nothing()
            skipped = self._skipped_by(cut)  # refuses what makes no network, before anything is changed
            resize(self.module, self.groups, cut)
            for path in skipped:
                _put(self.module, path, Skipped())
            self._skipped, self._cut, self._mode = skipped, cut, None
        if self.module.training != (mode == "train") or mode != self._mode:
            self.module.train(mode == "train")
            self._mode = mode
        for path, norm in self.norms.items():
            if norm.training != (mode != "eval"):
                norm.train(mode != "eval")
            norm.track_running_stats = mode == "eval" or f"{path}.running_mean" in held
            # momentum None makes PyTorch keep the cumulative average of all batches since the last reset
            norm.momentum = None if mode == "calibrate" else self._momenta[path]
        return self.module

    def lent(self, cut: Cut, held: Collection[str]) -> nn.Module:
        """The shell for others to run, at the sizes of ``cut`` and in evaluation; they may set its layers otherwise."""
        module, self._mode = self.fit(cut, "eval", held), None
        return module

    @contextmanager
    def seated(self, weights: Mapping[str, Tensor], cut: Cut) -> Iterator[None]:
        """Leave weights in their places inside the block, so that a step need not put them there.

        They must be all that a network of this cut needs in training, and are known by the very same dictionary.
        """
        self.fit(cut, "train", weights)
        at_rest = [self._place(name) for name in weights]
        places = [
            (holder, leaf, weights[name]) for name, (holder, leaf, _) in zip(weights, at_rest, strict=True)
        ]
        outer, self._seat = self._seat, Seat(weights, cut, places)
        if outer is not None:  # training inside training: the outer one sets the shell anew
            outer.ready = False
        try:
            yield
        finally:
            self._multiply_nothing()
            self._seat = outer
            for holder, leaf, value in at_rest:
                holder[leaf] = value

    def seats(self, weights: Collection[str], cut: Cut) -> bool:
        """Whether these weights have their seat here."""
        seat = self._seat
        return seat is not None and weights is seat.weights and cut is seat.cut

    def is_set(self, weights: Collection[str], cut: Cut, mode: Mode) -> bool:
        """Whether nothing is to be done before these weights are run."""
        seat = self._seat
        return seat is not None and seat.ready and mode == "train" and self.seats(weights, cut)

    def multiplies(self, scale: Scale | None, weights: Collection[str], cut: Cut) -> bool:
        """Multiply outputs by these factors until other ones are asked for, where these weights have their seat here.

        Whether that is done: elsewhere factors are those of one call (``altered``).
        """
        seat = self._seat
        if seat is None or not self.seats(weights, cut):
            return False
        if not _same_factors(seat.scale, scale or {}):
            self._multiply_nothing()
            seat.scale, seat.hooks = dict(scale or {}), self._multiply(scale or {})
        return True

    def _multiply_nothing(self) -> None:
        seat = self._seat
        if seat is not None and seat.scale:
            for hook in seat.hooks:
                hook.remove()
            seat.scale, seat.hooks = {}, []

    def _multiply(self, scale: Scale) -> list[RemovableHandle]:
        """Multiply the outputs of layers until the hooks are removed; layers that the cut skips have none."""
        layers = {path: factor for path, factor in scale.items() if not under(path, self._skipped)}
        return [
            self.module.get_submodule(path).register_forward_hook(_multiplied(factor))
            for path, factor in layers.items()
        ]

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module answers with the weights that have a seat."""
        assert self._seat is not None
        for holder, leaf, value in self._seat.places:
            if holder[leaf] is not value:  # other weights were here, or the module has put something there
                holder[leaf] = value
        return self.module(*args, **kwargs)

    def call(self, weights: Mapping[str, Tensor], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """What the module answers with these weights in the places of its own.

        ``torch.func.functional_call`` does the same, but looks for the places anew in every call: twice the time of a
        small network's forward pass.
        """
        places = [self._places.get(name) or self._place(name) for name in weights]
        try:
            for (holder, leaf, _), value in zip(places, weights.values(), strict=True):
                holder[leaf] = value
            return self.module(*args, **kwargs)
        finally:
            for holder, leaf, at_rest in places:
                holder[leaf] = at_rest

    def _place(self, name: str) -> Place:
        if name not in self._places:
            owner, _, leaf = name.rpartition(".")
            layer = self.module.get_submodule(owner)
            holders = (layer._parameters, layer._buffers, layer.__dict__)
            holder: dict[str, Any] = next(each for each in holders if leaf in each)
            self._places[name] = holder, leaf, holder[leaf]
        return self._places[name]

    def _skip_nothing(self) -> None:
        """Put back the layers that the last cut did without."""
        if not self._skipped:
            return  # as nearly always, in every step
        for path, layer in self._skipped.items():
            _put(self.module, path, layer)
        self._skipped, self._cut = {}, dataclasses.replace(self._cut, absent=frozenset())

    def _skipped_by(self, cut: Cut) -> dict[str, nn.Module]:
        if isinstance(self.module, SizedGraph):
            refuse_skipping(cut)
        return {path: self.module.get_submodule(path) for path in skipped_layers(self.module, cut)}

    @contextmanager
    def altered(self, scale: Scale | None, replace: Replacement | None) -> Iterator[None]:
        """Multiply the outputs of some layers, or replace the computation of others, inside the block.

        Layers that the cut skips have no output to multiply and no computation to replace.
        """
        if not scale and not replace:
            yield
            return
        replace = {path: f for path, f in (replace or {}).items() if not under(path, self._skipped)}
        hooks = self._multiply(scale or {})
        # PyTorch's fused Transformer layers would not call the layers inside them.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fused and not replace)
        replaced = [self.module.get_submodule(path) for path in replace]
        for layer, function in zip(replaced, replace.values(), strict=True):
            layer.forward = function
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for hook in hooks:
                hook.remove()
            for layer in replaced:
                del layer.forward


def _put(module: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(owner), leaf, layer)


def _same_factors(one: Scale, other: Scale) -> bool:
    """Whether hooks of one do for the other; a tensor that was changed in place is the same one."""
    if one.keys() != other.keys():
        return False
    pairs = ((one[path], factor) for path, factor in other.items())
    return all(a is b or (isinstance(a, float) and isinstance(b, float) and a == b) for a, b in pairs)


def _multiplied(factor: float | Tensor) -> Callable[[nn.Module, Any, Any], Any]:
    def multiply(_layer: nn.Module, _args: Any, output: Any) -> Any:
        if isinstance(output, tuple):  # recurrent layers and attention: the features, then states or weights
            return (output[0] * factor, *output[1:])
        return output * factor

    return multiply


def tracks_statistics(layer: nn.Module) -> bool:
    """Whether a layer keeps running statistics."""
    return isinstance(layer, _NormBase) and layer.running_mean is not None


def resize(module: nn.Module, groups: ChannelGroups, cut: Cut) -> None:
    """Set every size attribute that the trace recorded to what ``cut`` keeps; layers that are skipped have none."""
    skipped = [p for p, layer in module.named_modules() if isinstance(layer, Skipped)] if cut.absent else []
    for size in groups.sizes:
        if under(size.layer, skipped):
            continue
        kept = kept_positions(size.extent, cut, groups.counts)
        _set(module.get_submodule(size.layer), size, kept if isinstance(kept, int) else len(kept))


def _set(layer: nn.Module, size: Size, value: int) -> None:
    *above, name = size.attribute.split(".")  # ``config.hidden_size``
    holder = attrgetter(".".join(above))(layer) if above else layer
    if size.index is None:
        setattr(holder, name, value)
    elif isinstance(size.index, str):
        setattr(holder, name, {**getattr(holder, name), size.index: value})
    else:
        before = getattr(holder, name)
        entries = list(before)
        entries[size.index] = value
        setattr(holder, name, entries if isinstance(before, list) else tuple(entries))
