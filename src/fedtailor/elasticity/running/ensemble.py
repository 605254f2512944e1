"""Several small networks as one module that answers with the mean of their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map


class Ensemble(nn.Module):
    """A plain module: saves, loads and runs like any other."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return mean_of([member(*args, **kwargs) for member in self.members])


def mean_of(outputs: Sequence[Any]) -> Any:
    """The mean of equal structures of tensors, such as logits or a dict of them."""
    if len(outputs) == 1:
        return outputs[0]
    return tree_map(
        lambda *parts: torch.stack(parts).mean(0) if isinstance(parts[0], Tensor) else parts[0], *outputs
    )
