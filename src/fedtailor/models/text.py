"""Models of text: FjORD's two-layer LSTM for Shakespeare, a small Transformer, and a classifier of whole texts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedtailor.errors import unknown
from fedtailor.models.attention import Blocks, transformer_blocks
from fedtailor.models.parts import sequence_length, whole
from fedtailor.models.registry import register

PADDING = 0  # the token that fills short texts


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


class TextClassifier(nn.Module):
    """Embedding, a recurrent layer if there is one, the mean over what is no padding, two linear layers."""

    def __init__(
        self, embedding: nn.Module, reader: nn.Module | None, features: int, hidden: int, classes: int
    ) -> None:
        super().__init__()
        self.embedding = embedding
        self.reader = reader
        self.hidden = nn.Linear(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)  # (batch, time, embedding)
        if self.reader is not None:
            x, _ = self.reader(x)
        there = (tokens != PADDING).unsqueeze(-1).to(x.dtype)  # (batch, time, 1)
        mean = (x * there).sum(1) / there.sum(1).clamp(min=1.0)  # (batch, features)
        scores: Tensor = self.head(torch.relu(self.hidden(mean)))
        return scores


@register("text-classifier")
def text_classifier(
    *,
    input_shape: Sequence[int],
    num_classes: int,
    vocabulary: int = 10_000,
    embedding: int = 32,
    hidden: int = 64,
    reader: str = "mean",
) -> nn.Module:
    """One label for a whole text: embedding, mean over the text, two linear layers.

    ``vocabulary`` is the number of different tokens, which labelled text knows; 0 is padding. ``reader`` is mean
    (words in any order) or gru (a recurrent layer of ``hidden`` before the mean: what characters need).
    """
    sequence_length("text-classifier", input_shape)
    if reader not in ("mean", "gru"):
        raise unknown("reader", reader, ("mean", "gru"))
    embedding, hidden = whole("embedding", embedding), whole("hidden", hidden)
    table = nn.Embedding(whole("vocabulary", vocabulary), embedding)
    layer = nn.GRU(embedding, hidden, batch_first=True) if reader == "gru" else None
    return TextClassifier(table, layer, hidden if reader == "gru" else embedding, hidden, num_classes)
