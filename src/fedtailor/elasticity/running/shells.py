"""The shell: one copy of the user's module without weights, whose layer sizes are set to the cut at hand.

A functional call takes the weights from outside, but layers also carry sizes as attributes (``groups``,
``normalized_shape``, ``num_features``). The shell lies on the ``meta`` device, so it costs no memory, and setting a few
numbers before a call makes one shell serve every cut.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import kept_positions
from fedtailor.elasticity.groups import ChannelGroups, Size
from fedtailor.elasticity.running.skipping import Skipped, refuse_skipping, skipped_layers
from fedtailor.elasticity.tracing.rewrite import SizedGraph

Mode = Literal["train", "eval", "calibrate"]
Scale = Mapping[str, "float | Tensor"]
Replacement = Mapping[str, Callable[..., Any]]


class Shell:
    """A module without weights, resized in place to one cut after the other."""

    def __init__(self, module: nn.Module, groups: ChannelGroups) -> None:
        self.module = module
        self.groups = groups
        self.norms = {path: layer for path, layer in self.module.named_modules() if tracks_statistics(layer)}
        self._momenta = {path: layer.momentum for path, layer in self.norms.items()}
        self._cut = Cut.everything()
        self._skipped: dict[str, nn.Module] = {}

    def fit(self, cut: Cut, mode: Mode, held: Collection[str]) -> nn.Module:
        """The shell at the sizes of ``cut``; norms without statistics in ``held`` use those of the batch."""
        if cut != self._cut:
            for path, layer in self._skipped.items():
                _put(self.module, path, layer)
            resize(self.module, self.groups, cut)
            self._skip(cut)
            self._cut = cut
        self.module.train(mode == "train")
        for path, norm in self.norms.items():
            norm.train(mode != "eval")
            norm.track_running_stats = mode == "eval" or f"{path}.running_mean" in held
            # momentum None makes PyTorch keep the cumulative average of all batches since the last reset
            norm.momentum = None if mode == "calibrate" else self._momenta[path]
        return self.module

    def _skip(self, cut: Cut) -> None:
        """Take out the layers that a cut leaves no tensor of."""
        if cut.absent and isinstance(self.module, SizedGraph):
            refuse_skipping(cut)
        self._skipped = {path: self.module.get_submodule(path) for path in skipped_layers(self.module, cut)}
        for path in self._skipped:
            _put(self.module, path, Skipped())

    @contextmanager
    def altered(self, scale: Scale | None, replace: Replacement | None) -> Iterator[None]:
        """Multiply the outputs of some layers, or replace the computation of others, inside the block."""
        handles = []
        for path, factor in (scale or {}).items():
            layer = self.module.get_submodule(path)
            handles.append(layer.register_forward_hook(_multiplied(factor)))
        # PyTorch's fused Transformer layers would not call the layers inside them.
        fused = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(fused and not replace)
        replaced = [self.module.get_submodule(path) for path in replace or {}]
        for layer, function in zip(replaced, (replace or {}).values(), strict=True):
            layer.forward = function
        try:
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fused)
            for handle in handles:
                handle.remove()
            for layer in replaced:
                del layer.forward


def _put(module: nn.Module, path: str, layer: nn.Module) -> None:
    owner, _, leaf = path.rpartition(".")
    setattr(module.get_submodule(owner), leaf, layer)


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
    """Set every size attribute that the trace recorded to what ``cut`` keeps."""
    for size in groups.sizes:
        kept = kept_positions(size.extent, cut, groups.counts)
        _set(module.get_submodule(size.layer), size, kept if isinstance(kept, int) else len(kept))


def _set(layer: nn.Module, size: Size, value: int) -> None:
    if size.index is None:
        setattr(layer, size.attribute, value)
    else:
        entries = list(getattr(layer, size.attribute))
        entries[size.index] = value
        setattr(layer, size.attribute, tuple(entries))
