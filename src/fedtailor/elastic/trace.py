"""From an unmodified module and an example batch to its channel groups.

The module is traced with ``torch.fx`` and interpreted once on the ``meta`` device: next to every value runs an array of
unit numbers per axis, which the rules in ``layers.py`` and ``functions.py`` carry from node to node. The user's module
is never touched: all of this happens on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map

from fedtailor.elastic import functions, layers  # noqa: F401  (both fill the tables of rules)
from fedtailor.elastic.groups import ChannelGroups, Indices
from fedtailor.elastic.rules import FUNCTION_RULES, LAYER_RULES, Operand, Rule, Site, TraceError, describe, plain
from fedtailor.elastic.units import Units, solve

def trace(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], on_unknown: str = "error") -> ChannelGroups:
    """The channel groups of ``module``; ``args`` and ``kwargs`` are an example of its inputs.

    ``on_unknown="keep"`` leaves channels that reach an operation without a rule uncut instead of refusing.
    """
    graph_module = _symbolic(copy.deepcopy(module).eval()).to("meta")
    interpreter = _Interpreter(graph_module, shared_names(module), on_unknown)
    meta = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, (tuple(args), dict(kwargs)))
    interpreter.run(*_in_graph_order(graph_module.graph, module, *meta))
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    return solve(interpreter.units, shapes, interpreter.shared)


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared tensors once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shared_names(module: nn.Module) -> dict[str, str]:
    """Second and later names of shared tensors, each with the first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    both = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied


class _Tracer(fx.Tracer):
    """Stops at every layer that has a rule, looks into the others, and remembers source lines."""

    record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) in LAYER_RULES or super().is_leaf_module(m, module_qualified_name)


def _symbolic(module: nn.Module) -> fx.GraphModule:
    try:
        graph = _Tracer().trace(module)
    except (fx.proxy.TraceError, TypeError, RuntimeError, NotImplementedError) as error:
        raise TraceError(
            f"{type(module).__name__} cannot be traced with torch.fx: {error}. Control flow that depends on the data "
            "cannot be followed; move it into a layer of its own and register a rule with fedtailor.elastic.layer_rule"
        ) from error
    return fx.GraphModule(module, graph)


def _in_graph_order(graph: fx.Graph, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Positional and keyword inputs in the order of the graph's placeholders; defaults where none is given."""
    values = list(args)
    for node in [node for node in graph.nodes if node.op == "placeholder"][len(args) :]:
        if node.target in kwargs:
            values.append(kwargs[node.target])
        elif node.args:
            values.append(node.args[0])
        else:
            raise TraceError(f"{type(module).__name__}.forward: input {node.target!r} is missing in the example batch")
    return values


class _Interpreter(fx.Interpreter):
    """Runs the graph on ``meta`` tensors and carries unit numbers beside them."""

    def __init__(self, graph_module: fx.GraphModule, shared: dict[str, str], on_unknown: str) -> None:
        super().__init__(graph_module)
        self.units = Units()
        self.shared = shared
        self.on_unknown = on_unknown
        self.labels: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        layer = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        try:
            output = super().run_node(n)
        except (RuntimeError, TypeError, ValueError, IndexError) as error:
            raise TraceError(f"{describe(n, layer)} fails on the example batch: {error}") from error
        args, kwargs = tree_map(self._operand, (n.args, dict(n.kwargs)), is_leaf=lambda leaf: isinstance(leaf, fx.Node))
        path = str(n.target) if n.op in ("call_module", "get_attr") else ""
        site = Site(n, tuple(args), kwargs, output, self.units, layer, path, self.shared)
        self.labels[n] = self._rule(n, layer)(site)
        return output

    def _operand(self, leaf: Any) -> Any:
        if not isinstance(leaf, fx.Node):
            return leaf
        labels = self.labels[leaf]
        if isinstance(self.env[leaf], Tensor):
            return Operand(self.env[leaf], labels)
        if isinstance(self.env[leaf], tuple | list) and isinstance(labels, tuple | list):
            pairs = zip(self.env[leaf], labels, strict=True)
            return tuple(Operand(value, label) if isinstance(value, Tensor) else value for value, label in pairs)
        return self.env[leaf]

    def _rule(self, n: fx.Node, layer: nn.Module | None) -> Rule:
        if n.op == "placeholder":
            return _input
        if n.op == "output":
            return _output
        if n.op == "get_attr":
            return _attribute
        rule = LAYER_RULES.get(type(layer)) if layer is not None else FUNCTION_RULES.get(n.target)
        return rule or self._unknown

    def _unknown(self, site: Site) -> Any:
        if not any(labels is not None for operand in site.operands() for labels in operand.labels):
            return site.fix_all("")    # nothing that can shrink flows in
        if self.on_unknown == "keep":
            return site.fix_all(f"reaches {site.place}, which has no rule")
        kind = "layer_rule" if site.layer is not None else "function_rule"
        raise TraceError(
            f"no rule says how channels pass through {site.place}. Register one with fedtailor.elastic.{kind}, "
            'or pass on_unknown="keep" to leave the channels that reach it uncut'
        )


def _input(site: Site) -> Any:
    return tree_map(lambda leaf: plain(leaf) if isinstance(leaf, Tensor) else None, site.output)


def _attribute(site: Site) -> Any:
    """A parameter or buffer that ``forward`` uses by itself: each of its axes may turn out to be channels."""
    if not isinstance(site.output, Tensor):
        return None
    name = site.shared.get(site.path, site.path)
    labels: list[Indices | None] = []
    for dim, length in enumerate(site.output.shape):
        units = site.units.axes.get((name, dim))
        labels.append(site.units.fresh(length) if units is None else units)
        if length == 1:    # broadcasts over whatever it meets
            labels[-1] = None
        elif units is None:
            site.units.drive(name, dim, labels[-1])    # type: ignore[arg-type]
    return tuple(labels)


def _output(site: Site) -> Any:
    for operand in site.operands():
        for dim, labels in enumerate(operand.labels):
            site.units.fix(labels, "is an output of the module")
            if dim == len(operand.labels) - 1 and labels is not None:
                site.units.outputs.append(labels)
    return None
