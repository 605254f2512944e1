"""The shapes of results on the ``meta`` device, by rules of our own.

PyTorch's rules for these operators are written in Python: they take most of the time of counting, and the first of them
loads PyTorch's compiler and an algebra system, for three seconds. A rule that does not know its case says so
(``NotImplemented``), and PyTorch is asked. Only shapes are right: nobody looks at anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

aten = torch.ops.aten


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _normalised(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return _like(x), x, x  # and two kinds of statistics, which nobody looks at


def _alike(values: Sequence[Any]) -> list[Tensor]:
    """Tensors among values, if they are floating-point numbers of one type."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    fine = {value.dtype for value in tensors} <= {torch.float32, torch.float64}
    return tensors if fine and len({value.dtype for value in tensors}) == 1 else []


def _paired(*values: Tensor | float) -> Any:
    """Number by number, of tensors that fit each other."""
    if not (tensors := _alike(values)):
        return NotImplemented
    sizes = np.broadcast_shapes(*(tuple(value.shape) for value in tensors))
    return torch.empty(sizes, dtype=tensors[0].dtype, device="meta")


def _joined(values: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors one after the other along a dimension that they have; PyTorch passes over those of shape (0,)."""
    tensors = [value for value in _alike(values) if value.shape != (0,)]
    if not tensors or len({value.dim() for value in tensors}) > 1 or tensors[0].dim() < 1:
        return NotImplemented
    sizes = list(tensors[0].shape)
    sizes[dim] = sum(value.shape[dim] for value in tensors)
    return torch.empty(sizes, dtype=tensors[0].dtype, device="meta")


def _stacked(values: Sequence[Tensor], dim: int = 0) -> Any:
    """Tensors one after the other along a new dimension."""
    return _joined([value.unsqueeze(dim) for value in values], dim) if _alike(values) else NotImplemented


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Of two matrices, or of two batches of them."""
    return torch.empty((*a.shape[:-1], b.shape[-1]), dtype=a.dtype, device="meta")


def _convolved(x: Tensor, weight: Tensor, _bias: Tensor | None, *settings: Any) -> Any:
    """A convolution; settings are stride, padding, dilation, whether it is transposed, output padding, groups."""
    stride, padding, dilation, transposed, _, groups = settings
    if transposed or x.dim() != weight.dim() or x.shape[1] != weight.shape[1] * groups:
        return NotImplemented
    return _slid(x, weight.shape[0], weight.shape[2:], stride, padding, dilation)


def _pooled(
    x: Tensor,
    kernel: Sequence[int],
    stride: Any = (),
    padding: Any = 0,
    dilation: Any = 1,
    ceil: bool = False,
) -> Any:
    """The largest of every window, and where it was, which nobody looks at."""
    if ceil or x.dim() != 2 + len(kernel):
        return NotImplemented
    values = _slid(x, x.shape[1], kernel, stride or kernel, padding, dilation)
    return values if values is NotImplemented else (values, x)


def _slid(x: Tensor, channels: int, kernel: Sequence[int], *settings: Any) -> Any:
    """What a window leaves of images; stride, padding and dilation are numbers, or one for every dimension."""
    spread = len(kernel)
    stride, padding, dilation = (
        each if isinstance(each, (tuple, list)) and len(each) == spread
        else [each[0] if isinstance(each, (tuple, list)) else each] * spread
        for each in settings
    )  # fmt: skip
    sizes = [
        (x.shape[2 + d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1
        for d in range(spread)
    ]
    if min(sizes, default=1) < 1:
        return NotImplemented
    return torch.empty((x.shape[0], channels, *sizes), dtype=x.dtype, device="meta")


def _looked_up(table: Tensor, places: Tensor, *_: Any) -> Tensor:
    return torch.empty((*places.shape, table.shape[-1]), dtype=table.dtype, device="meta")


def _reduced(x: Tensor, dims: Sequence[int] | int | None = None, keepdim: bool = False, *_: Any) -> Tensor:
    """A mean over some dimensions, or over all."""
    over = range(x.dim()) if dims is None or dims == [] else [dims] if isinstance(dims, int) else dims
    gone = {dim % max(1, x.dim()) for dim in over}
    sizes = [1 if dim in gone else size for dim, size in enumerate(x.shape) if keepdim or dim not in gone]
    return torch.empty(sizes, dtype=x.dtype, device="meta")


SHAPES: dict[Any, Callable[..., Any]] = {
    aten.add: _paired,
    aten.sub: _paired,
    aten.mul: _paired,
    aten.div: _paired,
    aten.mm: _product,
    aten.bmm: _product,
    aten.convolution: _convolved,
    aten.max_pool2d_with_indices: _pooled,
    aten.embedding: _looked_up,
    aten.cat: _joined,
    aten.stack: _stacked,
    aten.mean: _reduced,
    aten.native_batch_norm: _normalised,
    aten.native_layer_norm: _normalised,
    aten.addmm: lambda _, a, b: torch.empty((a.shape[0], b.shape[1]), dtype=a.dtype, device="meta"),
    aten.relu: _like,
    aten.hardtanh: _like,
    aten.gelu: _like,
    aten.tanh: _like,
    aten.tanh_: lambda x: x,
    aten.sigmoid: _like,
    aten.sigmoid_: lambda x: x,
    aten.silu: _like,
    aten._softmax: _like,
    aten._safe_softmax: _like,
}
