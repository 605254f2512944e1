"""Products of low-rank factors, W = up @ down, and what is worked out without ever writing W down."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedtailor.elasticity.adapters import Factors, factors
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError


def adapters_of(model: ElasticModel, method: str) -> tuple[Factors, ...]:
    """The low-rank layers of a model; one that has none, or in which something else shrinks, is refused."""
    pairs = factors(model)
    others = sorted(set(model.groups.elastic) - {pair.group for pair in pairs})
    if not pairs:
        raise FedtailorError(
            f"method {method} trains low-rank adapters, and {type(model.module).__name__} has none: expected layers "
            "up(down(x)), such as peft's LoRA makes them"
        )
    if others:
        raise FedtailorError(
            f"method {method} cuts the ranks of adapters alone, and {others[0]!r} can shrink too: name what is no "
            "adapter in keep=[...] (model.keep)"
        )
    return pairs


def squared_norm(up: Tensor, down: Tensor) -> float:
    """||up @ down||_F^2 = sum((up^T up) * (down down^T)): two small squares instead of a large product.

    >>> squared_norm(torch.tensor([[2.0], [0.0]]), torch.tensor([[3.0, 4.0]]))
    100.0
    """
    return float(((up.T @ up) * (down @ down.T)).sum())


def split(parts: Sequence[tuple[Tensor, Tensor, float]], rank: int) -> tuple[Tensor, Tensor]:
    """U S and V^T of sum_i a_i up_i @ down_i: their first r columns and rows are the best factors of rank r.

    The factors of all parts side by side are narrow (as many columns as all ranks together), so one QR of each and a
    decomposition of their small core take the place of that of the large product. Fewer than ``rank`` where the sum has
    no more.
    """
    ups = torch.cat([share * up for up, _, share in parts], dim=1)
    downs = torch.cat([down for _, down, _ in parts], dim=0)
    left, from_left = torch.linalg.qr(ups)
    right, from_right = torch.linalg.qr(downs.T)
    u, s, vh = torch.linalg.svd(from_left @ from_right.T, full_matrices=False)
    up, down = left @ (u * s)[:, :rank], vh[:rank] @ right.T
    # Singular vectors are known up to their sign: the largest entry of each row is positive on every machine.
    signs = down.gather(1, down.abs().argmax(dim=1, keepdim=True)).sign()
    return up * signs.T, down * signs
