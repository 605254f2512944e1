"""FLANC: counts, who learns what, and that composing changes nothing but the parameters."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedtailor.client import training
from fedtailor.client.local_steps import LocalSteps
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.messages import ServerState
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.flanc.composition import compose
from fedtailor.methods.flanc.flanc import FLANC
from fedtailor.models import build_model
from fedtailor.seeds import Seeds
from fedtailor.storage.run_folder import RunFolder
from helpers import bits, client, cnn_model, differing, federated, image_data, images, run, snapshot

LOCAL = LocalTraining(lr=0.1, momentum=0.9, weight_decay=1e-3, batch_size=4)
HALVES = (0.5, 1)


@cache
def traced(name: str, shape: tuple[int, ...], keep: tuple[str, ...], **options: bool) -> ElasticModel:
    module = build_model(name, input_shape=shape, num_classes=10, **options)
    return elastic(module, (torch.zeros(2, *shape), torch.zeros(2, dtype=torch.long)), keep=keep)


def sent(method: FLANC, state: ServerState, model: ElasticModel, width: float) -> dict[str, Tensor]:
    return method.assign(state, client(0, width=width), model, Seeds(0)).patch.values


def count(values: dict[str, Tensor], model: ElasticModel, ending: str = "") -> int:
    parameters = set(model.parameters)
    return sum(
        v.numel() for n, v in values.items() if n.partition("@")[0] in parameters and n.endswith(ending)
    )


# What travels


@pytest.mark.slow
def test_the_papers_parameter_counts_of_resnet18():
    ranks = {
        f"stages.{s}.0.conv2.weight": (4 * 2**s, 16 * 2**s) for s in (1, 2, 3)
    }  # R1 of the block's input
    method = FLANC(ranks=ranks)
    # The authors' networks of p < 1 have a projection in the first block, the full one has none.
    narrow = traced("resnet18", (3, 8, 8), ("stem.0",), project=True)
    full = traced("resnet18", (3, 8, 8), ())
    expected = {0.25: 530_858, 0.5: 1_219_594, 0.75: 2_362_986, 1: 3_956_810}
    for model in (narrow, full):
        state = method.init(model)
        for width, number in expected.items():
            if (width == 1) == (model is full):
                values = sent(method, state, model, width)
                assert count(values, model) == number
                assert count(values, model, "@basis") == 294_912


def test_the_papers_parameter_counts_of_the_cnn():
    model = traced("flanc-cnn", (1, 28, 28), ("features.0",))
    method = FLANC(biases=False)
    state = method.init(model)
    expected = {0.25: 33_482, 0.5: 63_498, 0.75: 97_610, 1: 135_818}
    for width, number in expected.items():
        assert count(sent(method, state, model, width), model) == number
        task = method.assign(state, client(0, width=width), model, Seeds(0))
        assert method.work(task, model).params == number
        assert task.patch.nbytes == method.work(task, model).bytes == 4 * number
    with_biases = FLANC()
    assert count(sent(with_biases, with_biases.init(model), model, 1), model) == 135_818 + 2 * 128


def test_work_is_that_of_the_form_that_runs():
    model = traced("flanc-cnn", (1, 28, 28), ("features.0",))
    task = {}
    for form in ("composed", "two_step", "cheaper"):
        method = FLANC(LOCAL, form=form, biases=False)
        state = method.init(model)
        for width in (0.25, 1):
            one = method.assign(state, client(0, width=width), model, Seeds(0))
            task[form, width] = method.work(one, model).macs
    for width in (0.25, 1):
        assert task["cheaper", width] <= min(task["composed", width], task["two_step", width])
    dense = 3 * model.cost(prefix(model.groups, as_width(1))).macs
    made = 128 * 64 * 9 * 32 // 4 + 128 * 128 * 9 * 32 // 4  # composing two weights, once for four examples
    assert task["composed", 1] == dense + 3 * made


# Training


class Factors(nn.Module):
    """The same network with V and U as its own parameters, for plain federated averaging."""

    def __init__(self, values: dict[str, Tensor]) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(self.attribute(name), nn.Parameter(value.clone()))

    @staticmethod
    def attribute(name: str) -> str:
        return name.replace("@1", "").replace(".", "_").replace("@", "_")

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, self.get_parameter("0_weight"), self.get_parameter("0_bias"), padding=1))
        weight = compose(self.get_parameter("2_weight_basis"), self.get_parameter("2_weight_coefficients"))
        x = F.relu(F.conv2d(x, weight, self.get_parameter("2_bias"), padding=1))
        return F.linear(x.flatten(1), self.get_parameter("5_weight"), self.get_parameter("5_bias"))


def plain_network() -> nn.Module:
    torch.manual_seed(0)
    first, second = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 8, 3, padding=1)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(128, 4))


def test_with_one_width_it_is_fedavg_on_basis_and_coefficients_bit_for_bit():
    """The reference trains V and U with PyTorch's own optimiser, as the parameters of a hand-written module."""
    data = image_data((6, 9, 4))
    local = replace(LOCAL, batch_size=8)
    method = FLANC(local, widths=(1,), regulariser="off", form="composed")
    model = elastic(plain_network(), data.example())
    ours = run(method, model, data, rounds=3).state.weights

    values = method.init(model).weights
    for round in range(3):
        total = {name: torch.zeros(value.shape, dtype=torch.float64) for name, value in values.items()}
        for number in range(3):
            task = method.assign(ServerState(round, values), client(number), model, Seeds(0))
            module = Factors(values).to(memory_format=torch.channels_last)
            optimiser = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
            for batch in training.batches(local, task, data.client(number), skip_single=False):
                optimiser.zero_grad()
                F.cross_entropy(module(batch[0]), batch[1]).backward()
                optimiser.step()
            for name in values:
                trained = module.get_parameter(Factors.attribute(name)).detach()
                total[name] += trained.double() * int(data.sizes[number])
        values = {name: (value / int(data.sizes.sum())).float() for name, value in total.items()}
    assert differing(ours, values) == set()


def test_with_a_basis_of_full_rank_training_starts_from_the_module_itself():
    model, data = elastic(plain_network(), image_data().example()), image_data((6,))
    method = FLANC(LOCAL, widths=(1,), ranks={"2.weight": (1, 9)})
    patch = method.deploy(method.init(model), Budget(width=1), model).patches[0]
    for name, value in model.weights().items():
        torch.testing.assert_close(patch.values[name], value, rtol=0, atol=1e-6)
    batch = data.example()
    torch.testing.assert_close(model.forward(patch.values, patch.cut, batch), model.module(batch[0]))


def test_private_weights_start_as_if_drawn_for_the_inputs_that_they_read():
    """PyTorch draws the classifier of a network with a quarter of the features twice as large."""
    with Seeds(3).scope("wide network"):
        module = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 64, 3, padding=1), nn.Flatten(),
                               nn.Linear(64 * 16, 10))  # fmt: skip
    model = elastic(module, image_data().example())
    values = FLANC().init(model).weights
    for width, times in (("1/4", 2), ("1/2", 2**0.5), ("1", 1)):
        private = values[f"3.weight@{width}"]
        assert torch.equal(private, module[3].weight[:, : private.shape[1]] * times)
        assert float(private.std()) == pytest.approx((3 * private.shape[1]) ** -0.5, rel=0.05)
        assert torch.equal(values[f"0.weight@{width}"], module[0].weight[: len(values[f"0.weight@{width}"])])


@pytest.mark.parametrize("form", ["composed", "two_step"])
def test_the_basis_learns_from_a_client_of_any_width(form):
    model, data = cnn_model(first=8, second=8), image_data((6,))
    method = FLANC(LOCAL, widths="uniform-4", regulariser="off", form=form)
    state = method.init(model)
    for width in (0.25, 0.5, 0.75, 1):
        task = method.assign(state, client(0, width=width), model, Seeds(0))
        steps = LocalSteps(method, task, model)
        batch = data.client(0).take(torch.arange(6))
        leaves = steps._leaves(task.patch.cut)
        answer = method.forward(leaves, task.patch.cut, batch, task, model)
        method.loss([answer], [leaves], batch, task, model).backward()
        for name, value in steps.held.items():
            if value.requires_grad:
                assert value.grad is not None, name
        assert steps.held["4.weight@basis"].grad.abs().max() > 0
        assert steps.held["4.weight@basis"].shape == (2, 1, 3, 3)


def test_a_width_without_participants_keeps_its_bits_and_the_basis_does_not():
    model, data = cnn_model(first=8, second=8), image_data((6, 6, 6))
    method = FLANC(LOCAL)
    before = method.init(model).weights
    after = run(method, model, data, "equal-0.5", rounds=2).state.weights
    changed = differing(before, after)
    assert changed == {name for name in before if name.endswith(("@1/2", "@basis"))}
    assert "4.weight@coefficients@1/2" in changed


@pytest.mark.parametrize(("weighting", "shares"), [("samples", (6, 2)), ("count", (1, 1))])
def test_the_basis_is_merged_over_everyone_and_coefficients_over_their_width(weighting, shares):
    model, data = cnn_model(first=8, second=8), image_data((6, 2))
    method = FLANC(LOCAL, weighting=weighting)
    state = method.init(model)
    clients = [client(0, width=0.5, examples=6), client(1, width=1, examples=2)]
    tasks = [method.assign(state, each, model, Seeds(0)) for each in clients]
    updates = [method.perform(task, data.client(task.client.id), model) for task in tasks]
    merged = method.merge(state, updates, model).weights
    first, second = (update.patch.values["4.weight@basis"].double() for update in updates)
    expected = (first * shares[0] + second * shares[1]) / sum(shares)
    assert bits(merged["4.weight@basis"]) == bits(expected.float())
    for update in updates:
        own = {name: value for name, value in update.patch.values.items() if not name.endswith("@basis")}
        assert differing(own, {name: merged[name] for name in own}) == set()


def test_the_regulariser_keeps_the_basis_orthonormal():
    model, data = cnn_model(first=8, second=8), image_data((8, 8))
    error = {}
    for regulariser, strength in (("mean", 10.0), ("norm", 1.0), ("off", 10.0)):
        local = LocalTraining(lr=0.02, batch_size=4)
        method = FLANC(local, widths=HALVES, regulariser=regulariser, strength=strength)
        state = run(method, model, data, "uniform-2", rounds=15).state
        table = method.diagnostics(state, model, {})["gram/4.weight"]
        error[regulariser] = (table - torch.eye(len(table))).square().mean().item()
    assert error["mean"] < 0.1 * error["off"]
    assert error["norm"] < 0.1 * error["off"]


def test_the_penalty_is_lambda_times_the_sum_over_layers():
    model = cnn_model(first=8, second=8)
    method = FLANC(widths=HALVES, strength=3.0)
    weights = {"4.weight@basis": 2 * torch.eye(9)[:2].reshape(2, 1, 3, 3)}
    assert method.penalty(weights, model) == pytest.approx(
        3 * (2 * 9) / 4
    )  # (4 - 1)^2 twice, of four entries
    assert replace(method, regulariser="norm").penalty(weights, model) == pytest.approx(3 * 18)
    assert replace(method, regulariser="off").penalty(weights, model) is None


# Deployment


def test_zeros_and_ones_as_coefficients_are_a_heterofl_cut():
    """Pruning is a special case: the basis lists every fragment of the full weight, coefficients choose."""
    model = cnn_model(first=8, second=8)
    full = model.weights()
    fragment = 4  # the inputs of the narrowest width
    number = 8 * 8 // fragment
    method = FLANC(widths=HALVES, regulariser="off", ranks={"4.weight": (fragment, number)})
    weights = dict(method.init(model).weights)
    weights["4.weight@basis"] = full["4.weight"].reshape(number, fragment, 3, 3)
    for width in HALVES:
        cut = prefix(model.groups, as_width(width))
        outputs, inputs = model.shape("4.weight", cut)[:2]
        chosen = torch.zeros(outputs, inputs // fragment, number)
        for row in range(outputs):
            for group in range(inputs // fragment):
                chosen[row, group, row * (8 // fragment) + group] = 1
        weights[f"4.weight@coefficients@{cut.tag}"] = chosen.reshape(outputs, -1)
        weights[f"8.weight@{cut.tag}"] = model.cut(full, cut).values["8.weight"]
        deployed = method.deploy(ServerState(0, weights), Budget(width=width), model).patches[0]
        assert deployed.cut == cut
        assert differing(deployed.values, model.cut(full, cut).values) == set()


@pytest.mark.parametrize("form", ["composed", "two_step"])
@pytest.mark.parametrize("biases", [True, False])
def test_what_is_deployed_computes_what_was_trained(form, biases):
    model, data = elastic(plain_network(), image_data().example()), image_data((8, 8))
    method = FLANC(LOCAL, widths=HALVES, form=form, biases=biases)
    state = run(method, model, data, "uniform-2", rounds=2).state
    batch = data.example()
    for width in HALVES:
        task = method.assign(state, client(0, width=width), model, Seeds(0))
        trained = method.forward(task.patch.values, task.patch.cut, batch, task, model)
        patch = method.deploy(state, Budget(width=width), model).patches[0]
        module = model.build(patch).eval()
        torch.testing.assert_close(module(batch[0]), trained, rtol=0, atol=1e-5)
        assert [type(layer) for layer in module] == [type(layer) for layer in model.module]
        assert set(module.state_dict()) == set(model.module.state_dict())
        assert module[2].weight.shape == (int(8 * width), int(4 * width), 3, 3)
        assert bool(module[2].bias.any()) == biases


def test_a_deployed_network_of_norms_runs_on_its_widths_own_statistics():
    model, data = cnn_model(first=8, second=8), image_data((8, 8, 8, 8))
    method = FLANC(LOCAL, widths=HALVES)
    state = run(method, model, data, "uniform-2", rounds=2).state
    narrow, wide = (method.deploy(state, Budget(width=width), model).patches[0] for width in HALVES)
    assert bits(narrow.values["1.running_mean"]) == bits(state.weights["1.running_mean@1/2"])
    assert bits(wide.values["1.running_mean"]) == bits(state.weights["1.running_mean@1"])
    assert bits(narrow.values["1.running_mean"]) != bits(wide.values["1.running_mean"][:4])


# A recurrent network


def test_a_recurrent_network_learns():
    generator = torch.Generator().manual_seed(0)
    starts = torch.randint(6, (40, 1), generator=generator)
    text = starts + torch.arange(9)  # each symbol follows from the last one
    examples = Examples.of(text[:, :-1] % 6, text[:, 1:] % 6)
    data = federated(examples, (10,) * 4, classes=6)
    torch.manual_seed(0)
    module = build_model("char-lstm", input_shape=(8,), num_classes=6, hidden=16, predict="every")
    model = elastic(module, data.example(), keep=["embedding"])
    local = LocalTraining(lr=0.5, momentum=0.9, batch_size=5, epochs=2, clip_norm=5.0)
    method = FLANC(local, widths=HALVES, strength=1.0)
    assert len(method.plan(model).composed) == 3
    losses = [
        record.tiers
        for record in run(method, model, data, "uniform-2", rounds=25, every=5).records
        if record.tiers is not None
    ]
    for tier in ("0.5", "1"):
        assert losses[-1][tier]["loss"] < 0.5 * losses[0][tier]["loss"]


# Settings, and what a run leaves


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"regulariser": "l1"}, "unknown regulariser 'l1'"),
        ({"form": "three_step"}, "unknown form 'three_step'"),
        ({"strength": -1.0}, r"method\.strength = -1"),
        ({"input_share": 0}, r"method\.input_share = 0"),
        ({"output_share": 2}, r"method\.output_share = 2"),
        ({"widths": (1, 0.5)}, "ascending order"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings, problem):
    with pytest.raises(FedtailorError, match=problem):
        FLANC(**settings)


def test_a_budget_below_the_smallest_width_is_refused():
    with pytest.raises(FedtailorError, match=r"no width of method\.widths fits it; the smallest is 1/2"):
        FLANC(widths=HALVES).cut_for(ServerState(0, {}), Budget(width=0.25), cnn_model(first=8, second=8))


def test_diagnostics_are_written_with_the_run(tmp_path):
    from fedtailor.run.interface import train

    module, data = plain_network(), federated(images(16), (4,) * 4)
    method = FLANC(LOCAL, widths=HALVES, ranks={"2.weight": (2, 3)})
    folder = tmp_path / "run"
    done = train(
        module, data, "uniform-2", method, rounds=1, clients_per_round=4, folder=folder, device="cpu"
    )
    tables = RunFolder(folder).load_diagnostics()
    assert set(tables) == {"gram/2.weight", "coefficients/2.weight/1/2", "coefficients/2.weight/1"}
    rows = done.state.weights["2.weight@basis"].reshape(3, -1)
    torch.testing.assert_close(tables["gram/2.weight"], rows @ rows.T)
    assert tables["coefficients/2.weight/1/2"].shape == (4 * 1,)
    assert tables["coefficients/2.weight/1"].shape == (8 * 2,)
    start = snapshot(method.init(done.model).weights)
    assert start != snapshot(done.state.weights)
    plain = train(
        module,
        data,
        "uniform-2",
        FedAvg(LOCAL, width=0.5),
        rounds=1,
        clients_per_round=4,
        folder=tmp_path / "plain",
    )
    assert plain.state.round == 1
    assert RunFolder(tmp_path / "plain").load_diagnostics() == {}


def test_a_patch_that_is_deployed_owns_its_values():
    model = cnn_model(first=8, second=8)
    method = FLANC(widths=HALVES)
    state = method.init(model)
    before = snapshot(state.weights)
    patch: Patch = method.deploy(state, Budget(width=0.5), model).patches[0]
    for value in patch.values.values():
        value.zero_()
    assert snapshot(state.weights) == before
