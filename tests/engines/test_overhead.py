"""What a client and a merge cost beside arithmetic that nobody can do without: counted, so that no noise can fool it.

Seconds differ from machine to machine; operations, bytes and Python calls do not. Who makes one of these figures larger
makes every tiny client slower: mend it, or raise the limit and say why.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from fedtailor.client import tape
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.engines.protocol import answer_to
from fedtailor.messages import Update
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.seeds import Seeds
from fedtailor.server.checking import check_update
from helpers import CLASSES, client, cnn_model, mlp_model, update_of, vectors

STEPS, BATCH = 4, 16


@dataclass
class Counts(TorchDispatchMode):
    """Operations of PyTorch inside the block, and bytes of tensors that they made."""

    operations: Counter[str] = field(default_factory=Counter)
    made: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations[str(function)] += 1
        given = {value.untyped_storage()._cdata for value in args if isinstance(value, Tensor)}
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor) and value.untyped_storage()._cdata not in given:
                self.made += value.nbytes
        return result

    @property
    def total(self) -> int:
        return self.operations.total()


def calls_of(work: Callable[[], object]) -> int:
    """How many Python functions are called."""
    count = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count


def bare_steps(hidden: int) -> None:
    """The same training in plain PyTorch."""
    network = nn.Sequential(nn.Linear(5, hidden), nn.ReLU(), nn.Linear(hidden, CLASSES))
    optimiser = torch.optim.SGD(network.parameters(), lr=0.1, foreach=False)
    examples = vectors(STEPS * BATCH)
    for part in torch.randperm(len(examples)).split(BATCH):
        inputs, labels = examples.take(part)
        optimiser.zero_grad()
        cross_entropy(network(inputs), labels).backward()
        optimiser.step()


def test_a_tiny_client():
    method, model, examples = (
        FedAvg(LocalTraining(lr=0.1, batch_size=BATCH)),
        mlp_model(32),
        vectors(STEPS * BATCH),
    )
    state = method.init(model)

    def whole(number: int) -> None:
        task = method.assign(state, client(number, examples=len(examples)), model, Seeds(0))
        answer = answer_to(task, method, examples, model)
        assert isinstance(answer, Update)
        assert check_update(task, answer, model) is None

    whole(0)  # what is made once for a model or a cut
    with Counts() as ours:
        whole(1)
    with Counts() as bare:
        bare_steps(32)
    extra = (ours.operations - bare.operations).most_common(8)
    assert ours.total <= bare.total + 10, extra  # 190 against 187
    assert ours.made <= bare.made, extra  # 45,744 bytes against 48,000
    assert calls_of(lambda: whole(2)) <= 1050  # 928; the bare steps, with a network to build, 558


def test_a_tiny_client_whose_steps_come_from_a_tape(monkeypatch):
    monkeypatch.setattr(tape, "LEAST_STEPS", 0)
    method, model = FedAvg(LocalTraining(lr=0.1, batch_size=BATCH)), mlp_model(32)
    examples, state = vectors(STEPS * BATCH), method.init(model)

    def whole(number: int) -> None:
        task = method.assign(state, client(number, examples=len(examples)), model, Seeds(0))
        answer = answer_to(task, method, examples, model)
        assert isinstance(answer, Update)
        assert check_update(task, answer, model) is None

    whole(0)
    with Counts() as ours:
        whole(1)
    assert ours.total <= 106, ours.operations.most_common(8)  # 96; the bare steps 187
    assert calls_of(lambda: whole(2)) <= 390  # 347; the bare steps 558


def test_a_merge():
    model, method = cnn_model(16, 32), HeteroFL()
    state = method.init(model)
    widths = ("1/4", "1/2", "3/4", "1")
    cuts = [prefix(model.groups, as_width(width)) for width in widths]
    updates = [update_of(n, model.cut(state.weights, cuts[n % 4]), weight=n + 1) for n in range(20)]
    sent = sum(value.nbytes for update in updates for value in update.patch.values.values())
    method.merge(state, updates, model)
    with Counts() as counts:
        method.merge(state, updates, model)
    tensors = sum(len(update.patch.values) for update in updates)
    assert counts.total <= 5.8 * tensors, counts.operations.most_common(8)  # 5.35
    assert counts.made <= 3.2 * sent  # 3.03: each update as float64, the sum, the weights
    assert calls_of(lambda: method.merge(state, updates, model)) <= 11.5 * tensors  # 10.4
