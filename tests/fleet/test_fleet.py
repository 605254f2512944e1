from __future__ import annotations

import math
from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, FleetSettings, Population, Tier, fleet_by_name, fleet_examples
from fedtailor.fleet.presets import build_fleet
from fedtailor.messages import Client
from fedtailor.seeds import Seeds

SEEDS = Seeds(0)


def sizes(count: int) -> np.ndarray:
    return np.arange(1, count + 1)


def shape(fleet: Fleet) -> str:
    return ", ".join(f"{tier.name} {Fraction(tier.budget.width)} {tier.share}" for tier in fleet.tiers)


NAMED = {
    "uniform-5": "0.2 1/5 1/5, 0.4 2/5 1/5, 0.6 3/5 1/5, 0.8 4/5 1/5, 1 1 1/5",
    "uniform-3": "1/3 1/3 1/3, 2/3 2/3 1/3, 1 1 1/3",
    "uniform-1": "1 1 1",
    "a1-b1-c1-d1-e1": "e 1/16 1/5, d 1/8 1/5, c 1/4 1/5, b 1/2 1/5, a 1 1/5",
    "a1-e9": "e 1/16 9/10, a 1 1/10",
    "e3-a1": "e 1/16 3/4, a 1 1/4",
    "c7": "c 1/4 1",
    "high": "0.5 1/2 1/5, 0.75 3/4 3/10, 1 1 1/2",
    "low": "0.5 1/2 1/2, 0.75 3/4 3/10, 1 1 1/5",
    "two-25-75": "0.25 1/4 3/4, 1 1 1/4",
    "equal": "1 1 1",
    "equal-0.25": "0.25 1/4 1",
    "equal-1/3": "1/3 1/3 1",
}  # name, width and share of every tier, from the smallest device to the largest


@pytest.mark.parametrize("name", NAMED)
def test_fleets_by_name(name):
    fleet = fleet_by_name(name)
    assert shape(fleet) == NAMED[name]
    assert (fleet.dynamic, fleet.macs_range) == (False, None)
    assert sum(tier.share for tier in fleet.tiers) == 1


def test_every_example_of_a_name_is_one():
    assert len(fleet_examples()) == 8
    for name in fleet_examples():
        fleet = fleet_by_name(name)
        assert sum(tier.share for tier in fleet.tiers) == 1
        widths = [tier.budget.width or tier.budget.macs for tier in fleet.tiers]
        assert widths == sorted(widths)  # from the smallest device to the largest


def test_drop_scale_moves_devices_to_the_top_tier():
    shares = [tier.share for tier in fleet_by_name("uniform-5", drop_scale=0.5).tiers]
    assert shares == [Fraction(1, 10)] * 4 + [Fraction(6, 10)]
    assert shape(fleet_by_name("uniform-5", drop_scale=1)) == NAMED["uniform-5"]
    assert fleet_by_name("uniform-5", drop_scale=0.5).counts(100) == [10, 10, 10, 10, 60]


@pytest.mark.parametrize("scale", [0, -0.5, 1.5, math.nan, math.inf])
def test_drop_scales_that_are_none(scale):
    with pytest.raises(
        FedtailorError, match=r"fleet.drop_scale = .*: expected a number above 0 and at most 1"
    ):
        fleet_by_name("uniform-5", drop_scale=scale)


@pytest.mark.parametrize("name", ["high", "a1-e1", "flops-0.1-0.5", "equal"])
def test_only_uniform_fleets_have_a_drop_scale(name):
    with pytest.raises(FedtailorError, match="only uniform-k fleets have one"):
        fleet_by_name(name, drop_scale=0.5)


# Who belongs to which tier


def tiers_of(population: Population) -> list[str]:
    return [client.tier for client in population]


def test_static_tiers_are_blocks_that_never_change():
    fleet = fleet_by_name("uniform-2")
    assert tiers_of(fleet.capacity(sizes(6), 0, SEEDS)) == ["0.5"] * 3 + ["1"] * 3
    assert tiers_of(fleet.capacity(sizes(6), 9, Seeds(5))) == ["0.5"] * 3 + ["1"] * 3


@pytest.mark.parametrize(("name", "clients", "counts"), [
    ("uniform-5", 20, [4] * 5),
    ("uniform-5", 7, [2, 2, 1, 1, 1]),
    ("uniform-5", 5, [1] * 5),
    ("a1-e9", 10, [9, 1]),
    ("a1-e9", 100, [90, 10]),
    ("a1-e99", 10, [9, 1]),  # a rare tier still has one client
    ("high", 10, [2, 3, 5]),
    ("low", 10, [5, 3, 2]),
    ("two-25-75", 8, [6, 2]),
    ("two-25-75", 2, [1, 1]),
])  # fmt: skip
def test_counts(name, clients, counts):
    assert fleet_by_name(name).counts(clients) == counts


@given(st.lists(st.integers(1, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_counts_are_shares_to_within_one_client(shares, extra):
    fleet = Fleet(tuple(Tier(str(n), Budget(width=1), Fraction(share)) for n, share in enumerate(shares)))
    clients = len(shares) + extra
    counts = fleet.counts(clients)
    assert sum(counts) == clients
    assert min(counts) >= 1
    exact = [Fraction(share * clients, sum(shares)) for share in shares]
    if all(share >= 1 for share in exact):
        assert all(abs(count - share) < 1 for count, share in zip(counts, exact, strict=True))


def test_more_tiers_than_clients():
    message = (
        r"4 client\(s\) for 5 tiers: expected at least one client per tier; "
        "raise data.clients or choose a fleet with fewer tiers"
    )
    with pytest.raises(FedtailorError, match=message):
        fleet_by_name("uniform-5").capacity(sizes(4), 0, SEEDS)


def test_dynamic_tiers_are_redrawn_in_every_round_with_the_given_shares():
    fleet = fleet_by_name("a1-b1-e2", dynamic=True)
    rounds = [tiers_of(fleet.capacity(sizes(50), round_, SEEDS)) for round_ in range(40)]
    assert tiers_of(fleet.capacity(sizes(50), 3, SEEDS)) == rounds[3]
    assert tiers_of(fleet.capacity(sizes(50), 3, Seeds(1))) != rounds[3]
    assert len({tuple(tiers) for tiers in rounds}) == 40
    counts = Counter(tier for tiers in rounds for tier in tiers)  # 2000 draws, five standard deviations
    assert abs(counts["e"] - 1000) < 5 * math.sqrt(2000 * 0.25)
    assert abs(counts["a"] - 500) < 5 * math.sqrt(2000 * 3 / 16)
    assert counts.keys() == {"a", "b", "e"}


def test_a_dynamic_fleet_may_have_fewer_clients_than_tiers():
    assert len(tiers_of(fleet_by_name("uniform-5", dynamic=True).capacity(sizes(2), 0, SEEDS))) == 2


# FLOPs uniform in a range


def test_flops_ranges_give_every_client_a_limit_of_its_own():
    fleet = fleet_by_name("flops-0.04-0.64")
    assert fleet.macs_range == (Fraction(1, 25), Fraction(16, 25))
    assert [tier.budget.macs for tier in fleet.tiers] == [
        Fraction(4, 100),
        Fraction(19, 100),
        Fraction(34, 100),
        Fraction(49, 100),
        Fraction(64, 100),
    ]
    assert [tier.name for tier in fleet.tiers] == [
        "0.04 flops",
        "0.19 flops",
        "0.34 flops",
        "0.49 flops",
        "0.64 flops",
    ]
    population = fleet.capacity(sizes(2000), 0, SEEDS)
    limits = [Fraction(client.budget.macs) for client in population]
    assert all(Fraction(4, 100) <= limit <= Fraction(64, 100) for limit in limits)
    assert len(set(limits)) > 1900
    assert abs(float(sum(limits)) / 2000 - 0.34) < 5 * 0.6 / math.sqrt(12 * 2000)
    edges = {tier.name: Fraction(tier.budget.macs) for tier in fleet.tiers}
    for client in population:
        assert client.budget.limits.keys() == {"macs"}
        affordable = [name for name, edge in edges.items() if edge <= Fraction(client.budget.macs)]
        assert client.tier == affordable[-1]


def test_flops_are_static_unless_dynamic():
    still, moving = fleet_by_name("flops-0.1-0.9"), fleet_by_name("flops-0.1-0.9", dynamic=True)

    def limits(fleet: Fleet, round_: int) -> list:
        return [client.budget for client in fleet.capacity(sizes(20), round_, SEEDS)]

    assert limits(still, 0) == limits(still, 7)
    assert limits(moving, 0) != limits(moving, 7)
    assert limits(moving, 7) == limits(moving, 7)


def test_a_range_without_extent_is_one_tier():
    fleet = fleet_by_name("flops-0.5-0.5")
    assert [(tier.name, tier.budget.macs, tier.share) for tier in fleet.tiers] == [
        ("0.5 flops", Fraction(1, 2), 1)
    ]
    assert {client.budget.macs for client in fleet.capacity(sizes(5), 0, SEEDS)} == {Fraction(1, 2)}


def test_a_client_exactly_at_a_tiers_limit_belongs_to_that_tier():
    half = Fraction(1, 2)
    tiers = tuple(
        Tier(str(share), Budget(macs=share), Fraction(1, 3)) for share in (Fraction(1, 4), half, Fraction(1))
    )
    population = Fleet(tiers, macs_range=(half, half)).capacity(sizes(4), 0, SEEDS)
    assert tiers_of(population) == ["1/2"] * 4


# One's own tiers


def test_own_tiers():
    tiers = [
        {"name": "phone", "share": 3, "width": 0.25, "params": 100_000},
        {"share": 0.5, "macs": "1/2"},
        {"name": "server", "bytes": 4096, "width": 1},
    ]
    fleet = build_fleet(FleetSettings(tiers=tiers))
    assert [(tier.name, tier.share) for tier in fleet.tiers] == [
        ("phone", Fraction(3)),
        ("tier 1", Fraction(1, 2)),
        ("server", Fraction(1)),
    ]
    assert [tier.budget for tier in fleet.tiers] == [
        Budget(width="1/4", params=100_000), Budget(macs="1/2"), Budget(width=1, bytes=4096)
    ]  # fmt: skip
    assert fleet.counts(9) == [6, 1, 2]
    assert not fleet.dynamic
    assert build_fleet(FleetSettings(tiers=tiers, capacity="dynamic")).dynamic


@pytest.mark.parametrize(
    ("tier", "message"),
    [
        ({"width": 0}, "width = 0: expected a number above 0 and at most 1"),
        ({"width": -0.5}, "width = -0.5: expected a number above 0 and at most 1"),
        ({"width": 1.01}, "width = 1.01: expected a number above 0 and at most 1"),
        ({"width": math.nan}, "width = nan: expected a number above 0 and at most 1"),
        ({"width": math.inf}, "width = inf: expected a number above 0 and at most 1"),
        ({"width": "wide"}, "width = 'wide': expected a number above 0 and at most 1"),
        ({"width": "1/0"}, "width = '1/0': expected a number above 0 and at most 1"),
        ({"width": True}, "width = True: expected a number above 0 and at most 1"),
        ({"macs": 0}, "macs = 0: expected a whole number above 1, or a share of the full model"),
        ({"macs": -5}, "macs = -5: expected a whole number above 1, or a share of the full model"),
        ({"params": math.nan}, "params = nan: expected a whole number above 1, or a share of the full model"),
        ({"bytes": 10.5}, "bytes = 10.5: expected a whole number above 1, or a share of the full model"),
        ({"width": 1, "share": 0}, "fleet.tiers[0].share = 0: expected a number above 0"),
        ({"width": 1, "share": -1}, "fleet.tiers[0].share = -1: expected a number above 0"),
        ({"width": 1, "share": math.nan}, "fleet.tiers[0].share = nan: expected a number above 0"),
        ({"width": 1, "share": math.inf}, "fleet.tiers[0].share = inf: expected a number above 0"),
        ({"width": 1, "share": "half"}, "fleet.tiers[0].share = 'half': expected a number above 0"),
        ({"width": 1, "share": True}, "fleet.tiers[0].share = True: expected a number above 0"),
        ({"share": 1}, "fleet.tiers[0] = {'share': 1}: expected at least one of width, macs, params, bytes"),
        ({"widht": 1}, "unknown key of fleet.tiers[0] 'widht': did you mean 'width'?"),
    ],
)
def test_own_tiers_that_make_no_sense(tier, message):
    with pytest.raises(FedtailorError) as caught:
        FleetSettings(tiers=[tier])
    assert str(caught.value).startswith(message)


def test_tiers_of_the_same_name():
    with pytest.raises(FedtailorError, match="fleet.tiers = .*: expected different names"):
        FleetSettings(tiers=[{"name": "x", "width": 1}, {"name": "x", "width": 0.5}])


def test_a_fleet_needs_a_tier_and_tiers_a_share():
    with pytest.raises(FedtailorError, match=r"fleet.tiers = \[\]: expected at least one tier"):
        Fleet(())
    with pytest.raises(FedtailorError, match="share of tier x = .*: expected a number above 0"):
        Fleet((Tier("x", Budget(width=1), Fraction(0)),))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("uniform5", "unknown fleet 'uniform5': did you mean 'uniform-5'?"),
        ("hihg", "unknown fleet 'hihg': did you mean 'high'?"),
        ("", "unknown fleet ''"),
        ("A1-E1", "unknown fleet 'A1-E1'"),
        ("uniform-0", "fleet.name = 'uniform-0': expected at least one tier, such as uniform-5"),
        ("a1-f1", "fleet.name = 'a1-f1': level 'f' is none of a, b, c, d, e, each at most once"),
        ("z9", "fleet.name = 'z9': level 'z' is none of a, b, c, d, e, each at most once"),
        ("a1-a2", "fleet.name = 'a1-a2': level 'a1-a2' is none of a, b, c, d, e, each at most once"),
        ("a0-e1", "fleet.name = 'a0-e1': expected a number above 0 behind each level"),
        ("flops-0.6-0.2", "fleet.name = 'flops-0.6-0.2': expected the smaller share first"),
        ("flops-0-0.5", "fleet.name = '0': expected a number above 0 and at most 1"),
        ("flops-0.5-2", "fleet.name = '2': expected a number above 0 and at most 1"),
        ("flops-1.2.3-1", "fleet.name = '1.2.3': expected a number above 0 and at most 1"),
        ("two-25-70", "fleet.name = 'two-25-70': expected two percentages that add to 100"),
        ("two-0-100", "fleet.name = 'two-0-100': expected two percentages that add to 100"),
        ("equal-0", "fleet.name = '0': expected a number above 0 and at most 1"),
        ("equal-1.5", "fleet.name = '1.5': expected a number above 0 and at most 1"),
        ("equal-1/0", "fleet.name = '1/0': expected a number above 0 and at most 1"),
    ],
)
def test_names_that_make_no_fleet(name, message):
    for ask in (lambda: fleet_by_name(name), lambda: FleetSettings(name=name)):
        with pytest.raises(FedtailorError) as caught:
            ask()
        assert str(caught.value).startswith(message)


def test_capacity_is_static_or_dynamic():
    with pytest.raises(FedtailorError, match="fleet.capacity = 'random': expected static or dynamic"):
        FleetSettings(capacity="random")  # type: ignore[arg-type]
    assert build_fleet(FleetSettings("high", "dynamic")).dynamic


# The population


def test_a_population_is_a_sequence_of_clients():
    population = fleet_by_name("uniform-2").capacity(np.array([5, 6, 7, 8]), 0, SEEDS)
    low, high = Budget(width="1/2"), Budget(width=1)
    clients = [
        Client(0, "0.5", low, 5),
        Client(1, "0.5", low, 6),
        Client(2, "1", high, 7),
        Client(3, "1", high, 8),
    ]
    assert list(population) == clients
    assert [population[index] for index in (-1, -4, 2)] == [clients[-1], clients[-4], clients[2]]
    assert population[1:3] == clients[1:3]
    assert population[::-2] == clients[::-2]
    assert clients[2] in population
    for index in (4, -5):
        with pytest.raises(IndexError):
            population[index]
    assert type(population[0].num_examples) is int


@pytest.mark.parametrize("name", ["uniform-5", "flops-0.04-0.64"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_million_clients_are_a_few_arrays(name, dynamic):
    count = 1_000_000
    population = fleet_by_name(name, dynamic=dynamic).capacity(np.full(count, 3), 5, SEEDS)
    assert len(population) == count
    assert population[count - 1].id == count - 1
    arrays = [population.tiers, *([population.macs] if population.macs is not None else [])]
    assert sum(array.nbytes for array in arrays) <= 12 * count
    assert set(np.unique(population.tiers)) <= set(range(5))
