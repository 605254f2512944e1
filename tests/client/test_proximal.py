"""FedProx's term, for every method: mu * (w - w_round) is added to the gradient."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch.nn.functional import cross_entropy

from fedtailor.client import training
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.errors import FedtailorError
from fedtailor.method import Method
from helpers import bits, differing, mlp_model, task_for, vectors


@pytest.mark.parametrize("clip", [float("inf"), 0.05])
def test_the_gradient_of_the_proximal_term_is_part_of_the_clipped_gradient(clip):
    model, data = mlp_model(), vectors(8)
    local = LocalTraining(lr=0.2, batch_size=8, epochs=4, proximal=0.7, momentum=0.5, clip_norm=clip)
    task = task_for(model)
    patch, _ = training.train(Method(local), task, data, model)
    module = copy.deepcopy(model.module)  # the shared one must stay as it is
    start = [value.detach().clone() for value in module.parameters()]
    optimiser = torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.5)
    for x, y in training.batches(local, task, data, skip_single=False):
        optimiser.zero_grad()
        distance = sum((a - b).square().sum() for a, b in zip(module.parameters(), start, strict=True))
        (cross_entropy(module(x), y) + 0.7 / 2 * distance).backward()
        if clip < float("inf"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), clip)
        optimiser.step()
    for name, value in module.named_parameters():
        torch.testing.assert_close(patch.values[name], value.detach(), rtol=1e-5, atol=1e-6)


def test_without_it_nothing_changes_and_with_much_of_it_clients_stay_near_the_start():
    model, data, task = mlp_model(), vectors(8), task_for(mlp_model())

    def trained(proximal: float) -> dict[str, torch.Tensor]:
        return training.train(Method(LocalTraining(proximal=proximal, epochs=20)), task, data, model)[
            0
        ].values

    def moved(values: dict[str, torch.Tensor]) -> float:
        return sum((values[n] - task.patch.values[n]).square().sum().item() for n in values)

    assert not differing(
        trained(0.0), training.train(Method(LocalTraining(epochs=20)), task, data, model)[0].values
    )
    assert moved(trained(9.0)) < 0.1 * moved(trained(0.0))


@dataclass(frozen=True)
class WideThenNarrow(Method):
    def step_cuts(self, task, step, model):
        return [task.patch.cut if step == 0 else prefix(model.groups, as_width("1/4"))]


class Resting(WideThenNarrow):
    inactive: ClassVar = "active"


def test_outside_a_step_the_term_follows_the_policy_of_the_method():
    model, data, task = mlp_model(8), vectors(4), task_for(mlp_model(8))

    def outside(kind: type[Method], steps: int) -> torch.Tensor:
        local = LocalTraining(proximal=0.5, steps=steps, batch_size=4)
        return training.train(kind(local), task, data, model)[0].values["0.weight"][2:]

    start = task.patch.values["0.weight"][2:]
    after_one = outside(WideThenNarrow, 1)
    torch.testing.assert_close(outside(WideThenNarrow, 2), after_one - 0.1 * 0.5 * (after_one - start))
    assert bits(outside(Resting, 2)) == bits(outside(Resting, 1))


def test_a_negative_one_is_refused():
    with pytest.raises(FedtailorError, match=r"training.proximal = -1.0: expected at least 0"):
        LocalTraining(proximal=-1.0)
