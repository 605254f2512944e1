"""Whatever a client hands over is checked, not only tensors: each oddity is refused with a code and leaves no trace."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from test_faults import SIZES, Losing

from commands import call
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.engines.protocol import answer_to
from fedtailor.engines.values import answer_of, answer_value
from fedtailor.messages import Refused, Update
from fedtailor.method import Method
from fedtailor.methods.apfl.fedpa import FedPA
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.server.checking import check_answers, check_update
from fedtailor.storage.rows import as_line, record_of
from fedtailor.storage.wire import decode, encode
from helpers import LINEAR, cnn_model, differing, image_data, run, task_for

BIAS = f"{LINEAR}.bias"
SPARSE = torch.zeros(4).to_sparse()


class Sly(dict):
    """A dict of one's own."""


def metric(value: Any, name: Any = "loss") -> Callable[[Update], Update]:
    return lambda update: replace(update, metrics={**update.metrics, name: value})


def tensor(value: Any, name: Any = BIAS) -> Callable[[Update], Update]:
    return lambda update: replace(update, patch=Patch({**update.patch.values, name: value}, update.patch.cut))


def memory(value: Any) -> Callable[[Update], Update]:
    return lambda update: replace(update, memory=value)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return {"deep": value}


def looped() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


ODD: dict[str, tuple[str, Callable[[Update], Any]]] = {
    # metrics
    "10^400": ("bad-metrics", metric(10**400)),
    "-10^400": ("bad-metrics", metric(-(10**400))),
    "1e308, whose sum overflows": ("bad-metrics", metric(1e308)),
    "None": ("bad-metrics", metric(None)),
    "list": ("bad-metrics", metric([1.0])),
    "text": ("bad-metrics", metric("0.1")),
    "bool": ("bad-metrics", metric(True)),
    "complex": ("bad-metrics", metric(1j)),
    "tensor": ("bad-metrics", metric(torch.tensor(1.0))),
    "NaN": ("non-finite", metric(math.nan)),
    "-inf": ("non-finite", metric(-math.inf)),
    "a name that is no text": ("bad-metrics", metric(1.0, 7)),
    "None as a name": ("bad-metrics", metric(1.0, None)),
    "an empty name": ("bad-metrics", metric(1.0, "")),
    "a long name": ("bad-metrics", metric(1.0, "x" * 101)),
    "a name that steers a terminal": ("bad-metrics", metric(1.0, "\x1b[31mred")),
    "too many": ("bad-metrics", lambda u: replace(u, metrics={str(n): 0.0 for n in range(101)})),
    "metrics are a list": ("bad-metrics", lambda u: replace(u, metrics=[("loss", 1.0)])),
    "metrics are None": ("bad-metrics", lambda u: replace(u, metrics=None)),
    "fewer than no examples": ("bad-metrics", metric(-5, "examples")),
    "absurdly many examples": ("bad-metrics", metric(1e12, "examples")),
    # tensors
    "sparse": ("malformed", tensor(SPARSE)),
    "meta": ("malformed", tensor(torch.zeros(4, device="meta"))),
    "a list": ("malformed", tensor([0.0] * 4)),
    "no tensor": ("malformed", tensor(None)),
    "an array": ("malformed", tensor(np.zeros(4, np.float32))),
    "nested": ("malformed", tensor(torch.nested.nested_tensor([torch.zeros(4)]))),
    "quantised": ("malformed", tensor(torch.quantize_per_tensor(torch.zeros(4), 0.1, 0, torch.qint8))),
    "a tensor whose name is a number": ("malformed", tensor(torch.zeros(4), 5)),
    "a tensor whose name is None": ("malformed", tensor(torch.zeros(4), None)),
    "no patch": ("malformed", lambda u: replace(u, patch=None)),
    "values are a list": ("malformed", lambda u: replace(u, patch=Patch([], u.patch.cut))),
    "no cut": ("malformed", lambda u: replace(u, patch=Patch(u.patch.values, None))),
    "units are text": ("malformed", lambda u: replace(u, patch=Patch(u.patch.values, Cut({"0": ("a",)})))),
    "groups are numbers": ("malformed", lambda u: replace(u, patch=Patch(u.patch.values, Cut({3: range(1)})))),
    "units out of order": ("out-of-lease", lambda u: replace(u, patch=Patch(u.patch.values, Cut({"0": (2, 1)})))),
    "no units": ("out-of-lease", lambda u: replace(u, patch=Patch(u.patch.values, Cut({"0": ()})))),
    "units of another network": ("out-of-lease", lambda u: replace(u, patch=Patch(u.patch.values, Cut({"0": (99,)})))),
    "huge units": ("out-of-lease", lambda u: replace(u, patch=Patch(u.patch.values, Cut({"0": (10**30,)})))),
    # memory
    "memory is None": ("bad-memory", memory(None)),
    "memory is a list": ("bad-memory", memory([1])),
    "a set in memory": ("bad-memory", memory({"x": {1}})),
    "a function in memory": ("bad-memory", memory({"x": print})),
    "a sparse tensor in memory": ("bad-memory", memory({"x": SPARSE})),
    "a dict of one's own in memory": ("bad-memory", memory({"x": Sly()})),
    "a key that is a pair": ("bad-memory", memory({(1, 2): 1})),
    "deep": ("bad-memory", memory(deep(100_000))),
    "endless": ("bad-memory", memory(looped())),
    "large": ("bad-memory", memory({"x": torch.zeros(2**19)})),
    "long": ("bad-memory", memory({"x": "x" * 2**21})),
    "a number of 400 digits": ("bad-memory", memory({"x": 10**400})),
    # the rest
    "client of 400 digits": ("malformed|wrong-client", lambda u: replace(u, client=10**400)),
    "weight of 20 digits": ("bad-weight", lambda u: replace(u, weight=10**20)),
    "nothing": ("malformed", lambda _: None),
    "text instead of an answer": ("malformed", lambda _: "fine"),
    "a refusal that it is not asked for": ("malformed", lambda u: Refused(u.client, 0, "late")),
    "client is text": ("malformed", lambda u: replace(u, client="2")),
    "client is a list": ("malformed", lambda u: replace(u, client=[2])),
    "round is a fraction": ("malformed", lambda u: replace(u, round=0.0)),
    "weight is a number of 400 digits": ("bad-weight", lambda u: replace(u, weight=10**400)),
    "weight is None": ("bad-weight", lambda u: replace(u, weight=None)),
}  # fmt: skip


@dataclass(frozen=True)
class Odd(Method):
    """Plain averaging, in which client 2 hands over something odd."""

    spoil: ClassVar[Callable[[Update], Any]] = staticmethod(lambda update: update)

    def perform(self, task, data, model):
        update = super().perform(task, data, model)
        return type(self).spoil(update) if task.client.id == 2 and task.action == "train" else update


@pytest.mark.parametrize("row", ODD)
def test_oddities_are_refused_at_the_source_and_at_the_server(row, monkeypatch):
    reason, spoil = ODD[row]
    model, task, data = cnn_model(), task_for(cnn_model(), number=2), image_data(SIZES)
    monkeypatch.setattr(Odd, "spoil", staticmethod(spoil))
    answer = answer_to(task, Odd(), data.client(2), model)
    if isinstance(answer, Refused):
        assert answer.client == 2
        assert answer.reason in reason.split("|")
        assert len(answer.detail) < 300
        assert answer.detail.isprintable()
    travelled = answer_of(decode(b"".join(encode(answer_value(answer)))))
    assert travelled.client == 2  # what was let through can travel
    odd = spoil(get_method("fedavg")().perform(task, data.client(2), model))
    if isinstance(odd, Update):
        updates, refused = check_answers([task], [odd], model)
        assert updates == []
        assert [each.reason in reason.split("|") for each in refused] == [True]


@pytest.mark.parametrize("row", ["10^400", "sparse", "endless", "nothing", "client is a list"])
def test_an_odd_answer_leaves_no_trace_in_the_model(row, monkeypatch):
    reason, spoil = ODD[row]
    monkeypatch.setattr(Odd, "spoil", staticmethod(spoil))
    bad = run(Odd(), cnn_model(), image_data(SIZES), rounds=2)
    without = run(
        get_method("fedavg")(), cnn_model(), image_data(SIZES), rounds=2,
        engine=lambda inner: Losing(inner, {0: [2], 1: [2]}),
    )  # fmt: skip
    assert [record.cohort.refused for record in bad.records] == [{reason: 1}] * 2
    assert differing(bad.state.weights, without.state.weights) == set()
    assert bad.records[-1].train_loss == without.records[-1].train_loss


def test_a_memory_may_be_as_large_as_its_lease_says():
    task = task_for(cnn_model(), number=2)
    update = Update(2, 0, 0, task.patch, 1.0, {}, {"x": torch.zeros(2**19)})
    assert check_update(task, update, cnn_model()).reason == "bad-memory"
    roomy = replace(task, lease=replace(task.lease, memory=2**22))
    assert check_update(roomy, update, cnn_model()) is None
    handed_on = replace(task, memory=update.memory)
    travelled = {"x": torch.zeros(2**19)}  # through a worker it is another object
    for kept in (update.memory, travelled):
        assert check_update(handed_on, replace(update, memory=kept), cnn_model()) is None
    changed = {"x": torch.ones(2**19)}
    assert check_update(handed_on, replace(update, memory=changed), cnn_model()).reason == "bad-memory"


class AtHome(FedPA):
    """Clients evaluate their own networks, and one leaves out or adds a metric."""

    change: ClassVar[Callable[[dict], dict]] = staticmethod(dict)

    def evaluate(self, task, data, model):
        update = super().evaluate(task, data, model)
        return replace(update, metrics=type(self).change(update.metrics)) if task.client.id == 0 else update


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        (lambda metrics: {n: v for n, v in metrics.items() if n != "accuracy"}, {"bad-metrics": 1}),
        (lambda metrics: {}, {"bad-metrics": 1}),
        (lambda metrics: {n: v for n, v in metrics.items() if "global" not in n}, {}),
        (lambda metrics: {"mine": 1.0, **metrics}, {}),
    ],
    ids=["less", "nothing", "less of a method's own", "more"],
)
def test_metrics_that_one_client_leaves_out_or_adds_are_no_other_clients_loss(change, refused, monkeypatch):
    monkeypatch.setattr(AtHome, "change", staticmethod(change))
    (record,) = run(AtHome(), cnn_model(), image_data(SIZES), "uniform-2", every=1).records
    assert record.cohort.refused == refused
    assert all({"loss", "accuracy", "global accuracy"} <= scores.keys() for scores in record.tiers.values())
    assert all("mine" not in scores for scores in record.tiers.values())


def test_a_loss_that_is_missing_is_missing_and_not_zero():
    def silent(update):
        return replace(update, metrics={n: v for n, v in update.metrics.items() if n != "loss"})

    class Silent:
        def __init__(self, inner, who):
            self.inner, self.who = inner, who

        def run(self, tasks):
            return (silent(each) if each.client in self.who else each for each in self.inner.run(tasks))

    def loss(who):
        method = get_method("fedavg")()
        result = run(method, cnn_model(), image_data(SIZES), engine=lambda inner: Silent(inner, who))
        return result.records[0].train_loss

    kept = run(
        get_method("fedavg")(), cnn_model(), image_data(SIZES), engine=lambda inner: Losing(inner, {0: [2]})
    )
    assert loss({2}) == kept.records[0].train_loss
    assert loss({0, 1, 2, 3}) is None


def test_rows_hold_no_nan_and_are_read_back_as_what_they_were():
    record = RoundRecord(
        1, train_loss=math.nan, tiers={"1": {"loss": math.inf, "accuracy": 0.5}}, method={"x": [math.nan]}
    )
    line = as_line(record.as_row())
    assert b"NaN" not in line
    assert b"Infinity" not in line
    read = record_of(line.decode(), {}, {})
    assert math.isnan(read.tiers["1"]["loss"])
    assert read.tiers["1"]["accuracy"] == 0.5
    assert read.train_loss is None


METHOD = """
from dataclasses import dataclass, replace
from fedtailor.method import Method

@dataclass(frozen=True)
class Boastful(Method):
    def train(self, task, data, model):
        update = super().train(task, data, model)
        return replace(update, metrics={"loss": 10**400}) if task.client.id == 1 else update
"""


def test_the_command_goes_on_and_counts_the_code(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("boastful.py").write_text(METHOD, encoding="utf-8")
    Path("run.toml").write_text(
        'name = "odd"\nrounds = 2\nclients_per_round = 5\nevaluate_every = 2\n[data]\nclients = 5\nlimit = 80\n'
        '[model]\nname = "cnn"\nchannels = [4, 8]\n[method]\nname = "boastful.py:Boastful"\n',
        encoding="utf-8",
    )
    assert call(monkeypatch, "run", "run.toml") == 0
    assert "Refused updates: 2 x bad-metrics; of client 1 (2 x)" in capfd.readouterr().out
    rows = [
        json.loads(line) for line in Path("runs/odd/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    assert [row["refused"] for row in rows] == [{"bad-metrics": 1}] * 2
