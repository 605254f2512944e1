from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.merging import by_count, by_samples, holder_mean, mean_over_holders
from fedtailor.messages import Update
from helpers import (
    CONV1,
    CONV2,
    LINEAR,
    NORM1,
    NORM2,
    bits,
    cnn_model,
    differing,
    group_of,
    snapshot,
    update_of,
)

FIRST, SECOND, LABELS = 3, 4, 5
MODEL: ElasticModel = cnn_model(FIRST, SECOND, LABELS)
GROUPS = {
    "first": group_of(MODEL, f"{CONV1}.weight", 0),
    "second": group_of(MODEL, f"{CONV2}.weight", 0),
    "labels": group_of(MODEL, f"{LINEAR}.weight", 0),
}
COUNTS = (f"{NORM1}.num_batches_tracked", f"{NORM2}.num_batches_tracked")


@dataclass(frozen=True)
class Sent:
    """What one client sends, written down without any of the library's index arithmetic."""

    client: int
    first: list[int]
    second: list[int]
    labels: list[int]
    weight: float
    seed: int

    def positions(self, name: str) -> tuple[list[int], ...]:
        """The kept positions of each axis that is cut; the axes behind them are whole."""
        layer = name.partition(".")[0]
        if name in COUNTS:
            return ()
        if layer in (CONV1, NORM1):
            return (self.first,)
        if name == f"{CONV2}.weight":
            return (self.second, self.first)
        if layer in (CONV2, NORM2):
            return (self.second,)
        if name == f"{LINEAR}.weight":  # a channel owns 2 x 2 consecutive features
            return (self.labels, [unit * 4 + pixel for unit in self.second for pixel in range(4)])
        return (self.labels,)

    @cached_property
    def values(self) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        sent = {}
        for name, full in MODEL.weights().items():
            picked = full.numpy()[np.ix_(*self.positions(name))] if self.positions(name) else full.numpy()
            if name in COUNTS:
                sent[name] = torch.randint(0, 1000, (), generator=generator)
            else:
                scale = 10 ** (12 * torch.rand(picked.shape, generator=generator) - 6)
                sent[name] = torch.randn(picked.shape, generator=generator) * scale
        return sent

    @property
    def update(self) -> Update:
        channels = {GROUPS["first"]: self.first, GROUPS["second"]: self.second, GROUPS["labels"]: self.labels}
        return update_of(self.client, Patch(self.values, Cut.of(MODEL.groups, channels)), self.weight)


def units(width: int) -> st.SearchStrategy[list[int]]:
    """Any subset: prefixes, windows and scattered units, so that the cuts of a cohort cross."""
    return st.sets(st.integers(0, width - 1), min_size=1).map(sorted)


shares = st.one_of(st.integers(1, 10_000), st.floats(0.001, 1000, allow_nan=False))

value_seeds = st.integers(0, 2**32)


@st.composite
def cohorts(draw, smallest: int = 1) -> list[Sent]:
    clients = draw(st.lists(st.integers(0, 99), min_size=smallest, max_size=5, unique=True))
    return [
        Sent(
            number,
            *(draw(units(width)) for width in (FIRST, SECOND, LABELS)),
            draw(shares),
            draw(value_seeds),
        )
        for number in clients
    ]


def contributions(cohort: list[Sent], name: str) -> dict[tuple[int, ...], list[tuple[float, float]]]:
    """For every coordinate of a tensor, the (value, weight) of all clients that sent it: a slow loop."""
    found: dict[tuple[int, ...], list[tuple[float, float]]] = {}
    for sent in cohort:
        values, cut_axes = sent.values[name].numpy(), sent.positions(name)
        for place in np.ndindex(*values.shape):
            target = tuple(
                cut_axes[axis][position] if axis < len(cut_axes) else position
                for axis, position in enumerate(place)
            )
            found.setdefault(target, []).append((float(values[place]), sent.weight))
    return found


@settings(max_examples=20)
@given(cohorts())
def test_mean_is_within_one_ulp_of_the_exact_mean(cohort):
    old = MODEL.weights()
    merged = holder_mean(old, [sent.update for sent in cohort], MODEL)
    assert merged.keys() == old.keys()
    for name, value in merged.items():
        sent, values, uncovered = (
            contributions(cohort, name),
            value.numpy(),
            torch.ones_like(value, dtype=torch.bool),
        )
        for place, addends in sent.items():
            uncovered[place] = False
            weights = [Fraction(weight) for _, weight in addends]
            exact = sum(
                Fraction(one) * weight for (one, _), weight in zip(addends, weights, strict=True)
            ) / sum(weights)
            largest = np.float32(max(abs(addend) for addend, _ in addends))
            bound = Fraction(1, 2) if name in COUNTS else Fraction(float(np.spacing(largest)))
            assert abs(Fraction(float(values[place])) - exact) <= bound, (name, place)
        assert bits(value[uncovered]) == bits(old[name][uncovered])


@settings(max_examples=12)
@given(cohorts(smallest=2), st.randoms(use_true_random=False))
def test_order_of_arrival_does_not_change_a_bit(cohort, shuffler: random.Random):
    updates = [sent.update for sent in cohort]
    expected = snapshot(holder_mean(MODEL.weights(), updates, MODEL))
    shuffler.shuffle(updates)
    assert snapshot(holder_mean(MODEL.weights(), updates, MODEL)) == expected


@settings(max_examples=20)
@given(units(FIRST), units(SECOND), st.lists(st.integers(1, 10_000), min_size=1, max_size=4), value_seeds)
def test_patches_that_come_as_rows_of_a_table_have_the_same_mean_bit_for_bit(first, second, weights, seed):
    clients = [Sent(n, first, second, [0, 1, 2, 3, 4], weight, seed + n) for n, weight in enumerate(weights)]
    trained = [name for name in clients[0].values if name not in COUNTS]
    columns = {name: (0, clients[0].values[name].shape) for name in trained}
    table = torch.stack([torch.cat([each.values[n].reshape(-1) for n in trained]) for each in clients])
    cut = clients[0].update.patch.cut
    rows = [
        update_of(each.client, patch, each.weight)
        for each, patch in zip(clients, Patch.of_rows([table], columns, cut), strict=True)
    ]
    apart = [
        update_of(u.client, Patch({n: v.clone() for n, v in u.patch.values.items()}, cut), u.weight)
        for u in rows
    ]
    assert all(update.patch.row is not None for update in rows)
    assert all(update.patch.row is None for update in apart)
    assert snapshot(holder_mean(MODEL.weights(), rows, MODEL)) == snapshot(
        holder_mean(MODEL.weights(), apart, MODEL)
    )


def test_sums_that_cancel_come_out_alike_in_every_order():
    """Even in float64 (1e30 + 1) - 1e30 is not (1e30 - 1e30) + 1: only a fixed order gives the same bits."""
    name, sent = f"{LINEAR}.bias", (1e30, 1.0, -1e30, 3.0)
    updates = [
        update_of(number, Patch({name: torch.full((LABELS,), value)}, Cut.everything()), 1)
        for number, value in enumerate(sent)
    ]
    results = {
        bits(holder_mean(MODEL.weights(), order, MODEL)[name]) for order in itertools.permutations(updates)
    }
    assert len(results) == 1


@settings(max_examples=10)
@given(cohorts())
def test_neither_the_old_weights_nor_the_updates_are_written_to(cohort):
    old, updates = MODEL.weights(), [sent.update for sent in cohort]
    before = snapshot(old), [snapshot(update.patch.values) for update in updates]
    holder_mean(old, updates, MODEL)
    assert (snapshot(old), [snapshot(update.patch.values) for update in updates]) == before


@settings(max_examples=12)
@given(cohorts(smallest=1), st.data())
def test_a_client_of_weight_zero_changes_nothing(cohort, data):
    updates = [sent.update for sent in cohort]
    for update in updates:  # a lone -0.0 must keep its sign beside the other's 0 * value
        update.patch.values[f"{LINEAR}.bias"].fill_(-0.0)
    silent = Sent(100, list(range(FIRST)), list(range(SECOND)), list(range(LABELS)), 0, 1).update
    silent.patch.values[f"{CONV1}.weight"][0] = torch.inf
    expected = holder_mean(MODEL.weights(), updates, MODEL)
    position = data.draw(st.integers(0, len(updates)))
    actual = holder_mean(MODEL.weights(), [*updates[:position], silent, *updates[position:]], MODEL)
    assert differing(expected, actual) == set()


def test_uncovered_coordinates_keep_even_nan_and_minus_zero():
    old = MODEL.weights()
    old[f"{CONV2}.weight"][1] = torch.nan
    old[f"{CONV2}.weight"][0, 1] = -0.0
    sent = Sent(3, [0], [0], [0], 2, 0)
    merged = holder_mean(old, [sent.update], MODEL)[f"{CONV2}.weight"]
    assert bits(merged[1:]) == bits(old[f"{CONV2}.weight"][1:])
    assert bits(merged[0, 1:]) == bits(old[f"{CONV2}.weight"][0, 1:])
    assert bits(merged[0, :1]) == bits(sent.values[f"{CONV2}.weight"][0])


@settings(max_examples=12)
@given(cohorts(smallest=1), st.integers(2, 4))
def test_identical_uploads_come_back_unchanged(cohort, copies):
    sent = cohort[0]
    alone = holder_mean(MODEL.weights(), [sent.update], MODEL)
    together = [update_of(number, sent.update.patch, sent.weight + number) for number in range(copies)]
    assert differing(alone, holder_mean(MODEL.weights(), together, MODEL)) == set()


def test_nobody_answered_so_nothing_changes():
    old = MODEL.weights()
    assert differing(old, holder_mean(old, [], MODEL)) == set()


def test_weights_are_those_that_the_weighting_says():
    full = Cut.everything()
    one, three = ({f"{LINEAR}.bias": torch.full((LABELS,), value)} for value in (1.0, 5.0))
    updates = [update_of(0, Patch(one, full), 3), update_of(1, Patch(three, full), 1)]
    assert (
        holder_mean(MODEL.weights(), updates, MODEL, by_samples)[f"{LINEAR}.bias"].tolist() == [2.0] * LABELS
    )
    assert holder_mean(MODEL.weights(), updates, MODEL, by_count)[f"{LINEAR}.bias"].tolist() == [3.0] * LABELS


def floats(dtype: torch.dtype, width: int) -> st.SearchStrategy[Tensor]:
    special = [
        -0.0,
        0.0,
        torch.finfo(dtype).max,
        torch.finfo(dtype).tiny,
        torch.finfo(dtype).smallest_normal / 2,
    ]
    finite = st.floats(width=width, allow_nan=False, allow_infinity=False)
    entries = st.one_of(st.sampled_from(special), finite)
    return st.lists(entries, min_size=1, max_size=8).map(lambda values: torch.tensor(values, dtype=dtype))


LONE = {
    "float16": floats(torch.float16, 16),
    "bfloat16": floats(torch.bfloat16, 16),
    "float32": floats(torch.float32, 32),
    "float64": floats(torch.float64, 64),
    "int64": st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=8).map(torch.tensor),
    "int32": st.lists(st.integers(-(2**31), 2**31 - 1), min_size=1).map(lambda v: torch.tensor(v, dtype=torch.int32)),
    "uint8": st.lists(st.integers(0, 255), min_size=1).map(lambda v: torch.tensor(v, dtype=torch.uint8)),
    "bool": st.lists(st.booleans(), min_size=1).map(torch.tensor),
}  # fmt: skip


@pytest.mark.parametrize("kind", LONE)
def test_a_single_clients_own_bits_come_back(kind):
    @given(values=LONE[kind], weight=shares)
    def check(values, weight):
        assert bits(mean_over_holders(None, [(None, values, weight)])) == bits(values)
        old = torch.ones(len(values) + 2).to(values.dtype)
        merged = mean_over_holders(old, [((slice(0, len(values)),), values, weight)])
        assert bits(merged[: len(values)]) == bits(values)
        assert bits(merged[len(values) :]) == bits(old[len(values) :])
        scattered = torch.arange(len(values)) + 1  # the same through an index of positions
        merged = mean_over_holders(old, [((scattered,), values, weight)])
        assert bits(merged[1:-1]) == bits(values)

    check()


def test_lone_values_come_back_beside_shared_ones():
    """Coordinate 0 has two holders, coordinate 1 one: wide types must tell them apart."""
    large = 2**53 + 1
    for dtype, lone in ((torch.int64, large), (torch.float64, 0.1)):
        parts = [
            ((slice(0, 2),), torch.tensor([2, lone], dtype=dtype), 3),
            ((slice(0, 1),), torch.tensor([4], dtype=dtype), 1),
        ]
        merged = mean_over_holders(torch.zeros(3, dtype=dtype), parts)
        assert merged.dtype == dtype
        assert bits(merged[1:]) == bits(torch.tensor([lone, 0], dtype=dtype))
        assert merged[0].item() == (2 if dtype == torch.int64 else 2.5)


def test_integer_buffers_keep_their_type_and_are_rounded_once():
    name = COUNTS[0]
    updates = [
        update_of(number, Patch({name: torch.tensor(value)}, Cut.everything()), weight)
        for number, value, weight in ((0, 1, 1), (1, 2, 1), (2, 4, 1))
    ]
    merged = holder_mean(MODEL.weights(), updates, MODEL)[name]
    assert merged.dtype == torch.int64
    assert merged.shape == ()
    assert merged.item() == 2  # 7/3


def test_extra_tensors_are_merged_by_their_name_over_those_who_sent_them():
    old = MODEL.weights()
    small = Cut.of(MODEL.groups, {GROUPS["first"]: [0]})
    updates = [
        update_of(0, Patch({"1.running_mean@1/4": torch.tensor([1.0])}, small), 1),
        update_of(1, Patch({"1.running_mean@1/4": torch.tensor([4.0])}, small), 2),
        update_of(2, Patch({"1.running_mean@1": torch.tensor([9.0, 9.0, 9.0])}, Cut.everything()), 5),
    ]
    merged = holder_mean(old, updates, MODEL)
    assert merged["1.running_mean@1/4"].tolist() == [3.0]
    assert merged["1.running_mean@1"].tolist() == [9.0] * 3
    assert differing(old, {name: value for name, value in merged.items() if "@" not in name}) == set()
    again = holder_mean(
        merged, updates[:1], MODEL
    )  # an extra that is there already is replaced, not averaged in
    assert again["1.running_mean@1/4"].tolist() == [1.0]
    assert bits(again["1.running_mean@1"]) == bits(merged["1.running_mean@1"])


def test_a_tensor_that_some_clients_did_not_send_is_merged_over_the_others():
    name = f"{NORM1}.running_mean"
    values = {name: torch.tensor([1.0, 2.0, 3.0])}
    updates = [
        update_of(0, Patch(values, Cut.everything()), 1),
        update_of(1, Patch({}, Cut.everything()), 100),
    ]
    assert bits(holder_mean(MODEL.weights(), updates, MODEL)[name]) == bits(values[name])
