"""Single formats against their real libraries: operators they do not know, several widths, masks of single weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from networks import finished
from torch import Tensor, nn

from fedtailor import Budget, FedtailorError
from fedtailor.deploying.bundle import deploy
from fedtailor.deploying.formats import FORMATS
from fedtailor.deploying.inputs import Inputs, answers_of
from fedtailor.deploying.network import Network
from fedtailor.deploying.wanted import Wanted


def needs(form: str) -> None:
    for library in FORMATS[form].needs:
        pytest.importorskip(library, reason=f"pip install 'fedtailor[{FORMATS[form].extra}]'")


@torch.library.custom_op("fedtailor_tests::odd", mutates_args=())
def odd(x: Tensor) -> Tensor:
    return x * 2


@odd.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


class OddLayer(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return odd(x)


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.strange, self.last = nn.Linear(3, 4), OddLayer(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.strange(self.first(x)))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "pte"])
def test_an_operator_that_a_format_does_not_know_is_named_with_its_layer(form):
    needs(form)
    module, example = Odd().eval(), Inputs((torch.zeros(2, 3),))
    model: Any = None
    network = Network("odd", (), model, module, example, answers_of(module, example))
    with pytest.raises(
        FedtailorError, match="operator fedtailor_tests.odd.default of layer strange .OddLayer"
    ):
        FORMATS[form].pack(network, None)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["onnx", "pte"])
def test_several_widths_in_one_file(form, tmp_path: Path):
    needs(form)
    run = finished("wide", {"name": "fjord", "widths": [0.5, 1]})
    written = deploy(run, Wanted(switchable=True, formats=(form,)), tmp_path / "deploy")
    (network,) = written.networks
    (file,) = network["files"]
    assert file["difference"] <= 1e-5  # of both widths
    assert [each["macs"] for each in network["widths"]] == sorted(each["macs"] for each in network["widths"])
    assert len(network["widths"]) == 2
    if form == "onnx":
        assert file["size"] <= 1.1 * file["widest_alone"]
    assert bool(written.notices) == (form == "pte")  # what cannot be shared is said


def test_widths_in_a_format_that_holds_one(tmp_path: Path):
    run = finished("cnn", "fjord")
    with pytest.raises(
        FedtailorError, match="a file of format pt2 holds one width; expected --format onnx or pte"
    ):
        deploy(run, Wanted(switchable=True, formats=("pt2",)), tmp_path / "deploy")
    assert list(tmp_path.iterdir()) == []


def test_weights_that_share_nothing_are_not_switched_between():
    run = finished("cnn", "heterofl")
    with pytest.raises(FedtailorError, match="of its own: its weights are not shared"):
        run.switchable()


def test_masks_of_single_weights_make_a_small_file(tmp_path: Path):
    method = {"name": "ofa-fl", "ratios": (1, "1/5"), "trigger": "schedule", "first": 0}
    run = finished("cnn", method, rounds=3)
    wanted = Wanted(Budget(density=0.2), formats=("sparse", "safetensors"))
    written = deploy(run, wanted, tmp_path / "deploy")
    sparse, dense = written.networks[0]["files"]
    assert sparse["dense_size"] == dense["size"] > sparse["size"]
    assert sparse["difference"] <= 1e-6
    assert "inference gains nothing" in written.notices[0]
    with pytest.raises(FedtailorError, match="the network for width-1 leaves out no single weights"):
        deploy(finished("cnn"), Wanted(Budget(width=1), formats=("sparse",)), tmp_path / "other")
