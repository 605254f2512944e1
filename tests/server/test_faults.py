"""Rounds that survive their clients: deadline, quorum, over-selection, strikes, and every kind of bad update."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import QuorumError
from fedtailor.merging import by_samples
from fedtailor.messages import Refused, Task, Update
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.seeds import Seeds
from fedtailor.server import faults
from fedtailor.server.checking import check_answers
from fedtailor.server.faults import Timely
from fedtailor.server.loop import run_rounds
from fedtailor.server.sampling import sample
from fedtailor.server.setup import RoundSettings
from fedtailor.storage.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint
from helpers import (
    CONV2,
    LINEAR,
    NORM1,
    Spoiling,
    client,
    cnn_model,
    differing,
    image_data,
    mlp_model,
    run,
    setup_of,
    slow_if,
    timeless,
    vector_data,
    with_nan_inputs,
)

SIZES = (6, 5, 7, 4)


# Bad updates. The rows of reliability.md 2.3, each through a whole round of the loop.


def changed(update: Update, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Update:
    values = {n: change(v.clone()) if n == name else v for n, v in update.patch.values.items()}
    return replace(update, patch=Patch(values, update.patch.cut))


def scaled(update: Update, factor: float) -> Update:
    """All numbers larger."""
    values = {n: v * factor if v.is_floating_point() else v for n, v in update.patch.values.items()}
    return replace(update, patch=Patch(values, update.patch.cut))


def with_element(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[0] = value
        return tensor

    return change


def with_values(update: Update, values: dict[str, torch.Tensor]) -> Update:
    return replace(update, patch=Patch(values, update.patch.cut))


BAD: dict[str, tuple[str, Callable[[Update], Update]]] = {
    # C1: not finite, anywhere
    **{
        f"{bad} in {name}": ("non-finite", lambda u, n=name, b=bad: changed(u, n, with_element(b)))
        for bad in (math.nan, math.inf, -math.inf)
        for name in (f"{CONV2}.weight", f"{LINEAR}.bias", f"{NORM1}.running_mean", f"{NORM1}.running_var")
    },
    "nan loss": ("non-finite", lambda u: replace(u, metrics={**u.metrics, "loss": math.nan})),
    "loss is no number": ("bad-metrics", lambda u: replace(u, metrics={**u.metrics, "loss": "0.1"})),
    # C2: wrong shape
    "one number": ("wrong-shape", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v[:1])),
    "turned": ("wrong-shape", lambda u: changed(u, f"{LINEAR}.weight", lambda v: v.t().contiguous())),
    "zero axes": ("wrong-shape", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v[0])),
    "empty": ("wrong-shape", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v[:0])),
    "one axis more": ("wrong-shape", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v[None])),
    # C3: wrong type, wrong byte order
    "float64": ("wrong-dtype", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v.double())),
    "float16": ("wrong-dtype", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v.half())),
    "integers": ("wrong-dtype", lambda u: changed(u, f"{LINEAR}.bias", lambda v: v.int())),
    "swapped bytes": ("non-finite|bad-statistics|absurd-step", lambda u: swapped(u)),
    # C4: outside the lease
    "wider": ("out-of-lease", lambda u: replace(u, patch=replace(u.patch, cut=Cut({"x": range(1)})))),
    "a name more": ("wrong-names", lambda u: with_values(u, {**u.patch.values, "y": torch.ones(1)})),
    "a name less": ("wrong-names", lambda u: with_values(u, dict(list(u.patch.values.items())[1:]))),
    "no name": ("wrong-names", lambda u: with_values(u, {})),
    # C5: absurd norms and weights
    **{
        f"norm times {factor:g}": ("absurd-step", lambda u, f=factor: scaled(u, f))
        for factor in (1e3, 1e6, 1e12, 1e30)
    },
    "variance 1e30": ("absurd-statistics", lambda u: changed(u, f"{NORM1}.running_var", lambda v: v + 1e30)),
    **{
        f"weight {weight!r}": ("bad-weight", lambda u, w=weight: replace(u, weight=w))
        for weight in (-89, 0, 1e15, math.nan, math.inf, True, "10", 7.5)
    },
    # C6: another round, another client
    "of the round before": ("wrong-round", lambda u: replace(u, round=u.round - 1, base_round=u.round - 1)),
    "of a later round": ("wrong-round", lambda u: replace(u, round=u.round + 1, base_round=u.round + 1)),
    "from older weights": ("wrong-round", lambda u: replace(u, base_round=u.round - 1)),
    # C7: counts that overflow
    "count": ("bad-statistics", lambda u: changed(u, f"{NORM1}.num_batches_tracked", lambda v: v * 0 + 2**62)),
    "count below zero": ("bad-statistics", lambda u: changed(u, f"{NORM1}.num_batches_tracked", lambda v: v * 0 - 1)),
    "variance below zero": ("bad-statistics", lambda u: changed(u, f"{NORM1}.running_var", lambda v: -v)),
}  # fmt: skip


def swapped(update: Update) -> Update:
    """Big-endian floats read as little-endian ones."""
    values = {
        name: torch.from_numpy(value.numpy().byteswap()) if value.dtype == torch.float32 else value
        for name, value in update.patch.values.items()
    }
    return replace(update, patch=Patch(values, update.patch.cut))


def spoilt(spoil: Callable[[Update], Update | None], **settings: Any):
    method, data = get_method("fedavg")(), image_data(SIZES)
    return run(
        method, cnn_model(), data, rounds=2, every=2,
        engine=lambda inner: Spoiling(inner, 2, spoil), **settings,
    )  # fmt: skip


@cache
def without():
    return spoilt(lambda _update: None)


@pytest.mark.parametrize("row", BAD)
def test_a_bad_update_is_refused_and_the_model_is_that_of_the_round_without_the_client(row):
    reason, spoil = BAD[row]
    bad = spoilt(spoil)
    for each in bad.records:
        (found,) = each.cohort.refused
        assert found in reason.split("|")
        assert each.cohort.refused[found] == 1
        assert (each.cohort.asked, each.cohort.merged, each.cohort.abandoned) == (4, 3, 0)
    assert differing(bad.state.weights, without().state.weights) == set()
    assert bad.records[-1].tiers == without().records[-1].tiers
    assert bad.records[-1].train_loss == without().records[-1].train_loss
    assert all(bool(value.isfinite().all()) for value in bad.state.weights.values())


@dataclass(frozen=True)
class Adding:
    """An engine on which something is added to what one client answers."""

    inner: InProcess
    add: Callable[[Update], Sequence[Update]]
    first: bool = False

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        for answer in self.inner.run(tasks):
            more = self.add(answer) if answer.client == 2 else ()
            yield from [*more, answer] if self.first else [answer, *more]


@pytest.mark.parametrize(
    ("reason", "first", "add"),
    [
        ("duplicate", False, lambda update: [update]),
        ("duplicate", False, lambda update: [scaled(update, 3.0)]),
        ("wrong-round", True, lambda update: [replace(update, round=update.round - 1)]),
        ("wrong-client", True, lambda update: [replace(update, client=99)]),
        ("bad-weight", True, lambda update: [replace(update, weight=1e9)]),
    ],
)
def test_what_comes_on_top_of_a_good_update_changes_nothing(reason, first, add):
    method, data = get_method("fedavg")(), image_data(SIZES)
    fine = run(method, cnn_model(), data, rounds=2)
    more = run(method, cnn_model(), data, rounds=2, engine=lambda inner: Adding(inner, add, first))
    assert [record.cohort.refused for record in more.records] == [{reason: 1}] * 2
    assert [record.cohort.merged for record in more.records] == [4, 4]
    assert differing(fine.state.weights, more.state.weights) == set()


def test_an_answer_under_another_name_is_two_faults():
    """Somebody answered who was not asked, and somebody who was asked did not answer."""
    result = spoilt(lambda update: replace(update, client=99))
    assert [record.cohort.refused for record in result.records] == [{"no-answer": 1, "wrong-client": 1}] * 2
    assert differing(result.state.weights, without().state.weights) == set()


def test_honest_clients_of_very_different_sizes_are_not_absurd():
    """One example against a thousand, a start at zero, a high learning rate: far apart, and all of them honest."""
    model = mlp_model()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.zero_()
    data = vector_data((1, 1, 1, 1, 400))
    method = get_method("fedavg")(local=LocalTraining(lr=0.5, batch_size=1))
    result = run(method, model, data, rounds=2)
    assert [record.cohort.refused for record in result.records] == [{}, {}]


@dataclass(frozen=True)
class Longer:
    """An engine on which client 2 took the right step, but many times as long."""

    inner: InProcess
    factor: float

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        for task, answer in zip(tasks, self.inner.run(tasks), strict=True):
            assert isinstance(answer, Update)
            if answer.client != 2 or task.action != "train":
                yield answer
                continue
            sent = cnn_model().narrow(task.patch, answer.patch.cut).values
            values = answer.patch.values
            steps = {n: self.factor * (v - sent[n]) for n, v in values.items() if v.is_floating_point()}
            yield with_values(answer, {n: sent[n] + steps[n] if n in steps else v for n, v in values.items()})


@pytest.mark.parametrize("name", ["fedavg", "heterofl", "fedrolex"])
@pytest.mark.parametrize(
    ("factor", "refused"), [(1.0, {}), (3.0, {}), (1e3, {"absurd-step": 1}), (1e30, {"absurd-step": 1})]
)
def test_steps_a_thousand_times_too_long_are_refused_and_long_ones_are_not(name, factor, refused):
    method = get_method(name)(norm="static", local=LocalTraining(batch_size=2))
    data = image_data(SIZES)
    record = run(method, cnn_model(), data, "uniform-2", engine=lambda inner: Longer(inner, factor)).records[
        0
    ]
    assert record.cohort.refused == refused


def test_a_lone_client_has_nobody_to_be_compared_with():
    method, model, data = get_method("fedavg")(), cnn_model(), image_data((6,))
    result = run(method, model, data, engine=lambda e: Spoiling(e, 0, lambda update: scaled(update, 1e3)))
    assert result.records[0].cohort.refused == {}


def test_several_absurd_clients_are_refused_one_after_the_other():
    method, model, data = get_method("fedavg")(), cnn_model(), image_data((6,) * 7)

    def engine(inner: InProcess) -> Any:
        for number, factor in ((1, 1e4), (3, 1e30), (5, 1e8)):
            inner = Spoiling(inner, number, lambda update, f=factor: scaled(update, f))  # type: ignore[assignment]
        return inner

    bad = run(method, model, data, engine=engine)
    assert bad.records[0].cohort.refused == {"absurd-step": 3}
    fine = run(method, model, data, engine=lambda e: Losing(e, {0: [1, 3, 5]}))
    assert differing(bad.state.weights, fine.state.weights) == set()


# Drop-outs


@dataclass(frozen=True)
class Losing:
    """An engine on which some clients of each round do not answer, or say that they will not."""

    inner: InProcess
    lost: dict[int, list[int]]
    says_so: bool = False
    seen: list[Update] = field(default_factory=list)

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        gone = self.lost.get(tasks[0].round, []) if tasks else []
        yield None
        for answer in self.inner.run([task for task in tasks if task.client.id not in gone]):
            self.seen.append(answer)
            yield answer
            yield None
        if self.says_so:
            yield from (Refused(number, tasks[0].round, "gone") for number in gone)


@pytest.mark.parametrize(
    "drawn", [slow_if(each, "exactly 30 %") for each in ("exactly 30 %", "each with 30 %")]
)
def test_thirty_per_cent_drop_out_for_a_hundred_rounds(drawn):
    """No round is abandoned, and every merge is the exact mean over the survivors."""
    rounds, clients = 100, 10
    generator = np.random.default_rng(7)
    lost = {
        number: generator.choice(clients, 3, replace=False).tolist()
        if drawn == "exactly 30 %"
        else np.flatnonzero(generator.random(clients) < 0.3).tolist()
        for number in range(rounds)
    }
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data((3, 4, 5, 6, 7, 3, 4, 5, 6, 7))
    seen: list[Update] = []
    states: list[Checkpoint] = []
    records: list[RoundRecord] = []

    def note(record, at):
        records.append(record)
        states.append(at)

    engine = Losing(InProcess(method, model, data), lost, seen=seen)
    settings = RoundSettings(rounds, clients, rounds)
    run_rounds(setup_of(method, model, data, settings=settings), engine, note)
    assert [record.cohort.abandoned for record in records] == [0] * rounds
    assert [record.cohort.refused.get("no-answer", 0) for record in records] == [
        len(lost[n]) for n in range(rounds)
    ]
    assert [record.cohort.merged for record in records] == [clients - len(lost[n]) for n in range(rounds)]
    for number in range(rounds):
        survivors = [update for update in seen if update.round == number]
        assert {update.client for update in survivors} == set(range(clients)) - set(lost[number])
        total = sum(by_samples(update) for update in survivors)
        for name in ("0.weight", "2.bias"):
            terms = [u.patch.values[name].double().numpy() * by_samples(u) for u in survivors]
            exact = np.vectorize(lambda *numbers: math.fsum(numbers) / total)(*terms)  # noqa: B023
            merged = states[number].state.weights[name].numpy()
            assert np.abs(merged - exact).max() <= np.abs(exact).max() * 2**-24


@pytest.mark.parametrize("says_so", [True, False])
def test_half_of_the_clients_gone_is_still_a_round(says_so):
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    lost = {number: [0, 2, 4] for number in range(3)}
    result = run(method, model, data, rounds=3, engine=lambda e: Losing(e, lost, says_so))
    reason = "gone" if says_so else "no-answer"
    assert [record.cohort.refused for record in result.records] == [{reason: 3}] * 3
    assert [record.cohort.resting for record in result.records] == [0, 0, 3 if says_so else 0]


# Deadline


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Slow:
    """An engine on which every answer takes its time: seconds for each client."""

    inner: InProcess
    clock: Clock
    seconds: dict[int, float]
    closed: list[int] = field(default_factory=list)

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        started = self.clock.now
        answers = {answer.client: answer for answer in self.inner.run(tasks)}
        try:
            for number in sorted(answers, key=lambda each: self.seconds.get(each, 0.0)):
                while self.clock.now < started + self.seconds.get(number, 0.0):
                    self.clock.now += 0.1
                    yield None
                yield answers[number]
        finally:
            self.closed.append(len(tasks))


def slow_run(seconds: dict[int, float], deadline: float = 10.0, **settings: Any):
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    clock, closed = Clock(), list[int]()
    result = run(
        method, model, data, rounds=2,
        engine=lambda e: Timely(Slow(e, clock, seconds, closed), deadline, clock), **settings,
    )  # fmt: skip
    return result, clock, closed


def test_stragglers_are_late_and_the_round_closes_at_the_deadline():
    result, clock, closed = slow_run({1: 5.0, 2: 11.0, 4: 1e9})
    assert [record.cohort.refused for record in result.records] == [{"late": 2}] * 2
    assert [record.cohort.merged for record in result.records] == [4, 4]
    assert clock.now - 1000 <= 2 * (10 + 1)
    assert closed == [6, 6]  # the engine was told that nobody listens any more
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    others = run(method, model, data, rounds=2, engine=lambda e: Losing(e, {0: [2, 4], 1: [2, 4]}))
    assert differing(result.state.weights, others.state.weights) == set()
    assert result.records[-1].cohort.resting == 0  # being late is no offence


def test_a_deadline_that_does_not_fire_changes_nothing():
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    plain = run(method, model, data, rounds=2)
    for deadline in (10.0, 1e6):
        result, _, _ = slow_run({1: 5.0, 2: 9.0}, deadline)
        assert differing(result.state.weights, plain.state.weights) == set()
        assert timeless(result.records) == timeless(plain.records)


def test_jumps_of_the_time_of_day_do_not_matter(monkeypatch):
    import time

    monkeypatch.setattr(time, "time", lambda: -86400.0)
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    assert run(method, model, data, rules=EngineSettings(deadline=5)).records[0].cohort.refused == {}
    assert Timely(InProcess(method, model, data), 5).clock is time.monotonic


# Quorum


def test_a_round_below_its_quorum_is_tried_again_with_others():
    """Six of eight clients are dead; whoever asks two of them at a time needs some tries."""
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data((3,) * 8)
    dead = {number: [0, 1, 2, 3, 4, 5] for number in range(20)}
    rules = EngineSettings(quorum=0.5, retries=50)
    result = run(method, model, data, rounds=4, cohort=2, rules=rules, engine=lambda e: Losing(e, dead))
    assert [record.round for record in result.records] == [1, 2, 3, 4]
    assert sum(record.cohort.abandoned for record in result.records) > 0
    for record in result.records:
        assert record.cohort.asked == 2 * (1 + record.cohort.abandoned)
        assert record.cohort.merged >= 1
        assert record.cohort.refused.get("no-answer", 0) == record.cohort.asked - record.cohort.merged
    again = run(method, model, data, rounds=4, cohort=2, rules=rules, engine=lambda e: Losing(e, dead))
    assert differing(result.state.weights, again.state.weights) == set()


def test_after_its_retries_the_run_stops_with_the_model_unchanged(monkeypatch):
    pauses: list[float] = []
    monkeypatch.setattr("fedtailor.server.loop.time.sleep", pauses.append)
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    everyone = list(range(6))
    rules = EngineSettings(quorum=0.5, retries=2, pause=1.5)
    records: list[RoundRecord] = []
    asked: list[int] = []

    class Counting(Losing):
        def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
            asked.append(tasks[0].round)
            return super().run(tasks)

    engine = Counting(InProcess(method, model, data), {1: everyone})
    settings = RoundSettings(5, 4, 5, engine=rules)
    with pytest.raises(QuorumError) as caught:
        run_rounds(
            setup_of(method, model, data, settings=settings), engine, lambda record, _: records.append(record)
        )
    assert str(caught.value) == (
        "round 2 was tried 3 times and never had a quorum: the last time 0 of 4 clients gave an update that can be "
        "used, and 2 are needed; 4 x no-answer (clients 1, 3, 4, 5). The model is that of round 1. See engine.quorum, "
        "engine.deadline and engine.retries; if clients diverged, lower training.lr"
    )
    assert caught.value.exit_code == 69
    assert [record.round for record in records] == [1]
    assert asked == [0, 1, 1, 1]
    assert pauses == [1.5, 3.0]


def test_nobody_ever_answers_and_no_wait_is_unbounded():
    """B3: an engine that only ever says that it waits; two tries of a deadline of one second."""

    class Silent:
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        def run(self, tasks: Sequence[Task]) -> Iterator[None]:
            while True:
                self.clock.now += 0.1
                yield None

    clock = Clock()
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    with pytest.raises(QuorumError, match="tried 2 times .* 6 x late"):
        run(
            method,
            model,
            data,
            engine=lambda _: Timely(Silent(clock), 1.0, clock),
            rules=EngineSettings(retries=1),
        )
    assert clock.now - 1000 < 2.5


@pytest.mark.parametrize(
    ("cohort", "asked", "quorum", "needed"),
    [
        (10, 10, 0.25, 3),
        (10, 13, 0.25, 3),
        (10, 4, 0.25, 1),
        (10, 10, 0.0, 0),
        (10, 10, 1.0, 10),
        (10, 0, 1.0, 0),
        (10, 10, 0.3, 3),
    ],
)
def test_the_quorum_is_a_share_of_the_clients_that_a_round_should_have(cohort, asked, quorum, needed):
    tried = faults.Try([None] * asked, [], [])  # type: ignore[list-item]
    assert faults.needed(tried, cohort, EngineSettings(quorum=quorum)) == needed


def test_a_round_in_which_all_clients_diverge_says_what_to_do():
    data = vector_data()
    for number in range(6):
        data = with_nan_inputs(data, number)
    with pytest.raises(
        QuorumError, match=r"6 x diverged \(clients 0, 1, 2, 3, 4, 5; the loss .*lower training.lr"
    ):
        run(get_method("fedavg")(), mlp_model(), data)


# Over-selection


@pytest.mark.parametrize(
    ("count", "factor", "asked"), [(10, 1.3, 13), (10, 1.0, 10), (10, 1.1, 11), (3, 1.3, 4)]
)
def test_more_clients_are_asked_than_needed(count, factor, asked):
    assert faults.cohort_size(count, EngineSettings(over_selection=factor)) == asked
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data((2,) * 15)
    rules = EngineSettings(over_selection=factor)
    record = run(method, model, data, cohort=count, rules=rules).records[0]
    assert (record.cohort.asked, record.cohort.merged) == (asked, asked)


def test_no_more_are_asked_than_there_are():
    method, model, data = get_method("fedavg")(), mlp_model(), vector_data()
    record = run(method, model, data, cohort=6, rules=EngineSettings(over_selection=2)).records[0]
    assert record.cohort.asked == 6


# Strikes


def test_after_three_strikes_a_client_rests_for_the_run():
    method, model, data = get_method("fedavg")(), cnn_model(), image_data(SIZES)
    asked: list[tuple[int, list[int]]] = []

    class Watching(Spoiling):
        def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
            asked.append((tasks[0].round, [task.client.id for task in tasks]))
            return super().run(tasks)

    spoil = BAD["weight 1000000000000000.0"][1]
    result = run(method, model, data, rounds=6, engine=lambda e: Watching(e, 2, spoil))
    assert [record.cohort.refused for record in result.records] == [{"bad-weight": 1}] * 3 + [{}] * 3
    assert [record.cohort.resting for record in result.records] == [0, 0, 1, 1, 1, 1]
    assert [record.cohort.asked for record in result.records] == [4, 4, 4, 3, 3, 3]
    assert all((2 in ids) == (number < 3) for number, ids in asked)
    others = run(method, model, data, rounds=6, engine=lambda e: Losing(e, {n: [2] for n in range(6)}))
    assert differing(result.state.weights, others.state.weights) == set()


@pytest.mark.parametrize("reason", sorted(faults.FORGIVEN))
def test_some_faults_are_no_offence(reason):
    strikes = faults.with_strikes({1: 2}, [client(1)], [Refused(1, 0, reason)])
    assert strikes == {1: 2}


def test_strikes_count_rounds_and_hit_only_those_who_were_asked():
    refused = [Refused(1, 0, "non-finite"), Refused(1, 0, "duplicate"), Refused(99, 0, "wrong-client")]
    assert faults.with_strikes({3: 1}, [client(1), client(2)], refused) == {1: 1, 3: 1}


def test_strikes_can_be_switched_off():
    method, model, data = get_method("fedavg")(), cnn_model(), image_data(SIZES)
    result = run(
        method, model, data, rounds=5, rules=EngineSettings(strikes=0),
        engine=lambda e: Spoiling(e, 2, BAD["weight 0"][1]),
    )  # fmt: skip
    assert [record.cohort.refused for record in result.records] == [{"bad-weight": 1}] * 5
    assert [record.cohort.resting for record in result.records] == [0] * 5


def test_a_run_whose_clients_all_rest_stops():
    method, model, data = get_method("fedavg")(), cnn_model(), image_data((6, 6))

    def engine(inner: InProcess) -> Any:
        for number in (0, 1):
            inner = Spoiling(inner, number, BAD["weight 0"][1])  # type: ignore[assignment]
        return inner

    with pytest.raises(
        QuorumError, match="round 1 has nobody to ask: every client that could take part had 3 updates"
    ):
        run(method, model, data, rounds=5, engine=engine)


def test_bad_statistics_are_strikes_too_and_who_rests_is_not_asked_for_them():
    method, model, data = get_method("heterofl")(), cnn_model(), image_data(SIZES)
    asked: list[list[int]] = []

    class Watching(Spoiling):
        def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
            if tasks and tasks[0].action == "calibrate":
                asked.append([task.client.id for task in tasks])
            return super().run(tasks)

    def spoil(update: Update) -> Update:
        return replace(update, weight=-1)

    result = run(method, model, data, rounds=5, every=1, engine=lambda e: Watching(e, 2, spoil, "calibrate"))
    assert [record.cohort.refused for record in result.records] == [{"bad-weight": 1}] * 3 + [{}] * 2
    assert [record.cohort.resting for record in result.records] == [0, 0, 1, 1, 1]
    assert asked[-1] == [0, 1, 3]


def test_strikes_survive_a_checkpoint():
    """Interrupted after two strikes and resumed: the third one still counts, and the bits are the same."""
    method, model, data = get_method("fedavg")(), cnn_model(), image_data(SIZES)
    engine = Spoiling(InProcess(method, model, data), 2, BAD["weight 0"][1])
    ends: list[Checkpoint] = []
    records: list[RoundRecord] = []

    def go(rounds: int, start: Checkpoint | None) -> Checkpoint:
        setup = setup_of(method, model, data, settings=RoundSettings(rounds, 100, 100))
        return run_rounds(setup, engine, lambda record, _: records.append(record), start)

    ends.append(go(5, None))
    whole, records = records, []
    middle = go(2, None)
    assert middle.strikes == {2: 2}
    saved = b"".join(bytes(piece) for piece in encode_checkpoint(middle))
    ends.append(go(5, decode_checkpoint(saved)))
    assert differing(ends[0].state.weights, ends[1].state.weights) == set()
    assert ends[0].strikes == ends[1].strikes == {2: 3}
    # The last round of a run is evaluated.
    plain = {"seconds": 0, "tiers": None, "best_round": None, "deployed": {}}
    assert [replace(record, **plain) for record in whole] == [replace(record, **plain) for record in records]


# The order of things


def test_rows_can_be_written_and_do_not_depend_on_who_came_first():
    method, model, data = get_method("fedavg")(), cnn_model(), image_data((6,) * 6)

    def engine(backwards: bool) -> Callable[[InProcess], Any]:
        def wrap(inner: InProcess) -> Any:
            for number, kind in ((1, "weight 0"), (3, "nan loss"), (4, "one number")):
                inner = Spoiling(inner, number, BAD[kind][1])  # type: ignore[assignment]
            return Backwards(inner) if backwards else inner

        return wrap

    one, other = (run(method, model, data, rounds=2, engine=engine(backwards)) for backwards in (False, True))
    lines = [[json.dumps(record.as_row()) for record in result.records] for result in (one, other)]
    assert lines[0] == lines[1]
    assert list(one.records[0].cohort.refused) == ["bad-weight", "non-finite", "wrong-shape"]


@dataclass(frozen=True)
class Backwards:
    inner: Any

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        yield from reversed(list(self.inner.run(tasks)))


def test_waiting_is_no_answer():
    tasks: list[Task] = []
    assert check_answers(tasks, [None, None], cnn_model()) == ([], [])


# Who is asked


def test_those_who_rest_are_passed_over():
    clients = [client(number) for number in range(20)]
    for count, without_ in ((5, {3, 7}), (15, {0, 1, 2}), (19, {4}), (30, {4, 5}), (3, set(range(18)))):
        for round in range(20):
            chosen = [each.id for each in sample(clients, count, round, Seeds(1), without=without_)]
            assert len(chosen) == min(count, 20 - len(without_))
            assert not set(chosen) & without_
            assert chosen == sorted(set(chosen))


def test_a_retry_asks_others_and_always_the_same_others():
    clients = [client(number) for number in range(100)]
    draws = [tuple(each.id for each in sample(clients, 10, 3, Seeds(1), retry=retry)) for retry in range(5)]
    assert len(set(draws)) == 5
    assert draws[2] == tuple(each.id for each in sample(clients, 10, 3, Seeds(1), retry=2))


def test_resting_clients_leave_the_others_equal_chances():
    clients = [client(number) for number in range(10)]
    counts = np.zeros(10)
    for round in range(3000):
        for each in sample(clients, 3, round, Seeds(2), without={0, 5}):
            counts[each.id] += 1
    assert counts[[0, 5]].sum() == 0
    expected = 3000 * 3 / 8
    assert np.abs(np.delete(counts, [0, 5]) - expected).max() < 5 * math.sqrt(expected)
