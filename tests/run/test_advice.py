"""What is said before and after a run, of surprises that no rule refuses."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.errors import ClientsFailedError, FedtailorError
from fedtailor.method import Method
from helpers import tiny_mlp

X = torch.randn(60, 5, generator=torch.Generator().manual_seed(0))
Y = torch.arange(60) % 3
QUARTERS = [{"name": "small", "width": 0.25}, {"name": "middle", "width": 0.5}, {"name": "large", "width": 1}]


def train(**options: Any) -> fedtailor.Run:
    options = {"fleet": "uniform-2", "method": "fedavg", "rounds": 1, "progress": False, **options}
    return fedtailor.train(tiny_mlp(), (X, Y), **options)


def told(**options: Any) -> list[str]:
    """The sentences that a run is accompanied by."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(**options)
    return [str(each.message) for each in caught]


def test_tiers_between_the_widths_of_a_method_are_told_what_they_are_given() -> None:
    found = told(method="fjord", fleet=QUARTERS)
    less = (
        "fjord trains the widths 1/5, 2/5, 3/5, 4/5, 1 alone: tier small may have width 1/4 and gets at most 1/5, "
        'tier middle may have width 1/2 and gets at most 2/5; method.widths=["1/4","1/2",1] trains the fleet\'s own.'
    )
    assert found.count(less) == 1
    own = {"name": "fjord", "widths": ["1/4", "1/2", 1]}
    assert not [each for each in told(method=own, fleet=QUARTERS) if "may have width" in each]


def test_devices_that_are_left_out_are_told_why() -> None:
    tiers = [{"name": "chip", "macs": 1, "params": 2}, {"name": "board", "width": 0.5}]
    found = told(fleet={"tiers": tiers, "too_small": "skip"}, method="heterofl")
    assert any(each.startswith("tier 'chip' takes no part: ") and "params" in each for each in found)


def test_a_run_that_blew_up_says_so() -> None:
    found = told(training={"lr": 1e9}, rounds=2)
    assert any("training has blown up" in each and "training.lr" in each for each in found)
    assert not any("blown up" in each for each in told(training={"lr": 0.1}))


def test_a_rate_of_sgd_is_told_to_be_high_for_adam() -> None:
    found = told(training={"optimiser": "adamw"})
    assert any(each.startswith("training.lr = 0.1 is high for adamw") for each in found)
    assert not any("training.lr" in each for each in told(training={"optimiser": "adamw", "lr": 0.001}))


def test_losses_of_pytorch_are_taken_as_they_are() -> None:
    usual = train(training={"lr": 0.1}, task="classification")
    for loss in (nn.CrossEntropyLoss(), F.cross_entropy):
        same = train(training={"lr": 0.1}, task="classification", loss=loss)
        assert same.tiers["1"]["loss"] == pytest.approx(usual.tiers["1"]["loss"], rel=1e-6)


class OwnModule(nn.Module):
    """A loss of the user's own may be a module and is given the batch."""

    def forward(self, output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output, batch[-1])


def test_a_module_of_ones_own_is_given_the_batch() -> None:
    assert train(loss=OwnModule()).tiers["1"]["loss"] > 0


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda output, y: F.cross_entropy(output, y), "A loss takes (output, batch)"),
        (lambda output, batch: F.cross_entropy(output, batch[-1], reduction="none"), "expected one number"),
        (lambda output, batch: 0.5, "returned float: expected one number"),
    ],
)
def test_losses_that_cannot_be_used_are_refused(loss: Any, expected: str) -> None:
    with pytest.raises(FedtailorError, match="objective.loss = ") as refused:
        train(loss=loss)
    assert expected in str(refused.value)


class ReturnsNothing(Method):
    """A method of the user's own with a slip."""

    def cut_for(self, state: Any, budget: Any, model: Any) -> Cut:
        return None  # type: ignore[return-value]


def test_a_method_that_returns_no_cut_is_refused() -> None:
    with pytest.raises(
        FedtailorError, match="ReturnsNothing.cut_for returned an object of type NoneType: expected a"
    ):
        train(method=ReturnsNothing())


class Breaks(nn.Module):
    """Can be traced, not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 2:
            raise ZeroDivisionError("no batch of more than two")
        answer: Tensor = self.second(torch.relu(self.first(x)))
        return answer


def test_what_breaks_in_the_first_round_leaves_no_folder(tmp_path: Path) -> None:
    with pytest.raises(ClientsFailedError, match="ZeroDivisionError: no batch of more than two"):
        fedtailor.train(Breaks(), [(X, Y)], "uniform-1", "fedavg", folder=tmp_path / "own", progress=False)
    assert not (tmp_path / "own").exists()


def test_an_existing_folder_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    with pytest.raises(FedtailorError, match="is there already and is no run: choose another name"):
        fedtailor.train(None, None, folder=tmp_path / "own")  # type: ignore[arg-type]
    (tmp_path / "own" / "run.lock").touch()
    with pytest.raises(FedtailorError, match=r"exists already.*resume=True in Python"):
        fedtailor.train(None, None, folder=tmp_path / "own")  # type: ignore[arg-type]


def test_a_result_that_is_no_better_than_a_guess_is_told_so() -> None:
    prices = 200_000 + 10_000 * X[:, 0]
    with pytest.warns(UserWarning, match="no tier is better than the middle of all targets as the answer"):
        fedtailor.train(
            nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 1)), (X, prices), "equal", "fedavg",
            rounds=1, task="regression", training={"lr": 1e-9}, progress=False,
        )  # fmt: skip
    labels = torch.ones(60, 4)
    with pytest.warns(UserWarning, match="no tier is better than every label's usual value"):
        fedtailor.train(
            tiny_mlp(), (X, labels), "equal", "fedavg",
            rounds=1, task="multi-label", training={"lr": 1e-9}, progress=False,
        )  # fmt: skip


def test_outputs_that_are_not_what_the_loss_expects_are_told() -> None:
    softmax = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 7), nn.Softmax(-1))
    with pytest.warns(UserWarning, match="outputs") as caught:
        fedtailor.train(softmax, (X, Y), "equal", "fedavg", rounds=1, progress=False)
    found = [str(each.message) for each in caught]
    assert "the network has 7 outputs, and own data 3 classes" in found
    assert any("a softmax at its end?" in each for each in found)
    fitting = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fedtailor.train(fitting, (X, Y), "equal", "fedavg", rounds=1, progress=False)
