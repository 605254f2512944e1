"""Perplexity and F1 over all examples, however they are cut into batches; and names that metrics have elsewhere."""

from __future__ import annotations

import math
import pickle

import pytest
import torch
from sklearn.metrics import f1_score
from torch.nn import functional as F

from fedtailor.client.evaluate import mean_score, measured
from fedtailor.data.batches import batch_size
from fedtailor.errors import FedtailorError
from fedtailor.objective import TASKS, Objective
from fedtailor.record import less_is_better

GENERATOR = torch.Generator().manual_seed(0)
SCORES = torch.randn(10, 6, 4, generator=GENERATOR)
CLASSES = torch.randint(4, (10, 6), generator=GENERATOR)
CLASSES[3:, 2:] = -100  # most texts are short
CLASSES[8, 1] = -100


def over_batches(
    objective: Objective, output: torch.Tensor, target: torch.Tensor, *sizes: int
) -> dict[str, float]:
    """As an evaluation in batches of these sizes has it."""
    scores = []
    for answers, targets in zip(output.split(sizes), target.split(sizes), strict=True):
        batch = {"input_ids": targets, "labels": targets}
        values = {"loss": 0.0, **measured(objective.metrics, answers, batch)}
        scores.append((batch_size(batch), values))
    return mean_score(scores, objective.metrics)


@pytest.mark.parametrize("sizes", [(10,), (3, 7), (1, 8, 1)])
def test_perplexity_counts_every_labelled_position_alike(sizes):
    found = over_batches(
        Objective.of("token classification", metrics=["perplexity"]), SCORES, CLASSES, *sizes
    )
    expected = math.exp(F.cross_entropy(SCORES.reshape(-1, 4).double(), CLASSES.reshape(-1)).item())
    assert found == {"loss": 0.0, "perplexity": pytest.approx(expected, rel=1e-12)}


def test_perplexity_of_a_text_that_is_its_own_target_is_that_of_the_next_token():
    found = over_batches(Objective.of("causal", metrics=["accuracy", "perplexity"]), SCORES, CLASSES, 4, 6)
    scores, next_ones = SCORES[:, :-1].reshape(-1, 4).double(), CLASSES[:, 1:].reshape(-1)
    assert list(found) == ["loss", "accuracy", "perplexity"]
    assert found["perplexity"] == pytest.approx(
        math.exp(F.cross_entropy(scores, next_ones).item()), rel=1e-12
    )


@pytest.mark.parametrize("sizes", [(10,), (3, 7)])
def test_f1_of_classes_is_that_of_scikit_learn(sizes):
    found = over_batches(
        Objective.of("token classification", metrics=["F1", "accuracy"]), SCORES, CLASSES, *sizes
    )
    labelled = CLASSES != -100
    expected = f1_score(CLASSES[labelled], SCORES.argmax(-1)[labelled], average="macro")
    assert list(found) == ["loss", "macro F1", "accuracy"]
    assert found["macro F1"] == pytest.approx(expected, rel=1e-12)


def test_f1_of_labels_is_that_of_scikit_learn():
    answers = torch.randn(9, 3, generator=GENERATOR)
    labels = torch.randint(2, (9, 3), generator=GENERATOR)
    found = over_batches(Objective.of("multi-label", metrics=["macro F1", "micro F1"]), answers, labels, 2, 7)
    for average in ("macro", "micro"):
        expected = f1_score(labels, answers > 0, average=average)
        assert found[f"{average} F1"] == pytest.approx(expected, rel=1e-12)


def test_names_that_are_used_elsewhere_mean_the_same():
    assert list(Objective.of("regression", metrics=["MAE"]).metrics) == ["absolute error"]
    assert less_is_better("perplexity")
    assert not less_is_better("macro F1")
    with pytest.raises(FedtailorError, match=r"unknown metric of regression \(objective.metrics\) 'F1'"):
        Objective.of("regression", metrics=["F1"])


def test_every_metric_by_name_reaches_worker_processes():
    for task in TASKS.values():
        for metric in task.metrics.values():
            assert pickle.loads(pickle.dumps(metric)) == metric


def test_a_huge_loss_is_a_huge_perplexity_and_no_error():
    wrong = torch.tensor([[[0.0, 1e6]]])
    found = over_batches(Objective.of("next-token", metrics=["perplexity"]), wrong, torch.tensor([[0]]), 1)
    assert math.isfinite(found["perplexity"])
