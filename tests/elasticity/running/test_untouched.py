"""Tracing leaves the user's module, its gradients, its mode and the random numbers alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from elasticity.odd_constructions import ZOO
from fedtailor.elasticity.front_door import elastic


class Restless(nn.Module):
    """Writes into itself, into its input and into its buffers whenever it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))
        self.register_buffer("average", torch.zeros(8))
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1.0)
        self.calls += 1
        x = self.bn(self.conv(x))
        self.last = x
        self.average.mul_(0.9).add_(0.1 * x.detach().mean((0, 2, 3)))
        return self.head(F.dropout(x, 0.5, self.training).mean((2, 3)))


def test_mode_gradients_buffers_hooks_and_inputs():
    torch.manual_seed(0)
    module = Restless().train()
    module.bn.eval()
    images, labels = torch.randn(4, 3, 8, 8), torch.tensor([0, 1, 2, 3])
    F.cross_entropy(module(images.clone()), labels).backward()
    seen = []
    module.conv.register_forward_hook(lambda *_: seen.append("conv"))
    module.register_forward_pre_hook(lambda *_: seen.append("module"))
    before = {
        "state": copy.deepcopy(module.state_dict()),
        "gradients": {name: value.grad.clone() for name, value in module.named_parameters()},
        "modes": {name: part.training for name, part in module.named_modules()},
        "hooks": [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()],
        "images": images.clone(),
        "last": module.last,
        "random": torch.get_rng_state(),
    }
    model = elastic(module, (images, labels))
    assert model.groups.elastic == ("conv",)
    assert all(torch.equal(value, before["state"][name]) for name, value in module.state_dict().items())
    assert all(
        torch.equal(value.grad, before["gradients"][name]) for name, value in module.named_parameters()
    )
    assert {name: part.training for name, part in module.named_modules()} == before["modes"]
    hooks = [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in module.modules()]
    assert hooks == before["hooks"]
    assert torch.equal(images, before["images"])
    assert module.last is before["last"]
    assert torch.equal(torch.get_rng_state(), before["random"])


@pytest.mark.parametrize("name", ["ResNet", "LSTMClassifier", "ViT", "PatternMatching"])
def test_weights_and_random_numbers_of_the_zoo(name):
    torch.manual_seed(0)
    module, batch = ZOO[name].build(), ZOO[name].batch()
    state, random = copy.deepcopy(module.state_dict()), torch.get_rng_state()
    elastic(module, batch)
    assert module.training
    assert all(torch.equal(value, state[key]) for key, value in module.state_dict().items())
    assert all(parameter.grad is None for parameter in module.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    functions = (torch.zeros, torch.arange, torch.autograd.Function.apply)
    assert all("fedtailor" not in repr(function) for function in functions)
