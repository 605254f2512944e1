"""Gaussian noise from a secret key: nobody without the key can tell it from fresh noise.

The key and a text that is used for nothing else make a stream of bytes (SHAKE-256), 52 bits of it a number between 0
and 1, and the inverse of the normal distribution's function a draw.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BITS = 52  # with half of the last one added, the numbers nearest to 0 and 1 are still neither


def stream(key: bytes, text: str, length: int) -> bytes:
    """So many bytes of a key and a text."""
    head = b"".join((len(key).to_bytes(8, "little"), key, text.encode()))
    return hashlib.shake_256(head).digest(length)


def normal(key: bytes, text: str, shape: tuple[int, ...]) -> Tensor:
    """Independent draws of the standard normal distribution, in float64."""
    # Not at the top: every client on Flower would wait for it.
    from scipy.special import ndtri

    count = int(np.prod(shape, dtype=np.int64))
    words: NDArray[np.uint64] = np.frombuffer(stream(key, text, 8 * count), dtype="<u8")
    uniform = ((words >> np.uint64(64 - BITS)).astype(np.float64) + 0.5) * 2.0**-BITS
    return torch.from_numpy(np.asarray(ndtri(uniform), dtype=np.float64).reshape(shape))
