"""The report that people read."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from elasticity.odd_constructions import ZOO
from elasticity.traced import case
from fedtailor.elasticity.front_door import elastic


@pytest.mark.parametrize("name", ZOO)
def test_every_group_is_named_once(name):
    model = case(name).model
    report = model.explain()
    can, _, rest = report.partition("cannot shrink")
    rows = [line.split()[0] for line in can.splitlines() if line.startswith("  ")]
    assert rows == ["group", *model.groups.elastic]
    assert all(reason in rest for reason in model.groups.fixed.values())


def test_a_report_says_what_why_and_how_much():
    model = case("TiedLanguageModel").model
    lines = model.explain().splitlines()
    assert lines[0].startswith("TiedLanguageModel: ")
    assert "parameters" in lines[1]
    assert lines[1].startswith("elastic: 98.")
    assert "  decoder.weight is embedding.weight" in lines
    assert any(
        "is the vocabulary of 'embedding' (Embedding) at odd_constructions.py:" in line for line in lines
    )
    assert lines[-1] == "pieces are of class TiedLanguageModel"


def test_literal_sizes_are_reported_with_their_lines():
    report = case("LiteralLeNet").model.explain()
    assert "pieces run the traced graph of forward instead of the module's own class" in report
    assert "'view' (view) at odd_constructions.py:" in report
    assert report.endswith(": 36")


def test_constraints_are_reported():
    module = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 3))
    model = elastic(module, (torch.randn(2, 4), torch.tensor([0, 1])), minimum=4, multiple=8)
    assert "16 (at least 4) (multiples of 8)" in model.explain()


def test_a_small_share_is_a_finding_with_what_would_raise_it():
    class Ordered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 128), nn.Linear(128, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.c(self.b(self.a(x).flip(1)).relu())

    batch = (torch.randn(2, 4), torch.tensor([0, 1]))
    report = elastic(Ordered(), batch).explain()
    assert (
        "less than 90% of the parameters are elastic" not in report
    )  # the columns of b stay, but its rows go
    module = nn.Sequential(Ordered(), nn.Linear(3, 8), nn.Linear(8, 2))
    report = elastic(module, batch, keep=["0.b"]).explain()
    finding = report.partition("finding: ")[2]
    assert "of the parameters can shrink, less than 90%" in finding
    assert "is kept whole, as '0.b' asks (leave it out of keep)" in finding
