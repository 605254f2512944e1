"""The shell: one copy of the user's module without weights, whose layer sizes are set to the cut at hand.

A functional call takes the weights from outside, but layers also carry sizes as attributes (``groups``,
``normalized_shape``, ``num_features``). The shell lies on the ``meta`` device, so it costs no memory, and setting a few
numbers before a call makes one shell serve every cut.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from fedtailor.elastic.cut import Cut
from fedtailor.elastic.groups import ChannelGroups, Size
from fedtailor.elastic.patch import kept_positions

Mode = Literal["train", "eval", "calibrate"]
Scale = Mapping[str, "float | Tensor"]
Replacement = Mapping[str, Callable[..., Any]]

CACHED_SIZES = 64    # cuts whose sizes a shell remembers


class Shell:
    """The user's module on the ``meta`` device, resized in place to one cut after the other."""

    def __init__(self, module: nn.Module, groups: ChannelGroups) -> None:
        self.module = copy.deepcopy(module).to("meta")
        self.groups = groups
        self.norms = {path: layer for path, layer in self.module.named_modules() if tracks_statistics(layer)}
        self._momenta = {path: layer.momentum for path, layer in self.norms.items()}
        self._cut = Cut.everything()
        self._mode: Mode | None = None
        self._sizes: OrderedDict[Cut, list[tuple[nn.Module, Size, int]]] = OrderedDict()

    def fit(self, cut: Cut, mode: Mode, held: Mapping[str, Tensor]) -> nn.Module:
        """The shell at the sizes of ``cut``; norms without statistics in ``held`` use those of the batch."""
        if cut != self._cut:
            for layer, size, value in self._sizes_at(cut):
                _set(layer, size, value)
            self._cut = cut
        if mode != self._mode:
            self.module.train(mode == "train")
            for path, norm in self.norms.items():
                norm.train(mode != "eval")
                # momentum None makes PyTorch keep the cumulative average of all batches since the last reset
                norm.momentum = None if mode == "calibrate" else self._momenta[path]
            self._mode = mode
        for path, norm in self.norms.items():
            norm.track_running_stats = mode == "eval" or f"{path}.running_mean" in held
        return self.module

    def _sizes_at(self, cut: Cut) -> list[tuple[nn.Module, Size, int]]:
        """The sizes of a cut. Cached: steps of one client come back to the same few widths again and again."""
        if cut not in self._sizes:
            self._sizes[cut] = sizes_at(self.module, self.groups, cut)
            if len(self._sizes) > CACHED_SIZES:
                self._sizes.popitem(last=False)
        return self._sizes[cut]

    @contextmanager
    def altered(self, scale: Scale | None, replace: Replacement | None) -> Iterator[None]:
        """Multiply the outputs of some layers, or replace the computation of others, inside the block."""
        handles = []
        for path, factor in (scale or {}).items():
            layer = self.module.get_submodule(path)
            handles.append(layer.register_forward_hook(_multiplied(factor)))
        replaced = [self.module.get_submodule(path) for path in replace or {}]
        for layer, function in zip(replaced, (replace or {}).values(), strict=True):
            layer.forward = function    # type: ignore[method-assign]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            for layer in replaced:
                del layer.forward


def _multiplied(factor: float | Tensor) -> Callable[[nn.Module, Any, Tensor], Tensor]:
    return lambda _layer, _args, output: output * factor


def tracks_statistics(layer: nn.Module) -> bool:
    """Whether a layer keeps running statistics."""
    return isinstance(layer, _NormBase) and layer.running_mean is not None


def resize(module: nn.Module, groups: ChannelGroups, cut: Cut) -> None:
    """Set every size attribute that the trace recorded to what ``cut`` keeps."""
    for layer, size, value in sizes_at(module, groups, cut):
        _set(layer, size, value)


def sizes_at(module: nn.Module, groups: ChannelGroups, cut: Cut) -> list[tuple[nn.Module, Size, int]]:
    """What ``cut`` keeps of every size attribute that the trace recorded."""
    kept = [kept_positions(size.extent, cut, groups.widths) for size in groups.sizes]
    return [
        (module.get_submodule(size.layer), size, each if isinstance(each, int) else len(each))
        for size, each in zip(groups.sizes, kept, strict=True)
    ]


def _set(layer: nn.Module, size: Size, value: int) -> None:
    if size.index is None:
        setattr(layer, size.attribute, value)
    else:
        entries = list(getattr(layer, size.attribute))
        entries[size.index] = value
        setattr(layer, size.attribute, tuple(entries))
