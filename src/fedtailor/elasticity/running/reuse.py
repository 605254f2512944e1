"""Outputs of layers that one network shares with another: computed once, used again.

Networks that differ in some channel groups alone compute the same for a batch up to the first layer that has units of
such a group. To compare many of them, one run of the network that they come from is kept, and every other starts where
it parts from that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.data.batches import Batch
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.elasticity.running.shells import Mode


class Reuse:
    """The outputs of a network's layers for one batch at a time; layers are those that have no layers inside."""

    def __init__(self, model: Pieces) -> None:
        self.model = model
        self._outputs: dict[str, Tensor] = {}
        self._called: dict[str, int] = {}  # when a module was first called, by its path
        self._overwritten: set[str] = set()  # layers whose outputs something changes in place
        self._unsafe: set[str] = set()  # groups whose networks do not come out the same
        self._checked: set[str] = set()

    @torch.no_grad()
    def record(self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, mode: Mode) -> Any:
        """Run a network and keep what its layers put out."""
        self._outputs, self._called = {}, {}
        with self._listening(cut) as versions:
            output = self.model.forward(weights, cut, batch, mode=mode)
        changed = {path for path, version in versions.items() if self._outputs[path]._version != version}
        if changed:  # the outputs that were kept are no longer those that the layers gave
            self._overwritten |= changed
            return self.record(weights, cut, batch, mode)
        return output

    @torch.no_grad()
    def run(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, mode: Mode, differing: Collection[str]
    ) -> Any:
        """Run a network that differs from the recorded one in these groups alone, on the same batch.

        A group's first answer is compared with that of a whole run; where a module uses weights in a way that calls do
        not show, its networks are run whole from then on.
        """
        if self._unsafe.intersection(differing):
            return self.model.forward(weights, cut, batch, mode=mode)
        start = min((self._first_call(group) for group in differing), default=0)
        known = [path for path in self._outputs if self._called[path] < start]
        output = self.model.forward(weights, cut, batch, mode=mode, replace={p: self._kept(p) for p in known})
        fresh = set(differing) - self._checked
        if known and fresh:
            whole = self.model.forward(weights, cut, batch, mode=mode)
            self._checked |= fresh
            if not _equal(output, whole):
                self._unsafe |= fresh
                return whole
        return output

    def _first_call(self, group: str) -> int:
        """When the first module is called that has a part in a group; 0, the whole network, if that is not known."""
        layers = self.model.once(("has a part in", group), lambda: _with_a_part_in(self.model, group))
        return min((self._call_of(layer) for layer in layers), default=0)

    def _call_of(self, path: str) -> int:
        while path and path not in self._called:  # its weights may be used by what it lies in
            path = path.rpartition(".")[0]
        return self._called.get(path, 0)

    def _kept(self, path: str) -> Callable[..., Tensor]:
        value = self._outputs[path]
        if path in self._overwritten:
            return lambda *_args, **_options: value.clone()
        return lambda *_args, **_options: value

    @contextmanager
    def _listening(self, cut: Cut) -> Iterator[dict[str, int]]:
        """Note calls and outputs inside the block; gives the versions that outputs had when they were made."""
        versions: dict[str, int] = {}
        repeated: set[str] = set()
        handles = []

        def begins(path: str) -> Callable[[nn.Module, Any], None]:
            def note(_module: nn.Module, _args: Any) -> None:
                self._called.setdefault(path, len(self._called))

            return note

        def ends(path: str) -> Callable[[nn.Module, Any, Any], None]:
            def keep(_module: nn.Module, _args: Any, output: Any) -> None:
                if path in versions or not isinstance(output, Tensor):
                    repeated.add(path)  # which of its outputs is meant would not be known
                else:
                    self._outputs[path] = output.clone() if path in self._overwritten else output
                    versions[path] = self._outputs[path]._version

            return keep

        for path, module in self.model.shell(cut).named_modules():
            handles.append(module.register_forward_pre_hook(begins(path)))
            if next(module.children(), None) is None:
                handles.append(module.register_forward_hook(ends(path)))
        try:
            yield versions
        finally:
            for handle in handles:
                handle.remove()
            for path in repeated:
                self._outputs.pop(path, None)
                versions.pop(path, None)


def _with_a_part_in(model: Pieces, group: str) -> list[str]:
    """The modules that own a tensor, or have a size, which follows the group."""
    extents = model.groups.extents.items()
    tensors = [
        name for name, dims in extents if any(axis.group == group for extent in dims for axis in extent.axes)
    ]
    sizes = [
        size.layer for size in model.groups.sizes if any(axis.group == group for axis in size.extent.axes)
    ]
    return list(dict.fromkeys([*(name.rpartition(".")[0] for name in tensors), *sizes]))


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)
