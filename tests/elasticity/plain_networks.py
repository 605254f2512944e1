"""The papers' networks, cuttable, and what a cut costs when the small network is measured from scratch."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F

from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.models import build_model
from fedtailor.models.attention import Attention
from fedtailor.models.llama import GroupedAttention

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
    "llama": (TEXT, 86, (6,), {"embedding": 16, "heads": 2, "shared": 1, "hidden": 32}),
    "mlp": (GREY, 10, (1, 8, 8), {"hidden": (20, 10)}),
    "mnist-cnn": (GREY, 10, GREY, {}),
    "mobilenetv2": (IMAGE, 10, (3, 16, 16), {"width": 0.25}),
    "preresnet18": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "resnet18": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "resnet50": (IMAGE, 10, (3, 16, 16), SMALL_RESNET),
    "text-classifier": (TEXT, 86, (6,), {"vocabulary": 86, "hidden": 12, "reader": "gru"}),
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


@lru_cache(maxsize=4)
def small_network(model: ElasticModel, cut: Cut) -> nn.Module:
    """The plain module of a cut, on the meta device."""
    twin = on_meta(model)
    return twin.extract(twin.weights(), cut).train()


def from_scratch(
    model: ElasticModel,
    cut: Cut,
    workload: Workload,
    names: Collection[str] = ("params", "macs", "bytes", "memory"),
) -> dict[str, int]:
    """Costs of a cut, measured on the plain small network: no shell, no curve, other formulas."""
    sizes = sizes_from_scratch(model, cut)
    if "memory" in names:
        copies = 2 * sizes["held"] + (1 + workload.optimiser_slots) * sizes["trained"]
        sizes = {**sizes, "memory": copies + saved_from_scratch(model, cut, workload.batch_size)}
    return {name: sizes[name] for name in names}


@cache
def sizes_from_scratch(model: ElasticModel, cut: Cut) -> dict[str, int]:
    """What the shapes of the small network's tensors say."""
    small = small_network(model, cut)
    tensors = [*small.parameters(), *small.buffers()]
    persistent = {id(value) for value in small.state_dict(keep_vars=True).values()}
    uses = positions(model)
    return {
        "params": sum(value.numel() for value in small.parameters()),
        "macs": sum(_macs(layer, uses[path]) for path, layer in small.named_modules() if path in uses),
        "bytes": _bytes(value for value in tensors if id(value) in persistent),
        "held": _bytes(tensors),
        "trained": _bytes(value for value in small.parameters() if value.requires_grad),
    }


def _bytes(values: Iterable[Tensor]) -> int:
    return sum(value.numel() * value.element_size() for value in values)


@cache
def positions(model: ElasticModel) -> dict[str, int]:
    """How often each layer is applied to one example: image positions or steps of a text, which no cut changes."""
    found: dict[str, int] = {}
    full = copy.deepcopy(small_network(model, Cut.everything())).eval()

    def note(path: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
            if isinstance(layer, nn.Conv2d):
                found[path] = output.shape[2] * output.shape[3]
            elif isinstance(layer, nn.Linear):
                found[path] = output[0, ..., 0].numel()
            elif isinstance(layer, nn.LSTM | nn.GRU | Attention | GroupedAttention):
                found[path] = inputs[0].shape[1]

        return hook

    for path, layer in full.named_modules():
        layer.register_forward_hook(note(path))
    with torch.no_grad():
        full(model.example[0].to("meta"))
    return found


def _macs(layer: nn.Module, times: int) -> int:
    if isinstance(layer, Attention):  # every position looks at every other: scores, then a mean of values
        return times * times * (layer.query.weight.shape[0] + layer.value.weight.shape[0])
    if isinstance(layer, GroupedAttention):  # the same, with values that several heads share
        shared = layer.heads // layer.shared
        return times * times * (layer.query.weight.shape[0] + shared * layer.value.weight.shape[0])
    # Every weight is used once per position, be it of a convolution, of a linear layer or of a gate; so is every bias.
    return times * sum(value.numel() for value in layer.parameters(recurse=False))


@cache
def saved_from_scratch(model: ElasticModel, cut: Cut, batch_size: int) -> int:
    """The bytes that autograd saves when the small network is trained on a batch."""
    small = small_network(model, cut)
    recurrent = any(isinstance(layer, nn.RNNBase) for layer in small.modules())
    with torch.random.fork_rng(devices=[]) if recurrent else FakeTensorMode(allow_non_fake_inputs=True):
        named = {**dict(small.named_parameters()), **dict(small.named_buffers())}
        weights = {name: torch.zeros(value.shape, dtype=value.dtype) for name, value in named.items()}
        for name, value in small.named_parameters():
            weights[name].requires_grad_(value.requires_grad)
        inputs, labels = model.example
        inputs = torch.zeros((batch_size, *inputs.shape[1:]), dtype=inputs.dtype)
        labels = torch.zeros(batch_size, dtype=labels.dtype)
        # Constants of a cut (tables of angles) are made anew for every step, so the graph keeps them alive.
        weighed = (value for name, value in weights.items() if name not in model.constants)
        held = {value.untyped_storage()._cdata for value in weighed}
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
    return total
