"""FedCS and APFL: the sandwich, who takes part in which stage, what a search answers, and MobileNetV2."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.messages import Client, Update
from fedtailor.methods.apfl.apfl import APFL
from fedtailor.methods.apfl.architectures import UNITS, architecture
from fedtailor.methods.apfl.fedcs import FedCS
from fedtailor.methods.apfl.fedpa import FedPA
from fedtailor.models import build_model
from fedtailor.objective import distillation_loss
from fedtailor.seeds import Seeds
from helpers import bits, cnn_model, differing, image_data, images, run

LOCAL = LocalTraining(lr=1.0, batch_size=6)


def client(number: int = 0, width=1, examples: int = 6) -> Client:
    return Client(number, "t", Budget(width=width), examples)


@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("distillation", [True, False])
def test_the_gradient_of_a_warm_up_step_is_the_sum_of_its_four_parts(per_group, distillation):
    model = cnn_model()
    method = FedCS(local=LOCAL, warmup=1, per_group=per_group, distillation=distillation)
    task = method.assign(method.init(model), client(), model, Seeds(3))
    cuts = method.step_cuts(task, 0, model)
    assert len(cuts) == 4
    assert cuts[:2] == [Cut.everything(), prefix(model.groups, as_width(0.35))]
    batch = images(6).take(torch.arange(6))

    def output(cut):
        leaves = {n: v.clone().requires_grad_() for n, v in task.patch.values.items()}
        small = model.narrow(model.cut(leaves, Cut.everything()), cut)
        return leaves, model.forward(small.values, cut, batch, mode="train")

    teacher = output(cuts[0])[1].detach()
    total = {n: torch.zeros_like(v) for n, v in task.patch.values.items()}
    for number, cut in enumerate(cuts):
        leaves, answer = output(cut)
        labels = number == 0 or not distillation
        loss = model.objective.loss(answer, batch) if labels else distillation_loss(answer, teacher)
        loss.backward()
        total = {n: value + leaves[n].grad for n, value in total.items()}
    steps = LocalSteps(method, task, model)
    steps.take(0, batch)
    for name, value in steps.trained().values.items():
        torch.testing.assert_close(task.patch.values[name] - value, total[name], rtol=1e-4, atol=1e-5)


def test_a_network_as_wide_as_its_teacher_learns_nothing_from_it():
    logits = torch.randn(5, 4, requires_grad=True)
    (gradient,) = torch.autograd.grad(distillation_loss(logits, logits), logits)
    assert float(gradient.abs().max()) < 1e-7


def test_random_widths_lie_between_the_smallest_and_the_full_one():
    model = cnn_model(first=20, second=30)
    method = FedCS(local=LOCAL, warmup=1, smallest=0.5, random_widths=5, per_group=True)
    task = method.assign(method.init(model), client(), model, Seeds(0))
    drawn = [cut for step in range(20) for cut in method.step_cuts(task, step, model)[2:]]
    counts = [model.costs.counts(cut) for cut in drawn]
    assert len(counts) == 100
    assert all(10 <= one <= 20 and 15 <= two <= 30 for one, two in counts)
    assert len({2 * two - 3 * one for one, two in counts}) > 5  # not one width for both groups
    assert method.step_cuts(task, 3, model) == method.step_cuts(task, 3, model)


def test_the_warm_up_asks_clients_that_can_run_everything():
    model, method = cnn_model(), FedCS(local=LOCAL, warmup=2)
    state = method.init(model)
    full = model.cost(Cut.everything())
    budgets = [
        Budget(width=1), Budget(width=0.5), Budget(macs=full.macs), Budget(macs=full.macs - 1), Budget(params="99%"),
        Budget(params=full.params, macs=1),
    ]  # fmt: skip
    clients = [Client(k, "t", budget, 6) for k, budget in enumerate(budgets)]
    assert [each.id for each in method.participants(state, clients, model)] == [0, 2, 5]
    with pytest.raises(FedtailorError, match="no client can run the full network"):
        method.participants(state, [clients[1]], model)


def test_the_share_of_the_warm_up_is_of_all_rounds():
    assert FedCS(local=replace(LOCAL, rounds=30)).warmup_rounds == 9
    assert FedCS(warmup=4).warmup_rounds == 4
    with pytest.raises(FedtailorError, match="method.warmup = 0.3: a share needs training.rounds"):
        FedCS().warmup_rounds  # noqa: B018


def test_search_ends_within_flops_and_parameters_of_the_width():
    model, data = cnn_model(first=12, second=20), image_data((12,) * 2)
    method = FedCS(local=LOCAL, warmup=0, shrink=0.2)
    for width in (0.75, 0.5, 0.3):
        state, who = method.init(model), client(1, width, 12)
        task = method.assign(state, who, model, Seeds(0))
        assert task.action == "search"
        update = method.perform(task, data.client(1), model)
        assert update.patch.values == {}
        state = method.merge(state, [update], model)
        cut = method.select(state, who, model, Seeds(0))
        cost, allowed = model.cost(cut), model.cost(prefix(model.groups, as_width(width)))
        assert cost.macs <= allowed.macs
        assert cost.params <= allowed.params
        assert state.memory["architectures"][1] == {
            group: cut.count(group, model.groups.counts[group]) for group in model.groups.elastic
        }
        assert method.perform(task, data.client(1), model).metrics == update.metrics
    whole = method.perform(
        method.assign(method.init(model), client(1, 1, 12), model, Seeds(0)), data.client(1), model
    )
    assert whole.metrics["steps"] == 0
    assert whole.metrics[f"{UNITS}0"] == 12


@pytest.mark.parametrize("width", [0.75, 0.5, 0.4])
def test_a_search_stays_within_the_widths_that_were_trained_and_spends_its_budget(width):
    """Both failed once: groups went down to one unit, and networks used 89 % of their multiply-accumulates."""
    model, data = cnn_model(first=40, second=60), image_data((30,) * 2)
    method = FedCS(local=replace(LOCAL, rounds=10), warmup=1, shrink=0.3)
    state, who = replace(method.init(model), round=1), client(1, width, 30)
    update = method.perform(method.assign(state, who, model, Seeds(0)), data.client(1), model)
    found = [int(update.metrics[f"{UNITS}{group}"]) for group in model.groups.elastic]
    smallest = model.costs.counts(prefix(model.groups, as_width(0.35)))
    assert all(count >= few for count, few in zip(found, smallest, strict=True))
    cost = model.cost(model.costs.cut(tuple(found)))
    allowed = model.cost(prefix(model.groups, as_width(width)))
    assert 0.98 * allowed.macs <= cost.macs <= allowed.macs
    assert cost.params <= allowed.params
    assert update.metrics["share of budget"] == pytest.approx(cost.macs / allowed.macs)


def test_a_device_below_the_narrowest_trained_width_is_refused_before_the_run():
    model, method = cnn_model(first=12, second=20), FedCS(local=LOCAL, warmup=1)
    with pytest.raises(FedtailorError, match="no network of width 7/20, the narrowest.*method.smallest"):
        method.cut_for(method.init(model), Budget(width=0.2), model)
    assert FedCS(local=LOCAL, warmup=1, smallest=0.2).cut_for(method.init(model), Budget(width=0.2), model)
    assert FedCS(local=LOCAL, warmup=0).cut_for(method.init(model), Budget(width=0.2), model)
    budgets = [Budget(width=1), Budget(width=0.2)]
    assert method.for_fleet(budgets, model).cut_for(method.init(model), budgets[1], model)
    assert method.for_fleet(budgets[:1], model).narrowest == as_width(0.35)
    assert FedCS(local=LOCAL, warmup=1, smallest=0.5).for_fleet(budgets, model).narrowest == as_width(0.5)


def test_a_warm_up_ends_early_when_the_super_network_has_learnt():
    model, method = cnn_model(), FedCS(local=LOCAL, warmup=9, patience=2)
    state = method.init(model)
    for accuracy, goes_on in (
        (0.3, True),
        (0.32, True),
        (0.325, True),
        (0.33, True),
        (0.335, True),
        (0.3399, False),
    ):
        assert method.warming(state)
        state = method.observe(state, {"1": {"global accuracy": accuracy, "global loss": 1.0}})
        assert method.warming(state) == goes_on
    assert method.assign(replace(state, round=6), client(), model, Seeds(0)).action == "search"
    never = FedCS(local=LOCAL, warmup=9)
    state = never.init(model)
    for _ in range(8):
        state = never.observe(state, {"1": {"global accuracy": 0.3, "global loss": 1.0}})
    assert never.warming(state)
    assert not never.warming(replace(state, round=9))


def test_one_limit_alone_is_kept_too():
    model, data = cnn_model(first=12, second=20), image_data((12,))
    full = model.cost(Cut.everything())
    for budget, measure in ((Budget(params="40%"), "params"), (Budget(macs="40%"), "macs")):
        method = FedCS(local=LOCAL, warmup=0)
        task = method.assign(method.init(model), Client(0, "t", budget, 12), model, Seeds(0))
        state = method.merge(method.init(model), [method.perform(task, data.client(0), model)], model)
        cost = model.cost(architecture(state.memory["architectures"][0], model))
        assert getattr(cost, measure) <= 0.4 * getattr(full, measure)


def test_stages_follow_each_other_and_every_client_searches_once():
    model, data = cnn_model(), image_data((6, 5, 7, 4, 6))
    method = APFL(local=replace(LOCAL, lr=0.1), warmup=2, search_at_once=2)
    rows = run(method, model, data, "uniform-2", rounds=7, cohort=3).records
    assert [record.method["stage"] for record in rows] == ["warm-up"] * 2 + ["search"] * 3 + ["fedpa"] * 2
    assert [record.method["searched"] for record in rows] == [0, 0, 2, 4, 5, 5, 5]
    assert [record.cohort.asked for record in rows] == [2, 2, 2, 2, 1, 3, 3]
    searched = [int(client) for record in rows[2:5] for client in record.reported]
    assert searched == [0, 1, 2, 3, 4]
    assert rows[-1].tiers["0.5"].keys() == {"loss", "accuracy", "global loss", "global accuracy"}


class FirstOfFedPA:
    """Notes what the first round of FedPA sends."""

    def __init__(self, inner: InProcess) -> None:
        self.inner, self.sent = inner, []

    def run(self, tasks):
        if tasks[0].action == "train" and tasks[0].round == 2:
            self.sent.extend(tasks)
        yield from self.inner.run(tasks)


@pytest.mark.parametrize("inherit", [False, True])
def test_fedpa_starts_from_new_weights_or_from_the_warm_up(inherit):
    model, data, heard = cnn_model(), image_data((6, 5, 7)), []
    method = APFL(local=replace(LOCAL, lr=0.1), warmup=1, inherit=inherit)
    warm = run(method, model, data, "equal", rounds=2).state
    ends = run(
        method, model, data, "equal", rounds=3, engine=lambda e: heard.append(FirstOfFedPA(e)) or heard[0]
    )
    start = warm.weights if inherit else model.weights()
    moved = {n for n in model.trainable if n.endswith("weight")}  # batch norm makes biases before it useless
    assert moved <= differing(warm.weights, model.weights())
    assert len(heard[0].sent) == 3
    for task in heard[0].sent:
        assert all(bits(value) == bits(start[name]) for name, value in task.patch.values.items())
    if not inherit:  # from there on it is FedPA, whose rounds only have other numbers
        plain = FedPA(local=method.local)
        state = replace(plain.init(model), round=2)
        tasks = [plain.assign(state, replace(t.client), model, Seeds(0)) for t in heard[0].sent]
        updates = [plain.perform(task, data.client(task.client.id), model) for task in tasks]
        assert differing(plain.merge(state, updates, model).weights, ends.state.weights) == set()


def test_answers_that_are_no_architecture_leave_a_uniform_width():
    model, method = cnn_model(), FedCS(local=LOCAL, warmup=0)
    state, who = method.init(model), client(0, 0.5)
    task = method.assign(state, who, model, Seeds(0))
    uniform = prefix(model.groups, as_width(0.5))
    for said in ({}, {"0": 2.0}, {"0": 2.5, "4": 2.0}, {"0": 9.0, "4": 2.0}, {"0": 4.0, "4": 6.0}):
        metrics = {f"{UNITS}{group}": units for group, units in said.items()}
        update = Update(0, 0, 0, replace(task.patch, values={}), 6.0, metrics)
        assert method.select(method.merge(state, [update], model), who, model, Seeds(0)) == uniform


def test_a_search_that_nobody_answers_is_over():
    model, method = cnn_model(), APFL(local=LOCAL, warmup=0)
    clients = [client(k, 0.5) for k in range(3)]
    state = method.init(model)
    assert [each.id for each in method.participants(state, clients, model)] == [0, 1, 2]
    state = method.merge(state, [], model)
    assert method.participants(state, clients, model) == clients
    assert method.assign(state, clients[0], model, Seeds(0)).action == "train"


def test_bad_settings_are_refused():
    for wrong, text in (
        ({"shrink": 1}, "method.shrink = 1"), ({"shrink": 0}, "method.shrink = 0"), ({"warmup": -1}, "method.warmup"),
        ({"objective": "speed"}, "method.objective = 'speed': expected drop or drop_per_mac"),
        ({"min_channels": 0}, "method.min_channels"), ({"search_examples": 1}, "method.search_examples"),
        ({"smallest": 0}, "method.smallest"), ({"random_widths": -1}, "method.random_widths"),
        ({"search_at_once": -1}, "method.search_at_once"), ({"patience": -1}, "method.patience"),
        ({"judge": "taste"}, "method.judge = 'taste': expected loss or accuracy"),
    ):  # fmt: skip
        with pytest.raises(FedtailorError, match=text):
            FedCS(**wrong)


def test_mobilenet_has_a_group_for_the_stem_each_stage_and_each_expansion():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = build_model("mobilenetv2", input_shape=(3, 8, 8), num_classes=4)
    generator = torch.Generator().manual_seed(1)
    data = Examples.of(torch.randn(4, 3, 8, 8, generator=generator), torch.arange(4))
    model = elastic(module, data.take(torch.arange(2)))
    widths = [model.groups.counts[group] for group in model.groups.elastic]
    stages, read = [16, 24, 32, 64, 96, 160, 320], {16: 1, 24: 2, 32: 3, 64: 4, 96: 3, 160: 3}
    expansions = [6 * channels for channels, count in read.items() for _ in range(count)]
    assert sorted(widths) == sorted([32, *stages, *expansions, 1280])

    # Any widths per group: it runs, trains and extracts, and the extracted network answers alike.
    draw = [int(torch.randint(1, width + 1, (), generator=generator)) for width in widths]
    given = dict(zip(model.groups.elastic, draw, strict=True))
    method = FedPA(local=LocalTraining(lr=0.01, batch_size=4), architectures={"0": given})
    task = method.assign(method.init(model), client(0, 1, 4), model, Seeds(0))
    update = method.perform(task, data, model)
    assert model.costs.counts(update.patch.cut) == tuple(draw)
    trained = model.place(model.weights(), update.patch)
    assert any(bits(trained[name]) != bits(value) for name, value in model.weights().items())
    whole = model.cut(trained, update.patch.cut)
    batch = data.take(torch.arange(4))
    with torch.no_grad():
        torch.testing.assert_close(
            model.build(whole).eval()(batch[0]),
            model.forward(whole.values, update.patch.cut, batch),
            rtol=1e-4,
            atol=1e-5,
        )
