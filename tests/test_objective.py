from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import cross_entropy as torch_cross_entropy

from fedtailor.methods.heterofl import mask_absent_labels
from fedtailor.objective import Objective, accuracy, cross_entropy


@st.composite
def masked_problems(draw):
    classes = draw(st.integers(1, 12))
    owned = sorted(draw(st.sets(st.integers(0, classes - 1), min_size=1)))
    entries = st.floats(-20, 20)
    count = draw(st.integers(1, 4))
    logits = [draw(st.lists(entries, min_size=classes, max_size=classes)) for _ in range(count)]
    labels = [draw(st.sampled_from(owned)) for _ in range(count)]
    return torch.tensor(logits, dtype=torch.float64), torch.tensor(labels), owned


def presence(owned: list[int], classes: int) -> torch.Tensor:
    present = torch.zeros(classes, dtype=torch.bool)
    present[owned] = True
    return present


@given(masked_problems())
def test_masked_cross_entropy_is_the_formula(problem):
    """-z_y + log(sum over owned labels of exp(z_c) + the number of absent ones)."""
    logits, labels, owned = problem
    present = presence(owned, logits.shape[1])
    loss = cross_entropy(mask_absent_labels(logits, present), (torch.empty(0), labels))
    absent = logits.shape[1] - len(owned)
    terms = [
        math.log(math.fsum(math.exp(row[c] - row[label]) for c in owned) + absent * math.exp(-row[label]))
        for row, label in zip(logits.tolist(), labels.tolist(), strict=True)
    ]  # with z_y inside, where nothing cancels
    assert loss.item() == pytest.approx(math.fsum(terms) / len(terms), rel=1e-12, abs=1e-12)


@given(masked_problems())
def test_absent_logits_get_no_gradient(problem):
    logits, labels, owned = problem
    present = presence(owned, logits.shape[1])
    logits.requires_grad_()
    cross_entropy(mask_absent_labels(logits, present), (torch.empty(0), labels)).backward()
    assert torch.equal(logits.grad[:, ~present], torch.zeros_like(logits.grad[:, ~present]))
    if len(owned) < logits.shape[1] or len(owned) > 1:
        assert logits.grad[:, present].abs().max() > 0


def test_absent_rows_of_the_classifier_get_no_gradient():
    torch.manual_seed(0)
    layer = nn.Linear(6, 5).double()
    present = presence([1, 4], 5)
    labels = torch.tensor([1, 4, 4])
    cross_entropy(
        mask_absent_labels(layer(torch.randn(3, 6).double()), present), (torch.empty(0), labels)
    ).backward()
    for gradient in (layer.weight.grad, layer.bias.grad):
        assert torch.equal(gradient[~present], torch.zeros_like(gradient[~present]))
        assert (gradient[present] != 0).all()


def test_zero_is_not_minus_infinity():
    """Two ways of masking with different losses; this is the paper's code."""
    logits, labels, present = torch.zeros(1, 4).double(), torch.tensor([0]), presence([0], 4)
    masked = cross_entropy(mask_absent_labels(logits, present), (torch.empty(0), labels))
    assert masked.item() == pytest.approx(math.log(4), abs=1e-12)


def test_with_all_labels_owned_nothing_changes():
    logits = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mask_absent_labels(logits, presence([0, 1, 2, 3], 4)), logits)


def test_masks_on_sequences_are_masks_of_the_last_axis():
    logits = torch.ones(2, 3, 4)
    assert mask_absent_labels(logits, presence([1, 2], 4)).sum(dim=(0, 1)).tolist() == [0, 6, 6, 0]


@pytest.mark.parametrize(
    "batch", [lambda y: (torch.empty(0), y), lambda y: {"x": torch.empty(0), "label": y}]
)
def test_cross_entropy_of_classes_and_of_sequences(batch):
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(6, 4, generator=generator), torch.tensor([0, 1, 2, 3, 0, 1])
    expected = torch_cross_entropy(logits, labels)
    assert torch.equal(cross_entropy(logits, batch(labels)), expected)
    assert torch.equal(cross_entropy(logits.reshape(2, 3, 4), batch(labels.reshape(2, 3))), expected)


def test_accuracy_is_the_share_of_right_answers():
    logits = torch.eye(4)
    assert accuracy(logits, (torch.empty(0), torch.tensor([0, 1, 2, 0]))) == 0.75
    assert accuracy(logits.reshape(2, 2, 4), (torch.empty(0), torch.tensor([[0, 1], [0, 0]]))) == 0.5


def test_the_default_objective():
    objective = Objective()
    assert objective.loss is cross_entropy
    assert objective.metrics == {"accuracy": accuracy}


@pytest.mark.parametrize("shapes", [((6, 1), (6,)), ((6,), (6, 1)), ((6, 1), (6, 1)), ((6,), (6,))], ids=str)
def test_single_numbers_never_meet_all_with_all(shapes):
    """PyTorch's own losses stretch (N, 1) and (N,) to (N, N), and a network learns the mean of all targets."""
    output, target = (torch.arange(6.0).view(shape) for shape in shapes)
    for objective in (Objective.of("regression"), Objective.of("regression", loss=nn.HuberLoss())):
        assert float(objective.loss(output, (torch.zeros(6, 2), target))) == 0
