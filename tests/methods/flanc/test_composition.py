"""Weights from a shared basis: both forms, the regulariser, where training starts, and what a plan composes."""

from __future__ import annotations

from fractions import Fraction

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.methods.flanc.composition import (
    compose,
    fitted_coefficients,
    gram,
    orthogonality,
    principal_basis,
    two_step,
)
from fedtailor.methods.flanc.plan import Composed, Plan, Recipe, plan
from fedtailor.models import build_model
from helpers import bits, cnn_model, mlp_model

QUARTERS = tuple(Fraction(number, 4) for number in (1, 2, 3, 4))


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator)


def recipe(**changes) -> Recipe:
    settings = {
        "widths": QUARTERS,
        "align": 1,
        "input_share": Fraction(1, 8),
        "output_share": Fraction(1, 4),
        "ranks": (),
        "orthogonal": True,
        "biases": True,
    }
    return Recipe(**{**settings, **changes})


def by_tensor(made: Plan) -> dict[str, Composed]:
    return {each.tensor: each for each in made.composed}


# The arithmetic


def test_a_composed_weight_is_the_sum_of_the_paper():
    basis, coefficients = random(3, 2, 3, 3), random(5, 4 * 3, seed=1)
    weight = compose(basis, coefficients)
    assert weight.shape == (5, 8, 3, 3)
    for t, group, i in ((0, 0, 0), (4, 3, 1), (2, 1, 0)):
        expected = sum(coefficients[t, group * 3 + j] * basis[j, i] for j in range(3))
        torch.testing.assert_close(weight[t, group * 2 + i], expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("build", "image"),
    [
        (lambda stride: nn.Conv2d(8, 6, 3, stride, padding=1), (7, 9)),
        (lambda stride: nn.Conv2d(8, 6, (5, 1), stride, padding="valid", bias=False), (7, 9)),
        (lambda stride: nn.Conv2d(8, 6, 3, stride, padding=1, dilation=2, padding_mode="circular"), (7, 9)),
        (lambda stride: nn.Conv1d(8, 6, 3, stride, padding=1), (11,)),
        (lambda stride: nn.Conv3d(8, 6, 2, stride), (4, 5, 3)),
    ],
)
@pytest.mark.parametrize("leading", [(3,), ()])
def test_composed_and_two_step_agree(stride, build, image, leading):
    layer = build(stride).double()
    basis, coefficients = random(5, 2, *layer.kernel_size), random(6, 4 * 5, seed=1)
    x = random(*leading, 8, *image, seed=2)
    twice = two_step(layer, basis, coefficients, layer.bias, x)
    layer.weight.data = compose(basis, coefficients)
    torch.testing.assert_close(twice, layer(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("stride", [1, 2])
def test_both_forms_have_the_same_gradients(stride):
    layer = nn.Conv2d(8, 6, 3, stride, padding=1).double()
    basis, coefficients, x = random(5, 2, 3, 3), random(6, 4 * 5, seed=1), random(3, 8, 7, 9, seed=2)

    def gradients(run):
        leaves = [each.clone().requires_grad_() for each in (basis, coefficients, layer.bias.detach(), x)]
        output = run(*leaves)
        return torch.autograd.grad((output * random(*output.shape, seed=3)).sum(), leaves)

    twice = gradients(lambda v, u, bias, x: two_step(layer, v, u, bias, x))
    once = gradients(lambda v, u, bias, x: F.conv2d(x, compose(v, u), bias, stride, padding=1))
    for ours, expected in zip(twice, once, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("leading", [(3,), (3, 4), ()])
def test_both_forms_of_a_linear_layer_agree(leading):
    layer = nn.Linear(8, 6).double()
    basis, coefficients, x = random(3, 2), random(6, 4 * 3, seed=1), random(*leading, 8, seed=2)
    twice = two_step(layer, basis, coefficients, layer.bias, x)
    layer.weight.data = compose(basis, coefficients)
    torch.testing.assert_close(twice, layer(x), rtol=0, atol=1e-10)


def test_the_layout_of_the_basis_is_that_of_the_weight():
    basis, coefficients = random(5, 2, 3, 3), random(6, 20)
    last = compose(basis.contiguous(memory_format=torch.channels_last), coefficients)
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, compose(basis, coefficients))


def test_the_regulariser_is_zero_for_orthonormal_rows():
    basis = torch.eye(18, dtype=torch.float64)[:5].reshape(5, 2, 3, 3)
    assert orthogonality(basis, "mean") == 0
    assert orthogonality(basis, "norm") == 0
    assert torch.equal(gram(basis), torch.eye(5, dtype=torch.float64))


@pytest.mark.parametrize(("penalty", "divisor"), [("mean", 25), ("norm", 1)])
def test_the_regularisers_gradient_is_the_closed_form(penalty, divisor):
    basis = random(5, 2, 3, 3).requires_grad_()
    orthogonality(basis, penalty).backward()
    rows = basis.detach().reshape(5, -1)
    expected = 4 * (rows @ rows.T - torch.eye(5, dtype=torch.float64)) @ rows / divisor
    torch.testing.assert_close(basis.grad.reshape(5, -1), expected, rtol=0, atol=1e-12)


# Where training starts


def test_the_first_basis_is_orthonormal_and_the_composed_weight_has_the_scale_of_a_fresh_one():
    torch.manual_seed(0)
    weight = nn.Conv2d(64, 128, 3).weight.detach()
    basis = principal_basis(weight, 8, 32)
    assert basis.shape == (32, 8, 3, 3)
    torch.testing.assert_close(gram(basis), torch.eye(32), rtol=0, atol=1e-6)
    for inputs in (16, 64):
        narrow = weight[:32, :inputs]
        composed = compose(basis, fitted_coefficients(narrow, basis, 64))
        fresh = (3 * inputs * 9) ** -0.5  # the deviation with which PyTorch draws a layer of so many inputs
        assert composed.std().item() == pytest.approx(fresh, rel=0.05)


def test_a_weight_in_the_span_of_its_basis_comes_back():
    """So a pretrained network of low rank starts as it is."""
    weight = compose(random(4, 2, 3, 3), random(6, 4 * 4, seed=1))
    basis = principal_basis(weight, 2, 4)
    torch.testing.assert_close(
        compose(basis, fitted_coefficients(weight, basis, 8)), weight, rtol=0, atol=1e-12
    )


def test_more_vectors_than_dimensions_still_hold_the_weight():
    weight = random(6, 8)
    basis = principal_basis(weight, 2, 5)
    assert basis.shape == (5, 2)
    torch.testing.assert_close(basis.norm(dim=1), torch.ones(5, dtype=torch.float64))
    torch.testing.assert_close(
        compose(basis, fitted_coefficients(weight, basis, 8)), weight, rtol=0, atol=1e-12
    )


def test_a_weight_of_zeros_starts_at_zero():
    basis = principal_basis(random(6, 8), 2, 2)
    assert not fitted_coefficients(torch.zeros(6, 8, dtype=torch.float64), basis, 8).any()


# Plans


def image_model(name: str, shape: tuple[int, ...], keep: tuple[str, ...] = (), **options):
    module = build_model(name, input_shape=shape, num_classes=10, **options)
    return elastic(module, (torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long)), keep=keep)


def test_the_papers_rule_on_a_residual_network():
    model = image_model("resnet18", (3, 8, 8))
    found = by_tensor(plan(model, recipe()))
    assert len(found) == 16  # all 3 x 3 convolutions but the stem; no shortcut, no classifier
    assert all("conv" in tensor for tensor in found)
    first, last = found["stages.1.0.conv1.weight"], found["stages.3.1.conv2.weight"]
    assert (first.shape, first.positions) == ((32, 8, 3, 3), 16)
    assert (last.shape, last.positions) == ((128, 64, 3, 3), 1)


def test_r1_divides_the_inputs_of_every_width():
    model = image_model("cnn", (1, 8, 8), channels=(24, 40))
    third = recipe(widths=(Fraction(1, 3), Fraction(1, 2), Fraction(1)), input_share=Fraction(1, 2))
    (each,) = plan(model, third).composed
    assert each.fragment == 4  # of 8, 12 and 24 inputs, and at most 12


def test_recurrent_layers_are_composed_with_all_their_gates():
    module = build_model("char-lstm", input_shape=(6,), num_classes=10, hidden=32, predict="every")
    model = elastic(module, (torch.zeros(2, 6, dtype=torch.long), torch.zeros(2, 6, dtype=torch.long)))
    found = by_tensor(plan(model, recipe()))
    # The embedding has 8 columns: R1 = 1, and a single basis vector would share nothing.
    assert set(found) == {"lstm1.weight_hh_l0", "lstm2.weight_ih_l0", "lstm2.weight_hh_l0"}
    assert found["lstm2.weight_hh_l0"].shape == (
        4,
        4,
    )  # 25 % of 128 rows would be 32: four fit into four dimensions
    assert found["lstm2.weight_hh_l0"].positions is None


def test_the_cheaper_form_depends_on_the_width():
    model = image_model("flanc-cnn", (1, 28, 28), keep=("features.0",))
    each = by_tensor(plan(model, recipe()))["features.1.weight"]
    assert each.macs("two_step", 128, 64, 32) == 784 * (64 * 32 * 9 + 128 * 8 * 32)
    assert each.macs("composed", 128, 64, 32) == 784 * 128 * 64 * 9 + 128 * 64 * 9 * 32 // 32
    assert (each.cheaper(128, 64, 32), each.cheaper(32, 64, 32)) == ("two_step", "composed")


def test_ranks_of_single_weights():
    model = cnn_model()
    assert by_tensor(plan(model, recipe(ranks=(("4.weight", (1, 5)),))))["4.weight"].shape == (5, 1, 3, 3)
    with pytest.raises(FedtailorError, match="no layer of this model can be composed"):
        plan(model, recipe(ranks=(("4.weight", (0, 0)),)))
    named = plan(model, recipe(ranks=(("8.weight", (4, 2)), ("4.weight", (0, 0)))))
    assert list(by_tensor(named)) == ["8.weight"]  # a classifier, because it was named


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ((2, 3), r"method\.ranks\.4\.weight = \[2, 3\]: expected an R1 that divides 1,"),
        ((0, 3), "expected an R1 that divides 1"),
        ((1, 0), "expected an R2 from 1 to 24, the number of fragments"),
        ((1, 25), "expected an R2 from 1 to 24"),
        ((1, 10), r"expected an R2 of at most 9 .* method\.regulariser = 'off'"),
    ],
)
def test_ranks_that_cannot_be_are_refused(ranks, problem):
    with pytest.raises(FedtailorError, match=problem):
        plan(cnn_model(), recipe(ranks=(("4.weight", ranks),)))


def test_without_the_regulariser_a_basis_may_have_dependent_vectors():
    made = plan(cnn_model(), recipe(ranks=(("4.weight", (1, 10)),), orthogonal=False))
    assert made.composed[0].bases == 10


def test_unknown_weights_and_models_without_a_middle_are_refused():
    with pytest.raises(FedtailorError, match="unknown weight that can be composed '5.weight'"):
        plan(cnn_model(), recipe(ranks=(("5.weight", (1, 2)),)))
    with pytest.raises(FedtailorError, match="no layer of this model can be composed"):
        plan(mlp_model(), recipe())


def test_planning_leaves_the_model_as_it_is_and_is_done_once():
    model = cnn_model()
    before = {name: bits(value) for name, value in model.weights().items()}
    first = plan(model, recipe())
    assert plan(model, recipe()) is first
    assert {name: bits(value) for name, value in model.weights().items()} == before
    assert first.absent == ()
    assert plan(model, recipe(biases=False)).absent == ("4.bias",)
    assert set(first.private) == set(model.weights()) - {"4.weight"}
