"""What a piece of the model costs: parameters, multiply-accumulates, bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class Cost:
    """The cost of one piece of the model, per example where that matters."""

    params: int    # numbers that the optimiser may move; shared tensors once
    macs: int    # multiply-accumulates of one example's forward pass, one for each bias addition
    bytes: int    # parameters and buffers, as they are stored and sent

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.params + other.params, self.macs + other.macs, self.bytes + other.bytes)


def count_macs(shell: nn.Module, weights: dict[str, Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Multiply-accumulates of one example, counted on the ``meta`` device, where nothing is computed.

    PyTorch's counter reports two operations per multiply-accumulate, ignores additions of a bias, and returns zero for
    recurrent layers and fused attention on CPU tensors; on ``meta`` it sees them all.
    """
    meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    on_meta = {name: torch.empty_like(value, device="meta") for name, value in weights.items()}
    examples = next(leaf.shape[0] for leaf in tree_leaves(meta) if isinstance(leaf, Tensor) and leaf.dim())
    additions = 0

    def count_bias(layer: nn.Module, _args: Any, output: Any) -> None:
        nonlocal additions
        additions += output.numel()

    biased = [layer for layer in shell.modules() if _adds_bias(layer)]
    handles = [layer.register_forward_hook(count_bias) for layer in biased]
    try:
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            functional_call(shell, on_meta, *meta, tie_weights=False)
    finally:
        for handle in handles:
            handle.remove()
    return (counter.get_total_flops() // 2 + additions) // examples


def _adds_bias(layer: nn.Module) -> bool:
    convolution = isinstance(layer, nn.modules.conv._ConvNd)
    return (convolution or isinstance(layer, nn.Linear)) and layer.bias is not None
