"""A trial with a known answer: two groups of clients that need different halves of a wide layer.

A group's inputs lie on features of its own, its labels are classes of its own, and half of the hidden units read
either's features. At a quarter of the multiply-accumulates a client that knows which half is its own can draw twice as
many useful units as one that draws all units alike.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.front_door import elastic
from fedtailor.fleet import Fleet, Tier
from fedtailor.method import Method
from fedtailor.methods.flado.flado import Flado
from fedtailor.methods.uniprob import UniProb
from fedtailor.seeds import Seeds
from helpers import Result, federated, run

GROUPS, FEATURES, CLASSES, HIDDEN = 2, 8, 5, 32
CLIENTS, EXAMPLES, TESTS = 8, 40, 1000
LOCAL = LocalTraining(lr=0.2, batch_size=8)
FLEET = Fleet((Tier("quarter", Budget(macs=0.25), 1),))
SEEDS = range(5)


def drawn(count: int, seed: int) -> Examples:
    """Examples of both groups, group after group, labelled by teachers that do not change with the seed."""
    teacher, source = (torch.Generator().manual_seed(each) for each in (99, seed))
    first = torch.randn(GROUPS, 12, FEATURES, generator=teacher)
    second = torch.randn(GROUPS, CLASSES, 12, generator=teacher)
    inputs, labels = torch.zeros(GROUPS, count, GROUPS * FEATURES), []
    for group in range(GROUPS):
        own = torch.randn(count, FEATURES, generator=source)
        inputs[group, :, group * FEATURES : (group + 1) * FEATURES] = own
        labels.append((torch.tanh(own @ first[group].T) @ second[group].T).argmax(1) + CLASSES * group)
    return Examples.of(inputs.flatten(0, 1), torch.cat(labels))


def trained(method: Method, seed: int, rounds: int) -> Result:
    train = drawn(CLIENTS // GROUPS * EXAMPLES, seed)
    data = federated(train, [EXAMPLES] * CLIENTS, GROUPS * CLASSES, test=drawn(TESTS, 12345))
    with Seeds(seed).scope("two halves"):
        layer, half = nn.Linear(GROUPS * FEATURES, HIDDEN), HIDDEN // 2
        module = nn.Sequential(layer, nn.ReLU(), nn.Linear(HIDDEN, GROUPS * CLASSES))
    with torch.no_grad():
        layer.bias.zero_()
        layer.weight[:half, FEATURES:] = 0
        layer.weight[half:, :FEATURES] = 0
    return run(method, elastic(module, data.example()), data, FLEET, rounds=rounds, every=rounds, seed=seed)


def halves(result: Result) -> tuple[float, float]:
    """The mean probability of units of a client's own half, and of the other, over all clients."""
    table = np.stack([memory["probabilities"].numpy() for memory in result.kept.values()])
    by_half = table.reshape(CLIENTS, GROUPS, -1).mean(axis=2)
    group = np.arange(CLIENTS) // (CLIENTS // GROUPS)
    return float(by_half[range(CLIENTS), group].mean()), float(by_half[range(CLIENTS), 1 - group].mean())


@pytest.mark.slow
def test_clients_find_their_half_of_the_layer():
    hasty = Flado(LOCAL, alignment_step=0.06, trajectory_memory=0.5)
    own, other = halves(trained(hasty, seed=0, rounds=20))
    assert own > 1.5 * other, (own, other)


@pytest.mark.slow
def test_probabilities_that_follow_beat_uniform_ones_by_more_than_the_spread_of_five_seeds():
    followed = [trained(Flado(LOCAL), seed, rounds=60) for seed in SEEDS]
    uniform = [trained(UniProb(LOCAL), seed, rounds=60) for seed in SEEDS]
    ours, theirs = (
        np.array([each.records[-1].tiers["quarter"]["accuracy"] for each in results])
        for results in (followed, uniform)
    )
    assert all(own > 2 * other for own, other in map(halves, followed))
    assert (ours > theirs).all()
    assert ours.mean() - theirs.mean() > max(ours.std(ddof=1), theirs.std(ddof=1))
