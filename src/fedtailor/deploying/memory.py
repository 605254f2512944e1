"""Memory of one answer: weights, and the values that are alive at the same time while one example goes through."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedtailor.deploying.inputs import Inputs
from fedtailor.elasticity.costing.cost import plain_attention


def peak_memory(module: nn.Module, example: Inputs) -> int:
    """Bytes at the worst moment, counted operation by operation; what a runtime needs for itself comes on top."""
    one = example.rows(0, 1)
    tensors = {each.data_ptr(): each.nbytes for each in (*module.parameters(), *module.buffers())}
    counted = _Alive(set(tensors))
    with torch.no_grad(), plain_attention(), counted:
        module(*one.args, **one.kwargs)
    return sum(tensors.values()) + sum(each.nbytes for each in one.flat) + counted.most


class _Alive(TorchDispatchMode):
    """Adds up the storages of results for as long as a tensor holds them."""

    def __init__(self, weights: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.weights = weights  # counted already, also where views of them are made
        self.sizes: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self.now = self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        for each in tree_leaves(output):
            if isinstance(each, Tensor):
                self._hold(each)
        self.most = max(self.most, self.now)
        return output

    def _hold(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        place = storage.data_ptr()
        if place in self.weights or storage.nbytes() == 0:
            return
        if not self.holders.get(place):
            self.sizes[place] = storage.nbytes()
            self.now += storage.nbytes()
        self.holders[place] = self.holders.get(place, 0) + 1
        weakref.finalize(tensor, self._let_go, place)

    def _let_go(self, place: int) -> None:
        self.holders[place] -= 1
        if not self.holders[place]:
            self.now -= self.sizes.pop(place)
