"""What a person can say about a module: keep, tie, minimum, multiple, rules of their own."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.tracing.rules import FUNCTION_RULES, LAYER_RULES, Site, function_rule, layer_rule
from fedtailor.errors import FedtailorError

BATCH = (torch.randn(3, 3, 8, 8), torch.tensor([0, 1, 2]))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
        self.head = nn.Linear(16, 5)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(F.relu(self.conv1(x)))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


class Fourier(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.fft.fft(x, dim=1).real


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 3

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient * 5


class Straight(Net):
    def middle(self, x: Tensor) -> Tensor:
        return Triple.apply(x)


class Whitening(nn.Module):
    """A layer of the user's own, with code that depends on the data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 1e6:
            raise RuntimeError("diverged")
        assert x.shape[1] == self.width
        return x / x.square().mean((0, 2, 3), keepdim=True).sqrt() * self.gain[:, None, None]


class Whitened(Net):
    def __init__(self) -> None:
        super().__init__()
        self.white = Whitening(16)

    def middle(self, x: Tensor) -> Tensor:
        return self.white(x)


@pytest.fixture
def own_rules() -> Iterator[None]:
    layers, functions = dict(LAYER_RULES), dict(FUNCTION_RULES)
    yield
    for table, before in ((LAYER_RULES, layers), (FUNCTION_RULES, functions)):
        table.clear()
        table.update(before)


def test_keep_leaves_the_channels_of_a_layer_whole():
    model = elastic(Net(), BATCH, keep=["conv2"])
    assert model.groups.elastic == ("conv1",)
    assert model.groups.fixed["conv2"] == "is kept whole, as 'conv2' asks"
    small = model.extract(model.weights(), prefix(model.groups, Fraction(1, 4)))
    assert small.conv2.weight.shape == (16, 4, 3, 3)


def test_keep_takes_parents_patterns_and_tensors():
    assert elastic(Net(), BATCH, keep=["conv1*"]).groups.elastic == ("conv2",)
    assert elastic(Net(), BATCH, keep=["conv2.bias"]).groups.elastic == ("conv1",)
    assert elastic(Net(), BATCH, keep=["head.weight"]).groups.elastic == ("conv1",)  # all its axes
    module = nn.Sequential(
        nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 6)), nn.Linear(6, 5), nn.Linear(5, 3)
    )
    batch = (torch.randn(3, 4), BATCH[1])
    assert elastic(module, batch).groups.elastic == ("0.0", "0.2", "1")
    assert elastic(module, batch, keep=["0"]).groups.elastic == ("1",)
    assert elastic(module, batch, keep=["0.1"]).groups.elastic == ("0.2", "1")  # a norm passes channels on
    with pytest.raises(FedtailorError, match="unknown layer to keep 'conv3': did you mean 'conv"):
        elastic(Net(), BATCH, keep=["conv3"])
    with pytest.raises(FedtailorError, match="keep = 'conv1': expected a list"):
        elastic(Net(), BATCH, keep="conv1")


def test_tied_layers_shrink_together():
    free, tied = elastic(Net(), BATCH), elastic(Net(), BATCH, tie=[("conv1", "conv2")])
    assert free.groups.elastic == ("conv1", "conv2")
    assert tied.groups.elastic == ("conv1",)
    assert ("head.weight", 1) in tied.groups.tensors("conv1")
    with pytest.raises(FedtailorError, match="16 and 5 channels cannot shrink together"):
        elastic(Net(), BATCH, tie=[("conv1", "head")])
    with pytest.raises(FedtailorError, match="unknown layer to tie"):
        elastic(Net(), BATCH, tie=[("conv1", "nothing")])


def test_minimum_and_multiple_hold_in_every_prefix():
    model = elastic(Net(), BATCH, minimum={"conv1": 5}, multiple={"conv2": 4})
    widths = {}
    for width in (Fraction(1, 16), Fraction(1, 2), Fraction(9, 16), Fraction(1)):
        cut = prefix(model.groups, width)
        widths[width] = tuple(cut.count(group, 16) for group in ("conv1", "conv2"))
    assert widths == {
        Fraction(1, 16): (5, 4),
        Fraction(1, 2): (8, 8),
        Fraction(9, 16): (9, 12),
        Fraction(1): (16, 16),
    }
    with pytest.raises(FedtailorError, match="unknown layer or group in minimum 'conv9'"):
        elastic(Net(), BATCH, minimum={"conv9": 2})
    with pytest.raises(FedtailorError, match="multiple = 0"):
        elastic(Net(), BATCH, multiple=0)


def test_align_counts_channels_not_units():
    layer = nn.TransformerEncoderLayer(32, nhead=4, dim_feedforward=24, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Linear(5, 32), layer, nn.Linear(32, 3))
    model = elastic(module, (torch.randn(2, 4, 5), torch.randn(2, 4, 3)))
    assert model.groups.counts["0"] == 8  # one channel in each of four heads
    for width in (Fraction(1, 8), Fraction(1, 3), Fraction(1, 2)):
        small = model.extract(model.weights(), prefix(model.groups, width, align=8))
        assert small[0].out_features % 8 == 0
        assert small[1].linear1.out_features % 8 == 0
        small(torch.randn(2, 4, 5))


def test_an_operation_without_a_rule_is_refused_with_all_that_helps():
    with pytest.raises(FedtailorError) as caught:
        elastic(Fourier(), BATCH)
    message = str(caught.value)
    assert "fft" in message
    assert "test_annotations.py:" in message
    assert "keep=['conv1']" in message
    assert 'on_unknown="keep"' in message
    assert "fedtailor.function_rule" in message
    assert elastic(Fourier(), BATCH, keep=["conv1"]).groups.elastic == ("conv2",)
    kept = elastic(Fourier(), BATCH, on_unknown="keep")
    assert "has no rule" in kept.groups.fixed["conv1"]
    with pytest.raises(FedtailorError, match="on_unknown = 'guess'"):
        elastic(Fourier(), BATCH, on_unknown="guess")


def test_a_rule_for_a_custom_autograd_function(own_rules):
    with pytest.raises(FedtailorError, match=r"Triple.apply\) at test_annotations.py:\d+"):
        elastic(Straight(), BATCH)

    @function_rule(Triple)
    def same_channels(site: Site):
        return site.operand().numbers

    model = elastic(Straight(), BATCH)
    assert model.groups.elastic == ("conv1", "conv2")
    cut = prefix(model.groups, Fraction(1, 2))
    small = model.extract(model.weights(), cut)
    assert type(small) is Straight
    images = BATCH[0].clone()
    small(images).sum().backward()
    with_own_backward = small.conv1.weight.grad.clone()
    small.zero_grad()
    F.relu(small.conv1(images)).mul(3)
    assert with_own_backward.abs().sum() > 0


def test_a_rule_for_a_custom_layer(own_rules):
    with pytest.raises(FedtailorError, match="depends on the data"):
        elastic(Whitened(), BATCH)

    @layer_rule(Whitening)
    def whitening(site: Site):
        x = site.operand()
        site.parameter("gain", x.numbers[1])
        site.follow("width", x.numbers[1])
        return x.numbers

    model = elastic(Whitened(), BATCH)
    assert model.groups.elastic == ("conv1", "conv2")
    assert ("white.gain", 0) in model.groups.tensors("conv1")
    small = model.extract(model.weights(), prefix(model.groups, Fraction(1, 4)))
    assert small.white.width == 4
    assert small.white.gain.shape == (4,)
    small(BATCH[0])


def test_rules_may_call_the_numbers_labels(own_rules):
    @function_rule(Triple)
    def same_channels(site: Site):
        assert site.operand().labels is site.operand().numbers
        return site.operand().labels

    assert elastic(Straight(), BATCH).groups.elastic == ("conv1", "conv2")


class Reversed(Net):
    def middle(self, x: Tensor) -> Tensor:
        return torch.flip(x, [1])


def test_a_wrong_rule_is_caught_and_the_group_named(own_rules):
    @function_rule(torch.flip)
    def wrong(site: Site):
        return site.operand().numbers  # channels change places, and this rule does not say so

    with pytest.raises(
        FedtailorError, match=r"differs by .*group 'conv1', which lies on conv1.weight axis 0"
    ):
        elastic(Reversed(), BATCH)


def test_a_wrong_rule_for_a_layer_is_made_good_by_export(own_rules):
    class Turn(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.flip(x, [1])

    class Turned(Net):
        def __init__(self) -> None:
            super().__init__()
            self.turn = Turn()

        def middle(self, x: Tensor) -> Tensor:
            return self.turn(x)

    layer_rule(Turn)(lambda site: site.operand().numbers)
    model = elastic(Turned(), BATCH)
    assert "is ordered by" in model.groups.fixed["conv1"]
    assert "traced with torch.export" in model.explain()
