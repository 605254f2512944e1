"""What happens to running statistics of normalisation layers: a policy that every method names.

| policy     | in training            | uploaded            | at evaluation                                        |
|------------|------------------------|---------------------|------------------------------------------------------|
| `averaged` | tracked                | with the weights    | the merged statistics                                |
| `static`   | of the batch, untracked| scale and shift only| cumulative averages over clients' data, for each width|

Statistics that belong to one width are tensors with a name of their own, ``bn1.running_mean@1/4``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from fedtailor.data.batches import Examples
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.model import ElasticModel, Weights
from fedtailor.elastic.patch import Patch
from fedtailor.errors import FedtailorError

Policy = Literal["averaged", "static"]
POLICIES: tuple[Policy, ...] = ("averaged", "static")


def travelling(model: ElasticModel, policy: Policy) -> frozenset[str]:
    """The tensors that go to a client and come back."""
    names = frozenset(model.groups.extents) - frozenset(model.constants)
    return names if policy == "averaged" else names - frozenset(model.statistics)


def tagged(name: str, cut: Cut) -> str:
    """The name of a tensor that belongs to one cut alone."""
    return f"{name}@{cut.tag}"


def tagged_statistics(model: ElasticModel, cut: Cut) -> frozenset[str]:
    """The names under which the statistics of a cut are kept."""
    return frozenset(tagged(name, cut) for name in model.statistics)


def calibrated(model: ElasticModel, weights: Mapping[str, Tensor], cut: Cut) -> bool:
    """Whether the statistics of this cut are known."""
    return all(name in weights for name in tagged_statistics(model, cut))


def deployable(model: ElasticModel, weights: Mapping[str, Tensor], cut: Cut, policy: Policy) -> Patch:
    """The patch of a cut, complete with the statistics that the policy says it runs on."""
    if policy == "averaged" or not model.statistics:
        return model.cut(weights, cut, travelling(model, "averaged"))
    if not calibrated(model, weights, cut):
        raise FedtailorError(f"width {cut.tag} has no statistics yet: its norm layers must be calibrated on clients' data")
    patch = model.cut(weights, cut, travelling(model, policy))
    statistics = {name: weights[tagged(name, cut)].clone() for name in model.statistics}
    return Patch({**patch.values, **statistics}, cut)


@torch.no_grad()
def measure_statistics(model: ElasticModel, patch: Patch, data: Examples, batch_size: int) -> tuple[Weights, int]:
    """The cumulative average of batch statistics over the data, and the number of batches (sBN's query)."""
    fresh = {name: _blank(model, name, patch.cut, patch.values) for name in model.statistics}
    values = {**patch.values, **fresh}
    count = 0
    for chosen in torch.arange(len(data)).split(batch_size):
        if len(chosen) > 1:    # one example has no variance
            model.forward(values, patch.cut, data.take(chosen), mode="calibrate")
            count += 1
    return {tagged(name, patch.cut): value for name, value in fresh.items()}, count


def _blank(model: ElasticModel, name: str, cut: Cut, like: Mapping[str, Tensor]) -> Tensor:
    device = next(iter(like.values())).device
    template = model.module.get_buffer(name)
    start = 1 if name.endswith("running_var") else 0
    return torch.full(model.shape(name, cut), start, dtype=template.dtype, device=device)
