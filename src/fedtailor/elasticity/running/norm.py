"""What happens to running statistics of normalisation layers: a policy that every method names.

| policy      | in training             | uploaded             | at evaluation                                         |
|-------------|-------------------------|----------------------|-------------------------------------------------------|
| `averaged`  | tracked                 | with the weights     | the merged statistics                                 |
| `static`    | of the batch, untracked | scale and shift only | cumulative averages over clients' data, of each width |
| `per_width` | tracked for each width  | of each width held   | the merged statistics of that width                   |
| `local`     | tracked by each client  | scale and shift only | the client's own; where it has none, measured by it   |

Statistics that belong to one width are tensors with a name of their own, ``bn1.running_mean@1/4``: the width, not the
number of channels, names them, because two widths may keep equally many channels of a narrow layer. Scale and shift are
shared by all widths and cut like weights. Under ``local`` statistics live in the client's
memory alone, so clients evaluate their networks themselves (``server.evaluation.evaluate_clients``); a device without
memory and data is deployed with those of the module.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

import torch
from torch import Tensor

from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.cutting.patch import Patch, gather
from fedtailor.elasticity.running.layout import to_run
from fedtailor.elasticity.running.pieces import Pieces, Weights
from fedtailor.errors import FedtailorError

Policy = Literal["averaged", "static", "per_width", "local"]
POLICIES: tuple[Policy, ...] = ("averaged", "static", "per_width")  # that any method may follow


def travelling(model: Pieces, policy: Policy) -> frozenset[str]:
    """The tensors of the model that go to a client and come back; statistics of single widths are extra."""
    names = frozenset(model.groups.extents) - frozenset(model.constants)
    return names if policy == "averaged" else names - frozenset(model.statistics)


def tagged_statistics(model: Pieces, cut: Cut) -> frozenset[str]:
    """The names under which the statistics of a cut are kept."""
    return frozenset(tagged(name, cut.tag) for name in model.statistics)


def calibrated(model: Pieces, weights: Mapping[str, Tensor], cut: Cut) -> bool:
    """Whether the statistics of this cut are known."""
    return all(name in weights for name in tagged_statistics(model, cut))


def statistics_at(model: Pieces, weights: Mapping[str, Tensor], cuts: Iterable[Cut]) -> Weights:
    """Copies of the statistics of some cuts, under the cuts' own names.

    A cut that nobody has trained yet starts from the module's own statistics (fresh, or those of a pretrained start).
    """
    return {
        tagged(name, cut.tag): _statistic(model, weights, name, cut)
        for cut in cuts
        for name in model.statistics
    }


def with_statistics(
    model: Pieces, patch: Patch, weights: Mapping[str, Tensor], policy: Policy, cuts: Iterable[Cut]
) -> Patch:
    """The patch and, where the policy keeps them apart, the statistics of every cut that its holder may run."""
    if policy != "per_width":
        return patch
    return Patch({**patch.values, **statistics_at(model, weights, cuts)}, patch.cut)


def running(model: Pieces, held: Mapping[str, Tensor], cut: Cut) -> Weights:
    """The held statistics of a cut under the module's own names, to run on: the same tensors, so updates stay."""
    own = {name: held.get(tagged(name, cut.tag)) for name in model.statistics}
    return {name: value for name, value in own.items() if value is not None}


def with_own(model: Pieces, patch: Patch, memory: Mapping[str, Tensor]) -> Patch:
    """The patch with the statistics of its cut that a client keeps: what that client runs."""
    return Patch({**patch.values, **running(model, memory, patch.cut)}, patch.cut)


def _statistic(model: Pieces, weights: Mapping[str, Tensor], name: str, cut: Cut) -> Tensor:
    own = weights.get(tagged(name, cut.tag))
    return own.clone() if own is not None else gather(weights[name], model.table(cut)[name])


def deployable(model: Pieces, weights: Mapping[str, Tensor], cut: Cut, policy: Policy) -> Patch:
    """The patch of a cut, complete with the statistics that the policy says it runs on."""
    if policy == "averaged" or not model.statistics:
        return model.cut(weights, cut, travelling(model, "averaged"))
    if policy == "static" and not calibrated(model, weights, cut):
        raise FedtailorError(
            f"width {cut.tag} has no statistics yet: its norm layers must be calibrated on clients' data"
        )
    patch = model.cut(weights, cut, travelling(model, policy))
    statistics = {name: _statistic(model, weights, name, cut) for name in model.statistics}
    return Patch({**patch.values, **statistics}, cut)


@torch.no_grad()
def measure_statistics(model: Pieces, patch: Patch, data: Examples, batch_size: int) -> tuple[Weights, int]:
    """The cumulative average of batch statistics over the data, and the number of batches (sBN's query)."""
    fresh = {name: _blank(model, name, patch.cut, patch.values) for name in model.statistics}
    ready = to_run(model, patch)
    values = {**ready.values, **fresh}
    count = 0
    for chosen in torch.arange(len(data)).split(batch_size):
        if len(chosen) > 1:  # one example has no variance
            model.forward(values, ready.cut, data.take(chosen), mode="calibrate")
            count += 1
    return {tagged(name, patch.cut.tag): value for name, value in fresh.items()}, count


def _blank(model: Pieces, name: str, cut: Cut, like: Mapping[str, Tensor]) -> Tensor:
    device = next(iter(like.values())).device
    template = model.module.get_buffer(name)
    start = 1 if name.endswith("running_var") else 0
    return torch.full(model.shape(name, cut), start, dtype=template.dtype, device=device)
