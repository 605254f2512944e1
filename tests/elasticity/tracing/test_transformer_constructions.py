"""Constructions of Hugging Face's transformers, as the smallest plain modules that have them."""

from __future__ import annotations

import functools
from collections import OrderedDict
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import _dict_flatten, _dict_unflatten, register_pytree_node

from elasticity.traced import close, run
from fedtailor import FedtailorError
from fedtailor.elasticity.check import random_cut
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.explain import elastic_share
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.objective.losses import next_token_cross_entropy

WORDS, TIME = 11, 6


class Output(OrderedDict[str, Any]):
    """An output object: entries by name and by attribute."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(name)


register_pytree_node(Output, _dict_flatten, lambda values, context: Output(_dict_unflatten(values, context)))


class Config:
    def __init__(self, hidden: int = 24, heads: int = 4, head_dim: int = 6) -> None:
        self.hidden_size, self.num_heads, self.head_dim = hidden, heads, head_dim
        self.use_cache = True


def can_return_tuple(function: Any) -> Any:
    """A decorator that hides the names of the inputs."""

    @functools.wraps(function)
    def wrapper(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        as_object = kwargs.pop("return_dict", True)
        found = function(self, *args, **kwargs)
        return found if as_object else tuple(found.values())

    return wrapper


def texts(**more: Tensor) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, WORDS, (3, TIME), generator=generator)
    mask = torch.ones(3, TIME, dtype=torch.long)
    mask[1, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, **more}


def causal() -> dict[str, Tensor]:
    batch = texts()
    return {**batch, "labels": batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)}


class Conv1D(nn.Module):
    """GPT-2's linear layer: weight (in, out), and a shape that is put together."""

    def __init__(self, out: int, inputs: int) -> None:
        super().__init__()
        self.nf = out
        self.weight = nn.Parameter(torch.randn(inputs, out) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(out) / 4)

    def forward(self, x: Tensor) -> Tensor:
        shape = x.size()[:-1] + (self.nf,)  # noqa: RUF005  (as the original has it)
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(shape)


class SplitAttention(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.split_size, self.head_dim, self.joined_size = (
            config.hidden_size,
            config.head_dim,
            config.hidden_size,
        )
        self.c_attn = Conv1D(3 * config.hidden_size, config.hidden_size)
        self.c_proj = Conv1D(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.c_attn(x).split(self.split_size, dim=2)
        q, k, v = (part.view((*part.shape[:-1], -1, self.head_dim)).transpose(1, 2) for part in parts)
        joined = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        shape = joined.size()[:-2] + (self.joined_size,)  # noqa: RUF005  (as the original has it)
        return self.c_proj(joined.contiguous().view(*shape))


class TinyGPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.config = Config()
        self.words = nn.Embedding(WORDS, 24)
        self.norm, self.attention = nn.LayerNorm(24), SplitAttention(self.config)
        self.head = nn.Linear(24, WORDS, bias=False)
        self.head.weight = self.words.weight

    @can_return_tuple
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Output:
        x = self.words(input_ids) * attention_mask[..., None]
        x = x + self.attention(self.norm(x))
        return Output(logits=self.head(x), last_hidden_state=x)


class HandNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def rotate_half(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


class Grouped(nn.Module):
    """Grouped-query attention under rotary embeddings: two heads of queries for each head of keys and values."""

    def __init__(self, hidden: int, heads: int, head_dim: int) -> None:
        super().__init__()
        self.head_dim, self.repeated, self.scaling = head_dim, 2, head_dim**-0.5
        self.q, self.o = nn.Linear(hidden, heads * head_dim), nn.Linear(heads * head_dim, hidden)
        self.k, self.v = (nn.Linear(hidden, heads * head_dim // 2) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.head_dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        q, k = (each * cos[:, None] + rotate_half(each) * sin[:, None] for each in (q, k))
        k, v = (self.repeat(each) for each in (k, v))
        joined = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scaling)
        return self.o(joined.transpose(1, 2).reshape(*x.shape[:-1], -1))

    def repeat(self, x: Tensor) -> Tensor:
        batch, heads, time, width = x.shape
        return (
            x[:, :, None]
            .expand(batch, heads, self.repeated, time, width)
            .reshape(batch, heads * self.repeated, time, width)
        )


class TinyLlama(nn.Module):
    """A causal model with a loss of its own."""

    def __init__(self, hidden: int = 20, heads: int = 8, head_dim: int = 6) -> None:
        super().__init__()
        self.config = Config(hidden, heads, head_dim)
        self.words, self.head = nn.Embedding(WORDS, hidden), nn.Linear(hidden, WORDS)
        self.norm, self.attention = HandNorm(hidden), Grouped(hidden, heads, head_dim)
        frequencies = 1.0 / 10 ** (torch.arange(0, head_dim, 2) / head_dim)
        self.register_buffer("frequencies", frequencies, persistent=False)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Output:
        places = torch.arange(input_ids.shape[1])[None, None].to(self.frequencies)
        angles = (self.frequencies[None, :, None].expand(1, -1, 1) @ places).transpose(1, 2)
        angles = torch.cat((angles, angles), dim=-1)
        x = self.words(input_ids)
        x = x + self.attention(self.norm(x), angles.cos(), angles.sin())
        output = Output(logits=self.head(x))
        if labels is not None:
            scores = output.logits[:, :-1].reshape(-1, WORDS)
            output["loss"] = F.cross_entropy(scores, labels[:, 1:].reshape(-1))
        return output


class OwnNorm(nn.LayerNorm):
    """A norm with a forward of its own, whose size is an attribute."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)


class TinyBert(nn.Module):
    """Positions and types from buffers, and sizes that are attributes, used as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.all_heads = 4, 6, 24
        self.words, self.types, self.places = (nn.Embedding(n, 24) for n in (WORDS, 2, 16))
        self.register_buffer("position_ids", torch.arange(16)[None], persistent=False)
        self.register_buffer("type_ids", torch.zeros(1, 16, dtype=torch.long), persistent=False)
        self.norm = OwnNorm(24)
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.head = nn.Linear(24, 3)

    def split(self, x: Tensor) -> Tensor:
        return x.view(x.shape[0], x.shape[1], self.num_heads, self.head_dim).transpose(1, 2)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        places = self.position_ids[:, : input_ids.shape[1]]
        types = self.type_ids.expand(len(input_ids), -1).gather(1, places.expand(len(input_ids), -1))
        x = self.norm(self.words(input_ids) + self.types(types) + self.places(places))
        seen = (1.0 - attention_mask[:, None, None].to(x.dtype)) * torch.finfo(x.dtype).min
        scores = self.split(self.q(x)) @ self.split(self.k(x)).transpose(-1, -2) / 6**0.5
        joined = (scores + seen).softmax(-1) @ self.split(self.v(x))
        x = x + self.o(joined.transpose(1, 2).reshape(x.shape[0], x.shape[1], self.all_heads))
        return self.head(torch.tanh(x[:, 0]))


def classes() -> dict[str, Tensor]:
    return texts(labels=torch.tensor([0, 1, 2]))


def elastic_double(module: nn.Module, batch: dict[str, Tensor], **wishes: Any) -> ElasticModel:
    torch.manual_seed(0)
    model = elastic(module.double().eval(), batch, **wishes)
    assert elastic_share(model) >= 0.9, model.explain()
    assert model.own_class
    return model


@pytest.mark.parametrize("heads", ["auto", "count", "dimension"])
@pytest.mark.parametrize(("build", "batch"), [(TinyGPT, causal), (TinyLlama, causal), (TinyBert, classes)])
def test_heads_or_their_dimension_shrink_as_the_user_wants(build, batch, heads):
    model = elastic_double(build(), batch(), heads=heads)
    query, dim = {TinyGPT: ("attention.c_attn", 1), TinyLlama: ("attention.q", 0), TinyBert: ("q", 0)}[build]
    counted = heads == "count" or (heads == "auto" and build is not TinyBert)
    # as many units as heads (of keys, where queries share them), or as a head has channels (pairs, if they rotate)
    units = {TinyGPT: (4, 6), TinyLlama: (4, 3), TinyBert: (4, 6)}[build][0 if counted else 1]
    (group,) = {axis.group for axis in model.groups.extents[f"{query}.weight"][dim].axes}
    assert group in model.groups.elastic
    assert model.groups.counts[group] == units


def test_a_piece_is_the_class_at_smaller_sizes():
    batch = causal()
    model = elastic_double(TinyLlama(), batch, heads="count")
    cut = prefix(model.groups, Fraction(1, 2))
    piece = model.extract(model.weights(), cut)
    assert type(piece) is TinyLlama
    small = TinyLlama(hidden=10, heads=4).double()
    small.load_state_dict(piece.state_dict())
    small.frequencies.copy_(piece.frequencies)
    with torch.no_grad():
        close(run(small, batch), run(piece, batch), 1e-12)


def test_a_rotated_head_keeps_pairs_and_their_frequencies():
    model = elastic_double(TinyLlama(), causal(), heads="dimension")
    (group,) = model.groups.producers["attention.q"]
    assert ("frequencies", 0) in model.groups.tensors(group)
    piece = model.extract(model.weights(), Cut.of(model.groups, {group: [0, 2]}))
    assert piece.attention.head_dim == 4
    rows = [head * 6 + place for head in range(8) for place in (0, 2, 3, 5)]
    assert torch.equal(piece.attention.q.weight, model.module.attention.q.weight[rows])
    assert torch.equal(piece.frequencies, model.module.frequencies[[0, 2]])


def test_attributes_follow_and_the_users_own_module_does_not_change():
    module = TinyBert()
    model = elastic_double(module, classes(), heads="dimension")
    for seed in range(3):
        cut = random_cut(model.groups, np.random.default_rng(seed))
        piece = model.extract(model.weights(), cut)
        assert piece.all_heads == piece.o.weight.shape[1] == piece.num_heads * piece.head_dim
        assert piece.norm.normalized_shape == (piece.words.weight.shape[1],)
    assert (type(module.head_dim), module.head_dim, module.norm.normalized_shape) == (int, 6, (24,))


class TwoUses(nn.Module):
    """One attribute counts two axes that nothing else ties."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 8
        self.first, self.second = nn.Linear(5, 16), nn.Linear(5, 16)
        self.head = nn.Linear(16, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = attention_mask[:, :5].to(self.head.weight.dtype)
        if attention_mask.shape[0] > 100:  # so that no graph can stand in
            x = x + 1
        a = self.first(x).relu().view(-1, 2, self.width).sum(1)
        b = self.second(x).relu().view(-1, 2, self.width).sum(1)
        return self.head(torch.cat([a, b], dim=-1))


def test_axes_that_one_attribute_counts_shrink_alike():
    model = elastic_double(TwoUses(), classes())
    assert model.groups.producers["first"] == model.groups.producers["second"]
    assert model.extract(model.weights(), prefix(model.groups, Fraction(1, 2))).width == 4


def test_a_hidden_state_beside_the_answer_may_shrink():
    model = elastic_double(TinyGPT(), causal())
    piece = model.extract(model.weights(), prefix(model.groups, Fraction(1, 2)))
    output = piece(**texts())
    assert output.logits.shape == (3, TIME, WORDS)
    assert output.last_hidden_state.shape == (3, TIME, piece.words.weight.shape[1])
    assert piece.config.use_cache  # left out of the trace, not of the module


def test_the_own_loss_of_a_module_is_known_by_its_value():
    module, batch = TinyLlama(), causal()
    model = elastic_double(module, batch)
    assert (model.learning_task.name, model.objective.loss) == ("causal", next_token_cross_entropy)
    assert torch.isclose(model.objective.loss(model.output, batch), module(**batch)["loss"])
    assert isinstance(model.output, Tensor)
    assert set(model.objective.metrics) == {"accuracy", "top-5 accuracy"}


def test_an_own_loss_that_nobody_knows_is_refused_when_it_trains():
    class Odd(TinyLlama):
        def forward(self, input_ids: Tensor, labels: Tensor | None = None, **kwargs: Any) -> Output:
            output = super().forward(input_ids)
            if labels is not None:
                output["loss"] = output["logits"].square().mean()
            return output

    model = elastic(Odd().double().eval(), causal())
    with pytest.raises(FedtailorError, match=r"Odd computes a loss of its own .* objective.task"):
        model.objective.loss(model.output, model.example)


def test_code_that_asks_for_values_has_a_count():
    class Asking(TinyBert):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            if torch.is_tensor(attention_mask) and not isinstance(attention_mask, torch.fx.Proxy):
                attention_mask = attention_mask if bool(attention_mask.all()) else attention_mask.clone()
            return super().forward(input_ids, attention_mask)

    torch.manual_seed(0)
    asking, plain = (elastic(kind().eval(), classes()) for kind in (Asking, TinyBert))
    assert asking.cost(Cut.everything()).macs == plain.cost(Cut.everything()).macs > 0


def test_weight_norm_is_followed():
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv1d(3, 12, 3, padding=1), nn.Linear(12, 3)
            self.places = nn.utils.parametrizations.weight_norm(
                nn.Conv1d(12, 12, 3, padding=1, groups=2), dim=2
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.conv(x)
            return self.head((x + self.places(x).relu()).mean(-1))

    model = elastic(Normed().double().eval(), (torch.randn(3, 3, 8).double(), torch.tensor([0, 1, 2])))
    assert elastic_share(model) >= 0.9, model.explain()
    assert ("places.parametrizations.weight.original1", 0) in model.groups.tensors(
        *model.groups.producers["conv"]
    )


def test_training_that_cannot_be_followed_is_said():
    class Masking(TinyBert):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
            if self.training:
                drawn = np.random.default_rng(0).random(tuple(input_ids.shape)) < 0.1
                input_ids = input_ids.masked_fill(torch.as_tensor(drawn), 0)
            return super().forward(input_ids, attention_mask)

    model = elastic_double(Masking(), classes())
    assert "only evaluation was checked" in model.explain() or not model.remarks


def test_little_that_can_shrink_is_a_finding():
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.small, self.head = nn.Linear(8, 64), nn.Linear(8, 4), nn.Linear(4, 3)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.head(self.small(x).relu()), self.wide(x)

    report = elastic(Whole().eval(), (torch.randn(3, 8), torch.tensor([0, 1, 2]))).explain()
    assert "finding: " in report
    assert "wide (+" in report
    assert "checked against the masked full form in" in report
