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
from dataclasses import dataclass
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


@dataclass(frozen=True)
class NormPolicy:
    """Who measures running statistics, who keeps them, and who evaluates; the table above as an object."""

    name: Policy
    with_weights: bool = False  # tracked in training, sent and merged like weights
    per_width: bool = False  # tracked for each width, sent to whoever may run it, merged by name
    measured_after: bool = False  # not tracked: the server asks clients to measure each width's after merging
    # Tracked by each client and never sent: clients evaluate their networks themselves
    kept_by_clients: bool = False

    def travelling(self, model: Pieces) -> frozenset[str]:
        """The tensors of the model that go to a client and come back; statistics of single widths are extra."""
        names = frozenset(model.groups.extents) - frozenset(model.constants)
        return names if self.with_weights else names - frozenset(model.statistics)

    def with_statistics(
        self, model: Pieces, patch: Patch, weights: Mapping[str, Tensor], cuts: Iterable[Cut]
    ) -> Patch:
        """The patch and, where they are kept apart, the statistics of every cut that its holder may run."""
        if not self.per_width:
            return patch
        return Patch({**patch.values, **statistics_at(model, weights, cuts)}, patch.cut)

    def deployable(self, model: Pieces, weights: Mapping[str, Tensor], cut: Cut) -> Patch:
        """The patch of a cut, complete with the statistics that it runs on."""
        own = statistics_of(model, cut)
        if self.with_weights or not own:
            return model.cut(weights, cut, POLICIES["averaged"].travelling(model))
        if self.measured_after and not calibrated(model, weights, cut):
            raise FedtailorError(
                f"width {cut.tag} has no statistics yet: its norm layers must be calibrated on clients' data"
            )
        patch = model.cut(weights, cut, self.travelling(model))
        return Patch({**patch.values, **{name: _statistic(model, weights, name, cut) for name in own}}, cut)


POLICIES: dict[Policy, NormPolicy] = {
    "averaged": NormPolicy("averaged", with_weights=True),
    "static": NormPolicy("static", measured_after=True),
    "per_width": NormPolicy("per_width", per_width=True),
    "local": NormPolicy("local", kept_by_clients=True),
}
FOR_ANY_METHOD: tuple[Policy, ...] = (
    "averaged",
    "static",
    "per_width",
)  # ``local`` needs clients that take part in it


def statistics_of(model: Pieces, cut: Cut) -> tuple[str, ...]:
    """The statistics of the norm layers that a cut holds."""
    return tuple(name for name in model.statistics if name not in cut.absent)


def tagged_statistics(model: Pieces, cut: Cut) -> frozenset[str]:
    """The names under which the statistics of a cut are kept."""
    return frozenset(tagged(name, cut.tag) for name in statistics_of(model, cut))


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
        for name in statistics_of(model, cut)
    }


def running(model: Pieces, held: Mapping[str, Tensor], cut: Cut) -> Weights:
    """The held statistics of a cut under the module's own names, to run on: the same tensors, so updates stay."""
    own = {name: held.get(tagged(name, cut.tag)) for name in statistics_of(model, cut)}
    return {name: value for name, value in own.items() if value is not None}


def with_own(model: Pieces, patch: Patch, memory: Mapping[str, Tensor]) -> Patch:
    """The patch with the statistics of its cut that a client keeps: what that client runs."""
    return Patch({**patch.values, **running(model, memory, patch.cut)}, patch.cut)


def _statistic(model: Pieces, weights: Mapping[str, Tensor], name: str, cut: Cut) -> Tensor:
    own = weights.get(tagged(name, cut.tag))
    return own.clone() if own is not None else gather(weights[name], model.table(cut)[name])


@torch.no_grad()
def measure_statistics(model: Pieces, patch: Patch, data: Examples, batch_size: int) -> tuple[Weights, int]:
    """The cumulative average of batch statistics over the data, and the number of batches (sBN's query)."""
    fresh = {name: _blank(model, name, patch.cut, patch.values) for name in statistics_of(model, patch.cut)}
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
