"""How functions without weights carry channels: element by element, or mixed over an axis."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, layer_rule, plain
from fedtailor.elasticity.tracing.units import Numbers


def names(text: str) -> list[str]:
    """Words of a line."""
    return text.split()


ELEMENTWISE = names(
    "abs acos add addcdiv addcmul alpha_dropout asin atan atan2 bitwise_and bitwise_not bitwise_or "
    "bitwise_xor celu clamp clamp_max clamp_min clip copysign cos cosh div dropout dropout1d dropout2d "
    "dropout3d elu eq erf erfc exp exp2 expm1 feature_alpha_dropout float_power floor floor_divide fmod "
    "frac ge gelu gt half hardshrink hardsigmoid hardswish hardtanh heaviside hypot isfinite isinf isnan "
    "le leaky_relu lerp log log10 log1p log2 logaddexp logical_and logical_not logical_or logical_xor "
    "logit logsigmoid lt masked_fill maximum minimum mish mul multiply nan_to_num ne neg negative pow "
    "reciprocal relu relu6 remainder round rrelu rsqrt rsub selu sigmoid sign silu sin sinc sinh softplus "
    "softshrink softsign sqrt square sub subtract tan tanh tanhshrink threshold true_divide trunc where "
    "xlogy"
)
SAME = names(
    "alias bernoulli bfloat16 bool byte clone contiguous cpu cuda detach double empty_like float "
    "full_like half int lift_fresh_copy long ones_like rand_like randn_like requires_grad_ to type "
    "type_as zeros_like _to_copy"
)
# Element by element, in libraries that need not be there.
_OF_LIBRARIES = names(
    "torchvision.ops.stochastic_depth.stochastic_depth transformers.models.bloom.modeling_bloom.GeLUFunction"
)
_ARITHMETIC = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor"]
_OPERATORS = (
    operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv, operator.mod, operator.pow,
    operator.neg, operator.pos, operator.abs, operator.invert, operator.and_, operator.or_, operator.xor,
    operator.lt, operator.le, operator.eq, operator.ne, operator.gt, operator.ge,
    operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ifloordiv, operator.ipow,
    *(f"__{side}{name}__" for name in _ARITHMETIC for side in ("", "r", "i")),
)  # fmt: skip
ELEMENTWISE_LAYERS = (
    nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Sigmoid,
    nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Softplus, nn.Softsign, nn.Softshrink, nn.Hardshrink, nn.Hardtanh,
    nn.Hardsigmoid, nn.Hardswish, nn.Threshold,
)  # fmt: skip


def variants(*names: str) -> list[Any]:
    """The torch function, the functional, the tensor method and the in-place forms of each name."""
    found: list[Any] = []
    for name in names:
        for form in (name, f"{name}_"):
            found += [getattr(home, form) for home in (torch, F) if callable(getattr(home, form, None))]
            found += [form] if hasattr(Tensor, form) else []
    return found


@layer_rule(*ELEMENTWISE_LAYERS)
@function_rule(*variants(*SAME), F.gumbel_softmax, *_OF_LIBRARIES)
def same(site: Site) -> Numbers:
    """Every position by itself, or nothing at all."""
    return site.operand().numbers


@function_rule(*_OPERATORS, *variants(*ELEMENTWISE), "copy_", "fill_", "zero_")
def elementwise(site: Site) -> Numbers:
    """Tensors that meet element by element share their channels, axis by axis."""
    site.mark("arithmetic")
    return meet(site, site.operands(), site.output.shape)


def meet(site: Site, operands: Sequence[Operand], shape: Sequence[int]) -> Numbers:
    """Tie the axes of broadcast tensors; channels that meet something that cannot shrink cannot either."""
    numbers: list[Indices | None] = []
    for dim in range(-len(shape), 0):
        present = [x for x in operands if -dim <= len(x.shape) and x.shape[dim] == shape[dim]]
        numbered = [axis for x in present if (axis := x.numbers[dim]) is not None]
        if numbered and len(numbered) < len(present) and shape[dim] > 1:
            for axis in numbered:
                site.units.fix(axis, f"meets something that cannot shrink in {site.description}")
            numbered = []
        for other in numbered[1:]:
            site.units.tie(numbered[0], other)
        numbers.append(numbered[0] if numbered else None)
    return tuple(numbers)


@function_rule(getattr)
def attribute(site: Site) -> Any:
    """``x.T`` and the like."""
    if not isinstance(site.args[0], Operand):  # ``packed.data``
        return site.operand().numbers if site.args[1] == "data" else None
    x, name = site.operand(), site.args[1]
    if name in ("T", "mT", "H", "mH"):
        return (*x.numbers[:-2], *x.numbers[:-3:-1]) if name.startswith("m") else x.numbers[::-1]
    return x.numbers if name in ("data", "real") else site.fix_all(f"reaches {site.description}")


@layer_rule(nn.GLU)
@function_rule(F.glu, torch.nn.functional.glu, "aten::glu")
def gated_linear_unit(site: Site) -> Numbers:
    """The first half times the gate of the second half: both keep the same units."""
    x = site.operand()
    dim = x.dim(site.layer.dim if site.node.op == "call_module" else site.argument(1, "dim", -1))
    numbers = x.numbers[dim]
    if numbers is not None:
        halves = numbers.reshape(2, -1)
        site.units.tie(halves[:1], halves)
        numbers = halves[0]
    return (*x.numbers[:dim], numbers, *x.numbers[dim + 1 :])


# Mixing: an axis is reduced, normalised or accumulated, over the kept channels only

_DIM_SECOND = names(
    "mean sum nansum prod amax amin max min logsumexp all any softmax log_softmax softmin cumsum cumprod "
    "var std"
)
_DIM_THIRD = ("norm", "logcumsumexp")
_WHICH = names("argmax argmin topk sort argsort median mode kthvalue cummax cummin unique flip roll")


@function_rule(*variants(*_DIM_SECOND), torch.special.softmax)
def reduction(site: Site) -> Any:
    """An axis that is mixed mixes the kept channels; the others pass through."""
    if len(site.operands()) > 1:  # max(x, y)
        return elementwise(site)
    return mix(site, site.kwargs.get("dim", site.kwargs.get("axis", site.argument(1, "dim"))))


@function_rule(*variants(*_DIM_THIRD), torch.linalg.vector_norm, torch.linalg.norm)
def length(site: Site) -> Any:
    """A norm: its order comes before its axes."""
    return mix(site, site.argument(2, "dim"))


@function_rule(torch.var_mean, torch.std_mean)
def moments(site: Site) -> Any:
    """Two reductions at once."""
    return mix(site, site.argument(1, "dim"), positions=False)


@layer_rule(nn.Softmax, nn.LogSoftmax, nn.Softmin)
def softmax_layer(site: Site) -> Any:
    """As the function."""
    return mix(site, site.layer.dim)


def mix(site: Site, dims: Any, positions: bool = True) -> Any:
    """Mix the axes ``dims`` (all, if None); a second output says at which ``positions`` the values were found."""
    x = site.operand()
    chosen: Iterable[int] = (
        range(x.value.dim()) if dims is None else [dims] if isinstance(dims, int) else dims
    )
    mixed = {dim % max(1, x.value.dim()) for dim in chosen if x.value.dim()}
    if any(x.numbers[dim] is not None for dim in mixed):
        site.mark("small")
        if "var" in str(site.node.target) or "std" in str(site.node.target):
            for dim in mixed:  # the unbiased estimate divides by one less
                site.units.at_least(x.numbers[dim], 2)
    if not isinstance(site.output, Tensor):
        users = [user for user in site.node.users if user.target is operator.getitem and user.args[1] == 1]
        if positions and any(user.users for user in users):  # a position is a number that a cut would change
            site.fix_axes(x, mixed, "is searched by")
        return tuple(_reduced(x.numbers, mixed, part) for part in site.output)
    return _reduced(x.numbers, mixed, site.output)


def _reduced(numbers: Numbers, mixed: set[int], output: Tensor) -> Numbers:
    if output.dim() == len(numbers):  # kept with size one, or not reduced at all (softmax)
        return tuple(
            None if output.shape[dim] == 1 and dim in mixed else held for dim, held in enumerate(numbers)
        )
    return tuple(held for dim, held in enumerate(numbers) if dim not in mixed)


@function_rule(*variants(*_WHICH))
def order(site: Site) -> Any:
    """The position of a channel among the others becomes a number, so that axis must stay whole."""
    x = site.operand()
    named = str(getattr(site.node.target, "__name__", site.node.target))
    dims = site.argument(2 if named in ("topk", "kthvalue", "roll") else 1, "dim", site.kwargs.get("dims"))
    if dims is None:
        dims = -1 if named in ("topk", "sort", "argsort") else list(range(x.value.dim()))
    chosen = {x.dim(dim) for dim in ([dims] if isinstance(dims, int) else dims)}
    site.fix_axes(x, chosen, "is ordered by")
    outputs = [site.output] if isinstance(site.output, Tensor) else list(site.output)
    numbers = [_reduced(_without(x.numbers, chosen), chosen, output) for output in outputs]
    return numbers[0] if isinstance(site.output, Tensor) else tuple(numbers)


def _without(numbers: Numbers, dims: set[int]) -> Numbers:
    return tuple(None if dim in dims else held for dim, held in enumerate(numbers))


# Constants that the code makes

_BLANK = (torch.zeros, torch.ones, torch.full, torch.empty, "new_zeros", "new_ones", "new_full", "new_empty")


@function_rule(*_BLANK)
def blank(site: Site) -> Numbers:
    """All entries are alike, so every axis may turn out to be channels."""
    method = site.node.op == "call_method" or str(getattr(site.node.target, "__name__", "")).startswith(
        "new_"
    )
    written, path = site.written(1 if method else 0, "size")
    shape = site.findings.shapes.get(written) if isinstance(written, fx.Node) else None
    if (
        shape is not None and len(shape) == site.output.dim()
    ):  # as large as another tensor: it holds those units
        sizes = zip(shape, site.output.shape, strict=True)
        return tuple(axis if axis is None or len(axis) else site.units.fresh(size) for axis, size in sizes)
    if not isinstance(written, tuple | list):
        first = 1 if method else 0
        written, path = site.node.args[first:], ("args",)
        steps = [(*path, first + index) for index in range(len(written))]
    else:
        steps = [(*path, index) for index in range(len(written))]
    numbers = tuple(site.units.fresh(size) if size > 1 else None for size in site.output.shape)
    for step, axis in zip(steps, numbers, strict=False):
        site.sized(step, axis)
    return numbers


@function_rule(
    torch.arange, torch.eye, torch.linspace, torch.tensor, torch.scalar_tensor, torch.rand, torch.randn, torch.randint,
    torch.tril_indices, torch.triu_indices,
)  # fmt: skip
def by_position(site: Site) -> Any:
    """Entries that depend on their position cannot follow a cut."""
    if site.node.target in (torch.tensor, torch.scalar_tensor) and not site.output.dim():
        site.mark("arithmetic")
    return plain(site.output)
