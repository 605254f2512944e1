"""Every network that comes with fedtailor can be traced, and nearly all of it can shrink."""

from __future__ import annotations

import pytest
import torch

from fedtailor.elasticity.explain import elastic_share
from fedtailor.elasticity.front_door import elastic
from fedtailor.models import build_model, model_names

TEXT = ("char-lstm", "llama", "text-classifier", "transformer")


@pytest.mark.parametrize("name", [name for name in model_names() if name != "adapted"])
def test_models(name):
    torch.manual_seed(0)
    if name in TEXT:
        module = build_model(name, input_shape=(20,), num_classes=30)
        batch = (torch.randint(0, 30, (2, 20)), torch.tensor([0, 1]))
    else:
        module = build_model(name, input_shape=(3, 32, 32), num_classes=10)
        batch = (torch.randn(2, 3, 32, 32), torch.tensor([0, 1]))
    model = elastic(module, batch)
    assert model.own_class
    assert elastic_share(model) >= 0.95
    assert len(model.groups.outputs) == 1
