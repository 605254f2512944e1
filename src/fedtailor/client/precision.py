"""In which numbers a client computes: float32, or bfloat16 where PyTorch's autocast thinks it safe."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch

Precision = Literal["float32", "bfloat16", "auto"]
PRECISIONS = ("float32", "bfloat16", "auto")
# As PyTorch names them: instructions that multiply matrices of bfloat16. Others emulate them, slower than float32.
CPU_INSTRUCTIONS = ("amx_bf16", "avx512_bf16", "bf16")


def autocast(precision: Precision, device: torch.device) -> AbstractContextManager[object]:
    """What a forward pass and its loss run in. Weights, gradients and the optimiser's state stay as they are."""
    wanted = precision == "bfloat16" or (precision == "auto" and gains(device))
    return torch.autocast(device.type, dtype=torch.bfloat16) if wanted else nullcontext()


def gains(device: torch.device) -> bool:
    """Whether a device has instructions for bfloat16, by what it says of itself; nothing is timed, so it never wavers.

    Of Apple's devices nothing is known: they stay at float32.
    """
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    asked = getattr(torch.cpu, "get_capabilities", None)  # an older PyTorch does not say
    known = asked() if asked is not None else {}
    return any(known.get(name, False) for name in CPU_INSTRUCTIONS)
