"""Modules that cannot be traced, or only with care: handled or refused by name, never wrong in silence."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.tracing.rules import TraceError
from fedtailor.errors import FedtailorError

LABELS = torch.tensor([0, 1, 2])
IMAGES = (torch.randn(3, 3, 8, 8), LABELS)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def middle(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.middle(F.relu(self.conv1(x)))
        return self.head(F.relu(self.conv2(x)).mean((2, 3)))


def net(middle) -> nn.Module:
    """A network with the given step between its two convolutions."""
    return type("Net", (Net,), {"middle": middle})()


def branch_on_values(self, x: Tensor) -> Tensor:
    return x * 2 if x.sum() > 0 else x


def loop_over_values(self, x: Tensor) -> Tensor:
    for _ in range(int(x.abs().max().item())):
        x = x * 0.9
    return x


@pytest.mark.parametrize("middle", [branch_on_values, loop_over_values])
def test_code_that_depends_on_the_data_is_refused_with_its_line(middle):
    line = rf"test_bad_input.py:{middle.__code__.co_firstlineno + 1}: the code asks for the value of a tensor"
    with pytest.raises(TraceError, match=line):
        elastic(net(middle), IMAGES)


def test_sizes_that_depend_on_the_data_are_fine_where_they_are_not_channels():
    class Selecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.fc, self.head = nn.Embedding(10, 8), nn.Linear(8, 6), nn.Linear(6, 3)

        def forward(self, x: Tensor) -> Tensor:
            chosen = self.fc(self.embedding(x)[x > 2])  # as many rows as there are large tokens
            return self.head(chosen.mean(0, keepdim=True))

    model = elastic(Selecting(), (torch.randint(0, 10, (3, 7)), LABELS))
    assert model.groups.elastic == ("embedding", "fc")


def test_packed_sequences():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 8), nn.Linear(12, 3)
            self.lstm = nn.LSTM(8, 6, batch_first=True, bidirectional=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embedding(x), lengths, batch_first=True, enforce_sorted=False
            )
            output, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
            return self.head(output.mean(1))

    batch = (torch.randint(0, 10, (3, 7)), torch.tensor([7, 5, 3]), LABELS)
    assert elastic(Packed(), batch).groups.elastic == ("embedding", "lstm")


def in_place_on_all(self, x: Tensor) -> Tensor:
    x.mul_(2).clamp_(max=1)
    x[:, :, 0] = 0
    return x


def in_place_on_some(self, x: Tensor) -> Tensor:
    x[:, :2] = 0
    return x


def in_place_on_one(self, x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = x[:, 1]
    return y


def test_in_place_tricks():
    assert elastic(net(in_place_on_all), IMAGES).groups.elastic == ("conv1", "conv2")
    some = elastic(net(in_place_on_some), IMAGES)  # the first two channels are counted apart
    assert some.groups.counts["conv1"] == 2
    assert not some.own_class
    one = elastic(net(in_place_on_one), IMAGES)
    assert "is indexed by a number" in one.groups.fixed["conv1"]


def flip(self, x: Tensor) -> Tensor:
    return x.flip(1)


def largest(self, x: Tensor) -> Tensor:
    return x.topk(4, dim=1)[0].repeat(1, 2, 1, 1)


def place_of_the_largest(self, x: Tensor) -> Tensor:
    return x + x.argmax(1, keepdim=True)


def numbered(self, x: Tensor) -> Tensor:
    return x * torch.arange(8.0)[:, None, None]


def constant_tensor(self, x: Tensor) -> Tensor:
    return x * torch.from_numpy(np.linspace(0, 1, 8, dtype=np.float32))[:, None, None]


@pytest.mark.parametrize("middle", [flip, largest, place_of_the_largest, numbered, constant_tensor])
def test_channels_whose_place_matters_stay_whole(middle):
    model = elastic(net(middle), IMAGES)
    assert "conv1" in model.groups.fixed
    assert model.groups.elastic == ("conv2",)


def test_lazy_layers_are_refused_until_they_are_built():
    module = nn.Sequential(nn.LazyConv2d(8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))
    with pytest.raises(TraceError, match="0.weight is built lazily .* call the module once"):
        elastic(module, IMAGES)
    module(IMAGES[0])
    assert elastic(module, IMAGES).groups.elastic == ("0",)


def test_frozen_layers_are_cut_but_not_trained():
    module = Net()
    module.conv1.requires_grad_(False)
    model = elastic(module, IMAGES)
    assert "conv1" in model.groups.elastic
    assert "conv1.weight" not in model.trainable
    small = model.extract(model.weights(), model.costs.cut((2, 3)))
    assert not small.conv1.weight.requires_grad
    assert small.conv2.weight.requires_grad


@pytest.mark.filterwarnings("ignore")
def test_quantised_layers_are_refused_or_kept():
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Linear(4, 8), nn.Linear(6, 3)
            self.quantised = torch.ao.nn.quantized.dynamic.Linear(8, 6)
            self.other = nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(F.relu(self.quantised(self.first(x)) * self.head.weight.sum() + self.other(x)))

    batch = (torch.randn(3, 4), LABELS)
    with pytest.raises(TraceError, match=r"torch.ao.nn.quantized.*keep=\['first'\]"):
        elastic(Quantised(), batch)


def test_parametrised_layers_stay_whole():
    module = Net()
    module.conv1 = nn.utils.parametrizations.spectral_norm(module.conv1)
    model = elastic(module, IMAGES)
    assert "has no rule" in model.groups.fixed["conv1"]
    assert model.groups.elastic == ("conv2",)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (
            (torch.randn(3, 4, 8, 8), LABELS),
            r"'conv1' \(Conv2d\) at test_bad_input.py:\d+ fails on the example batch: ",
        ),
        ((torch.randn(3, 8), LABELS), "fails on the example batch"),
        ((LABELS,), "does not take the example batch: missing a required argument: 'x'"),
        ((*IMAGES, LABELS), "too many positional arguments"),
        ({"image": IMAGES[0], "label": LABELS}, "missing a required argument: 'x'"),
    ],
)
def test_an_example_of_the_wrong_shape(batch, message):
    with pytest.raises(TraceError, match=message):
        elastic(Net(), batch)


def test_a_module_without_anything_to_shrink():
    with pytest.raises(FedtailorError, match="nothing in Linear can shrink .*is an output of the module"):
        elastic(nn.Linear(4, 3), (torch.randn(3, 4), LABELS))
    with pytest.raises(FedtailorError, match="nothing in ReLU can shrink"):
        elastic(nn.ReLU(), (torch.randn(3, 4), LABELS))


def test_what_neither_fx_nor_export_can_follow():
    def vectorised(self, x: Tensor) -> Tensor:
        return torch.vmap(lambda one: one * 2)(x)

    with pytest.raises(
        TraceError, match=r"neither with torch.fx .* nor with torch.export .* register a rule"
    ):
        elastic(net(vectorised), IMAGES)


def test_random_numbers_in_forward():
    def noisy(self, x: Tensor) -> Tensor:
        return x + 0.1 * torch.randn_like(x)

    def stochastic_depth(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return x * x.new_empty((x.shape[0], 1, 1, 1)).bernoulli_(0.9)

    for middle in (noisy, stochastic_depth):
        assert elastic(net(middle), IMAGES).groups.elastic == ("conv1", "conv2")


def test_zeros_in_dropped_channels_may_be_divided_by():
    def ratio(self, x: Tensor) -> Tensor:
        return torch.log(x) / x.square().mean((0, 2, 3), keepdim=True).sqrt()

    module = net(ratio)
    with torch.no_grad():
        module.conv1.bias.fill_(9.0)  # so that there is a logarithm of every kept channel
    assert elastic(module, IMAGES).groups.elastic == ("conv1", "conv2")


def test_a_hook_that_changes_the_result_is_not_forgotten():
    module = Net()
    module.conv1.register_forward_hook(lambda _layer, _args, output: output * 3)
    model = elastic(module, IMAGES)
    full = model.extract(model.weights(), model.costs.cut((8, 6)))
    torch.testing.assert_close(full(IMAGES[0]), module(IMAGES[0]))

    class Block(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(x)

    module = net(lambda self, x: self.block(x))
    module.block = Block()
    module.block.register_forward_hook(lambda _layer, _args, output: output * 3)
    with pytest.raises(TraceError, match="Hooks of block are not traced"):
        elastic(module, IMAGES)
