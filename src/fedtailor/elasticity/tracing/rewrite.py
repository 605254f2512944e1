"""Changes a recorded graph: sizes that the code gives as numbers become attributes, and so does the mode.

The graph then stands in for the user's ``forward`` at every width: ``x.view(-1, 400)`` reads
``x.view(-1, self.size_0)``. ``trace.py`` has sizes written once ``units.py`` knows which axis they count; the front
door and the pieces of a model run the result.
"""

from __future__ import annotations

import importlib
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _assert_is_none
from torch.utils._pytree import tree_leaves

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rules import Counted, LiteralSize, lookup

SIZE = "size_"


def write_sizes(graph: fx.Graph, root: nn.Module, literals: Sequence[LiteralSize]) -> dict[str, Indices]:
    """Replace literal sizes by attributes of ``root``; returns the axis that each attribute counts."""
    sizes: dict[str, Indices] = {}
    nodes: dict[tuple[int, ...], fx.Node] = {}
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for literal in literals:
        key = (literal.value, *literal.numbers.tolist())
        if key not in nodes:
            number = len(sizes)
            while hasattr(root, f"{SIZE}{number}"):
                number += 1
            name = f"{SIZE}{number}"
            setattr(root, name, literal.value)
            with graph.inserting_before(first):
                nodes[key] = graph.create_node("get_attr", name)
            nodes[key].meta["value"] = literal.value
            sizes[name] = literal.numbers
        _put(literal.node, literal.path, nodes[key])
    return sizes


def training_switches(graph: fx.Graph, other: fx.Graph) -> bool:
    """Make numbers that differ in training follow ``self.training``; False if the graphs differ in more."""
    mine, theirs = _live(graph), _live(other)
    pairs = list(zip(mine, theirs, strict=False))
    if len(mine) != len(theirs) or any((a.op, a.target) != (b.op, b.target) for a, b in pairs):
        return False
    twin = {b: a for a, b in pairs}
    changes: list[tuple[fx.Node, tuple[Any, ...], Any]] = []
    for a, b in pairs:
        for field in ("args", "kwargs"):
            different = _differences(
                getattr(a, field), fx.node.map_arg(getattr(b, field), lambda n: twin[n]), (field,)
            )
            if different is None:
                return False
            changes += [(a, path, value) for path, value in different]
    if changes:
        _switch(graph, changes)
    return True


def _live(graph: fx.Graph) -> list[fx.Node]:
    """The nodes whose values matter: without numbers that were only looked at."""
    dead: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        number = node.op == "call_function" or node.op == "call_method"
        number = number and not any(isinstance(leaf, Tensor) for leaf in tree_leaves(node.meta["value"]))
        pure = node.target not in (operator.setitem, _assert_is_none)
        if number and pure and all(user in dead for user in node.users):
            dead.add(node)
    return [node for node in graph.nodes if node not in dead]


def _differences(a: Any, b: Any, path: tuple[Any, ...]) -> list[tuple[tuple[Any, ...], Any]] | None:
    """Where ``b`` has another number than ``a``, and which; None if they differ in anything else."""
    if isinstance(a, fx.Node) or isinstance(b, fx.Node):
        return [] if a is b else None
    if isinstance(a, tuple | list) and isinstance(b, tuple | list):
        if len(a) != len(b):
            return None
        parts = [_differences(x, y, (*path, index)) for index, (x, y) in enumerate(zip(a, b, strict=True))]
    elif isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return None
        parts = [_differences(a[key], b[key], (*path, key)) for key in a]
    elif isinstance(a, slice) and isinstance(b, slice):
        parts = [
            _differences(getattr(a, side), getattr(b, side), (*path, side))
            for side in ("start", "stop", "step")
        ]
    else:
        if type(a) is type(b) and a == b:
            return []
        return (
            [(path, b)] if isinstance(a, bool | int | float) and isinstance(b, bool | int | float) else None
        )
    joined: list[tuple[tuple[Any, ...], Any]] = []
    for part in parts:
        if part is None:
            return None
        joined += part
    return joined


def _switch(graph: fx.Graph, changes: Sequence[tuple[fx.Node, tuple[Any, ...], Any]]) -> None:
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        mode = graph.create_node("get_attr", "training")
        mode.meta["value"] = False
    for node, path, in_training in changes:
        in_evaluation = lookup(node, path)
        if (in_evaluation, in_training) == (False, True):
            _put(node, path, mode)
            continue
        with graph.inserting_before(node):
            chosen = graph.call_function(operator.getitem, ((in_evaluation, in_training), mode))
        chosen.meta["value"] = in_evaluation
        _put(node, path, chosen)


def _put(node: fx.Node, path: tuple[Any, ...], value: fx.Node) -> None:
    if path[0] == "args":
        node.args = _with(node.args, path[1:], value)
    else:
        node.kwargs = _with(dict(node.kwargs), path[1:], value)


def _with(holder: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of nested arguments with one entry replaced."""
    if not path:
        return value
    step, rest = path[0], path[1:]
    if isinstance(holder, slice):
        sides = {side: getattr(holder, side) for side in ("start", "stop", "step")}
        sides[step] = _with(sides[step], rest, value)
        return slice(*sides.values())
    if isinstance(holder, dict):
        return {key: _with(entry, rest, value) if key == step else entry for key, entry in holder.items()}
    entries = [_with(entry, rest, value) if index == step else entry for index, entry in enumerate(holder)]
    return tuple(entries) if isinstance(holder, tuple) else entries


class SizedGraph(fx.GraphModule):
    """A traced network whose sizes are attributes, so that one graph serves every width.

    ``fx.GraphModule`` would trace its own code anew when it is unpickled, and freeze the sizes; this one keeps its
    nodes.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        nodes = [
            (
                node.op,
                _by_name(node.target),
                *fx.node.map_arg((node.args, dict(node.kwargs)), _Reference.of),
                node.name,
            )
            for node in self.graph.nodes
        ]
        state = {key: value for key, value in self.__dict__.items() if key not in ("_graph", "_code")}
        return _restore, (type(self).__name__, state, nodes)


@dataclass(frozen=True)
class _Reference:
    """A node of a pickled graph, by its name."""

    name: str

    @staticmethod
    def of(node: fx.Node) -> Any:
        return _Reference(node.name)


def _by_name(target: Any) -> Any:
    """A function as its module and name: some of PyTorch's cannot be pickled."""
    home, name = getattr(target, "__module__", None), getattr(target, "__name__", None)
    if home and name and getattr(importlib.import_module(home), name, None) is target:
        return home, name
    return target


def _restore(name: str, state: dict[str, Any], nodes: Sequence[tuple[Any, ...]]) -> SizedGraph:
    root = nn.Module()
    root.__dict__.update(state)
    graph, made = fx.Graph(), dict[str, fx.Node]()
    for op, target, args, kwargs, node_name in nodes:
        args, kwargs = fx.node.map_aggregate(
            (args, kwargs), lambda leaf: made[leaf.name] if isinstance(leaf, _Reference) else leaf
        )
        if isinstance(target, tuple):
            target = getattr(importlib.import_module(target[0]), target[1])
        made[node_name] = graph.create_node(op, target, args, kwargs, node_name)
    return SizedGraph(root, graph, class_name=name)


def stand_in(network: fx.GraphModule, module: nn.Module) -> SizedGraph:
    """A network of its own that runs the graph and holds every tensor of ``module``, also those that it never uses."""
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    graph.output(graph.graph_copy(network.graph, values))
    used = {str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module")}
    names = [*dict(module.named_parameters()), *dict(module.named_buffers())]
    unused = [name for name in names if not any(name == path or name.startswith(f"{path}.") for path in used)]
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.inserting_before(first):
        for name in unused:  # an unused line keeps a tensor when the network is copied
            graph.create_node("get_attr", name)
    for node in graph.nodes:
        node.meta = {}
        node.args, node.kwargs = fx.node.map_aggregate((node.args, node.kwargs), _plain_number)
    return SizedGraph(network, graph, class_name=f"{type(module).__name__}Graph")


def _plain_number(leaf: Any) -> Any:
    return int(leaf) if isinstance(leaf, Counted) else leaf


def plain_graph(network: SizedGraph, constants: Sequence[str]) -> fx.GraphModule:
    """The network at its present sizes, as an ordinary graph module with plain numbers in its code.

    ``constants`` are buffers that are not part of the saved state.
    """
    graph = network.graph
    for node in list(graph.nodes):
        if node.op == "get_attr" and str(node.target).startswith(SIZE):
            number = getattr(network, str(node.target))
            if isinstance(number, int):
                for user in list(node.users):
                    _replace(user, node, number)
                graph.erase_node(node)
    small = fx.GraphModule(network, graph, class_name=type(network).__name__)
    for name in constants:
        owner, _, leaf = name.rpartition(".")
        holder = small.get_submodule(owner)
        if leaf in holder._buffers:
            holder._non_persistent_buffers_set.add(leaf)
    return small


def _replace(user: fx.Node, node: fx.Node, number: int) -> None:
    def swap(n: fx.Node) -> Any:
        return number if n is node else n

    user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), swap)
