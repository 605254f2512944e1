"""The table of tracing rules, and what a rule sees: one node, its inputs and the units along their axes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from fedtailor.elastic.units import Labels, Units
from fedtailor.errors import FedtailorError

Rule = Callable[["Site"], Any]    # returns the labels of the node's output (a tuple of labels where it is a tuple)

LAYER_RULES: dict[type[nn.Module], Rule] = {}
FUNCTION_RULES: dict[Any, Rule] = {}    # a function, or the name of a tensor method


class TraceError(FedtailorError):
    """The module cannot be traced; the message names the node, its type and what to do."""


def layer_rule(*types: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Register how a layer type carries channels; a later registration replaces an earlier one."""

    def register(rule: Rule) -> Rule:
        for layer_type in types:
            LAYER_RULES[layer_type] = rule
        return rule

    return register


def function_rule(*targets: Any) -> Callable[[Rule], Rule]:
    """Register how a function, or a tensor method given by its name, carries channels."""

    def register(rule: Rule) -> Rule:
        for target in targets:
            FUNCTION_RULES[target] = rule
        return rule

    return register


@dataclass(frozen=True)
class Operand:
    """A value that flows into a node: the tensor (on ``meta``) and the units along each of its axes."""

    value: Tensor
    labels: Labels

    @property
    def shape(self) -> torch.Size:
        """Sizes of the full model."""
        return self.value.shape


@dataclass(frozen=True)
class Site:
    """One node of the traced graph, as a rule sees it."""

    node: fx.Node
    args: tuple[Any, ...]    # tensors as operands, everything else as it is
    kwargs: Mapping[str, Any]
    output: Any
    units: Units
    layer: nn.Module | None
    path: str    # of the layer
    shared: Mapping[str, str]    # second name of a shared tensor -> its first

    def tensor(self, name: str) -> str:
        """The full name of a parameter or buffer of this layer; shared tensors have one name."""
        full = f"{self.path}.{name}" if self.path else name
        return self.shared.get(full, full)

    def operands(self) -> list[Operand]:
        """All tensors that flow in, in order."""
        leaves = tree_leaves((self.args, dict(self.kwargs)))
        return [leaf for leaf in leaves if isinstance(leaf, Operand)]

    def argument(self, position: int, name: str, default: Any = None) -> Any:
        """An argument by position or keyword."""
        if position < len(self.args):
            return self.args[position]
        return self.kwargs.get(name, default)

    @property
    def place(self) -> str:
        """The node, its type and its source line, for messages."""
        return describe(self.node, self.layer)

    def fix_all(self, reason: str) -> Any:
        """Fix every channel that flows in; nothing behind this node shrinks because of them."""
        for operand in self.operands():
            for labels in operand.labels:
                self.units.fix(labels, reason)
        return tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Tensor) else None, self.output)


def plain(value: Tensor) -> Labels:
    """Labels of a tensor whose axes cannot shrink."""
    return (None,) * value.dim()


def describe(node: fx.Node, layer: nn.Module | None) -> str:
    """``'fft' (torch.fft.fft) at model.py:12``: what a person needs to find the place."""
    target = type(layer).__name__ if layer is not None else getattr(node.target, "__name__", node.target)
    return f"{node.name!r} ({target}){_source(node)}"


def _source(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines() if line.strip().startswith("File ")]
    if not lines:
        return ""
    file, _, rest = lines[-1][len('File "') :].partition('", line ')
    return f" at {file.rpartition('/')[2]}:{rest.split(',')[0]}"
