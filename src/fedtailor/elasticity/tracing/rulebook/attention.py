"""How attention carries channels: heads stay, and every head keeps the same of its units.

The scale of the scores is that of the kept head size: ``scaled_dot_product_attention`` divides by the square root of
what it sees.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn
from torch.nn import functional as F

from fedtailor.elasticity.groups import Indices
from fedtailor.elasticity.tracing.rulebook.functions import meet
from fedtailor.elasticity.tracing.rules import Operand, Site, function_rule, layer_rule


@function_rule(F.scaled_dot_product_attention)
def scaled_dot_product_attention(site: Site) -> Any:
    """Query (..., time, head), key (..., other time, head), value (..., other time, channels)."""
    query, key, value = (site.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    site.join(query.numbers[-1], key.numbers[-1], "is compared with what cannot shrink in")
    for x in (query, key, value):
        site.fix_axes(x, (-2,), "is the time of")
    site.mark("masked")
    parts = [query, key, value]
    mask = site.argument(3, "attn_mask")
    if isinstance(mask, Operand):  # a bias for every head, perhaps
        site.fix_axes(mask, range(max(-2, -mask.value.dim()), 0), "is the time of")
        parts += [mask] if mask.value.dim() > 1 else []
    leading = [Operand(x.value[..., 0, 0], x.numbers[:-2]) for x in parts]
    return (*meet(site, leading, site.output.shape[:-2]), None, value.numbers[-1])


@layer_rule(nn.MultiheadAttention)
def multihead_attention(site: Site) -> Any:
    """The stream has as many channels as all heads together, so its channels shrink head by head like theirs."""
    layer = site.layer
    query, key, value = (site.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    stream = _stream(site, query)
    by_head = stream.reshape(layer.num_heads, -1)
    site.units.tie(by_head[:1], by_head)
    for x in (query, key, value):
        site.fix_axes(x, range(x.value.dim() - 1), "is the time or batch of")
    if layer._qkv_same_embed_dim:
        for x in (key, value):
            site.join(x.numbers[-1], stream, "is the stream of")
        site.parameter("in_proj_weight", np.tile(stream, 3), stream)
    else:
        for name, x in (("q", query), ("k", key), ("v", value)):
            weight = site.parameter(f"{name}_proj_weight", stream, stream if x is query else x.numbers[-1])
            assert weight is not None
            site.join(weight.numbers[1], x.numbers[-1], site.reading)
    site.parameter("in_proj_bias", np.tile(stream, 3))
    for name in ("bias_k", "bias_v"):
        if getattr(layer, name) is not None:
            site.units.drive(site.tensor(name), 2, stream)
    output = site.parameter("out_proj.weight", None, stream)
    assert output is not None
    site.parameter("out_proj.bias", output.numbers[0])
    site.follow("embed_dim", stream)
    site.follow("head_dim", by_head[0])
    site.follow("kdim", stream if layer._qkv_same_embed_dim else key.numbers[-1])
    site.follow("vdim", stream if layer._qkv_same_embed_dim else value.numbers[-1])
    site.units.follow(f"{site.path}.out_proj", "in_features", stream)
    site.units.follow(f"{site.path}.out_proj", "out_features", output.numbers[0])  # type: ignore[arg-type]
    site.produce(output.numbers[0])
    weights = site.output[1]
    return (*query.numbers[:-1], output.numbers[0]), None if weights is None else (None,) * weights.dim()


def _stream(site: Site, query: Operand) -> Indices:
    """The units of the channels that go in, which are also those of the heads."""
    stream = query.numbers[-1]
    if stream is None:
        stream = site.axis(site.tensor("out_proj.weight"), 1, site.layer.embed_dim)
        site.units.fix(stream, f"is as wide as the input of {site.description}")
    return stream
