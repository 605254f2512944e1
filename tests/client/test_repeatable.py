"""Which networks do the same in every step: those that compute and do nothing else."""

from __future__ import annotations

import functools
import math
import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.client.repeatable import is_repeatable
from fedtailor.data.batches import Batch
from fedtailor.models import build_model
from fedtailor.objective import Objective, cross_entropy
from fedtailor.objective.losses import OnTargets

counter = [0]


class Base(nn.Module):
    """What the networks below have in common."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)
        self.calls, self.width = 0, 3
        self.names, self.generator = ["a"], random.Random(0)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x))


class Helping(Base):
    def hidden(self, x: Tensor) -> Any:
        return F.relu(self.a(x)).flatten(1)

    def forward(self, x: Tensor) -> Any:
        parts = [self.hidden(x), torch.zeros(len(x), 0)]
        return self.b(torch.cat(parts, dim=1) * math.sqrt(self.width)).view(-1, 2)


class Dropping(Base):
    def forward(self, x: Tensor) -> Any:
        if self.training:
            x = F.dropout(x.view(x.size(0), -1), 0.5, self.training)
        return self.b(torch.relu(self.a(x)))


class Counting(Base):
    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        return super().forward(x)


class CountingElsewhere(Base):
    def forward(self, x: Tensor) -> Any:
        counter[0] += 1
        return self.b(self.a(x))


class CountingInAMethod(Base):
    def note(self) -> None:
        self.calls += 1

    def forward(self, x: Tensor) -> Any:
        self.note()
        return self.b(self.a(x))


class CountingInALayer(Base):
    def __init__(self) -> None:
        super().__init__()
        self.a = CountingInAMethod()

    def forward(self, x: Tensor) -> Any:
        self.a.note()
        return self.b(x)


class CountingInAProperty(Base):
    @property
    def factor(self) -> float:
        self.calls += 1
        return 1.0

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) * self.factor


class CountingByName(Base):
    def forward(self, x: Tensor) -> Any:
        setattr(self, "calls", self.width)  # noqa: B010
        return self.b(self.a(x))


class Inside(nn.Module):
    """One of them as a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Counting()

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


class Drawing(Base):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) * random.random()


class DrawingFromItsOwn(Base):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) * self.generator.random()


class ReadingAClock(Base):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) * time.time()


class Printing(Base):
    def forward(self, x: Tensor) -> Any:
        print(x.shape)
        return self.b(self.a(x))


class Appending(Base):
    def forward(self, x: Tensor) -> Any:
        self.names.append("x")
        return self.b(self.a(x))


class Switching(Base):
    def forward(self, x: Tensor) -> Any:
        self.eval()
        return self.b(self.a(x))


class Seeding(Base):
    def forward(self, x: Tensor) -> Any:
        torch.manual_seed(1)
        return self.b(self.a(x))


class HandingOut(Base):
    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) * float(x.numpy().sum())


class Importing(Base):
    def forward(self, x: Tensor) -> Any:
        import secrets

        return self.b(self.a(x)) * secrets.randbelow(2)


class OwnConvolution(nn.Conv2d):
    """PyTorch's forward, which calls what this class has changed."""

    def _conv_forward(self, *args: Any) -> Any:
        counter[0] += 1
        return super()._conv_forward(*args)


class Disguised(Base):
    @functools.wraps(nn.Linear.forward)
    def forward(self, x: Tensor) -> Any:
        counter[0] += 1
        return self.b(self.a(x))


class Hidden(Base):
    """A layer that no one has registered."""

    def __init__(self) -> None:
        super().__init__()
        self.others = (Counting(),)

    def forward(self, x: Tensor) -> Any:
        return self.others[0](x)


class WithADefault(Base):
    def forward(self, x: Tensor, seen: list[int] = []) -> Any:  # noqa: B006
        seen.append(1)
        return self.b(self.a(x))


class ByItsDictionary(Base):
    def forward(self, x: Tensor) -> Any:
        self.__dict__["calls"] = self.width
        return self.b(self.a(x))


class NamedAsATensors(Base):
    def half(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x

    def forward(self, x: Tensor) -> Any:
        return self.b(self.half(self.a(x)))


temperature = 1.0


class AtATemperature(Base):
    """Which anybody may change from round to round."""

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) / temperature


class KeepingATensor(Base):
    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(1)

    def forward(self, x: Tensor) -> Any:
        return self.b(self.a(x)) + self.total


class InPlace(Base):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Any:
        self.total.add_(1)
        return self.b(self.a(x))


def remembering() -> type[nn.Module]:
    steps = 0

    class Remembering(Base):
        def forward(self, x: Tensor) -> Any:
            nonlocal steps
            steps += 1
            return self.b(self.a(x))

    return Remembering


@pytest.mark.parametrize("kind", [Base, Helping, Dropping])
def test_code_that_only_computes_is_repeatable(kind: type[nn.Module]) -> None:
    assert is_repeatable(kind(), cross_entropy)


@pytest.mark.parametrize("name", ["cnn", "mlp", "mnist-cnn", "preresnet18", "resnet18"])
def test_the_networks_of_the_papers_are(name: str) -> None:
    assert is_repeatable(build_model(name, input_shape=(1, 28, 28), num_classes=10), cross_entropy)


@pytest.mark.parametrize(
    "kind",
    [
        Counting, CountingElsewhere, CountingInAMethod, CountingInALayer, CountingInAProperty, CountingByName, Inside,
        Drawing, DrawingFromItsOwn, ReadingAClock, Printing, Appending, Switching, Seeding, HandingOut, Importing,
        Disguised, Hidden, WithADefault, ByItsDictionary, NamedAsATensors, AtATemperature, KeepingATensor, InPlace,
        remembering(),
    ],
)  # fmt: skip
def test_code_that_does_more_is_not(kind: type[nn.Module]) -> None:
    assert not is_repeatable(kind(), cross_entropy)


def test_what_layers_of_pytorch_are_given_is_read() -> None:
    assert is_repeatable(nn.TransformerEncoderLayer(4, 2, activation=F.gelu), cross_entropy)
    assert not is_repeatable(
        nn.TransformerEncoderLayer(4, 2, activation=lambda x: print(x) or x), cross_entropy
    )
    assert not is_repeatable(OwnConvolution(1, 1, 1), cross_entropy)


def test_a_name_that_means_nothing_yet_is_no_reason_to_fail() -> None:
    def outer() -> Any:
        def loss(output: Tensor, batch: Batch) -> Tensor:
            return later(output, batch)

        assert not is_repeatable(Base(), loss)
        later = own_loss
        return later

    outer()


def test_hooks_and_replaced_methods_may_do_anything() -> None:
    hooked, replaced = Base(), Base()
    hooked.a.register_forward_hook(lambda *_: None)
    replaced.a.forward = lambda x: x  # type: ignore[method-assign]
    assert not is_repeatable(hooked, cross_entropy)
    assert not is_repeatable(replaced, cross_entropy)


def own_loss(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, batch[-1]) + torch.einsum("ij->", output)


def counting_loss(output: Tensor, batch: Batch) -> Tensor:
    counter.append(1)
    return F.mse_loss(output, batch[-1])


teacher = nn.Linear(4, 2)


def taught(output: Tensor, batch: Batch) -> Tensor:
    return F.mse_loss(output, teacher(batch[0]))


def test_losses_are_read_too() -> None:
    assert not is_repeatable(Base(), taught)  # a network of which nobody here knows what it does
    assert is_repeatable(Base(), own_loss)
    assert is_repeatable(Base(), OnTargets(F.l1_loss))
    assert is_repeatable(Base(), Objective.of(loss=nn.HuberLoss()).loss)
    assert not is_repeatable(Base(), counting_loss)
