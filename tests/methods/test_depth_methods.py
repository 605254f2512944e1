"""DepthFL, ScaleFL and NeFL: who holds what, what a step minimises, and FedAvg where there is one end."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, meets
from fedtailor.elasticity.cutting.depth import ending
from fedtailor.elasticity.cutting.names import plain, tag_of, untagged
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.messages import ServerState
from fedtailor.method import Method
from fedtailor.methods.depth.branches import branch_ends
from fedtailor.methods.depth.depthfl import DepthFL
from fedtailor.methods.depth.levels import LevelMethod
from fedtailor.methods.depth.nefl import NeFL
from fedtailor.methods.depth.scalefl import ScaleFL
from fedtailor.methods.fedavg import FedAvg
from fedtailor.models.registry import build_model
from helpers import client, cnn_model, deep_model, differing, image_data, images, run, task_for

LOCAL = LocalTraining(lr=0.05, momentum=0.9, weight_decay=0.01, batch_size=4, rounds=2)
BATCH = images(6, seed=5).take(torch.arange(6))
METHODS: dict[type[LevelMethod], dict[str, Any]] = {DepthFL: {"ramp": 0}, ScaleFL: {"labels_alone": 0}}

both = pytest.mark.parametrize("kind", METHODS)


def method_of(kind: type[LevelMethod], **settings: Any) -> LevelMethod:
    return kind(**{"local": LOCAL, **METHODS[kind], **settings})


@both
def test_with_one_end_and_everyone_at_full_size_it_is_fedavg_bit_for_bit(kind):
    data, model = image_data((6, 5, 7)), cnn_model()
    settings: dict[str, Any] = {"local": LOCAL, "norm": "averaged", "weighting": "samples"}
    fleet = Fleet((Tier("all", Budget(width=1), Fraction(1)),))
    ours = run(kind(**settings), model, data, fleet, rounds=2).state.weights
    plain = run(FedAvg(**settings), model, data, fleet, rounds=2).state.weights
    assert differing(ours, plain) == set()
    assert differing(ours, model.weights()) != set()


def test_a_client_of_depthfl_holds_full_width_as_deep_as_it_can_with_all_exits_on_the_way():
    method, model = method_of(DepthFL), deep_model()
    state = ServerState(0, model.weights())
    held = method.assign(state, client(width=1), model, seeds=None).patch  # type: ignore[arg-type]
    assert set(held.values) == set(model.weights())
    middle = replace(client(), budget=Budget(depth=0.7))
    held = method.assign(state, middle, model, seeds=None).patch  # type: ignore[arg-type]
    blocks = {name.partition(".")[0] for name in held.values if not name.startswith("exits")}
    assert blocks == {"0", "1", "2", "3"}
    assert {name.split(".")[1] for name in held.values if name.startswith("exits")} == {"0", "1"}
    assert held.values["3.conv.weight"].shape == model.weights()["3.conv.weight"].shape
    run_by = method.cut_for(state, middle.budget, model)
    assert (run_by, run_by.tag) == (ending(prefix(model.groups, Fraction(1)), model.exits[1]), held.cut.tag)


@both
@pytest.mark.parametrize(
    "budget", [Budget(macs="60%"), Budget(params=500), Budget(width=0.5), Budget(depth="2/3")]
)
def test_it_gives_the_largest_level_that_a_budget_pays_for(kind, budget):
    method, model = method_of(kind), deep_model()
    levels = method.levels(model)
    chosen = levels.index(method.level(budget, model))
    for number, level in enumerate(levels):
        affordable = meets(model.costs, level.trained, budget)
        if budget.width is not None:
            most = model.cost(prefix(model.groups, Fraction(1, 2))).macs
            affordable = model.cost(level.trained).macs <= most
        if budget.depth is not None:
            affordable = (level.trained.depth or 1) <= Fraction(budget.depth)
        assert affordable == (number <= chosen)


@both
def test_a_device_that_nothing_fits_is_told_so(kind):
    with pytest.raises(
        TooSmallError, match=rf"no level of {kind.name} fits it; the smallest has \d+ parameters"
    ):
        method_of(kind).level(Budget(macs=100), deep_model())


@both
def test_what_lies_below_an_exit_is_merged_over_all_that_reach_it(kind):
    """Two shallow clients and a deep one: the mean of three below the first exit, the deep one's own above."""
    method, model = method_of(kind, norm="averaged", weighting="count"), deep_model()
    tiers = (
        Tier("small", Budget(depth="1/3"), Fraction(2, 3)),
        Tier("large", Budget(depth=1), Fraction(1, 3)),
    )
    data, answers = image_data((6, 6, 6)), []

    class Watching:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def run(self, tasks: Any) -> Any:
            for answer in self.inner.run(tasks):
                answers.append(answer)
                yield answer

    merged = run(method, model, data, Fleet(tiers), engine=Watching).state.weights
    deep = [each for each in answers if "7.weight" in each.patch.values]
    assert (len(answers), len(deep)) == (3, 1)
    stem = [each.patch.values["0.weight"] for each in answers]
    kept = min(value.shape[0] for value in stem)
    shared = torch.stack([value[:kept].double() for value in stem]).mean(0)
    torch.testing.assert_close(merged["0.weight"][:kept], shared.float(), rtol=0, atol=1e-7)
    assert torch.equal(merged["3.conv.weight"], deep[0].patch.values["3.conv.weight"])
    assert torch.equal(merged["exits.1.4.weight"], deep[0].patch.values["exits.1.4.weight"])


def answers_of(method: Method) -> tuple[list[torch.Tensor], torch.Tensor]:
    """What the three ends answer in training, and the loss of the method."""
    model = deep_model()
    task = replace(task_for(model), round=1)
    weights = {name: value for name, value in model.weights().items() if name not in model.statistics}
    output = method.forward(weights, task.patch.cut, BATCH, task, model)
    return output, method.loss([output], [weights], BATCH, task, model)


def teaching(student: torch.Tensor, teacher: torch.Tensor, temperature: float) -> torch.Tensor:
    target = (teacher / temperature).softmax(1)
    return -(target * (student / temperature).log_softmax(1)).sum(1).mean() * temperature**2


def test_the_loss_of_depthfl():
    (one, two, three), loss = answers_of(method_of(DepthFL, ramp=2))
    weight = torch.e ** (-5 / 4)  # half-way through the ramp
    expected = sum(F.cross_entropy(each, BATCH[1]) for each in (one, two, three))
    pairs = [(one, two), (one, three), (two, one), (two, three), (three, one), (three, two)]
    expected = expected + weight / 2 * sum(teaching(*pair, 1.0) for pair in pairs)
    torch.testing.assert_close(loss, expected)
    _, alone = answers_of(method_of(DepthFL, distillation=False))
    torch.testing.assert_close(alone, sum(F.cross_entropy(each, BATCH[1]) for each in (one, two, three)))


def test_the_loss_of_scalefl():
    (one, two, three), loss = answers_of(method_of(ScaleFL, gamma=0.5))
    first, second, last = (F.cross_entropy(each, BATCH[1]) for each in (one, two, three))
    first, second = first + 0.5 * teaching(one, three, 3.0), second + 0.5 * teaching(two, three, 3.0)
    torch.testing.assert_close(loss, (first + 2 * second + 3 * last) / 6)
    _, early = answers_of(method_of(ScaleFL, gamma=0.5, labels_alone=0.5))  # round 1 of 2
    first, second, last = (F.cross_entropy(each, BATCH[1]) for each in (one, two, three))
    torch.testing.assert_close(early, (first + 2 * second + 3 * last) / 6)


def test_the_table_of_scalefl():
    model = deep_model()
    levels = method_of(ScaleFL).levels(model)
    assert [(str(level.deployed.width), str(level.deployed.depth)) for level in levels] == [
        ("7/10", "1/3"), ("17/20", "2/3"), ("1", "1"),
    ]  # fmt: skip
    two = method_of(ScaleFL, level_widths=(0.5, 1), level_ends=(2, 3)).levels(model)
    assert [level.deployed.tag for level in two] == ["1/2x2/3", "1x1"]
    with pytest.raises(
        FedtailorError, match="method.level_widths = .*: expected 3 widths, one for each level"
    ):
        method_of(ScaleFL, level_widths=(0.5, 1), level_ends=(1, 2, 3)).levels(model)
    with pytest.raises(
        FedtailorError, match="method.level_ends = .*: expected 3 last, as many ends as the model has"
    ):
        method_of(ScaleFL, level_widths=(0.5, 1)).levels(model)
    with pytest.raises(FedtailorError, match="widths that rise to 1"):
        method_of(ScaleFL, level_widths=(1, 0.5))


def test_what_scalefl_deploys_is_what_it_trained():
    """A narrow piece with factors in training, and with the factors in its weights afterwards."""
    method, model = method_of(ScaleFL), deep_model()
    state = ServerState(0, model.weights())
    level = method.levels(model)[0]
    values = {
        n: v for n, v in model.cut(state.weights, level.deployed).values.items() if n not in model.statistics
    }
    task = replace(task_for(model), round=0)
    (trained,) = method.forward(values, level.deployed, BATCH, task, model)
    patch = method.as_deployed(state, model.cut(state.weights, level.deployed, set(values)), model)
    again = model.forward(patch.values, level.deployed, BATCH, mode="train")
    torch.testing.assert_close(again, trained)
    bare = model.forward(values, level.deployed, BATCH, mode="train")
    assert not torch.allclose(bare, trained)


# NeFL


NESTED: dict[str, Any] = {"level_widths": (0.5, 1), "level_depths": (0.5, 1)}


def untagged_as(weights: Any, tag: str) -> dict[str, torch.Tensor]:
    """What one sub-model runs on: its own norms under the module's names, the others' left out."""
    own = {untagged(name): value for name, value in weights.items() if tag_of(name) == tag}
    return {name: value for name, value in {**weights, **own}.items() if "@" not in name}


def test_nefl_with_one_sub_model_and_fixed_steps_is_fedavg_bit_for_bit():
    data, model = image_data((6, 5, 7)), cnn_model()
    fleet = Fleet((Tier("all", Budget(width=1), Fraction(1)),))
    settings: dict[str, Any] = {"local": LOCAL, "weighting": "samples"}
    nested = NeFL(**settings, level_widths=(1,), level_depths=(1,), learned_steps=False)
    ours = run(nested, model, data, fleet, rounds=2).state.weights
    theirs = run(FedAvg(**settings, norm="per_width"), model, data, fleet, rounds=2).state.weights
    assert differing(untagged_as(ours, "1"), untagged_as(theirs, "1")) == set()
    assert any(name.endswith("weight@1") for name in ours)


def test_sub_models_of_nefl_are_nested_and_keep_norms_and_steps_for_themselves():
    method, model = NeFL(local=LOCAL, **NESTED), deep_model()
    small, full = method.levels(model)
    assert full.trained.holds(small.trained)
    assert small.trained.depth == Fraction(2, 3)  # half of three blocks, rounded up
    assert (small.trained.tag, full.trained.tag) == ("1/2x2/3", "1")
    assert not {name for name in model.weights() if name.startswith(("4.", "exits."))} - small.trained.absent
    data, fleet = image_data((6, 6)), Fleet((Tier("small", Budget(width=0.5), Fraction(1)),))
    before = method.init(model).weights
    after = run(method, model, data, fleet, rounds=1).state.weights
    moved = differing(before, after)
    assert {name for name in moved if "norm" in name and "@" not in name} == set()
    assert {tag_of(name) for name in moved if "@" in name} == {"1/2x2/3"}
    steps = {name: float(value) for name, value in after.items() if name.endswith("@step@1/2x2/3")}
    assert steps.keys() == {"1.norm.weight@step@1/2x2/3", "3.norm.weight@step@1/2x2/3"}
    assert all(value not in (0.0, 1.0) for value in steps.values())
    assert "3.conv.weight" in moved
    assert "4.conv.weight" not in moved


def test_what_nefl_deploys_is_what_it_trained():
    method, model, data = NeFL(local=LOCAL, **NESTED), deep_model(), image_data((6, 6))
    fleet = Fleet((Tier("small", Budget(width=0.5), Fraction(1)),))
    state = run(method, model, data, fleet, rounds=2).state
    task = method.assign(state, client(width=0.5), model, seeds=None)  # type: ignore[arg-type]
    weights = {
        name: value for name, value in task.patch.values.items() if plain(name) not in model.statistics
    }
    trained = method.forward(weights, task.patch.cut, BATCH, task, model)
    (patch,) = method.deploy(state, Budget(width=0.5), model).patches
    values = {name: value for name, value in patch.values.items() if name not in model.statistics}
    torch.testing.assert_close(model.forward(values, patch.cut, BATCH, mode="train"), trained)
    built = model.build(patch).eval()
    torch.testing.assert_close(built(BATCH[0]), model.forward(patch.values, patch.cut, BATCH))
    assert not any(name.startswith("4.") for name, _ in built.named_parameters())


def test_branches_end_where_their_sum_begins():
    sizes = {"widths": (4, 4, 4, 4), "stem": 4}
    resnet = build_model("resnet18", input_shape=(1, 8, 8), num_classes=3, **sizes)
    vit = build_model("vit", input_shape=(1, 8, 8), num_classes=3, embedding=8, heads=2, hidden=8, depth=1)
    batch = torch.randn(2, 1, 8, 8), torch.tensor([0, 1])
    ends = branch_ends(elastic(resnet, batch))
    assert ends == (*(f"stages.{place}.norm2" for place in ("0.0", "0.1", "1.1", "2.1", "3.1")),)
    one = elastic(vit, batch, chain=["blocks.0"])
    assert branch_ends(one) == ("blocks.0.attention.output", "blocks.0.feedforward.2")
