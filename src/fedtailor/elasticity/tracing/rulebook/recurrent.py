"""How recurrent layers carry channels: every gate, layer and direction keeps the same hidden units.

The weights stack the gates: rows ``g * hidden + j`` for every gate ``g`` belong to unit ``j``. PyTorch's layers
have one ``hidden_size`` for all layers and directions, so these shrink together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, layer_rule, plain
from fedtailor.elasticity.tracing.units import Numbers

GATES = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1, nn.LSTMCell: 4, nn.GRUCell: 3, nn.RNNCell: 1}


@layer_rule(nn.LSTM, nn.GRU, nn.RNN)
def recurrent(site: Site) -> Any:
    """Several layers, one or two directions; the input and the initial states may be operands."""
    layer = site.layer
    x, states = _operands(site)
    if layer.proj_size:
        return site.fix_all(f"reaches {site.description} with proj_size, whose units stay whole")
    gates, directions = GATES[type(layer)], 2 if layer.bidirectional else 1
    hidden, inputs = _hidden(site, "weight_hh_l0"), x.numbers[-1]
    site.fix_axes(x, range(x.value.dim() - 1), "is the time or batch of")
    for depth in range(layer.num_layers):
        for direction in range(directions):
            suffix = f"l{depth}" + ("_reverse" if direction else "")
            _cell(site, gates, hidden, inputs, suffix=f"_{suffix}")
        inputs = np.tile(hidden, directions)
    site.follow("hidden_size", hidden)
    site.follow("input_size", x.numbers[-1])
    site.produce(hidden)
    return _states(site, x, states, hidden, directions)


def _operands(site: Site) -> tuple[Operand, list[Operand]]:
    """The features and the initial states; features may be packed."""
    given = site.argument(0, "input")
    x = given[0] if isinstance(given, tuple) else given
    return x, [leaf for leaf in tree_leaves(site.argument(1, "hx")) if isinstance(leaf, Operand)]


@layer_rule(nn.LSTMCell, nn.GRUCell, nn.RNNCell)
def recurrent_cell(site: Site) -> Any:
    """One step of one layer."""
    x, *states = site.operands()
    hidden = _hidden(site, "weight_hh")
    _cell(site, GATES[type(site.layer)], hidden, x.numbers[-1], suffix="")
    for state in states:
        site.join(state.numbers[-1], hidden, "is the state of")
    site.follow("hidden_size", hidden)
    site.follow("input_size", x.numbers[-1])
    site.produce(hidden)
    leading = x.numbers[:-1]
    return ((*leading, hidden), (*leading, hidden)) if isinstance(site.output, tuple) else (*leading, hidden)


def _hidden(site: Site, name: str) -> Indices:
    known = site.units.axes.get((site.tensor(name), 1))  # where the layer was called before
    return site.units.fresh(site.layer.hidden_size) if known is None else known


def _cell(site: Site, gates: int, hidden: Indices, inputs: Indices | None, suffix: str) -> None:
    rows = np.tile(hidden, gates)
    weight = site.parameter(f"weight_ih{suffix}", rows, inputs)
    assert weight is not None
    site.join(weight.numbers[1], inputs, site.reading)
    site.parameter(f"weight_hh{suffix}", rows, hidden)
    for name in ("bias_ih", "bias_hh"):
        site.parameter(f"{name}{suffix}", rows)


def _states(site: Site, x: Operand, states: Sequence[Operand], hidden: Indices, directions: int) -> Any:
    """The numbers of ``output, h_n`` or ``output, (h_n, c_n)``; initial states hold the hidden units too."""
    for state in states:
        site.join(state.numbers[-1], hidden, "is the state of")
    output: Any = (*x.numbers[:-1], np.tile(hidden, directions))
    if not isinstance(site.output[0], Tensor):
        output = (output, *plain(site.output[0][1:]))
    last = site.output[1]
    state_numbers: Numbers = (*(None,) * ((last if isinstance(last, Tensor) else last[0]).dim() - 1), hidden)
    return output, state_numbers if isinstance(last, Tensor) else (state_numbers, state_numbers)


@function_rule(nn.utils.rnn.pack_padded_sequence)
def pack(site: Site) -> Any:
    """Batch and time become one axis; the other parts are positions."""
    x = site.operand()
    site.fix_axes(x, range(x.value.dim() - 1), "is the time or batch of")
    return ((None, *x.numbers[2:]), *plain(site.output[1:]))


@function_rule(nn.utils.rnn.pad_packed_sequence)
def unpack(site: Site) -> Any:
    """Batch and time come back, and the lengths."""
    return (None, None, *site.operand().numbers[1:]), plain(site.output[1])


@function_rule("aten::lstm", "aten::gru", "aten::rnn_tanh", "aten::rnn_relu")
def recurrent_exported(site: Site) -> Any:
    """The exported operation: input, states, all weights in a list, then settings."""
    x, states, weights, biased, layers = site.args[:5]
    bidirectional = site.argument(7, "bidirectional")
    gates = {"aten::lstm": 4, "aten::gru": 3}.get(site.node.target._schema.name, 1)  # type: ignore[union-attr]
    directions, per_cell = 2 if bidirectional else 1, 4 if biased else 2
    hidden = weights[1].numbers[1]
    if len(weights) != layers * directions * per_cell or hidden is None:
        return site.fix_all(f"reaches {site.description} with projected states, whose units stay whole")
    inputs, rows = x.numbers[-1], np.tile(hidden, gates)
    for number in range(layers * directions):
        into, over, *biases = weights[number * per_cell : (number + 1) * per_cell]
        site.join(
            into.numbers[1],
            inputs if number < directions else np.tile(hidden, directions),
            site.reading,
        )
        site.join(over.numbers[1], hidden, site.reading)
        for tensor in (into, over, *biases):
            site.join(tensor.numbers[0], rows, "is a gate of")
    for state in states if isinstance(states, tuple | list) else [states]:
        site.join(state.numbers[-1], hidden, "is the state of")
    site.follow("hidden_size", hidden)
    site.follow("input_size", x.numbers[-1])
    site.produce(hidden)
    output: Numbers = (*x.numbers[:-1], np.tile(hidden, directions))
    return (output, *((None,) * (part.dim() - 1) + (hidden,) for part in site.output[1:]))
