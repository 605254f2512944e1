"""Simulated time: what hand computes, who is late, who takes less, and merging that waits for nobody."""

from __future__ import annotations

import copy
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError
from fedtailor.fleet import FleetSettings
from fedtailor.fleet.devices.table import Device
from fedtailor.fleet.presets import build_fleet
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.methods.registry import get_method
from fedtailor.server.clock.buffered import check_buffered, moved
from fedtailor.server.clock.equipping import equipped, plain_trip, widest
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import AsynchronousSettings, RoundSettings
from fedtailor.storage.checkpoint import decode_checkpoint, encode_checkpoint
from helpers import Spoiling, cnn_model, differing, image_data, mlp_model, setup_of, timeless, vector_data

LOCAL = LocalTraining(lr=0.1, batch_size=4)
SIZES = (8, 8, 8, 8, 8, 8)


def fleet_of(model, method, data, rows, **settings):
    return equipped(build_fleet(FleetSettings(devices=rows, **settings)), method, model, data)


def simulate(rows, *, name="heterofl", rounds=3, cohort=3, sizes=SIZES, rules=None, at=None, buffer=0, until=None,
             concurrency=0, staleness=0.5, most_staleness=20, rule="mean", bad=None, **fleet):  # fmt: skip
    composed = name == "flanc"  # it needs a layer between the first and the last
    model, data = (cnn_model(), image_data(sizes)) if composed else (mlp_model(), vector_data(sizes))
    settled = {"widths": "uniform-5"} if name == "tailor" else {}  # what a run settles before it asks a hook
    method = get_method(name)(local=LOCAL, merging=MergeSettings(rule), **settled)
    nobody_waits = AsynchronousSettings(buffer, concurrency, staleness, most_staleness)
    settings = RoundSettings(rounds, cohort, 100, engine=rules or EngineSettings(), asynchronous=nobody_waits)
    setup = setup_of(method, model, data, fleet_of(model, method, data, rows, **fleet), settings)
    records, ends = [], []

    def end(record, checkpoint):
        records.append(copy.deepcopy(record))
        ends.append(checkpoint)
        if until is not None and record.round == until:
            raise Stop

    try:
        engine = InProcess(method, model, data)
        last = run_rounds(setup, engine if bad is None else Spoiling(engine, bad, turned), end, at)
    except Stop:
        last = ends[-1]
    return last, records


def turned(update):
    """Weights of the other sign: a step that goes far the other way, and not yet beyond all measure."""
    values = {name: -2 * value for name, value in update.patch.values.items()}
    return replace(update, patch=replace(update.patch, values=values))


class Stop(Exception):  # noqa: N818  (what happens to the run)
    """The end of a run in its middle."""


FAST = {"name": "fast", "macs_per_second": "1G"}
QUICK = {**FAST, "latency": "500ms"}
SLOW = {
    "name": "slow",
    "macs_per_second": 10_000,
    "overhead": "100ms",
    "down": 1000,
    "up": 500,
    "latency": "1s",
}


def by_hand(model, cut, examples=8):
    """Seconds on SLOW: two messages that wait a second each, bytes down and up, steps of four, MACs of the examples."""
    cost = model.cost(cut)
    return 2 * 1.0 + cost.bytes / 1000 + cost.bytes / 500 + examples / 4 * 0.1 + cost.macs * examples / 10_000


def test_the_clock_is_what_hand_computes():
    model = mlp_model()
    _, records = simulate([SLOW], rounds=2, cohort=2)
    expected = by_hand(model, prefix(model.groups, 1))
    assert [record.simulated.seconds for record in records] == pytest.approx([expected, expected])
    slow = records[0].simulated.by_class["slow"]
    assert (slow["asked"], slow["answered"]) == (2, 2)
    assert slow["seconds"] == pytest.approx(2 * expected)


def test_the_slowest_decides_and_the_others_wait():
    model = mlp_model()
    _, records = simulate([FAST, SLOW], rounds=1, cohort=6)
    slowest = by_hand(model, prefix(model.groups, 1))
    assert records[0].simulated.seconds == pytest.approx(slowest)
    assert records[0].simulated.idle == pytest.approx(3 * slowest, rel=1e-3)  # three fast ones take no time


def test_a_deadline_gives_each_tier_what_it_can_finish():
    model, method, data = mlp_model(), get_method("heterofl")(local=LOCAL), vector_data(SIZES)
    half = prefix(model.groups, Fraction(1, 2))
    deadline = by_hand(model, half) + 1e-6
    fleet = fleet_of(model, method, data, [SLOW, FAST], deadline=deadline)
    assert [(tier.name, tier.budget.width) for tier in fleet.tiers] == [("slow", Fraction(1, 2)), ("fast", 1)]
    _, records = simulate([SLOW, FAST], deadline=deadline, cohort=6)
    assert records[-1].cohort.refused == {}
    assert records[-1].simulated.seconds == pytest.approx(deadline)


def test_tiers_stand_from_the_smallest_to_the_largest_and_clients_stay_with_theirs():
    model, method, data = mlp_model(), get_method("heterofl")(local=LOCAL), vector_data(SIZES)
    deadline = by_hand(model, prefix(model.groups, Fraction(1, 2))) + 1e-6
    fleet = fleet_of(model, method, data, [FAST, SLOW], deadline=deadline)
    assert [tier.name for tier in fleet.tiers] == ["slow", "fast"]
    clients = fleet.capacity(data.sizes, 0, None)
    assert [client.tier for client in clients] == ["fast"] * 3 + ["slow"] * 3


def test_memory_limits_the_piece_too():
    model, method = mlp_model(64), get_method("heterofl")(local=LOCAL)
    quarter = model.cost(prefix(model.groups, Fraction(1, 4)), method.workload).training_memory
    assert widest(model, method, Device("small", 1e9, memory=quarter), 8) == Fraction(1, 4)


def test_a_device_too_small_for_the_smallest_piece_is_named_or_left_out():
    model, method, data = mlp_model(), get_method("heterofl")(local=LOCAL), vector_data(SIZES)
    with pytest.raises(TooSmallError) as error:
        fleet_of(model, method, data, [SLOW, FAST], deadline="1s")
    assert "tier 'slow' (3 clients): even the smallest piece of the model takes" in str(error.value)
    assert "s to get there" in str(error.value)
    fleet = fleet_of(model, method, data, [SLOW, FAST], deadline="1s", too_small="skip")
    assert [tier.name for tier in fleet.left_out] == ["slow"]
    assert [client.id for client in fleet.capacity(data.sizes, 0, None)] == [3, 4, 5]


def test_a_client_with_more_examples_takes_a_smaller_piece_for_the_round():
    """Tiers are fitted to a typical client; the last one has half as many again, and would be late."""
    model = mlp_model()
    sizes = (8, 8, 8, 8, 8, 12)
    full, half = (prefix(model.groups, Fraction(width)) for width in (1, Fraction(1, 2)))
    deadline = by_hand(model, full) + 0.05
    assert by_hand(model, full, 12) > deadline > by_hand(model, half, 12)
    rows = [{**SLOW, "down": 500, "share": 1, "name": "slower"}, {**SLOW, "share": 5}]
    _, records = simulate(rows, cohort=6, rounds=1, sizes=sizes, deadline=deadline)
    assert records[0].cohort.refused == {}
    assert records[0].by_tier["slower"].asked == 2  # its own one, and the client that took less


def test_without_a_smaller_piece_it_is_late_and_the_round_lasts_until_the_deadline():
    model = mlp_model()
    deadline = by_hand(model, prefix(model.groups, 1)) + 0.05
    _, records = simulate([SLOW], cohort=6, rounds=1, sizes=(8, 8, 8, 8, 8, 200), deadline=deadline)
    assert records[0].cohort.refused == {"late": 1}
    assert records[0].cohort.merged == 5
    assert records[0].simulated.seconds == pytest.approx(deadline)


def test_over_selection_waits_for_no_more_than_it_needs():
    rules = EngineSettings(over_selection=2.0)
    _, records = simulate([FAST, SLOW], cohort=3, rounds=1, rules=rules)
    assert records[0].cohort.refused == {"surplus": 3}
    assert records[0].simulated.seconds < 0.1
    assert records[0].simulated.by_class["slow"]["answered"] == 0


def test_who_is_not_there_is_not_asked():
    rows = [{**FAST, "availability": 0.5}]
    _, records = simulate(rows, cohort=6, rounds=30)
    asked = [record.cohort.asked for record in records]
    assert min(asked) < 6
    assert 60 < sum(asked) < 120  # about half of 180
    again = simulate(rows, cohort=6, rounds=30)[1]
    assert timeless(again) == timeless(records)


def test_a_trace_slows_devices_down(tmp_path):
    (tmp_path / "t.csv").write_text(
        "device,from,to,availability,load\nslow,0s,3s,1,1\nslow,3s,1h,1,3\n", "utf-8"
    )
    model = mlp_model()
    cut = prefix(model.groups, 1)
    _, records = simulate([SLOW], rounds=2, trace=str(tmp_path / "t.csv"))
    quiet, busy = (record.simulated.seconds for record in records)
    computing = 2 * 0.1 + model.cost(cut).macs * 8 / 10_000
    assert quiet == pytest.approx(by_hand(model, cut))
    assert busy == pytest.approx(quiet + 2 * computing)


# Merging that waits for nobody


@pytest.mark.parametrize(
    "name", ["fedavg", "heterofl", "fjord", "flanc", "fedrolex", "federated-dropout", "efd", "tailor"]
)
def test_a_buffer_of_all_without_delay_is_the_synchronous_run_bit_for_bit(name):
    none = [{"name": "any", "macs_per_second": float("inf")}]
    rounds, _ = simulate(none, name=name, rounds=4)
    merged, records = simulate(none, name=name, rounds=4, buffer=3)
    assert differing(rounds.state.weights, merged.state.weights) == set()
    assert [record.cohort.merged for record in records] == [3] * 4


@pytest.mark.parametrize("rule", ["clip", "median"])
def test_rules_of_merging_hold_where_nobody_waits(rule):
    """With a buffer of all they are those of rounds, bit for bit; old answers are compared after they were moved."""
    none = [{"name": "any", "macs_per_second": float("inf")}]
    rounds, told = simulate(none, cohort=5, rule=rule, bad=2)
    merged, also = simulate(none, cohort=5, rule=rule, bad=2, buffer=5)
    assert differing(rounds.state.weights, merged.state.weights) == set()
    assert [record.merge for record in told] == [record.merge for record in also]
    busy = {"rows": [QUICK, SLOW], "cohort": 5, "rounds": 4, "buffer": 4, "concurrency": 6}
    moved_by_rule = apart(simulate(**busy, rule=rule, bad=2), simulate(**busy, rule=rule))
    moved_by_mean = apart(simulate(**busy, bad=2), simulate(**busy))
    assert 0 < moved_by_rule < moved_by_mean / 10


def apart(one, other):
    """How far two runs have come from each other."""
    pairs = [(one[0].state.weights[name], other[0].state.weights[name]) for name in one[0].state.weights]
    return sum(float((a - b).square().sum()) for a, b in pairs) ** 0.5


def test_nobody_waits_for_the_slowest():
    rows = [QUICK, SLOW]
    last, _ = simulate(rows, rounds=6, cohort=4)
    quick, records = simulate(rows, rounds=6, cohort=4, buffer=2)
    assert quick.under_way.now < last.under_way.now
    assert all(record.simulated.idle == 0 for record in records)
    assert sum(record.simulated.by_class.get("slow", {"answered": 0})["answered"] for record in records) > 0


def test_the_same_seed_gives_the_same_events():
    one, other = (simulate([QUICK, SLOW], rounds=6, cohort=4, buffer=2) for _ in range(2))
    assert timeless(one[1]) == timeless(other[1])
    assert one[0].under_way.flights == other[0].under_way.flights


def test_a_run_that_is_resumed_has_the_same_clients_under_way():
    whole, records = simulate([QUICK, SLOW], rounds=6, cohort=4, buffer=2)
    cut, _ = simulate([QUICK, SLOW], rounds=6, cohort=4, buffer=2, until=3)
    assert cut.under_way.flights
    assert any(flight.base < cut.state.round for flight in cut.under_way.flights)
    read = decode_checkpoint(b"".join(bytes(part) for part in encode_checkpoint(cut)))
    assert read.under_way.flights == cut.under_way.flights
    resumed, rest = simulate([QUICK, SLOW], rounds=6, cohort=4, buffer=2, at=read)
    assert differing(whole.state.weights, resumed.state.weights) == set()
    assert timeless(rest) == timeless(records[3:])


def test_answers_to_a_model_that_is_too_old_are_refused():
    _, records = simulate([QUICK, SLOW], rounds=12, cohort=4, buffer=1, most_staleness=1)
    assert sum(record.cohort.refused.get("stale", 0) for record in records) > 0


def test_an_old_answer_moves_the_present_model_by_its_difference():
    model = mlp_model()
    sent = model.cut(model.weights(), prefix(model.groups, Fraction(1, 2)))
    returned = replace(sent, values={name: value + 1.0 for name, value in sent.values.items()})
    now = {name: value + 10.0 for name, value in model.weights().items()}
    found = moved(sent, returned, now, model, 0.25)
    for name, value in model.cut(now, sent.cut).values.items():
        torch.testing.assert_close(found[name], value + 0.25)


def test_methods_with_a_merge_of_their_own_say_that_they_cannot():
    with pytest.raises(FedtailorError, match=r"asynchronous\.buffer: flado does more in its merge"):
        check_buffered(get_method("flado")())
    with pytest.raises(FedtailorError, match=r"asynchronous\.buffer: tailor does more in its merge"):
        check_buffered(get_method("tailor")(few_holders=0.5))
    check_buffered(get_method("heterofl")())
    check_buffered(get_method("tailor")())


def test_a_piece_that_is_sent_trained_and_sent_back():
    model = mlp_model()
    found = plain_trip(
        model, LOCAL, Device("d", 1e4, 0.1, down=1000, up=500, latency=1.0), prefix(model.groups, 1), 8
    )
    assert found.seconds == pytest.approx(by_hand(model, prefix(model.groups, 1)))
    assert Budget(width=1).width == 1
