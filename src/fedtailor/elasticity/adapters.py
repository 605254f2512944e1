"""Adapters: low-rank layers beside frozen ones, whose rank is the elastic axis.

``peft`` keeps the factors of an adapted layer in dictionaries with known names, ``lora_A`` and ``lora_B`` for one. The
rank lies on these tensors alone and nothing else of the network is cut, so no forward has to be traced: a Llama, a BERT
or a module of the user's own becomes elastic by its names. What comes out is checked all the same, against the full
module with the dropped ranks at zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor.data.batches import Batch
from fedtailor.elasticity.check import FAILURES, TRIALS, difference, random_cut, shaken
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.groups import Axis, ChannelGroups, Extent, Size
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.elasticity.tracing.copies import named_tensors, shared_names
from fedtailor.elasticity.tracing.reference import tensors_of
from fedtailor.errors import FedtailorError, require

# The axis of the rank in what peft's layers hold: LoRA, of embeddings, AdaLoRA's singular values; LoHa; LoKr
RANK_AXES = {
    "lora_A": 0, "lora_B": 1, "lora_embedding_A": 0, "lora_embedding_B": 1, "lora_E": 0,
    "hada_w1_a": 1, "hada_w1_b": 0, "hada_w2_a": 1, "hada_w2_b": 0,
    "lokr_w1_a": 1, "lokr_w1_b": 0, "lokr_w2_a": 1, "lokr_w2_b": 0,
}  # fmt: skip
# Attributes of factors that are layers, by the axis of their weight
SIZES = {0: ("out_features", "out_channels"), 1: ("in_features", "in_channels")}


@dataclass(frozen=True)
class Place:
    """A tensor of an adapted layer, and which of its axes is the rank."""

    group: str
    tensor: str
    axis: int


@dataclass(frozen=True)
class Factors:
    """The two factors of one low-rank layer, of which the product alone matters: W = up @ down."""

    group: str
    up: str  # (outputs, rank, ...)
    down: str  # (rank, inputs, ...)


def rank_places(module: nn.Module) -> list[Place]:
    """Where the ranks of trained adapters lie; empty for a module without any."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    found: list[Place] = []
    for path, layer in module.named_modules():
        for adapter in _adapters_of(layer):
            places = list(_places(path, layer, adapter, parameters))
            trained = any(parameters[place.tensor].requires_grad for place in places)
            ranks = {parameters[place.tensor].shape[place.axis] for place in places}
            if trained and len(ranks) == 1:
                found.extend(places)
    return found


def _adapters_of(layer: nn.Module) -> list[str]:
    """The names of the adapters that a layer has, in their order."""
    containers = (getattr(layer, attribute, None) for attribute in RANK_AXES)
    kept = [each for each in containers if isinstance(each, nn.ModuleDict | nn.ParameterDict)]
    return list(dict.fromkeys(str(adapter) for each in kept for adapter in each))


def _places(
    path: str, layer: nn.Module, adapter: str, parameters: dict[str, nn.Parameter]
) -> Iterator[Place]:
    only = len(_adapters_of(layer)) == 1
    group = path if only else f"{path}:{adapter}"
    for attribute, axis in RANK_AXES.items():
        base = f"{path}.{attribute}.{adapter}".removeprefix(".")
        for tensor in (base, f"{base}.weight"):
            if tensor in parameters:
                yield Place(group, tensor, axis)


def rank_groups(module: nn.Module, places: Sequence[Place], keep: Sequence[str] = ()) -> ChannelGroups:
    """A group for the rank of every adapted layer; ``keep`` names those whose rank stays, or what is above them."""
    tensors, ties = named_tensors(module), shared_names(module)
    counts = {
        place.group: tensors[ties.get(place.tensor, place.tensor)].shape[place.axis] for place in places
    }
    axes = {(ties.get(place.tensor, place.tensor), place.axis): place.group for place in places}
    fixed = {group: "kept whole by keep" for group in counts if any(_names(name, group) for name in keep)}
    for name in keep:
        if not any(_names(name, group) for group in counts):
            raise FedtailorError(
                f"keep = {name!r}: expected an adapted layer, such as {next(iter(counts))!r}"
            )

    def extent(name: str, axis: int, length: int) -> Extent:
        group = axes.get((name, axis))
        return Extent(length) if group is None else Extent(length, (Axis(group),))

    extents = {
        name: tuple(extent(name, axis, length) for axis, length in enumerate(value.shape))
        for name, value in tensors.items()
    }
    producers: dict[str, tuple[str, ...]] = {
        place.tensor.removesuffix(".weight"): (place.group,)
        for place in places
        if place.axis == 0 and place.tensor.endswith(".weight")
    }
    return ChannelGroups(
        counts, extents, tuple(_sizes(module, places, counts)), fixed, producers=producers, ties=ties
    )


def _names(name: str, group: str) -> bool:
    return fnmatchcase(group, name) or group.startswith(f"{name}.")


def _sizes(module: nn.Module, places: Sequence[Place], counts: dict[str, int]) -> Iterator[Size]:
    """The attributes that say how large a rank is: of the factors, where they are layers, and of the adapted layer."""
    told: set[tuple[str, str]] = set()
    for place in places:
        extent = Extent(counts[place.group], (Axis(place.group),))
        path = place.tensor.removesuffix(".weight")
        if path != place.tensor:
            layer = module.get_submodule(path)
            yield from (Size(path, name, extent) for name in SIZES[place.axis] if hasattr(layer, name))
        owner, _, adapter = path.rpartition(".")
        owner = owner.rpartition(".")[0]
        ranks = getattr(module.get_submodule(owner), "r", None)
        if isinstance(ranks, dict) and adapter in ranks and (owner, adapter) not in told:
            told.add((owner, adapter))
            yield Size(owner, "r", extent, adapter)


def disagreement(model: ElasticModel, batch: Batch) -> str:
    """What differs between small ranks and the full module with the other ranks at zero; empty if nothing."""
    generator = np.random.default_rng(0)
    weights = shaken(model)
    try:
        with torch.no_grad():
            for _ in range(TRIALS):
                problem = _difference(model, weights, random_cut(model.groups, generator), batch)
                if problem:
                    return problem
    except FAILURES as error:
        return f"it does not run on the example: {type(error).__name__}: {error}"
    return ""


def _difference(model: ElasticModel, weights: Weights, cut: Cut, batch: Batch) -> str:
    patch = model.cut(weights, cut)
    masked = model.place({name: torch.zeros_like(value) for name, value in weights.items()}, patch)
    small = model.forward(patch.values, cut, batch)
    return difference(tensors_of(small), tensors_of(model.forward(masked, Cut.everything(), batch)))


def factors(model: ElasticModel) -> tuple[Factors, ...]:
    """The pairs of factors whose inner axis is elastic, those of peft and those that users write themselves.

    Two tensors share the axis, both are trained; and with the factors mixed by an invertible matrix, up M and
    M^-1 down, the network must compute the same: what lies between them is linear.
    """
    return model.once("factors", lambda: tuple(_factors(model)))


def _factors(model: ElasticModel) -> Iterator[Factors]:
    weights = shaken(model)
    with torch.no_grad():
        before = tensors_of(model.forward(weights, Cut.everything(), model.example))
        for group in model.groups.elastic:
            lies = sorted(model.groups.tensors(group), key=lambda place: place[1])
            if [axis for _, axis in lies] != [0, 1] or not model.trainable.issuperset(t for t, _ in lies):
                continue
            pair = Factors(group, up=lies[1][0], down=lies[0][0])
            if any(size > 1 for size in weights[pair.up].shape[2:]):  # a kernel is no matrix
                continue
            after = model.forward({**weights, **_mixed(weights, pair)}, Cut.everything(), model.example)
            if not difference(tensors_of(after), before):
                yield pair


def _mixed(weights: Weights, pair: Factors) -> Weights:
    """Other factors of the same product."""
    up, down = matrices(weights[pair.up], weights[pair.down])
    rank = up.shape[1]
    generator = torch.Generator().manual_seed(0)
    mixing = (
        torch.eye(rank, dtype=torch.float64) + 0.5 * torch.randn(rank, rank, generator=generator).double()
    )
    mixing = mixing.to(up.device)
    return {
        pair.up: (up @ mixing).reshape(weights[pair.up].shape).to(weights[pair.up].dtype),
        pair.down: torch.linalg.solve(mixing, down)
        .reshape(weights[pair.down].shape)
        .to(weights[pair.down].dtype),
    }


def matrices(up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Factors as matrices (outputs, rank) and (rank, inputs) in float64; a convolution's kernels are flattened."""
    return up.flatten(1).double(), down.flatten(1).double()


def as_peft(module: nn.Module) -> nn.Module:
    """The same network of peft's, its settings at the ranks that it has: ``save_pretrained`` writes what loads again.

    A piece keeps the factor of the full rank, so alpha shrinks with the rank: 16 / 8 is 4 / 2.
    """
    configs = getattr(module, "peft_config", None)
    require(isinstance(configs, dict), "module", type(module).__name__, "a network that peft has adapted")
    for adapter, config in (configs or {}).items():
        ranks, alphas = {}, {}
        for path, layer in module.named_modules():
            rank = getattr(layer, "r", {})
            if isinstance(rank, dict) and adapter in rank and hasattr(layer, "scaling"):
                by = rank[adapter] ** 0.5 if getattr(config, "use_rslora", False) else rank[adapter]
                name = path.removeprefix("base_model.model.")
                ranks[name], alphas[name] = rank[adapter], layer.scaling[adapter] * by
        largest = max(ranks, key=lambda name: ranks[name])
        config.r, config.lora_alpha = ranks[largest], alphas[largest]
        config.rank_pattern = {name: rank for name, rank in ranks.items() if rank != config.r}
        config.alpha_pattern = {n: alpha for n, alpha in alphas.items() if alpha != config.lora_alpha}
    return module
