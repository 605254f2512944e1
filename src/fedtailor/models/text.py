"""Character models: FjORD's two-layer LSTM for Shakespeare and a small Transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtailor.errors import unknown
from fedtailor.models.attention import Blocks, transformer_blocks
from fedtailor.models.parts import sequence_length, whole
from fedtailor.models.registry import register


class CharacterHead(nn.Module):
    """Scores of the next character, after the last position or after every one."""

    def __init__(self, features: int, num_classes: int, predict: str) -> None:
        super().__init__()
        if predict not in ("last", "every"):
            raise unknown("predict", predict, ("last", "every"))
        self.every = predict == "every"
        self.linear = nn.Linear(features, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        if not self.every:
            x = x[:, -1]  # (batch, features)
        scores: Tensor = self.linear(x)  # (batch, classes), or (batch, time, classes)
        return scores


class CharacterLSTM(nn.Module):
    """Embedding, two LSTM layers, linear."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm1 = nn.LSTM(embedding, hidden, batch_first=True)
        self.lstm2 = nn.LSTM(hidden, hidden, batch_first=True)
        self.head = head

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters)  # (batch, time, embedding)
        x, _ = self.lstm1(x)
        x, _ = self.lstm2(x)
        scores: Tensor = self.head(x)
        return scores


class CharacterTransformer(nn.Module):
    """Embedding of characters and positions, causal pre-norm blocks, linear."""

    def __init__(
        self, vocabulary: int, length: int, embedding: int, blocks: nn.Module, head: nn.Module
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.position = nn.Parameter(torch.empty(length, embedding))
        nn.init.normal_(self.position, std=0.02)
        self.blocks = blocks
        self.head = head

    def forward(self, characters: Tensor) -> Tensor:
        x = self.embedding(characters) + self.position  # (batch, time, embedding)
        scores: Tensor = self.head(self.blocks(x))
        return scores


@register("char-lstm")
def char_lstm(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    embedding: int = 8,
    hidden: int = 128,
    vocabulary: int | None = None,
    predict: str = "last",
) -> nn.Module:
    """FjORD's Shakespeare LSTM: embedding, two LSTM layers, linear.

    ``vocabulary`` is the number of input symbols, by default ``num_classes``. ``predict`` is last (the
    character after the text: batch x classes) or every (after each position: batch x time x classes).
    """
    sequence_length("char-lstm", input_shape)
    hidden = whole("hidden", hidden)
    symbols = whole("vocabulary", num_classes if vocabulary is None else vocabulary)
    head = CharacterHead(hidden, num_classes, predict)
    return CharacterLSTM(symbols, whole("embedding", embedding), hidden, head)


@dataclass(frozen=True)
class TransformerOptions(Blocks):
    """The blocks, and what goes in and comes out: ``vocabulary`` and ``predict`` are as in char-lstm."""

    vocabulary: int | None = None
    predict: str = "last"


@register("transformer", options=TransformerOptions)
def transformer(options: TransformerOptions, *, input_shape: Sequence[int], num_classes: int) -> nn.Module:
    """Small character Transformer: causal, pre-norm, learned positions."""
    length = sequence_length("transformer", input_shape)
    embedding = whole("embedding", options.embedding)
    symbols = whole("vocabulary", num_classes if options.vocabulary is None else options.vocabulary)
    blocks = transformer_blocks(options, causal=True)
    head = CharacterHead(embedding, num_classes, options.predict)
    return CharacterTransformer(symbols, length, embedding, blocks, head)
