"""Tasks by name, in Python and in a config: what is minimised, what is reported, which targets are refused."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fedtailor
from fedtailor import FederatedData, FedtailorError, Objective
from fedtailor.config import make_config, to_toml
from fedtailor.data.batches import Examples, target_of
from fedtailor.data.sources import looks_like_quantity
from fedtailor.objective import OWN, TASKS
from fedtailor.objective.losses import binary_cross_entropy, distillation_loss, squared_error
from fedtailor.objective.tasks import told_by_shapes
from fedtailor.run.interface import run_config
from fedtailor.run.setup import prepare_config
from fedtailor.seeds import Seeds

LABELS, INPUTS = 5, 6
QUICK: dict[str, Any] = {"rounds": 4, "clients_per_round": 4, "evaluate_every": 4, "engine": {"workers": 0}}


def network(outputs: int = LABELS) -> nn.Module:
    with Seeds(0).scope("network"):
        return nn.Sequential(nn.Linear(INPUTS, 24), nn.ReLU(), nn.Linear(24, outputs))


def problem() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(240, INPUTS, generator=generator)
    return x, x @ torch.randn(INPUTS, LABELS, generator=generator)


def data_of(y: Tensor, **settings: Any) -> FederatedData:
    x, _ = problem()
    return FederatedData.from_examples(Examples.of(x, y), Examples.of(x, y), clients=4, **settings)


def bce(output: Tensor, batch: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(output, target_of(batch).float())


def right_of(label: int) -> Any:
    return lambda output, batch: float(((output[:, label] > 0) == (batch[-1][:, label] > 0)).double().mean())


@pytest.mark.parametrize(
    ("kind", "task"), [(torch.int64, None), (torch.float32, None), (torch.bool, "multi-label")]
)
def test_every_output_of_a_multi_hot_task_learns_under_heterofl(kind, task):
    """Targets of 0 and 1 are no classes 0 and 1, of whatever type: outputs 2 and up learnt nothing, floats failed."""
    _, hidden = problem()
    metrics = {f"right {label}": right_of(label) for label in range(LABELS)}
    run = fedtailor.train(
        network(), data_of((hidden > 0).to(kind)), "equal", "heterofl", task=task, loss=bce, metrics=metrics,
        training={"lr": 3.0, "batch_size": 12}, **QUICK,
    )  # fmt: skip
    (tier,) = run.tiers.values()
    assert min(tier[name] for name in metrics) > 0.8


def test_a_regression_trains_with_the_default_method():
    _, hidden = problem()
    run = fedtailor.train(
        network(1), data_of(hidden[:, 0]), "uniform-2", task="regression", training={"lr": 0.3}, **QUICK
    )
    assert list(run.tiers["1"]) == ["loss", "absolute error"]
    assert run.tiers["1"]["absolute error"] < 0.8 * float(hidden[:, 0].abs().mean())
    assert run.data.num_classes == 0


def test_whole_numbers_may_be_values():
    """Ages are no classes: neither the number of outputs nor the split may take them for such."""
    _, hidden = problem()
    ages = (hidden[:, 0] * 10).round().long()
    run = fedtailor.train(
        network(1), data_of(ages, num_classes=0), "equal", task="regression", training={"lr": 1e-3}, **QUICK
    )
    assert run.data.num_classes == 0
    with pytest.raises(
        FedtailorError, match=r"label -\d+ of example .* num_classes = 0 says that they are no classes"
    ):
        data_of(ages)


def test_of_a_loss_of_ones_own_and_outputs_of_unknown_meaning_the_loss_is_reported():
    _, hidden = problem()
    run = fedtailor.train(network(1), data_of(hidden[:, 0]), "equal", "fedavg", loss=squared_error, **QUICK)
    assert list(run.tiers["1"]) == ["loss"]


@pytest.mark.parametrize(
    ("outputs", "targets", "task"),
    [
        ((4, 3), torch.zeros(4, dtype=torch.int64), "classification"),
        ((4, 5, 3), torch.zeros(4, 5, dtype=torch.int64), "token classification"),
        ((4, 3), torch.zeros(4, 3, dtype=torch.int64), "own"),  # multi-hot
        ((4, 3), torch.zeros(4, 3), "own"),
        ((4, 1), torch.zeros(4, dtype=torch.int64), "own"),  # one output: a number, not one class
        ((4, 3), torch.zeros(4, 1, dtype=torch.int64), "own"),
    ],
)
def test_shapes_tell_classes_from_everything_else(outputs, targets, task):
    assert told_by_shapes(torch.zeros(outputs), targets) is (OWN if task == "own" else TASKS[task])


def classes(y: Tensor) -> Tensor:
    return y.argmax(1)


REFUSED = [
    ({}, lambda y: F.one_hot(classes(y), 5), r"classes, pass y.argmax\(1\), as .* one-hot; if not, .*'multi-label'"),
    ({}, lambda y: F.one_hot(classes(y), 5).float(), r"meant as classes, pass y.argmax\(1\)"),
    ({"task": "classification"}, lambda y: F.one_hot(classes(y), 5), r"per example \(pass y.argmax\(1\)"),
    ({}, lambda y: classes(y)[:, None], r"as classes, leave out the last axis, y.squeeze\(1\); if not"),
    ({}, lambda y: classes(y)[:, None].float(), r"leave out the last axis, y.squeeze\(1\).long\(\)"),
    ({}, lambda y: classes(y).float(), r"meant as classes, pass whole numbers, y.long\(\)"),
    ({"task": "classification"}, lambda y: classes(y).float(), r"whole numbers, the classes; .*y.long\(\)"),
    ({}, lambda y: classes(y) + 1, r"5 outputs, but .* go up to 5; they start at 1: subtract 1 \(y - 1\)"),
    ({}, lambda y: classes(y) * 2, "go up to 8; expected at least 9 outputs, or labels from 0 to 4"),
    ({}, lambda y: (y[:, 0].abs() * 1e4).long(), r"look like a quantity \(2\d\d .* objective.task = 'regression'"),
    ({}, lambda y: y, r"own data \(5 float32 per example\) are no classes .* objective.task = 'regression'"),
    ({}, lambda y: (y > 0).long(), r"\(5 int64 per example\) .* objective.task = 'multi-label'"),
    ({"task": "classification"}, lambda y: y, "one class per example .token classification or multi-label"),
    ({"task": "classification"}, lambda y: y[:, 0], "are of type float32: expected whole numbers, the classes"),
    ({"task": "classification"}, lambda y: (y[:, :1] > 0).long(), "leave out the last axis"),
    ({"task": "multi-label"}, lambda y: (y > 0).long() * 2, r"hold 2 \(example 0\): expected 0 or 1 for every label"),
    ({"task": "multi-label"}, lambda y: (y[:, :3] > 0).long(), r"shape \(3,\) and the outputs \(5,\): expected 0 or 1"),
    ({"task": "regression"}, lambda y: y.log(), r"hold nan \(example \d+\): expected finite numbers"),
    ({"task": "regression"}, lambda y: y[:, 0], r"shape \(\) and the outputs \(5,\): expected a number for every"),
    ({"task": "next-token"}, lambda y: y, "are of type float32"),
    ({"task": "token classification"}, lambda y: (y[:, 0] > 0).long(), "expected a class for every position"),
    ({"task": "regresion"}, lambda y: y, "unknown task .objective.task. 'regresion': did you mean 'regression'"),
    ({"task": "own"}, lambda y: y, "expected a loss of your own beside it"),
    ({"task": "regression", "metrics": ["accuracy"]}, lambda y: y, "unknown metric of regression .* 'accuracy'"),
    ({"loss": bce, "method": "fjord"}, lambda y: y, "nothing says what the outputs mean: set objective.task"),
    (
        {"task": "regression", "method": {"name": "fedcs", "judge": "accuracy"}}, lambda y: y,
        "method.judge = 'accuracy': expected loss, as the metrics are absolute error",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "targets", "words"), REFUSED)
def test_what_cannot_be_learnt_is_refused_before_the_run(settings, targets, words):
    started: list[Any] = []
    method = settings.get("method", "fedavg")
    if isinstance(method, dict):
        method = make_config({"method": method, "rounds": 4}).built_method
    with pytest.raises(FedtailorError, match=words):
        fedtailor.train(
            network(), data_of(targets(problem()[1])), "equal",
            **{**QUICK, **settings, "method": method}, on_round=started.append,
        )  # fmt: skip
    assert started == []


def price() -> Tensor:
    return (problem()[1][:, 0].abs() * 1e5).long()


def test_whole_numbers_that_are_clearly_no_classes_get_no_output_each():
    x = problem()[0]
    with (
        pytest.warns(UserWarning, match="look like a quantity"),
        pytest.raises(
            FedtailorError, match="set objective.task = 'regression' .* 'classification' takes them"
        ),
    ):
        fedtailor.train("mlp", (x, price()), "equal", **QUICK)
    with pytest.warns(
        UserWarning, match=r"mean \d+,\d+ and deviation \d+,\d+: networks .* about 1; scale them"
    ):
        run = fedtailor.train("mlp", (x, price()), "equal", task="regression", **{**QUICK, "rounds": 1})
    assert run.data.num_classes == 0
    assert not any("classes" in sentence for sentence in run.data.findings)


@pytest.mark.parametrize(
    ("values", "quantity"),
    [
        (torch.arange(240) % 10, False),
        (torch.arange(240) * 37, True),  # every one once, with gaps
        (torch.arange(240), False),  # one example of each class
        (1980 + torch.arange(240) % 40, True),  # years
        (torch.arange(240) % 5 * 100, False),  # few values
        (torch.rand(240), False),
    ],
)
def test_quantities_are_told_from_classes(values, quantity):
    assert bool(looks_like_quantity(values)) == quantity


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (
            torch.rand(40, 8, 8, 3),
            r"^'0' \(Conv2d\) fails .*The inputs are \(8, 8, 3\): channels last\? x.permute",
        ),
        (torch.rand(40, 8, 8), r"The inputs are \(8, 8\): no axis of channels\? x\[:, None\]"),
        (torch.zeros(40, 3, 8, 8, dtype=torch.uint8), r"bytes \(uint8\): divide them by 255, .*preparation="),
    ],
)
def test_inputs_that_a_network_fails_on_get_a_guess(x, words):
    conv = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    with pytest.raises(FedtailorError, match=words):
        fedtailor.train(conv, Examples.of(x, torch.arange(40) % 3), "equal", **QUICK)


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of data, and a module of the user's own in the folder that the command is called in."""
    x, hidden = (part.numpy() for part in problem())
    np.savez(tmp_path / "own.npz", x_train=x, y_train=hidden[:, :2], x_test=x, y_test=hidden[:, :2])
    (tmp_path / "own_losses.py").write_text(
        "def halved(output, batch):\n    return ((output - batch[-1]) ** 2).mean() / 2\n"
        "def worst(output, batch):\n    return float((output - batch[-1]).abs().max())\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def config_of(objective: dict[str, Any], **more: Any) -> dict[str, Any]:
    data = {"dataset": "./own.npz", "clients": 4}
    return {
        "rounds": 1, "clients_per_round": 4, "data": data, "model": {"name": "mlp", "hidden": [8]},
        "fleet": {"name": "uniform-2"}, "objective": objective, "engine": {"workers": 0}, **more,
    }  # fmt: skip


def test_a_task_a_loss_and_metrics_in_a_config(table):
    objective = {
        "task": "regression",
        "loss": "own_losses:halved",
        "metrics": ["own_losses:worst", "absolute error"],
    }
    config = make_config(config_of(objective))
    assert make_config(tomllib.loads(to_toml(config))).objective == config.objective
    run = run_config(config, table / "run")
    assert list(run.tiers["1"]) == ["loss", "worst", "absolute error"]
    usual = prepare_config(make_config(config_of({"task": "regression"})))
    assert usual.model.objective.loss is squared_error
    assert (usual.data.num_classes, usual.model.learning_task.name) == (0, "regression")


@pytest.mark.parametrize(
    ("objective", "words"),
    [
        ({"task": "ranking"}, "unknown task .objective.task. 'ranking'"),
        ({"tsk": "regression"}, r"unknown key in \[objective\] 'tsk': did you mean 'task'"),
        ({"task": 3}, "objective.task = 3: input should be a valid string"),
        ({"loss": "halved"}, "objective.loss = 'halved': expected an import path such as my_module:my_loss"),
        ({"task": "regression", "loss": "own_losses:gone"}, "loss 'own_losses:gone': module .* has no 'gone'"),
        ({"task": "regression", "loss": "own_losse:halved"}, "there is no module 'own_losse'; it must be"),
        ({"task": "regression", "loss": "own_losses:number"}, "is of type int: expected a function"),
        ({"task": "own"}, "objective.task = 'own': expected objective.loss beside it"),
        ({"task": "multi-label", "metrics": ["f1"]}, "unknown metric of multi-label .objective.metrics. 'f1'"),
        ({}, r"own.npz \(2 float32 per example\) are no classes of the model's outputs"),
    ],
)  # fmt: skip
def test_an_objective_that_cannot_be_is_refused_with_nothing_written(table, objective, words):
    with pytest.raises(FedtailorError, match=words):
        run_config(make_config(config_of(objective)), table / "run")
    assert not (table / "run").exists()


def test_a_split_by_classes_of_a_task_without_classes_is_refused(table):
    config = config_of({"task": "regression"})
    config["data"] |= {"partition": "dirichlet"}
    with pytest.raises(
        FedtailorError, match="expected one class per example, but the targets are no classes"
    ):
        prepare_config(make_config(config))


# Losses and what networks learn from each other


def batch_of(target: Tensor) -> Any:
    return torch.empty(0), target


def test_losses_are_those_of_pytorch():
    generator = torch.Generator().manual_seed(0)
    output = torch.randn(6, 3, generator=generator)
    labels = (torch.randn(6, 3, generator=generator) > 0).long()
    assert torch.equal(
        binary_cross_entropy(output, batch_of(labels)),
        F.binary_cross_entropy_with_logits(output, labels.float()),
    )
    assert torch.equal(squared_error(output, batch_of(labels)), F.mse_loss(output, labels.float()))
    one = output[:, :1]  # (N, 1) against (N,) is no table of N x N
    assert torch.equal(
        squared_error(one, batch_of(labels[:, 0])), F.mse_loss(one[:, 0], labels[:, 0].float())
    )


def test_a_student_that_answers_as_its_teacher_has_nothing_to_learn():
    generator = torch.Generator().manual_seed(0)
    teacher = torch.randn(4, 3, generator=generator, requires_grad=True)
    for task in TASKS.values():
        student = teacher.detach().clone().requires_grad_()
        target = torch.zeros(4, dtype=torch.int64)
        task.taught(student, teacher, batch_of(target), 2.0).backward()
        assert student.grad.abs().max() < 1e-6
        other = (teacher.detach() + 1 - torch.eye(4, 3)).requires_grad_()
        task.taught(other, teacher, batch_of(target), 2.0).backward()
        assert other.grad.abs().max() > 1e-3
        assert teacher.grad is None


def test_positions_without_a_label_are_in_no_loss_no_metric_and_teach_nothing():
    generator = torch.Generator().manual_seed(0)
    output, teacher = (torch.randn(2, 4, 3, generator=generator) for _ in range(2))
    labels = torch.tensor([[0, 1, -100, -100], [2, 0, 1, -100]])
    held = labels != -100
    objective = Objective.of("token classification")
    batch, short = batch_of(labels), batch_of(labels[held])
    assert torch.equal(objective.loss(output, batch), objective.loss(output[held], short))
    assert objective.metrics["accuracy"](output, batch) == objective.metrics["accuracy"](output[held], short)
    expected = distillation_loss(output[held], teacher[held], 2.0)
    assert torch.equal(objective.task.taught(output, teacher, batch, 2.0), expected)
