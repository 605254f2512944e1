"""Several widths in one ONNX graph: the input ``width`` chooses the branch, and branches share their weights.

The initialisers of the widest network are kept once. A narrower one takes the first rows and columns of them where its
own numbers are just that; what is its alone (statistics of norms, layouts that mix a recurrent layer's gates) it keeps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

WIDTH = "width"


def joined(models: Sequence[Any]) -> bytes:
    """One model of several, the widest last; ``width`` is the place of one in this order."""
    from onnx import TensorProto, helper

    widest = models[-1]
    shared = {each.name: each for each in widest.graph.initializer}
    branches = [_branch(place, model, shared) for place, model in enumerate(models)]
    outputs = [each.name for each in widest.graph.output]
    nodes = _chain(branches, outputs)
    inputs = [*widest.graph.input, helper.make_tensor_value_info(WIDTH, TensorProto.INT64, [])]
    graph = helper.make_graph(nodes, "widths", inputs, list(widest.graph.output), list(shared.values()))
    opsets = {each.domain: each.version for model in models for each in model.opset_import}
    whole = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in opsets.items()],
        ir_version=widest.ir_version,
        functions=list(widest.functions),
    )
    packed: bytes = whole.SerializeToString()
    return packed


def _chain(branches: Sequence[Any], outputs: Sequence[str]) -> list[Any]:
    """``if width == 0 then ... else if width == 1 ...``; the last branch answers for every other number."""
    from onnx import helper, numpy_helper

    inner = branches[-1]
    nodes: list[Any] = []
    for place in reversed(range(len(branches) - 1)):
        number, asked = f"{WIDTH}_{place}", f"is_{WIDTH}_{place}"
        constant = numpy_helper.from_array(np.array(place, dtype=np.int64), f"{number}_value")
        names = list(outputs) if place == 0 else [f"{asked}/{name}" for name in outputs]
        nodes = [
            helper.make_node("Constant", [], [number], value=constant),
            helper.make_node("Equal", [WIDTH, number], [asked]),
            helper.make_node("If", [asked], names, then_branch=branches[place], else_branch=inner),
        ]
        inner = helper.make_graph(nodes, f"otherwise_{place}", [], [_untyped(name) for name in names])
    return nodes


def _untyped(name: str) -> Any:
    from onnx import ValueInfoProto

    return ValueInfoProto(name=name)


def _branch(place: int, model: Any, shared: dict[str, Any]) -> Any:
    """The graph of one width as a branch: names of its own, weights of the widest where it can."""
    from onnx import helper

    graph = model.graph
    given = {each.name for each in graph.input}
    own: dict[str, str] = {}
    nodes: list[Any] = []
    kept: list[Any] = []
    for tensor in graph.initializer:
        own[tensor.name] = f"{place}/{tensor.name}"
        source = shared.get(tensor.name)
        if source is not None and source is tensor:
            own[tensor.name] = tensor.name
        elif source is not None and (ends := _prefix(tensor, source)) is not None:
            nodes += _slice(source.name, own[tensor.name], ends)
        else:
            copy = type(tensor)()
            copy.CopyFrom(tensor)
            copy.name = own[tensor.name]
            kept.append(copy)
    for node in graph.node:
        copy = type(node)()
        copy.CopyFrom(node)
        for names in (copy.input, copy.output):
            names[:] = [_renamed(name, place, given, own) for name in names]
        copy.name = f"{place}/{copy.name}"
        nodes.append(copy)
    outputs = [_untyped(_renamed(each.name, place, given, own)) for each in graph.output]
    return helper.make_graph(nodes, f"{WIDTH}_{place}", [], outputs, kept)


def _renamed(name: str, place: int, given: set[str], own: dict[str, str]) -> str:
    if not name or name in given:
        return name
    return own.get(name, f"{place}/{name}")


def _prefix(tensor: Any, source: Any) -> tuple[int, ...] | None:
    """The sizes of a tensor, if it is the first rows and columns of another."""
    from onnx import numpy_helper

    one, whole = numpy_helper.to_array(tensor), numpy_helper.to_array(source)
    if (
        one.ndim != whole.ndim
        or one.ndim == 0
        or any(a > b for a, b in zip(one.shape, whole.shape, strict=True))
    ):
        return None
    same = np.array_equal(one, whole[tuple(slice(0, size) for size in one.shape)])
    return tuple(one.shape) if same else None


def _slice(source: str, name: str, ends: tuple[int, ...]) -> Iterator[Any]:
    from onnx import helper, numpy_helper

    starts = np.zeros(len(ends), dtype=np.int64)
    for what, values in (("starts", starts), ("ends", np.array(ends, dtype=np.int64))):
        constant = numpy_helper.from_array(values, f"{name}/{what}/value")
        yield helper.make_node("Constant", [], [f"{name}/{what}"], value=constant)
    yield helper.make_node("Slice", [source, f"{name}/starts", f"{name}/ends"], [name])
