"""A small Transformer as Llama is built: RMS norms, rotary positions, grouped queries, gated feed-forward layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.errors import require
from fedtailor.models.parts import sequence_length, whole
from fedtailor.models.registry import register
from fedtailor.models.text import CharacterHead


class GroupedAttention(nn.Module):
    """Causal attention in which some query heads share a key and a value head; positions turn queries and keys.

    A head's features are two halves: entry i of both is a pair, which position t turns by t / base^(i / half).
    """

    cosine: Tensor
    sine: Tensor

    def __init__(self, features: int, heads: int, shared: int, length: int, base: float) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        size = features // heads
        self.query = nn.Linear(features, features, bias=False)
        self.key = nn.Linear(features, shared * size, bias=False)
        self.value = nn.Linear(features, shared * size, bias=False)
        self.output = nn.Linear(features, features, bias=False)
        half = size // 2
        angles = torch.outer(torch.arange(length), base ** (-torch.arange(half) / half))  # (time, half)
        self.register_buffer("cosine", angles.cos(), persistent=False)
        self.register_buffer("sine", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        query = self.turned(self.query(x).unflatten(-1, (self.heads, 2, -1)))
        key = self.turned(self.key(x).unflatten(-1, (self.shared, 2, -1)))
        value = self.value(x).unflatten(-1, (self.shared, -1)).transpose(1, 2)
        times = self.heads // self.shared
        key, value = key.repeat_interleave(times, dim=1), value.repeat_interleave(times, dim=1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        out: Tensor = self.output(mixed.transpose(1, 2).flatten(2))  # (batch, time, features)
        return out

    def turned(self, x: Tensor) -> Tensor:
        """From (batch, time, heads, 2, half) to (batch, heads, time, head size), every pair turned by its angle."""
        first, second = x.transpose(1, 2).unbind(3)  # (batch, heads, time, half)
        left = first * self.cosine - second * self.sine
        right = second * self.cosine + first * self.sine
        return torch.stack((left, right), dim=3).flatten(3)


class LlamaBlock(nn.Module):
    """Attention, then a gated pair of linear layers, each normalised before and added to its input."""

    def __init__(self, features: int, attention: nn.Module, hidden: int) -> None:
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(features), attention
        self.norm2 = nn.RMSNorm(features)
        self.gate = nn.Linear(features, hidden, bias=False)
        self.up = nn.Linear(features, hidden, bias=False)
        self.down = nn.Linear(hidden, features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        wide = self.norm2(x)
        out: Tensor = x + self.down(F.silu(self.gate(wide)) * self.up(wide))
        return out


class CharacterLlama(nn.Module):
    """Character embedding, blocks, scores of the next character."""

    def __init__(self, vocabulary: int, embedding: int, blocks: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.blocks, self.head = blocks, head

    def forward(self, characters: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.embedding(characters)))
        return scores


@dataclass(frozen=True)
class LlamaOptions:
    """Its sizes; ``shared`` is the number of key and value heads. ``vocabulary`` and ``predict`` as in char-lstm."""

    embedding: int = 128
    heads: int = 4
    shared: int = 2
    hidden: int = 256
    depth: int = 2
    base: float = 10_000.0
    vocabulary: int | None = None
    predict: str = "last"


@register("llama", options=LlamaOptions)
def llama(options: LlamaOptions, *, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Small character Transformer as Llama is built: RMS norms, rotary positions, grouped queries."""
    length = sequence_length("llama", input_shape)
    features, heads = whole("embedding", options.embedding), whole("heads", options.heads)
    hidden, shared = whole("hidden", options.hidden), whole("shared", options.shared)
    require(features % (2 * heads) == 0, "heads", heads, f"a divisor of half of embedding = {features}")
    require(heads % shared == 0, "shared", shared, f"a divisor of heads = {heads}")
    symbols = whole("vocabulary", num_classes if options.vocabulary is None else options.vocabulary)
    blocks = [
        LlamaBlock(features, GroupedAttention(features, heads, shared, length, options.base), hidden)
        for _ in range(whole("depth", options.depth))
    ]
    head = CharacterHead(features, num_classes, options.predict)
    return CharacterLlama(symbols, features, nn.Sequential(*blocks, nn.RMSNorm(features)), head)
