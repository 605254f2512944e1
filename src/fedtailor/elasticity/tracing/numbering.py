"""Walks a recorded or exported graph and gives every axis of every value its unit numbers, one rule per node.

The rules come from the tables of ``rules.py``, which ``rulebook/`` fills; what they say about numbers goes to
``units.py``, and what they say about nodes to ``rules.Findings``. No node is computed here: the shapes that
``recorder.py`` or ``exported.py`` left behind are enough.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.exported import rule_of_operation
from fedtailor.elasticity.tracing.rules import (
    LAYER_RULES,
    Findings,
    Operand,
    Rule,
    Site,
    plain,
    rule_of_function,
    rule_of_layer,
)
from fedtailor.elasticity.tracing.units import Numbers, Units

HIDDEN = "hidden_state"  # in the name of an output: ``last_hidden_state``, ``encoder_last_hidden_state``


class Numberer:
    """Walks a recorded graph and carries unit numbers beside its values."""

    def __init__(self, root: nn.Module, units: Units, findings: Findings, shared: Mapping[str, str]) -> None:
        self.root = root
        self.units = units
        self.findings = findings
        self.shared = shared
        self.known: dict[fx.Node, Any] = {}  # values of the example, tensors as operands

    def run(self, graph: fx.Graph) -> None:
        """Apply the rule of every node, in order."""
        for node in graph.nodes:
            if node.op == "output":
                self._output(node)
            else:
                self._visit(node)

    def is_open(self, node: fx.Node) -> bool:
        """Whether what the code computes depends on sizes that are not channels: batch, time, space."""
        return node in self.findings.open

    def _visit(self, node: fx.Node) -> None:
        value = node.meta["value"]
        holds_tensors = any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
        if not holds_tensors and node.op != "call_module" and node.target is not operator.setitem:
            self.known[node] = value
            self._trace_size(node)
            return
        layer, path = self._layer(node)
        args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda n: self.known[n])
        site = Site(node, tuple(args), kwargs, value, self.units, layer, path, self.shared, self.findings)
        numbers = self._rule(site)(site)
        self.known[node] = self._attach(value, plain(value) if numbers is None else numbers)

    def _layer(self, node: fx.Node) -> tuple[Any, str]:
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target)), str(node.target)
        if node.op == "get_attr":
            return None, str(node.target)
        path = node.meta.get("layer") or self._inside(node)
        return (self.root.get_submodule(path), path) if path else (None, "")

    def _inside(self, node: fx.Node) -> str:
        """The layer that a function is called in, if it is one of PyTorch's with a ``forward`` of the user's own."""
        stack = node.meta.get("nn_module_stack")
        path = next(reversed(stack.values()))[0] if stack else ""
        kind = type(self.root.get_submodule(path))
        return path if path and any(base in LAYER_RULES for base in kind.__mro__) else ""

    def _rule(self, site: Site) -> Rule:
        node, target = site.node, site.node.target
        if node.op == "placeholder":
            return lambda site: plain(site.output)
        if node.op == "get_attr":
            return self._attribute
        if node.op == "call_module":
            rule = rule_of_layer(type(site.layer))
        elif isinstance(target, torch._ops.OpOverload):
            rule = rule_of_operation(target)
        else:
            rule = rule_of_function(target)
        return rule or self._unknown

    def _unknown(self, site: Site) -> Any:
        reaching = [
            numbers for operand in site.operands() for numbers in operand.numbers if numbers is not None
        ]
        if site.node.op == "call_module":  # its own weights must not be cut either
            reason = f"belongs to {site.description}, which has no rule"
            for name, value in site.layer.named_parameters():
                for dim, length in enumerate(value.shape):
                    self.units.fix(site.axis(site.tensor(name), dim, length), reason)
        self.findings.unknown.append((site, reaching))
        return self._doubt(site.output, f"comes out of {site.description}, which has no rule")

    def _doubt(self, value: Any, reason: str) -> Any:
        """New numbers for what an operation without a rule returns: whatever meets it cannot shrink because of it."""
        if isinstance(value, Tensor):
            numbers = tuple(self.units.fresh(size) if size > 1 else None for size in value.shape)
            self.units.doubtful += [(axis, reason) for axis in numbers if axis is not None]
            return numbers
        if isinstance(value, dict):
            return {key: self._doubt(entry, reason) for key, entry in value.items()}
        if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
            return tuple(self._doubt(entry, reason) for entry in value)
        return None

    def _trace_size(self, node: fx.Node) -> None:
        """Where a size that the code computes comes from: which axes of channels, and whether other sizes take part."""
        axes = self._shape(node)
        if axes is not None:
            self.findings.shapes[node] = axes
            self.findings.sources[node] = tuple(
                numbers for numbers in axes if numbers is not None and len(numbers)
            )
            is_open = any(numbers is None for numbers in axes)
        else:
            before = node.all_input_nodes
            self.findings.sources[node] = tuple(
                numbers for part in before for numbers in self.findings.sources.get(part, ())
            )
            is_open = any(self.is_open(part) for part in before) or node.target == "numel"
        if is_open:
            self.findings.open.add(node)

    def _shape(self, node: fx.Node) -> Numbers | None:
        """A shape, or a part of one, as the numbers along its axes: none for a literal size, None for other sizes."""
        if not node.args or not isinstance(node.args[0], fx.Node):
            return None
        source = node.args[0]
        known = self.known.get(source)
        if isinstance(known, Operand) and (node.target == "size" or node.args[1:] == ("shape",)):
            dim = node.args[1] if node.target == "size" and len(node.args) > 1 else node.kwargs.get("dim")
            return (known.numbers[dim],) if isinstance(dim, int) else known.numbers
        if source not in self.findings.shapes:
            return None
        places = self.findings.places.get(source, (None,) * len(self.findings.shapes[source]))
        if node.target is operator.getitem and isinstance(node.args[1], int | slice):
            chosen = self.findings.shapes[source][node.args[1]]
            self.findings.places[node] = (
                places[node.args[1]] if isinstance(node.args[1], slice) else (places[node.args[1]],)
            )
            return chosen if isinstance(chosen, tuple) else (chosen,)
        # x.shape[:-1] + (heads, size)
        if node.target is operator.add and isinstance(node.args[1], tuple | list):
            added = tuple((node, ("args", 1, index)) for index in range(len(node.args[1])))
            self.findings.places[node] = (*places, *added)
            return (*self.findings.shapes[source], *(self._entry(entry) for entry in node.args[1]))
        return None

    def _entry(self, entry: Any) -> Indices | None:
        if not isinstance(entry, fx.Node):
            return np.empty(0, dtype=np.int64)
        axes = self.findings.shapes.get(entry)
        return axes[0] if axes is not None and len(axes) == 1 else None

    def _attach(self, value: Any, numbers: Any) -> Any:
        """The value with every tensor in it as an operand."""
        if isinstance(value, Tensor):
            return Operand(value, tuple(self.units.free(axis) for axis in numbers))
        if isinstance(value, dict):
            return {key: self._attach(entry, numbers[key]) for key, entry in value.items()}
        if isinstance(value, tuple | list) and not isinstance(value, torch.Size) and numbers is not None:
            return tuple(self._attach(entry, held) for entry, held in zip(value, numbers, strict=True))
        return value

    def _output(self, node: fx.Node) -> None:
        args = fx.node.map_arg(_answers(node.args), lambda n: self.known[n])
        for operand in tree_leaves(args):
            if isinstance(operand, Operand):
                for numbers in operand.numbers:
                    self.units.fix(numbers, "is an output of the module")
                    self.units.outputs += [] if numbers is None else [numbers]

    def _attribute(self, site: Site) -> Any:
        """A parameter or buffer that ``forward`` uses by itself: each of its axes may turn out to be channels.

        The kernel of a convolution never does.
        """
        if not isinstance(site.output, Tensor):
            return None
        name = site.shared.get(site.path, site.path)
        owner, _, leaf = site.path.rpartition(".")
        kernel = leaf == "weight" and isinstance(self.root.get_submodule(owner), nn.modules.conv._ConvNd)
        return tuple(
            None if length == 1 or (kernel and dim > 1) else site.axis(name, dim, length)
            for dim, length in enumerate(site.output.shape)
        )


def _answers(returned: Any) -> Any:
    """What a module returns, without the states inside it that an output object names beside the answers."""
    named = returned[0]
    if not isinstance(named, dict):
        return returned
    answers = {name: value for name, value in named.items() if HIDDEN not in name}
    return (answers or named,)
