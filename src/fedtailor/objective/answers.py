"""What a module answers, where it returns more than that: an object with ``logits``, as Hugging Face's models do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ANSWER, LOSS = "logits", "loss"


def answer_of(output: Any) -> Any:
    """The logits of an output that names them; any other output as it is.

    >>> import torch
    >>> answer_of({"loss": torch.tensor(0.5), "logits": torch.zeros(2, 3)}).shape
    torch.Size([2, 3])
    """
    found = output.get(ANSWER) if isinstance(output, Mapping) else None
    return found if isinstance(found, Tensor) else output


def own_loss(output: Any) -> Tensor | None:
    """The loss that a module computed by itself, because it was given the targets."""
    found = output.get(LOSS) if isinstance(output, Mapping) else None
    return found if isinstance(found, Tensor) and found.numel() == 1 else None
