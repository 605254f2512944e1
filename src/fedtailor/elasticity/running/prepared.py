"""A network with the preparation of its inputs in front: what is deployed answers raw inputs."""

from __future__ import annotations

import inspect
import operator
from typing import Any

from torch import fx, nn

from fedtailor.data.batches import Batch, inputs_of


def with_preparation(
    network: nn.Module,
    preparation: nn.Module | None,
    key: str | None,
    example: Batch,
    answer: str | None = None,
) -> fx.GraphModule:
    """A plain module ``(preparation, network)`` that prepares one input and hands the others on.

    It is a graph of PyTorch's own, so that no fedtailor code is needed to run or load it. ``key`` names the input that
    is prepared, as keyword argument; None is the first one. Without a preparation it hands on all of them, and what it
    is called with has names whatever the network's own signature says. ``answer`` is what is handed out of an output
    object; without it all that the network returns.
    """
    args, kwargs = inputs_of(example)
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in _names(network, len(args))]
    named: dict[str, Any] = {name: graph.placeholder(name) for name in kwargs}
    if preparation is None:
        pass
    elif key is None:
        given[0] = graph.call_module("preparation", (given[0],))
    else:
        named[key] = graph.call_module("preparation", (named[key],))
    output = graph.call_module("network", tuple(given), named)
    graph.output(output if answer is None else graph.call_function(operator.getitem, (output, answer)))
    holder = nn.Module()
    holder.network = network
    if preparation is not None:
        holder.preparation = preparation
    whole = fx.GraphModule(holder, graph, class_name=type(network).__name__)
    whole.train(network.training)
    return whole


def _names(network: nn.Module, count: int) -> list[str]:
    """What the network calls its first inputs, so that they can be given by name too."""
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(network.forward).parameters.values()
    names = [parameter.name for parameter in parameters if parameter.kind in plain][:count]
    return [*names, *(f"input_{place}" for place in range(len(names), count))]
