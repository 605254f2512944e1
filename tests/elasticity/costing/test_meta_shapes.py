"""Shapes by our own rules are PyTorch's; and counting what a piece costs does not load PyTorch's compiler."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from fedtailor.elasticity.costing.meta_shapes import SHAPES

aten = torch.ops.aten


def on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


X = on_meta(2, 3, 9, 8)
ROWS = on_meta(4, 3)
CASES = [
    (aten.add.Tensor, (X, on_meta(3, 1, 1))),
    (aten.add.Tensor, (X, on_meta(2, 3, 9, 8, dtype=torch.int64))),
    (aten.mul.Tensor, (on_meta(5, 1), on_meta(1, 7))),
    (aten.mul.Scalar, (ROWS, 2.0)),
    (aten.sub.Tensor, (ROWS, ROWS)),
    (aten.div.Tensor, (on_meta(2, dtype=torch.int64), on_meta(2, dtype=torch.int64))),
    (aten.mm.default, (ROWS, on_meta(3, 6))),
    (aten.bmm.default, (on_meta(2, 4, 3), on_meta(2, 3, 6))),
    (aten.addmm.default, (on_meta(6), ROWS, on_meta(3, 6))),
    (aten.convolution.default, (X, on_meta(5, 3, 3, 2), None, [2, 1], [1, 0], [1, 1], False, [0, 0], 1)),
    (
        aten.convolution.default,
        (X, on_meta(6, 1, 3, 3), on_meta(6), [1, 1], [2, 2], [2, 2], False, [0, 0], 3),
    ),
    (aten.convolution.default, (X, on_meta(3, 5, 2, 2), None, [2, 2], [0, 0], [1, 1], True, [0, 0], 1)),
    (aten.convolution.default, (on_meta(2, 3, 9), on_meta(4, 3, 3), None, [1], [1], [1], False, [0], 1)),
    (aten.max_pool2d_with_indices.default, (X, [2, 2])),
    (aten.max_pool2d_with_indices.default, (X, [3, 3], [2, 2], [1, 1])),
    (aten.max_pool2d_with_indices.default, (X, [2, 2], [2, 2], [0, 0], [1, 1], True)),
    (aten.embedding.default, (ROWS, on_meta(2, 5, dtype=torch.int64))),
    (aten.cat.default, ([ROWS, on_meta(2, 3)],)),
    (aten.cat.default, ([ROWS, on_meta(4, 1)], -1)),
    (aten.cat.default, ([on_meta(0), on_meta(2, 4, 3, 6)], -2)),  # how a cache of keys and values begins
    (aten.cat.default, ([on_meta(0), on_meta(0)],)),
    (aten.stack.default, ([ROWS, ROWS, ROWS], 1)),
    (aten.stack.default, ([ROWS, ROWS], -1)),
    (aten.mean.default, (X,)),
    (aten.mean.dim, (X, [2, 3])),
    (aten.mean.dim, (X, [-1], True)),
    (aten.sigmoid.default, (X,)),
    (aten._softmax.default, (X, 1, False)),
    (aten.native_layer_norm.default, (ROWS, [3], None, None, 1e-5)),
]


@pytest.mark.parametrize(("operator", "given"), CASES, ids=lambda value: getattr(value, "__name__", ""))
def test_shapes_are_those_of_pytorch(operator, given):
    ours, theirs = SHAPES[operator.overloadpacket](*given), operator(*given)
    if ours is NotImplemented:
        return  # then PyTorch is asked
    one, other = (each[0] if isinstance(each, tuple) else each for each in (ours, theirs))
    assert (one.shape, one.dtype, one.device.type) == (other.shape, other.dtype, "meta")


def test_most_cases_have_a_rule():
    known = [SHAPES[operator.overloadpacket](*given) is not NotImplemented for operator, given in CASES]
    assert (
        known.count(False) == 5
    )  # types that differ, whole numbers, a transposed convolution, rounding up, nothing


PROGRAM = """
import sys, torch
from torch import nn
import fedtailor
from fedtailor.elasticity.cutting.cut import Cut
layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 3)
module = nn.Sequential(*layers)
model = fedtailor.elastic(module, (torch.randn(2, 1, 8, 8), torch.tensor([0, 1])))
assert model.cost(Cut.everything()).macs > 0
print([name for name in ("torch._dynamo", "sympy") if name in sys.modules])
"""


def test_counting_does_not_load_a_compiler():
    """It takes three seconds, in every command, worker and device."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stderr
