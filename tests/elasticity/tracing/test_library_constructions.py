"""Constructions of torchvision and timm, as the smallest plain modules that have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elasticity.oracle import kept_statistics, masked_module
from elasticity.traced import close, run
from fedtailor import FedtailorError, function_rule
from fedtailor.elasticity.check import random_cut, shaken
from fedtailor.elasticity.explain import elastic_share
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.tracing.exported import rule_of_operation
from fedtailor.elasticity.tracing.rulebook.functions import elementwise, same
from fedtailor.elasticity.tracing.rules import FUNCTION_RULES


def images(*shape: int) -> tuple[Tensor, Tensor]:
    return torch.randn(3, *shape, dtype=torch.float64), torch.tensor([0, 1, 2])


def traced(module: nn.Module, batch: tuple[Tensor, Tensor], share: float = 0.9) -> ElasticModel:
    """The elastic model, after its cuts were compared with the masked class itself."""
    module = module.double().eval()
    model = elastic(module, batch)
    assert elastic_share(model) >= share, model.explain()
    for name, value in shaken(model).items():
        dict([*module.named_parameters(), *module.named_buffers()])[name].data.copy_(value)
    for seed in range(3):
        cut = random_cut(model.groups, np.random.default_rng(seed))
        with torch.no_grad(), kept_statistics():
            theirs = run(masked_module(module, model.groups, cut, ""), batch)
        with torch.no_grad():
            close(run(model.extract(model.weights(), cut).eval(), batch), theirs, 1e-9)
    return model


def wrapped_block(x: Tensor, scale: float) -> Tensor:
    return F.relu(x) * scale


def wrapped_drop(x: Tensor, p: float, training: bool) -> Tensor:
    if not training:
        return x
    noise = torch.empty([x.shape[0], *[1] * (x.dim() - 1)], dtype=x.dtype).bernoulli_(1 - p)
    return x * noise


torch.fx.wrap("wrapped_block")
torch.fx.wrap("wrapped_drop")


class Wrapped(nn.Module):
    """Functions that ``torch.fx.wrap`` hides: stochastic depth and window attention of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = wrapped_block(self.a(x), 0.5)
        x = x + wrapped_drop(self.b(x), 0.2, self.training)
        return self.head(x.mean((2, 3)))


def test_functions_that_fx_would_hide_are_looked_into():
    model = traced(Wrapped(), images(3, 6, 6))
    assert model.own_class
    hidden = {name for _, name in torch.fx._symbolic_trace._wrapped_fns_to_patch}
    assert {"wrapped_block", "wrapped_drop"} <= hidden  # as before, for everybody else


def test_a_function_may_have_a_rule_by_its_full_name():
    name = f"{wrapped_drop.__module__}.wrapped_drop"
    function_rule(name)(same)
    try:
        assert traced(Wrapped(), images(3, 6, 6)).own_class
    finally:
        del FUNCTION_RULES[name]
    assert "torchvision.ops.stochastic_depth.stochastic_depth" in FUNCTION_RULES


class StandardisedConv(nn.Conv2d):
    """Weights with mean zero and deviation one over their inputs, times a gain (NFNet, BiT)."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int = 1) -> None:
        super().__init__(inputs, outputs, kernel, padding=kernel // 2, groups=groups)
        self.gain = nn.Parameter(torch.ones(outputs, 1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, weight=self.gain.view(-1), training=True, momentum=0.0)
        return F.conv2d(
            x, weight.reshape_as(self.weight), self.bias, padding=self.padding, groups=self.groups
        )


def test_standardised_weights_are_standardised_over_the_kept_columns():
    net = nn.Sequential(
        StandardisedConv(3, 8, 3),
        nn.SiLU(),
        StandardisedConv(8, 8, 3, groups=8),
        nn.SiLU(),
        StandardisedConv(8, 12, 1),
    )
    module = nn.Sequential(net, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(12, 4)).double()
    model = elastic(module, images(3, 6, 6))
    assert elastic_share(model) > 0.95
    assert model.own_class
    assert set(model.groups.elastic) == {"0.0", "0.4"}


class WindowAttention(nn.Module):
    """A bias for every head and pair of positions, picked from a table (Swin, BEiT)."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = 2, fused
        self.embed, self.qkv, self.out = nn.Linear(5, 12), nn.Linear(12, 36), nn.Linear(12, 12)
        self.head = nn.Linear(12, 4)
        self.table = nn.Parameter(torch.randn(7, 2))
        places = torch.arange(4)
        self.register_buffer("index", places[:, None] - places[None, :] + 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous().unsqueeze(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=0.5)
        else:
            x = (q * 0.5 @ k.transpose(-2, -1) + bias).softmax(-1) @ v
        return self.head(self.out(x.transpose(1, 2).reshape(b, n, c)).mean(1))


@pytest.mark.parametrize("fused", [False, True])
def test_a_bias_of_relative_positions_stays_whole(fused):
    model = traced(WindowAttention(fused), images(4, 5))
    assert model.shape("table", random_cut(model.groups, np.random.default_rng(0))) == (7, 2)


class Outlook(nn.Module):
    """Attention over patches that are taken apart and laid over each other again (VOLO)."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.v, self.attention, self.head = (
            nn.Linear(3, 8),
            nn.Linear(8, 8),
            nn.Linear(8, 81 * 2),
            nn.Linear(8, 4),
        )
        self.unfold = nn.Unfold(3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.permute(0, 2, 3, 1))
        b, h, w, c = x.shape
        v = self.unfold(self.v(x).permute(0, 3, 1, 2)).reshape(b, 2, c // 2, 9, h * w).permute(0, 1, 4, 3, 2)
        scores = self.attention(x).reshape(b, h * w, 2, 9, 9).permute(0, 2, 1, 3, 4).softmax(-1)
        y = (scores @ v).permute(0, 1, 4, 3, 2).reshape(b, c * 9, h * w)
        y = F.fold(y, (h, w), 3, padding=1)
        return self.head((x + y.permute(0, 2, 3, 1)).mean((1, 2)))


def test_patches_are_taken_apart_and_put_together():
    traced(Outlook(), images(3, 4, 4), share=0.85)


class Aggregate(nn.Module):
    """Scores of several scales become one: a convolution whose kernel is one, across stacked tensors (CoaT)."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.join, self.head = (
            nn.Linear(3, 8),
            nn.Linear(3, 8),
            nn.Conv1d(2, 1, 1),
            nn.Linear(8, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.join(torch.stack([self.a(x), self.b(x)], dim=1)).squeeze(1))


def test_a_kernel_of_one_leaves_its_positions_alone():
    traced(Aggregate(), images(3))


class MergedHeads(nn.Module):
    """Heads that are merged with the batch before they are compared (BoTNet, GPT-J)."""

    def __init__(self) -> None:
        super().__init__()
        self.heads, self.size = 2, 4
        self.stem, self.qkv, self.head = nn.Linear(3, 8), nn.Linear(8, 24), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).transpose(1, 2)
        b, _, n = x.shape
        q, k, v = self.qkv(x.transpose(1, 2)).transpose(1, 2).chunk(3, dim=1)
        q = q.reshape(b * self.heads, self.size, -1).transpose(-1, -2)
        k, v = (part.reshape(b * self.heads, self.size, -1) for part in (k, v))
        x = ((q @ k) * 0.5).softmax(-1) @ v.transpose(-1, -2)
        return self.head(x.transpose(-1, -2).reshape(b, -1, n).mean(2))


def test_heads_that_are_merged_with_the_batch_keep_their_number():
    model = traced(MergedHeads(), images(5, 3))
    assert 4 in {model.groups.counts[group] for group in model.groups.elastic}


def test_a_size_that_comes_from_what_cannot_shrink_does_not_shrink():
    class Stream(nn.Module):
        """The stream stays whole (it is flipped), and with it what is reshaped to its size."""

        def __init__(self) -> None:
            super().__init__()
            self.stem, self.qkv, self.out, self.head = (
                nn.Linear(3, 8),
                nn.Linear(8, 8),
                nn.Linear(8, 16),
                nn.Linear(16, 4),
            )

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x).flip(-1)
            b, n, c = x.shape
            return self.head(
                self.out(self.qkv(x).reshape(b, n, 2, -1).permute(0, 1, 3, 2).reshape(b, n, c)).relu().mean(1)
            )

    model = traced(Stream(), images(5, 3), share=0.5)
    assert "has a size that comes from what cannot shrink" in model.groups.fixed["qkv"]


class WithoutAutocast(nn.Module):
    """A step in full precision, whatever the rest has (EfficientViT), and an activation in place."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.hardswish(self.a(x), inplace=True)
        with torch.autocast(device_type=x.device.type, enabled=False):
            return self.b(x * 2)


def test_the_kind_of_device_is_a_plain_word():
    assert not any("torch.export" in remark for remark in traced(WithoutAutocast(), images(3)).remarks)


def test_operations_in_place_have_the_rules_of_their_twins():
    for operation in (torch.ops.aten.hardswish_.default, torch.ops.aten.leaky_relu_.default):
        assert rule_of_operation(operation) is elementwise


def test_the_sentence_names_the_node_where_a_function_has_no_rule():
    class Fourier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.fft.fft(self.a(x)).real * math.pi)

    with pytest.raises(
        FedtailorError, match=r"no rule says how channels pass through 'fft_fft' .*keep=\['a'\]"
    ):
        elastic(Fourier(), (torch.randn(3, 3), torch.tensor([0, 1, 2])))


class NormAct(nn.BatchNorm2d):
    """A norm with a ``forward`` of its own, which asks whether it trains (timm)."""

    def forward(self, x: Tensor) -> Tensor:
        mean, variance = (self.running_mean, self.running_var) if not self.training else (None, None)
        return F.silu(F.batch_norm(x, mean, variance, self.weight, self.bias, self.training, 0.1, self.eps))


def test_errors_of_rounding_in_training_are_no_disagreement():
    torch.manual_seed(0)
    layers = [layer for _ in range(3) for layer in (nn.Conv2d(200, 200, 1, bias=False), NormAct(200))]
    module = nn.Sequential(
        nn.Conv2d(3, 200, 1), *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(200, 4)
    )
    batch = (
        1 + 1e-5 * torch.randn(2, 3, 1, 1),
        torch.tensor([0, 1]),
    )  # two examples that are almost the same
    assert elastic_share(elastic(module, batch)) > 0.9


def wrapped_mixing(x: Tensor) -> Tensor:
    return x.flip(-1)


torch.fx.wrap("wrapped_mixing")


def test_another_result_in_training_is_a_disagreement_in_any_precision():
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.a(x)
            return self.b(wrapped_mixing(x) if self.training else x)

    name = f"{wrapped_mixing.__module__}.wrapped_mixing"
    function_rule(name)(same)  # wrong: a cut changes which channel comes first
    try:
        with pytest.raises(FedtailorError, match="in training, an output differs"):
            elastic(Mixing(), (torch.randn(2, 3), torch.tensor([0, 1])))
    finally:
        del FUNCTION_RULES[name]
