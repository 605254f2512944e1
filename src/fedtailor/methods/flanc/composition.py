"""Weights composed from a small shared basis: the arithmetic, on tensors alone.

A weight of T outputs, S inputs and a kernel of k x k numbers is cut into fragments of R1 inputs, and every fragment is
a combination of the same R2 basis vectors:

    W[t, g R1 + i] = sum_j C[t, g R2 + j] B[j, i]      B: (R2, R1, k, k)      C: (T, S / R1 * R2)

The basis does not know T or S, so that networks of any width share it. A linear or recurrent weight is the case k = 1.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Penalty = Literal["mean", "norm"]

_POINTWISE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}  # by the number of axes of the image


def compose(basis: Tensor, coefficients: Tensor) -> Tensor:
    """The weight itself, (T, S, k, k), in the memory layout of the basis. Differentiable."""
    bases, _, *kernel = basis.shape
    fragments = coefficients.reshape(-1, bases) @ basis.reshape(bases, -1)  # (T S / R1, R1 k k)
    weight = fragments.reshape(len(coefficients), -1, *kernel)
    if basis.dim() == 4 and not basis.is_contiguous():
        return weight.contiguous(memory_format=torch.channels_last)
    return weight


def two_step(layer: nn.Module, basis: Tensor, coefficients: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """The output of a layer without its weight: the basis on every R1 inputs, then the coefficients.

    Stride, padding and dilation belong to the first step. The same as ``layer`` with ``compose(basis, coefficients)``,
    up to rounding.
    """
    fragment = basis.shape[1]
    if isinstance(layer, nn.Linear):
        answers = F.linear(x.unflatten(-1, (-1, fragment)), basis)  # (..., S / R1, R2)
        return F.linear(answers.flatten(-2), coefficients, bias)
    axes = basis.dim() - 2
    leading = x.shape[: -axes - 1]  # the batch; nothing, where there is a single image
    pieces = x.reshape(-1, fragment, *x.shape[-axes:])
    answers = layer._conv_forward(pieces, basis, None)  # type: ignore[operator]
    answers = answers.reshape(*leading, -1, *answers.shape[-axes:])  # (batch, S / R1 * R2, height, width)
    return _POINTWISE[axes](answers, coefficients.reshape(*coefficients.shape, *(1,) * axes), bias)


def gram(basis: Tensor) -> Tensor:
    """The products of all basis vectors with each other, (R2, R2): the identity where they are orthonormal."""
    rows = basis.reshape(len(basis), -1)
    return rows @ rows.T


def orthogonality(basis: Tensor, penalty: Penalty) -> Tensor:
    """How far the basis is from orthonormal: the squared error of its Gram matrix, as ``mean`` or as sum (``norm``)."""
    products = gram(basis)
    errors = (products - torch.eye(len(basis), dtype=basis.dtype, device=basis.device)).square()
    return errors.mean() if penalty == "mean" else errors.sum()


@torch.no_grad()
def principal_basis(weight: Tensor, fragment: int, bases: int) -> Tensor:
    """The orthonormal basis that holds most of a weight's fragments: for a fresh weight, as good as a random one.

    More than R1 k k vectors cannot be orthogonal; those beyond are fragments of the weight itself, with unit norm.
    """
    kernel = weight.shape[2:]
    fragments = weight.double().reshape(-1, fragment * kernel.numel())
    directions = torch.linalg.eigh(fragments.T @ fragments).eigenvectors.flip(1).T[:bases]
    beyond = F.normalize(fragments[: bases - len(directions)])
    return torch.cat([directions, beyond]).to(weight.dtype).reshape(bases, fragment, *kernel)


@torch.no_grad()
def fitted_coefficients(weight: Tensor, basis: Tensor, inputs: int) -> Tensor:
    """Coefficients with which the basis comes close to a weight, scaled as if it had been drawn for its own inputs.

    ``inputs`` are those of the full layer, for which the weight was drawn. The result composes to the weight's
    projection on the basis, with the norm of the weight times sqrt(inputs / own inputs): PyTorch's initialisers give a
    layer with fewer inputs larger weights. A full weight that lies in the span of the basis comes back as it is.
    """
    vectors = basis.double().reshape(len(basis), -1)
    orthonormal = vectors[: vectors.shape[1]]
    fragments = weight.double().reshape(-1, vectors.shape[1])
    found = torch.zeros(len(fragments), len(vectors), dtype=torch.float64, device=weight.device)
    found[:, : len(orthonormal)] = fragments @ orthonormal.T
    norm = torch.linalg.vector_norm(found[:, : len(orthonormal)] @ orthonormal)
    if norm > 0:
        found *= torch.linalg.vector_norm(fragments) / norm * (inputs / weight.shape[1]) ** 0.5
    return found.reshape(len(weight), -1).to(weight.dtype)
