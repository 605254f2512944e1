"""A pre-norm Transformer block with explicit query, key and value layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.errors import require
from fedtailor.models.parts import dropout_rate, whole


class Attention(nn.Module):
    """Multi-head self-attention over (batch, time, features); ``causal`` hides later positions."""

    def __init__(self, features: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.query = nn.Linear(features, features)
        self.key = nn.Linear(features, features)
        self.value = nn.Linear(features, features)
        self.output = nn.Linear(features, features)

    def forward(self, x: Tensor) -> Tensor:
        # The size of a head is left to -1, so that the layers may be narrower than they were built.
        query = (
            self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        )  # (batch, heads, time, head size)
        key = self.key(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        value = self.value(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=self.causal)
        joined = torch.flatten(mixed.transpose(1, 2), 2)  # (batch, time, features)
        out: Tensor = self.output(joined)
        return out


class TransformerBlock(nn.Module):
    """Attention, then two linear layers, each normalised before and added to its input."""

    def __init__(self, features: int, heads: int, hidden: int, dropout: float, causal: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(features)
        self.attention = Attention(features, heads, causal)
        self.norm2 = nn.LayerNorm(features)
        self.feedforward = nn.Sequential(nn.Linear(features, hidden), nn.GELU(), nn.Linear(hidden, features))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: Tensor = x + self.dropout(self.feedforward(self.norm2(x)))
        return out


@dataclass(frozen=True)
class Blocks:
    """The options of a stack of blocks, as a model takes them; ``hidden`` is the width of the feed-forward layers."""

    embedding: int = 128
    heads: int = 4
    hidden: int = 256
    depth: int = 2
    dropout: float = 0.0


def transformer_blocks(options: Blocks, causal: bool) -> nn.Sequential:
    """``depth`` blocks and the normalisation after the last one."""
    features, heads = whole("embedding", options.embedding), whole("heads", options.heads)
    hidden, depth = whole("hidden", options.hidden), whole("depth", options.depth)
    require(features % heads == 0, "heads", heads, f"a divisor of embedding = {features}")
    rate = dropout_rate(options.dropout)
    blocks = [TransformerBlock(features, heads, hidden, rate, causal) for _ in range(depth)]
    return nn.Sequential(*blocks, nn.LayerNorm(features))
