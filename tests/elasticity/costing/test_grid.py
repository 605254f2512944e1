"""``align = "auto"``: which grid of widths is taken, and that pieces are compared at equal MACs."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedtailor import elastic
from fedtailor.elasticity.costing import grid
from fedtailor.elasticity.costing.grid import MULTIPLES, Grid, chosen, fastest_grid
from fedtailor.elasticity.costing.memory import Workload


def network(hidden: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(20, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, 4)
    )


@pytest.fixture
def model():
    return elastic(network(70), (torch.randn(4, 20), torch.tensor([0, 1, 2, 3])))


def lanes(width: int, overhead: float = 0.0):
    """A machine that works on so many channels at once."""

    def seconds(costs, cut, workload) -> float:
        rounded = [math.ceil(count / width) * width for count in costs.counts(cut)]
        return 1e-6 * math.prod(rounded) + overhead

    return seconds


@pytest.mark.parametrize("width", [1, 8, 16])
def test_the_grid_is_that_of_the_machine(model, monkeypatch, width):
    monkeypatch.setattr(grid, "_step", lanes(width))
    found = fastest_grid(model.costs, Workload())
    assert found.multiple == width
    assert f"takes {width}:" in found.in_words


def test_a_machine_whose_steps_all_take_as_long_keeps_every_width(model, monkeypatch):
    monkeypatch.setattr(grid, "_step", lanes(1, overhead=10.0))
    assert fastest_grid(model.costs, Workload()).multiple == 1


def test_what_saves_little_is_not_worth_coarser_pieces():
    plain = [(1.0, 1.0), (2.0, 2.0), (4.0, 4.0)]
    little = [(macs, seconds * 0.97) for macs, seconds in plain]
    much = [(macs, seconds * 0.8) for macs, seconds in plain]
    assert chosen({1: plain, 8: little}).multiple == 1
    assert chosen({1: plain, 4: much, 8: much}).multiple == 4
    assert chosen({1: plain, 4: much, 8: little}).times[4] == pytest.approx(0.8)


def test_a_grid_that_rounds_small_pieces_far_up_is_not_taken_however_fast_it_is():
    plain = [(1.0, 1.08), (2.0, 1.08), (4.0, 1.0)]
    assert chosen({1: plain, 16: [(4.0, 1.0)] * 3}).multiple == 1
    found = chosen({1: plain, 2: [(1.4, 1.0), (2.0, 1.0), (4.0, 1.0)], 16: [(4.0, 1.0)] * 3})
    assert (found.multiple, set(found.times)) == (2, {1, 2})


def test_where_all_grids_have_the_same_pieces_there_is_nothing_to_choose():
    found = chosen({multiple: [(4.0, math.inf)] * 5 for multiple in MULTIPLES})
    assert found == Grid(1, {1: 1.0})
    assert "no coarser widths to choose from" in found.in_words


def test_real_steps_are_measured(model):
    found = fastest_grid(model.costs, Workload(4))
    assert found.multiple in MULTIPLES
    assert set(found.times) == set(MULTIPLES)
    assert all(time > 0 for time in found.times.values())
