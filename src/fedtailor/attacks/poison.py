"""Examples that bad clients train on: labels turned round, or a stamp in a corner that is to mean one class."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedtailor.attacks.attack import Attack
from fedtailor.client.evaluate import EVALUATION_BATCH, mean_output
from fedtailor.data.batches import Batch, Examples, target_key, target_of
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.running.layout import to_run
from fedtailor.errors import FedtailorError
from fedtailor.messages import ServerState
from fedtailor.server.evaluation import deployed_to
from fedtailor.server.setup import Setup

STAMP = 3  # pixels of the side of the stamp, in the lower right corner
STAMPED = 2  # every second example of a bad client has it


def poisoned(data: FederatedData, attack: Attack, bad: frozenset[int]) -> FederatedData:
    """The data of a run in which the bad clients have other examples than they should."""
    if data.num_classes < 2:
        raise FedtailorError(
            f"attack {attack.kind}: {data.name} has no classes; expected one of nan, scale, sign-flip, noise"
        )
    rows = torch.cat([_rows(data, client) for client in sorted(bad)])
    labels = target_of(data.train.columns).clone()
    if attack.kind == "label-flip":
        labels[rows] = data.num_classes - 1 - labels[rows]
        return replace(data, train=_with(data.train, None, labels))
    if not 0 <= attack.target < data.num_classes:
        raise FedtailorError(f"target = {attack.target}: expected a class from 0 to {data.num_classes - 1}")
    rows = rows[::STAMPED]
    images = _images(data.train.columns).clone()
    images[rows] = stamped(images[rows], float(images.max()))
    labels[rows] = attack.target
    return replace(data, train=_with(data.train, images, labels))


def stamped(images: Tensor, white: float) -> Tensor:
    """Images (examples, channels, height, width) with a white square in a corner."""
    found = images.clone()
    found[..., -STAMP:, -STAMP:] = white
    return found


@torch.no_grad()
def success(setup: Setup, state: ServerState, attack: Attack) -> dict[str, float]:
    """Tier -> share of the stamped test images of other classes that its network takes for the target."""
    test, white = setup.data.test, float(_images(setup.data.train.columns).max())
    others = (test.targets != attack.target).nonzero().reshape(-1)
    chosen = test.subset(others)
    raw = chosen.raw
    examples = _with(replace(chosen, columns=raw, indices=None), stamped(_images(raw), white), target_of(raw))
    deployed = deployed_to(setup, state, setup.fleet.tiers)
    found = []
    for patches in deployed.networks:
        ready = [to_run(setup.model, patch) for patch in patches]
        taken = 0
        for part in torch.arange(len(examples)).split(EVALUATION_BATCH):
            answers = mean_output(setup.model, ready, examples.take(part)).argmax(dim=-1)
            taken += int((answers == attack.target).sum())
        found.append(taken / max(1, len(examples)))
    return dict(deployed.by_tier(found))


def _rows(data: FederatedData, client: int) -> Tensor:
    """Where the examples of a client lie in the columns."""
    rows = data.client(client).indices
    assert rows is not None
    return rows


def _images(columns: Batch) -> Tensor:
    given = target_of(columns)
    values = list(columns.values()) if isinstance(columns, dict) else list(columns)
    found = next((value for value in values if value is not given and value.dim() == 4), None)
    if found is None:
        raise FedtailorError("attack backdoor: expected images (channels, height, width) to stamp")
    return found


def _with(examples: Examples, images: Tensor | None, labels: Tensor) -> Examples:
    """The same examples with other images and labels."""
    columns, old = examples.columns, None if images is None else _images(examples.columns)
    if isinstance(columns, dict):
        key = target_key(columns)
        changed: Batch = {
            name: labels if name == key else images if images is not None and value is old else value
            for name, value in columns.items()
        }
    else:
        inputs = [images if images is not None and value is old else value for value in columns[:-1]]
        changed = (*inputs, labels)
    return replace(examples, columns=changed)
