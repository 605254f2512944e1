"""The tables of rules, and what a rule sees: one node (``Site``), its inputs and the unit numbers along their axes.

``rulebook/`` fills the tables with the rules of PyTorch's layers and functions, users with those of their own;
``numbering.py`` looks them up. A rule ties and fixes numbers in ``units.py`` and leaves ``Findings`` about the node.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.units import Numbers, Units
from fedtailor.errors import FedtailorError

# A rule returns the numbers of the node's output: one entry per axis, and a tuple of such where the output is one.
Rule = Callable[["Site"], Any]

LAYER_RULES: dict[type[nn.Module], Rule] = {}
FUNCTION_RULES: dict[Any, Rule] = {}  # a function, or the name of a tensor method

# How the check computes a node of the masked full module. Most nodes run as they are: zeros in the weights do
# the masking. ``arithmetic``: numbers that the code computes from sizes are those of the small network (attention
# scaled by the size of a head). ``masked``: dropped channels are zeros on the way in (two activations are
# multiplied, so no weight masks them). ``small``: the node sees the kept channels only (statistics over channels).
Mode = Literal["arithmetic", "masked", "small"]


_HARMLESS = ("__init__", "__repr__", "extra_repr", "reset_parameters")  # methods that compute nothing


class TraceError(FedtailorError):
    """The module cannot be traced; the message names the node, its source line and what to do."""


def layer_rule(*types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register how a layer type carries channels; a later registration replaces an earlier one."""

    def register(rule: Rule) -> Rule:
        for layer_type in types:
            LAYER_RULES[layer_type] = rule
        return rule

    return register


def function_rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register how a function, an autograd function or a tensor method (by its name) carries channels.

    A function of a library that need not be there is known by its full name (``"library.module.function"``).
    """

    def register(rule: Rule) -> Rule:
        for target in targets:
            FUNCTION_RULES[target] = rule
        return rule

    return register


def rule_of_layer(kind: type) -> Rule | None:
    """The rule of a layer type, or of the type that it inherits everything but its constructor from."""
    for base in kind.__mro__:
        if base in LAYER_RULES:
            return LAYER_RULES[base]
        if any(inspect.isfunction(value) and name not in _HARMLESS for name, value in vars(base).items()):
            return None
    return None


def rule_of_function(target: Any) -> Rule | None:
    """The rule of a function, of an autograd function (``MyFunction.apply``), or of what is known by its full name."""
    owner = getattr(target, "__self__", None)
    named = owner if isinstance(owner, type) else target
    full = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', '')}"
    return FUNCTION_RULES.get(target) or FUNCTION_RULES.get(owner) or FUNCTION_RULES.get(full)


@dataclass(frozen=True)
class Operand:
    """A value that flows into a node, and the unit numbers along each of its axes.

    Only the shape and the type of ``value`` say anything: what a node computes has no memory here (``meta``).
    """

    value: Tensor
    numbers: Numbers

    @property
    def labels(self) -> Numbers:
        """The numbers, by the name under which rules of users may know them."""
        return self.numbers

    @property
    def shape(self) -> torch.Size:
        """Sizes of the full model."""
        return self.value.shape

    def dim(self, dim: int) -> int:
        """An axis counted from the front."""
        return dim % max(1, self.value.dim())


class Counted(int):
    """A size that is an attribute of a user's layer, and which one; what is computed from it is a plain number."""

    layer: str
    attribute: str
    index: int | None  # of an entry, where the attribute is a tuple

    @classmethod
    def at(cls, value: int, layer: str, attribute: str, index: int | None = None) -> Counted:
        """The number with its place."""
        made = cls(value)
        made.layer, made.attribute, made.index = layer, attribute, index
        return made


@dataclass(frozen=True)
class LiteralSize:
    """A size that the code gives as a number, though it must follow the cut."""

    node: fx.Node
    path: tuple[Any, ...]  # where it stands: ("args", 1, 2), ("kwargs", "size"), ("args", 1, "stop")
    numbers: Indices  # along the axis that it counts
    value: int
    description: str  # of the call, for messages


@dataclass
class Findings:
    """What rules say about nodes rather than about channels."""

    modes: dict[fx.Node, Mode] = field(default_factory=dict)
    literals: list[LiteralSize] = field(default_factory=list)
    unknown: list[tuple[Site, list[Indices]]] = field(default_factory=list)
    sources: dict[fx.Node, tuple[Indices, ...]] = field(default_factory=dict)  # axes behind a computed size
    shapes: dict[fx.Node, Numbers] = field(default_factory=dict)  # as the numbers along each axis
    # where the numbers stand that a shape is put together from: ``x.size()[:-1] + (self.width,)``
    places: dict[fx.Node, tuple[tuple[fx.Node, tuple[Any, ...]] | None, ...]] = field(default_factory=dict)
    open: set[fx.Node] = field(default_factory=set)  # sizes that depend on others than those of channels
    heads: str = "auto"  # which axis shrinks where channels are split into heads; see ``Annotations``
    usual: dict[tuple[str, ...], int] = field(
        default_factory=dict
    )  # layers (their stack) -> which of two axes shrinks
    front: frozenset[fx.Node] = frozenset()  # reshapes whose first new axis carries channels, not the last
    undecided: dict[fx.Node, None] = field(default_factory=dict)  # reshapes that could do either


@dataclass(frozen=True)
class Site:
    """One node of the traced graph, as a rule sees it."""

    node: fx.Node
    args: tuple[Any, ...]  # tensors as operands, everything else as it is
    kwargs: Mapping[str, Any]
    output: Any
    units: Units
    layer: Any  # the layer whose call this is, or inside which it happens; None for code of the module itself
    path: str  # of the layer
    shared: Mapping[str, str]  # second name of a shared tensor -> its first
    findings: Findings

    @property
    def description(self) -> str:
        """The node, its type and its source line, for messages."""
        return describe(self.node, self.layer if self.node.op == "call_module" else None)

    def tensor(self, name: str) -> str:
        """The full name of a parameter or buffer of this layer; shared tensors have one name."""
        full = f"{self.path}.{name}" if self.path else name
        return self.shared.get(full, full)

    def parameter(self, name: str, *held: Indices | None) -> Operand | None:
        """A parameter or buffer of the layer whose first axes hold these units (None: new ones); None if there is none.

        Axes beyond those given, such as the kernel of a convolution, never shrink.
        """
        value = self.layer
        for part in name.split("."):
            value = getattr(value, part, None)
        if not isinstance(value, Tensor):
            return None
        tensor, numbers = self.tensor(name), []
        for dim, units in enumerate(held):
            if units is None:
                numbers.append(self.axis(tensor, dim, value.shape[dim]))
            else:
                self.units.drive(tensor, dim, units)
                numbers.append(units)
        return Operand(value, (*numbers, *(None,) * (value.dim() - len(held))))

    def axis(self, tensor: str, dim: int, length: int) -> Indices:
        """The units along one axis of a tensor: those it is known to hold, or new ones."""
        known = self.units.axes.get((tensor, dim))
        if known is None:
            known = self.units.fresh(length)
            self.units.drive(tensor, dim, known)
        return known

    def operands(self) -> list[Operand]:
        """All tensors that flow in, in order."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Operand)]

    def operand(self) -> Operand:
        """The first tensor that flows in."""
        return self.operands()[0]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    def written(self, position: int, name: str) -> tuple[Any, tuple[Any, ...]]:
        """An argument as the code gives it (a number, or a node that computes it), and where it stands."""
        if position < len(self.node.args):
            return self.node.args[position], ("args", position)
        return self.node.kwargs.get(name), ("kwargs", name)

    def sized(self, path: tuple[Any, ...], numbers: Indices | None, node: fx.Node | None = None) -> None:
        """The size at ``path`` of the call (of ``node``, if given) must equal the number of kept positions."""
        node = node or self.node
        value = lookup(node, path)
        places = self.findings.places.get(value, ()) if isinstance(value, fx.Node) else ()
        if (
            len(places) == 1 and places[0] is not None
        ):  # ``x.view(*shape)``: the number stands where shape was made
            self.sized(places[0][1], numbers, places[0][0])
            return
        if isinstance(value, Counted):
            self.units.counted.setdefault((value.layer, value.attribute, value.index), []).append(numbers)
        if numbers is None or isinstance(value, bool):
            return
        if self.constant(value):
            value = value.meta["value"] if isinstance(value, fx.Node) else value
            self.findings.literals.append(LiteralSize(node, path, numbers, value, self.description))
            self.units.parts.append(numbers)
        elif isinstance(value, fx.Node):
            for axis in self.findings.sources.get(value, ()):
                self._computed(axis, numbers)
            if not self.findings.sources.get(value):
                self.units.fix(
                    numbers, f"has a size that comes from what cannot shrink in {self.description}"
                )

    def constant(self, value: Any) -> bool:
        """Whether a size is the same for every batch and every cut: a number, or computed from numbers only."""
        if isinstance(value, fx.Node):
            known = isinstance(value.meta.get("value"), int)
            return known and not self.findings.sources.get(value) and value not in self.findings.open
        return isinstance(value, int)

    def _computed(self, source: Indices, numbers: Indices) -> None:
        """A size that was computed from another axis: ``q.view(b, t, heads, c // heads)`` with ``c`` of the stream.

        Both axes must shrink alike, position by position in every part.
        """
        parts, rest = divmod(len(source), len(numbers))
        if rest == 0 and parts and not np.isin(numbers, source).any():
            self.units.tie(numbers, source.reshape(parts, -1))

    def follow(self, attribute: str, numbers: Indices | None, index: int | None = None) -> None:
        """The attribute of the layer must equal the number of kept positions."""
        if numbers is not None and self.layer is not None and hasattr(self.layer, attribute):
            self.units.follow(self.path, attribute, numbers, index)

    def produce(self, numbers: Indices | None) -> None:
        """The layer makes these channels (what HeteroFL's scaler multiplies)."""
        if numbers is not None and self.layer is not None:
            self.units.producers[self.path] = numbers

    def join(self, a: Indices | None, b: Indices | None, reason: str) -> None:
        """Two axes are the same; where one of them cannot shrink, neither can the other."""
        if a is not None and b is not None:
            self.units.tie(a, b)
        else:
            self.units.fix(a if a is not None else b, f"{reason} {self.description}")

    @property
    def reading(self) -> str:
        """Why the columns of a weight cannot shrink where its input cannot."""
        source = self.node.args[0] if self.node.args else None
        direct = isinstance(source, fx.Node) and source.op == "placeholder"
        return "reads the module's input in" if direct else "reads what cannot shrink in"

    def fix_axes(self, x: Operand, dims: Iterable[int], what: str) -> None:
        """Channels on these axes cannot shrink; ``what`` says why."""
        for dim in dims:
            self.units.fix(x.numbers[dim], f"{what} {self.description}")

    def fix_all(self, reason: str) -> Any:
        """Fix every channel that flows in; nothing behind this node shrinks because of them."""
        for operand in self.operands():
            for numbers in operand.numbers:
                self.units.fix(numbers, reason)
        return plain(self.output)

    def mark(self, mode: Mode) -> None:
        """Say how the check computes this node."""
        self.findings.modes[self.node] = mode


def plain(value: Any) -> Any:
    """The numbers of a value whose axes cannot shrink."""
    if isinstance(value, Tensor):
        return (None,) * value.dim()
    if isinstance(value, dict):
        return {key: plain(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return tuple(plain(entry) for entry in value)
    return None


def lookup(node: fx.Node, path: tuple[Any, ...]) -> Any:
    """What stands at a path into the arguments of a call."""
    value: Any = node.args if path[0] == "args" else node.kwargs
    for step in path[1:]:
        value = getattr(value, step) if isinstance(value, slice) else value[step]
    return value


def describe(node: fx.Node, layer: nn.Module | None = None) -> str:
    """``'fft' (torch.fft.fft) at model.py:12``: what a person needs to find the call."""
    target: Any = type(layer) if layer is not None else node.target
    owner = getattr(target, "__self__", None)
    if isinstance(owner, type):  # the ``apply`` of an autograd function
        kind = f"{owner.__name__}.{target.__name__}"
    elif getattr(target, "__module__", "").startswith("torch.ao"):
        kind = f"{target.__module__}.{target.__name__}"  # quantised layers have the names of others
    else:
        kind = getattr(target, "__name__", target)
    name = node.target if layer is not None else node.name
    line = node.meta.get("source_line")
    return f"{name!r} ({kind})" + (f" at {line}" if line else "")
