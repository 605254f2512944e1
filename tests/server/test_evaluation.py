from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedtailor.client.evaluate import evaluate_deployed, evaluate_patches
from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, fleet_by_name
from fedtailor.methods.registry import get_method
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import calibrate, evaluate_tiers
from fedtailor.server.inquiry import Inquiry
from helpers import (
    CONV1,
    CONV2,
    LINEAR,
    NORM1,
    NORM2,
    cnn_model,
    differing,
    federated,
    image_data,
    images,
    mlp_model,
    setup_of,
    snapshot,
    tiny_cnn,
    vector_data,
    with_nan_inputs,
)

STATIC = get_method("heterofl")(local=LocalTraining(batch_size=4), scaler=False)


def calibrated(method, model, data, fleet, state=None, budgets=None, round_=0):
    setup = setup_of(method, model, data, fleet)
    budgets = budgets or [tier.budget for tier in setup.fleet.tiers]
    inquiry = Inquiry(setup, InProcess(method, model, data))
    return calibrate(inquiry, state or setup.start.state, budgets, setup.clients(round_))


def scores(method, model, data, fleet, state=None):
    setup = setup_of(method, model, data, fleet)
    return evaluate_tiers(setup, state or setup.start.state, setup.fleet.tiers).tiers


def small_module(module: nn.Module, first: int, second: int) -> nn.Module:
    """The prefix of ``tiny_cnn``, sliced by hand."""
    full, small = module.state_dict(), tiny_cnn(first, second)
    small.load_state_dict(
        {
            f"{CONV1}.weight": full[f"{CONV1}.weight"][:first],
            f"{CONV1}.bias": full[f"{CONV1}.bias"][:first],
            f"{CONV2}.weight": full[f"{CONV2}.weight"][:second, :first],
            f"{CONV2}.bias": full[f"{CONV2}.bias"][:second],
            f"{LINEAR}.weight": full[f"{LINEAR}.weight"][:, : second * 4],
            f"{LINEAR}.bias": full[f"{LINEAR}.bias"],
            **{
                name: value[:first]
                for name, value in full.items()
                if name.startswith(f"{NORM1}.") and value.dim()
            },
            **{
                name: value[:second]
                for name, value in full.items()
                if name.startswith(f"{NORM2}.") and value.dim()
            },
        },
        strict=False,
    )
    return small


def average_of_batch_statistics(module: nn.Module, batches) -> dict[str, torch.Tensor]:
    """Mean and unbiased variance of what flows into each norm, batch by batch, then the plain average."""
    module = copy.deepcopy(module).train()
    seen: dict[str, list[torch.Tensor]] = {}

    def note(name):
        def hook(_layer, args):
            axes = (0, 2, 3)
            seen.setdefault(f"{name}.running_mean", []).append(args[0].double().mean(axes))
            seen.setdefault(f"{name}.running_var", []).append(args[0].double().var(axes, unbiased=True))

        return hook

    for name in (NORM1, NORM2):
        module.get_submodule(name).register_forward_pre_hook(note(name))
    with torch.no_grad():
        for inputs in batches:
            module(inputs)
    return {name: torch.stack(values).mean(0) for name, values in seen.items()}


def client_batches(data, clients, size):
    """The batches of all clients, in order, without remainders of one example."""
    for client in clients:
        inputs, _ = data.client(client).take(torch.arange(int(data.sizes[client])))
        yield from (batch for batch in inputs.split(size) if len(batch) > 1)


def test_static_statistics_are_the_plain_average_of_all_batch_statistics():
    data, model = image_data((6, 9, 4, 3)), cnn_model()  # 9 = 4 + 4 + 1: the last example has no variance
    state = calibrated(STATIC, model, data, "equal")
    expected = average_of_batch_statistics(model.module, client_batches(data, range(4), 4))
    for name, value in expected.items():
        torch.testing.assert_close(state.weights[f"{name}@1"].double(), value, rtol=1e-5, atol=1e-6)


def test_each_width_is_measured_on_the_clients_that_can_run_it():
    data, model = image_data((6, 9, 4, 3)), cnn_model(4, 6)
    state = calibrated(STATIC, model, data, "uniform-2")  # clients 0 and 1 have width 1/2, 2 and 3 all of it
    half = average_of_batch_statistics(small_module(model.module, 2, 3), client_batches(data, range(4), 4))
    full = average_of_batch_statistics(model.module, client_batches(data, (2, 3), 4))
    for tag, expected in (("1/2", half), ("1", full)):
        for name, value in expected.items():
            torch.testing.assert_close(state.weights[f"{name}@{tag}"].double(), value, rtol=1e-5, atol=1e-6)


def test_static_statistics_do_not_depend_on_the_order_of_clients():
    examples, sizes, model = images(22), (6, 9, 4, 3), cnn_model()
    reference = None
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        data = federated(examples, sizes)
        parts = [data.partition[client] for client in order]
        shuffled = type(data).from_examples(examples, examples, parts=parts, num_classes=4)
        state = calibrated(STATIC, model, shuffled, "equal")
        tagged = {name: value for name, value in state.weights.items() if "@" in name}
        assert len(tagged) == 6
        reference = reference or tagged
        for name, value in tagged.items():
            torch.testing.assert_close(value, reference[name], rtol=1e-6, atol=1e-6)


def test_only_tagged_statistics_are_added():
    data, model = image_data(), cnn_model()
    before = STATIC.init(model)
    after = calibrated(STATIC, model, data, "uniform-2", before)
    assert {name.partition("@")[0] for name in differing(before.weights, after.weights)} == set(
        model.statistics
    )
    assert all("@" in name for name in differing(before.weights, after.weights))
    assert differing(before.weights, model.weights()) == set()  # the old state is as it was


def test_statistics_of_older_weights_are_replaced_not_averaged_in():
    data, model = image_data(), cnn_model()
    stale = calibrated(STATIC, model, data, "equal")
    moved = replace(stale, weights={**stale.weights, f"{CONV1}.weight": stale.weights[f"{CONV1}.weight"] * 3})
    fresh = replace(moved, weights={name: value for name, value in moved.weights.items() if "@" not in name})
    again, anew = (calibrated(STATIC, model, data, "equal", state) for state in (moved, fresh))
    assert differing(again.weights, anew.weights) == set()
    assert differing(again.weights, stale.weights) != {f"{CONV1}.weight"}


def test_statistics_of_older_weights_are_dropped_when_nobody_can_answer():
    data, model = image_data((6, 6)), cnn_model()
    state = calibrated(STATIC, model, data, "equal")
    broken = with_nan_inputs(with_nan_inputs(data, 0), 1)
    after = calibrated(STATIC, model, broken, "equal", state)
    assert not any("@" in name for name in after.weights)
    with pytest.raises(FedtailorError, match="width 1 has no statistics yet"):
        STATIC.deploy(after, Budget(width=1), model)


@pytest.mark.parametrize("method", [get_method("fedavg")(), get_method("heterofl")(norm="averaged")])
def test_averaged_norms_need_no_calibration(method):
    model = cnn_model()
    state = method.init(model)
    assert calibrated(method, model, image_data(), "uniform-2", state) is state


def test_a_model_without_norms_needs_no_calibration():
    model = mlp_model()
    state = STATIC.init(model)
    assert calibrated(STATIC, model, vector_data(), "uniform-2", state) is state


def test_widths_that_cut_alike_are_calibrated_each_under_its_own_name():
    """Both 1/8 and 1/16 of four channels are one channel: equal cuts, but two tiers."""
    data, model, fleet = image_data((6, 6)), cnn_model(4, 4), fleet_by_name("d1-e1")
    state = calibrated(STATIC, model, data, fleet)
    results = scores(STATIC, model, data, fleet, state)
    assert results["d"] == results["e"]
    for name in model.statistics:
        assert torch.equal(state.weights[f"{name}@1/8"], state.weights[f"{name}@1/16"])


@pytest.mark.parametrize("budget", [Budget(width=1), Budget(macs=0.9)])
def test_a_width_that_no_client_can_run_is_measured_on_everyone(budget):
    """Levels are redrawn in every round: it happens that nobody has the largest one."""
    data, model = image_data((6, 9, 4, 3)), cnn_model()
    state = calibrated(STATIC, model, data, "equal-0.25", budgets=[budget])
    (patch,) = STATIC.deploy(state, budget, model).patches
    assert all(bool(value.isfinite().all()) for value in patch.values.values())
    if budget.width:
        expected = average_of_batch_statistics(model.module, client_batches(data, range(4), 4))
        for name, value in expected.items():
            torch.testing.assert_close(patch.values[name].double(), value, rtol=1e-5, atol=1e-6)


def test_dynamic_levels_never_stop_a_run():
    """One in ten clients is of level a: in a third of the rounds nobody is."""
    data, model = image_data((2,) * 10), cnn_model()
    fleet = fleet_by_name("a1-e9", dynamic=True)
    lonely = 0
    for round_ in range(6):
        lonely += all(one.tier == "e" for one in fleet.capacity(data.sizes, round_, Seeds(0)))
        state = calibrated(STATIC, model, data, fleet, round_=round_)
        assert scores(STATIC, model, data, fleet, state).keys() == {"a", "e"}
    assert lonely > 0  # otherwise this test shows nothing


def test_a_patch_of_calibration_is_not_copied_for_each_client():
    """A hundred clients and a network of ten million numbers: four gigabytes, if each task held its own copy."""
    data, model = image_data((2,) * 10), cnn_model()
    seen = []

    class Watching(InProcess):
        def run(self, tasks):
            seen.extend(tasks)
            return super().run(tasks)

    setup = setup_of(STATIC, model, data)
    inquiry = Inquiry(setup, Watching(STATIC, model, data))
    calibrate(inquiry, setup.start.state, [Budget(width=1)], setup.clients(0))
    assert len(seen) == 10
    assert len({id(task.patch) for task in seen}) == 1


def test_deploying_without_statistics_is_an_error_that_names_the_width():
    model = cnn_model()
    with pytest.raises(FedtailorError, match="width 1/4 has no statistics yet"):
        STATIC.deploy(STATIC.init(model), Budget(width="1/4"), model)
    state = calibrated(STATIC, model, image_data(), "equal-0.5")
    STATIC.deploy(state, Budget(width="1/2"), model)
    with pytest.raises(FedtailorError, match="width 1 has no statistics yet"):
        STATIC.deploy(state, Budget(width=1), model)


@pytest.mark.parametrize("name", ["fedavg", "heterofl"])
def test_evaluation_leaves_state_and_module_as_they_are(name):
    method, model, data, fleet = get_method(name)(), cnn_model(), image_data(), fleet_by_name("uniform-2")
    state = calibrated(method, model, data, fleet)
    before = snapshot(state.weights), snapshot(model.weights())
    first = scores(method, model, data, fleet, state)
    assert scores(method, model, data, fleet, state) == first
    assert (snapshot(state.weights), snapshot(model.weights())) == before


def test_tiers_are_evaluated_as_plain_modules_would_be():
    examples = images(300, seed=5)  # more than one batch of evaluation, the last one smaller
    model, data, fleet = cnn_model(4, 6), image_data((8, 8)), fleet_by_name("uniform-2")
    state = calibrated(STATIC, model, data, fleet)
    results = scores(STATIC, model, replace(data, test=examples), fleet, state)
    inputs, labels = examples.take(torch.arange(300))
    for tier, module, tag in (
        ("0.5", small_module(model.module, 2, 3), "1/2"),
        ("1", copy.deepcopy(model.module), "1"),
    ):
        for name in (NORM1, NORM2):
            for statistic in ("running_mean", "running_var"):
                setattr(module.get_submodule(name), statistic, state.weights[f"{name}.{statistic}@{tag}"])
        with torch.no_grad():
            output = module.eval()(inputs)
        assert results[tier]["accuracy"] == pytest.approx((output.argmax(1) == labels).double().mean().item())
        assert results[tier]["loss"] == pytest.approx(
            nn.functional.cross_entropy(output, labels).item(), abs=1e-5
        )


def test_several_patches_answer_with_the_mean_of_their_outputs():
    one = mlp_model()
    other = elastic(copy.deepcopy(one.module), one.example)
    with torch.no_grad():
        other.module[2].bias += 1
    data = vector_data().test
    patches = [model.cut(model.weights(), Cut.everything()) for model in (one, other)]
    inputs, labels = data.take(torch.arange(len(data)))
    output = (one.module(inputs) + other.module(inputs)) / 2
    expected = nn.functional.cross_entropy(output, labels).item()
    assert evaluate_patches(one, patches, data)["loss"] == pytest.approx(expected, abs=1e-6)


def test_metrics_are_the_users_to_replace():
    from fedtailor.objective import Objective

    base = mlp_model()
    objective = Objective(
        loss=lambda output, batch: output.sum() * 0 + len(batch[1]),
        metrics={"size": lambda _o, batch: len(batch[1])},
    )
    model = elastic(base.module, base.example, objective=objective)
    method, data = get_method("fedavg")(), vector_data()
    results = scores(method, model, data, "equal")
    assert results == {"1": {"loss": 20.0, "size": 20.0}}


def test_tiers_that_get_the_same_piece_get_the_same_figures():
    method, model, data = get_method("fedavg")(width="1/2"), cnn_model(), image_data()
    fleet = fleet_by_name("uniform-5")
    assert isinstance(fleet, Fleet)
    results = scores(method, model, data, fleet)
    assert len(results) == 5
    assert len({tuple(figures.items()) for figures in results.values()}) == 1


def test_all_tiers_are_evaluated_in_one_pass_over_the_examples():
    """Each batch is prepared once for all tiers, and the scores are those of one tier at a time."""
    prepared: list[int] = []

    def count(batch, generator):
        prepared.append(len(batch[-1]))
        return batch

    data, model = images(300, seed=7), cnn_model()
    weights = model.weights()
    widths = [prefix(model.groups, as_width(width)) for width in ("1/2", "1")]
    deployed = [[model.cut(weights, cut)] for cut in widths]
    scores = evaluate_deployed(model, deployed, data.prepared_by(count))
    assert prepared == [256, 44]
    assert scores == [evaluate_patches(model, patches, data) for patches in deployed]
    assert scores[0] != scores[1]
