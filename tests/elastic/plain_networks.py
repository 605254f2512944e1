"""The papers' networks, cuttable, and what a cut costs when the small network is measured from scratch."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F

from fedtailor.elastic import elastic
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.memory import Workload
from fedtailor.elastic.model import ElasticModel
from fedtailor.models import build_model
from fedtailor.models.attention import Attention

IMAGE, GREY, TEXT = (3, 32, 32), (1, 28, 28), (80,)
SMALL_RESNET = {"widths": (4, 6, 8, 10), "stem": 4}

# name -> input shape and classes of the paper, input shape and options of a small version
NETWORKS: dict[str, tuple[tuple[int, ...], int, tuple[int, ...], dict[str, Any]]] = {
    "char-lstm": (TEXT, 86, (6,), {"hidden": 12}),
    "cnn": (IMAGE, 10, (1, 8, 8), {"channels": (4, 6, 8, 10)}),
    "femnist-cnn": (GREY, 62, GREY, {}),
    "flanc-cnn": (GREY, 10, (1, 8, 8), {"channels": (8, 8), "stem": 4}),
    "heterofl-resnet": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "lenet5": (GREY, 10, GREY, {"channels": (4, 6, 8), "hidden": 12}),
    "mlp": (GREY, 10, (1, 8, 8), {"hidden": (20, 10)}),
    "mnist-cnn": (GREY, 10, GREY, {}),
    "mobilenetv2": (IMAGE, 10, (3, 16, 16), {"width": 0.25}),
    "preresnet18": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "resnet18": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "resnet50": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "transformer": (TEXT, 86, (6,), {"embedding": 16, "heads": 2, "hidden": 32}),
    "vgg9": (IMAGE, 10, (3, 8, 8), {"channels": (4, 4, 6, 6, 8, 8), "hidden": (12, 12)}),
    "vit": (IMAGE, 10, (1, 28, 28), {"embedding": 16, "heads": 2, "hidden": 32, "depth": 2}),
}


@cache
def network(name: str, small: bool = False) -> ElasticModel:
    shape, classes, small_shape, options = NETWORKS[name]
    shape = small_shape if small else shape
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build_model(name, input_shape=shape, num_classes=classes, **(options if small else {}))
        inputs = torch.randint(classes, (2, *shape)) if len(shape) == 1 else torch.randn(2, *shape)
    return elastic(module, (inputs, torch.arange(2)))


@cache
def on_meta(model: ElasticModel) -> ElasticModel:
    """A twin without values: small networks come out of it without copying any."""
    return ElasticModel(copy.deepcopy(model.module).to("meta"), model.groups, model.example, model.objective)


def from_scratch(model: ElasticModel, cut: Cut, workload: Workload | None = None) -> dict[str, int]:
    """Every cost of a cut, measured on the plain small network: no shell, no curve, other formulas."""
    workload = workload or Workload()
    twin = on_meta(model)
    small = twin.extract(twin.weights(), cut).train()
    state = {**dict(small.named_parameters()), **dict(small.named_buffers())}
    parameters = [value for value in small.parameters() if value.requires_grad]
    persistent = {id(value) for value in small.state_dict(keep_vars=True).values()}
    stored = [value for value in state.values() if id(value) in persistent]
    recurrent = any(isinstance(layer, nn.RNNBase) for layer in small.modules())
    macs, saved = _run(small, model, workload.batch_size, imagined=not recurrent)
    return {
        "params": sum(value.numel() for value in small.parameters()),
        "macs": macs,
        "bytes": _bytes(stored),
        "memory": 2 * _bytes(list(state.values()))
        + (1 + workload.optimiser_slots) * _bytes(parameters)
        + saved,
    }


def _bytes(values: list[Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in values)


def _run(small: nn.Module, model: ElasticModel, batch_size: int, imagined: bool) -> tuple[int, int]:
    """MACs of one example, counted layer by layer, and the bytes that autograd saves for a batch."""
    counts: list[int] = []
    handles = [layer.register_forward_hook(_counter(counts)) for layer in small.modules()]
    mode = FakeTensorMode(allow_non_fake_inputs=True) if imagined else torch.random.fork_rng(devices=[])
    with mode:
        named = {**dict(small.named_parameters()), **dict(small.named_buffers())}
        weights = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in named.items()}
        for name, value in small.named_parameters():
            weights[name].requires_grad_(value.requires_grad)
        inputs, labels = model.example
        inputs = torch.zeros((batch_size, *inputs.shape[1:]), dtype=inputs.dtype)
        labels = torch.zeros(batch_size, dtype=labels.dtype)
        held = {value.untyped_storage()._cdata for value in weights.values()}
        saved: dict[int, Tensor] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved.setdefault(tensor.untyped_storage()._cdata, tensor)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            F.cross_entropy(functional_call(small, weights, (inputs,)), labels)
        kept = [tensor for key, tensor in saved.items() if key not in held]
        total = sum(tensor.untyped_storage().nbytes() for tensor in kept)
        for workspace in sorted(t.numel() for t in kept if t.dtype == torch.uint8)[:-1]:
            total -= workspace - workspace // 3  # untouched until the layer's turn in the backward pass
    for handle in handles:
        handle.remove()
    assert sum(counts) % batch_size == 0
    return sum(counts) // batch_size, total


def _counter(counts: list[int]) -> Any:
    def count(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        if isinstance(layer, nn.Conv2d | nn.Linear):
            counts.append(output.numel() * (layer.weight[0].numel() + (layer.bias is not None)))
        elif isinstance(layer, nn.LSTM):
            examples, time, features = inputs[0].shape
            hidden = layer.hidden_size
            counts.append(examples * time * (4 * hidden * (features + hidden) + 8 * hidden))
        elif isinstance(layer, Attention):
            examples, time, _ = inputs[0].shape
            sizes = layer.query.weight.shape[0] + layer.value.weight.shape[0]
            counts.append(examples * time * time * sizes)

    return count
