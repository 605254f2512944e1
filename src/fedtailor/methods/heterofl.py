"""HeteroFL: every client trains the prefix of each layer that its level allows.

Diao, Ding, Tarokh, "HeteroFL: Computation and Communication Efficient Federated Learning for Heterogeneous Clients",
ICLR 2021. Symbols: r_p = the client's width, s = r_p / r_g the scaler's ratio (r_g = 1), L = the client's own labels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Batch, Examples
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.elasticity.running.scaling import folded, scaler
from fedtailor.errors import FedtailorError
from fedtailor.messages import Client, ServerState, Task
from fedtailor.method import Method
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds


@register("heterofl")
@dataclass(frozen=True)
class HeteroFL(Method):
    """Width-prefix sub-models, merged per coordinate over the clients that hold it.

    The paper's preset counts every client alike, clips gradients at norm 1, re-estimates batch-norm statistics after
    training (sBN), and touches only the classes that a client owns. The last two settings reveal a client's classes,
    and do nothing where the task has none (multi-label, regression).
    """

    rules: ClassVar[tuple[str, ...]] = (*Method.rules, "masked_loss", "label_rows")

    local: LocalTraining = LocalTraining(clip_norm=1.0)
    norm: Policy = "static"
    weighting: Literal["samples", "count"] = "count"
    scaler: bool = True  # divide layer outputs by the width while training
    masked_loss: bool = True  # set logits of labels that the client does not own to 0
    label_rows: bool = True  # merge only the classifier rows of labels that the client owns

    def check_task(self, model: ElasticModel) -> None:
        if (self.masked_loss or self.label_rows) and model.learning_task.classes:
            _label_group(model.groups)

    @property
    def alike(self) -> bool:
        """Unless clients look at their own labels."""
        return self.trains_as(HeteroFL) and not (self.masked_loss or self.label_rows)

    def assign(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Task:
        task = super().assign(state, client, model, seeds)
        if not (self.label_rows and model.learning_task.classes):
            return task
        return replace(task, lease=replace(task.lease, partial=frozenset({_label_group(model.groups)})))

    def prepare(self, task: Task, data: Examples, model: ElasticModel) -> Task:
        """The client finds out which labels it owns; of the classifier it sends back their rows alone."""
        if not (self.masked_loss or self.label_rows) or not model.learning_task.classes:
            return task
        present = torch.zeros(model.groups.counts[_label_group(model.groups)], dtype=torch.bool)
        owned = data.targets.reshape(-1).unique().cpu()
        present[owned[owned >= 0]] = True  # positions of sequences may have no label
        task = replace(task, prepared={**task.prepared, "labels": present})
        if not self.label_rows:
            return task
        rows: Sequence[int] = present.nonzero().flatten().tolist()
        leased, classes = task.lease.cut, _label_group(model.groups)
        credited = leased.with_channels(model.groups, {**leased.channels, classes: rows})
        return replace(task, lease=replace(task.lease, cut=credited))

    def forward(
        self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch, task: Task, model: ElasticModel
    ) -> Any:
        """Inverted-dropout scaling: outputs of width r are divided by r, so that they match the full network's."""
        scale = scaler(model, cut, self.policy) if self.scaler else None
        return model.forward(weights, cut, batch, mode="train", scale=scale)

    def as_deployed(self, state: ServerState, patch: Patch, model: ElasticModel) -> Patch:
        """The network that was trained: its factors folded into its weights."""
        return folded(model, patch, scaler(model, patch.cut, self.policy)) if self.scaler else patch

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        if self.masked_loss and model.learning_task.classes:
            present = task.prepared["labels"].to(outputs[0].device)
            outputs = [mask_absent_labels(output, present) for output in outputs]
        return super().loss(outputs, weights, batch, task, model)


def mask_absent_labels(logits: Tensor, present: Tensor) -> Tensor:
    """Set the logits of labels that the client does not own to 0 (HeteroFL's masked cross-entropy).

    With the owned labels L of C classes the loss becomes -z_y + log(sum over L of exp(z_c) + (C - |L|)):
    zero, not minus infinity, so absent classes keep a constant share and get no gradient.
    """
    return torch.where(present, logits, torch.zeros((), dtype=logits.dtype, device=logits.device))


def _label_group(groups: ChannelGroups) -> str:
    """The group of the classifier's rows."""
    if len(groups.outputs) != 1:
        raise FedtailorError(
            f"masked_loss and label_rows need one output axis of classes, this model has {len(groups.outputs)}; "
            "set method.masked_loss = false and method.label_rows = false"
        )
    return groups.outputs[0]
