"""FedPA and FedUniform: crossing widths, statistics that stay at home, and what clients measure of themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

import fedtailor
from fedtailor.client.evaluate import evaluate_patches
from fedtailor.client.local_training import LocalTraining
from fedtailor.data.federated import Parts
from fedtailor.data.partitions import Partition
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.running import norm
from fedtailor.elasticity.running.norm import POLICIES
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.messages import Client, Lease, Task
from fedtailor.methods.apfl.apfl import APFL
from fedtailor.methods.apfl.architectures import architecture
from fedtailor.methods.apfl.fedpa import FedPA, FedUniform
from fedtailor.methods.fedavg import FedAvg
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import evaluate_clients
from fedtailor.server.inquiry import Inquiry
from fedtailor.storage.patch_frames import encode_patch
from helpers import (
    CONV1,
    CONV2,
    bits,
    cnn_model,
    differing,
    held_mask,
    image_data,
    images,
    run,
    setup_of,
    tiny_cnn,
    update_of,
)

LOCAL = LocalTraining(batch_size=4, momentum=0.9, weight_decay=0.01)
CROSSING = {"0": {CONV1: 1, CONV2: 5}, "1": {CONV1: 3, CONV2: 2}}


def whole_client(number: int = 0, width=1, examples: int = 6) -> Client:
    return Client(number, "t", Budget(width=width), examples)


@pytest.mark.parametrize("widths", [{}, {CONV1: 2, CONV2: 5}])
def test_equal_widths_are_fedavg_bit_for_bit_on_what_is_trained(widths):
    """With one network for all, the only difference is where statistics stay."""
    model, data = cnn_model(), image_data((6, 5, 7, 4))
    method = FedPA(local=LOCAL, architectures={str(k): widths for k in range(4)})
    ours = run(method, model, data, rounds=3, cohort=3).state.weights

    class Same(FedAvg):
        def cut_for(self, state, budget, model):
            return architecture(widths, model)

    theirs = run(Same(local=LOCAL), model, data, rounds=3, cohort=3).state.weights
    assert differing(*({n: w[n] for n in model.trainable} for w in (ours, theirs))) == set()
    assert (
        differing({n: ours[n] for n in model.statistics}, {n: model.weights()[n] for n in model.statistics})
        == set()
    )


def test_crossing_widths_merge_as_a_loop_over_coordinates_says():
    model, method = cnn_model(), FedPA(local=LOCAL, architectures=CROSSING)
    state, draw = method.init(model), torch.Generator().manual_seed(0)
    cuts = [method.select(state, whole_client(k), model, Seeds(0)) for k in (0, 1)]
    assert not cuts[0].holds(cuts[1])
    assert not cuts[1].holds(cuts[0])
    updates = []
    for number, (cut, weight) in enumerate(zip(cuts, (3.0, 5.0), strict=True)):
        patch = model.cut(state.weights, cut, POLICIES["local"].travelling(model))
        values = {n: torch.randn(v.shape, generator=draw) for n, v in patch.values.items()}
        updates.append(update_of(number, Patch(values, cut), weight))
    merged = method.merge(state, updates, model).weights
    for name in model.trainable:
        wide = [model.place(state.weights, update.patch)[name] for update in updates]
        held = [held_mask(model, cut, name) for cut in cuts]
        for place in product(*map(range, merged[name].shape)):
            holders = [k for k in (0, 1) if held[k][place]]
            total = sum(updates[k].weight for k in holders)
            mean = sum(updates[k].weight * float(wide[k][place]) for k in holders) / total if holders else 0
            expected = torch.tensor(mean) if holders else state.weights[name][place]
            assert merged[name][place] == expected, (name, place)


class Listening:
    """Keeps all that is sent up, in bytes as they would travel, and what clients keep."""

    def __init__(self, inner: InProcess) -> None:
        self.inner, self.sent, self.kept, self.actions = inner, [], [], set()

    def run(self, tasks):
        for task in tasks:
            for update in self.inner.run([task]):
                self.actions.add(task.action)
                frame = b"".join(bytes(piece) for piece in encode_patch(update.patch))
                self.sent.append(frame)
                self.kept.extend(update.memory.items())
                yield update


@pytest.mark.parametrize(
    ("method", "fleet", "rounds", "actions"),
    [
        (FedPA(local=LOCAL, architectures=CROSSING), "equal", 2, set()),
        (FedUniform(local=LOCAL), "uniform-2", 2, set()),
        (APFL(local=LOCAL, warmup=1), "uniform-2", 4, {"warm-up", "search"}),
    ],
)
def test_no_statistic_is_ever_uploaded(method, fleet, rounds, actions):
    """In no stage, neither in training nor in evaluation: no name of one, and no bytes of one."""
    model, heard = cnn_model(), []
    run(
        method, model, image_data(), fleet, rounds=rounds, every=1,
        engine=lambda inner: heard.append(Listening(inner)) or heard[0],
    )  # fmt: skip
    assert heard[0].actions == {"train", "calibrate", "evaluate"} | actions
    means = [value for name, value in heard[0].kept if "running_mean" in name]
    assert len(means) > 10
    for frame in heard[0].sent:
        assert b"running" not in frame
        assert b"num_batches" not in frame
        assert all(value.numpy().tobytes() not in frame for value in means if value.numel() > 1)


def test_statistics_go_on_from_round_to_round_in_the_clients_memory():
    model, data, method = cnn_model(), image_data(), FedPA(local=LOCAL, architectures=CROSSING)
    client = whole_client(1)
    first = method.assign(method.init(model), client, model, Seeds(0))
    one = method.perform(first, data.client(1), model)
    two = method.perform(replace(first, round=1, memory=one.memory), data.client(1), model)
    assert set(one.memory) == norm.tagged_statistics(model, first.patch.cut)
    counts = [int(update.memory[f"1.num_batches_tracked@{first.patch.cut.tag}"]) for update in (one, two)]
    assert counts == [2, 4]
    assert one.memory[f"1.running_mean@{first.patch.cut.tag}"].shape == (3,)


def evaluation_task(model, method, memory=None, action="evaluate") -> Task:
    state, client = method.init(model), whole_client(0)
    patch = model.cut(state.weights, Cut.everything(), POLICIES["local"].travelling(model))
    cut = method.select(state, client, model, Seeds(0))
    return Task(client, 0, patch, Lease(frozenset(), cut), Seeds(0), action, memory=memory or {})


def test_loc_is_the_own_network_and_glo_the_super_network_both_on_own_statistics():
    model, method, data = cnn_model(), FedPA(local=LOCAL, architectures=CROSSING), images(12)
    calibrated = method.perform(evaluation_task(model, method, action="calibrate"), data, model)
    update = method.perform(evaluation_task(model, method, calibrated.memory), images(8, seed=3), model)
    weights = model.weights()
    for prefix, cut in (("", architecture(CROSSING["0"], model)), ("global ", Cut.everything())):
        patch = model.cut(weights, cut, set(model.parameters))
        statistics, _ = norm.measure_statistics(model, patch, data, 4)
        own = norm.with_own(model, patch, statistics)
        for name, value in evaluate_patches(model, [own], images(8, seed=3)).items():
            assert update.metrics[prefix + name] == value
    assert update.patch.values == {}


def test_a_client_that_has_trained_keeps_its_own_statistics():
    model, method, data = cnn_model(), FedPA(local=LOCAL, architectures=CROSSING), images(12)
    cut = architecture(CROSSING["0"], model)
    kept = norm.statistics_at(model, model.weights(), [cut])
    task = evaluation_task(model, method, kept, "calibrate")
    memory = method.perform(task, data, model).memory
    assert all(bits(memory[name]) == bits(value) for name, value in kept.items())
    assert set(memory) - set(kept) == {f"{name}@global" for name in model.statistics}


def test_recalibration_measures_anew_what_a_client_runs_and_leaves_its_training_alone():
    """The statistics are those of the merged weights, and the memory that training goes on from is not touched."""
    model, data = cnn_model(), image_data()
    method = FedPA(local=LOCAL, architectures=CROSSING, recalibrate=True)
    cut = architecture(CROSSING["0"], model)
    stale = {name: value + 7 for name, value in norm.statistics_at(model, model.weights(), [cut]).items()}
    memory = method.perform(evaluation_task(model, method, stale, "calibrate"), data.client(0), model).memory
    patch = model.cut(model.weights(), cut, set(model.parameters))
    measured, _ = norm.measure_statistics(model, patch, data.client(0), LOCAL.batch_size)
    assert all(bits(memory[name]) == bits(value) for name, value in measured.items())

    def memories(every: int) -> list[dict]:
        """What clients went on from in their second training."""
        seen = []

        class Watching(InProcess):
            def run(self, tasks):
                seen.extend(task.memory for task in tasks if task.action == "train" and task.round == 1)
                return super().run(tasks)

        run(
            method,
            cnn_model(),
            data,
            rounds=2,
            every=every,
            engine=lambda inner: Watching(method, inner.model, data),
        )
        return seen

    between, never = memories(1), memories(100)
    assert len(between) == data.num_clients
    assert all(differing(*pair) == set() for pair in zip(between, never, strict=True))


def test_a_tier_is_the_mean_of_its_clients_and_one_without_clients_is_evaluated_without_data():
    model, data, method = cnn_model(), image_data((6, 5, 7, 4)), FedUniform(local=LOCAL)
    setup, engine = setup_of(method, model, data, "uniform-2"), InProcess(method, model, data)
    clients = setup.clients(0)

    def tiers(chosen):
        (scores,) = evaluate_clients(Inquiry(setup, engine), setup.start, chosen)
        return scores

    ones = [tiers([clients[k]])["1"] for k in (2, 3)]
    both = tiers(clients)
    assert both["1"]["accuracy"] == pytest.approx(np.mean([each["accuracy"] for each in ones]), abs=1e-12)
    assert both["1"].keys() == {"loss", "accuracy", "global loss", "global accuracy"}
    assert tiers([clients[2]])["0.5"].keys() == {"loss", "accuracy"}


def test_clients_are_evaluated_on_their_own_test_examples_where_there_are_such():
    data = image_data((4, 4))
    own = Parts(images(6, seed=9), Partition.from_parts([[0, 1, 2], []]))
    data = replace(data, tests=own)
    assert len(data.examples_for(0, "evaluate")) == 3
    assert len(data.examples_for(1, "evaluate")) == len(data.test)
    assert [len(data.examples_for(0, action)) for action in ("train", "calibrate", "search")] == [4, 4, 4]


def test_cuts_of_feduniform_are_nested():
    model, method = cnn_model(), FedUniform()
    cuts = [method.cut_for(method.init(model), Budget(width=w), model) for w in (1, 0.75, 0.5)]
    assert cuts[0].holds(cuts[1])
    assert cuts[1].holds(cuts[2])
    assert not cuts[2].holds(cuts[1])


def test_architectures_that_make_no_sense_are_refused():
    model, method = cnn_model(), FedPA(architectures={"0": {CONV1: 4, CONV2: 6}})
    with pytest.raises(FedtailorError, match="that of client 0 costs .* more than Budget\\(width=1/2\\)"):
        method.select(method.init(model), whole_client(0, 0.5), model, Seeds(0))
    with pytest.raises(FedtailorError, match="unknown channel group 'conv9'"):
        architecture({"conv9": 2}, model)
    with pytest.raises(FedtailorError, match="units of group 0 = 5: expected 1 to 4"):
        architecture({CONV1: 5}, model)
    with pytest.raises(FedtailorError, match="method.architectures"):
        FedPA(architectures={"first": {CONV1: 1}})
    with pytest.raises(FedtailorError, match="unknown normalisation policy 'averaged'"):
        FedPA(norm="averaged")


def test_the_network_of_one_client():
    method = FedPA(local=LOCAL, architectures=CROSSING)
    finished = fedtailor.train(
        tiny_cnn(), image_data(), "equal", method, rounds=2, clients_per_round=6, engine={"workers": 0}
    )
    network = finished.submodel(client=1)
    assert network[0].weight.shape == (3, 1, 3, 3)
    assert network[4].weight.shape == (2, 3, 3, 3)
    tag = architecture(CROSSING["1"], finished.model).tag
    kept = finished.memories[1][1][f"1.running_mean@{tag}"]
    assert bits(network[1].running_mean) == bits(kept)
    assert bits(network[0].weight) == bits(finished.state.weights["0.weight"][:3])
    assert network(images(3).take(torch.arange(3))[0]).shape == (3, 4)
    for wrong in ({}, {"budget": 0.5, "client": 1}):
        with pytest.raises(FedtailorError, match="a budget, or the number of a client"):
            finished.submodel(**wrong)
    with pytest.raises(FedtailorError, match="client = 6: expected 0 to 5"):
        finished.submodel(client=6)
    plain = replace(finished, setup=replace(finished.setup, method=FedAvg()))
    with pytest.raises(FedtailorError, match="with fedavg, devices of one budget are given the same network"):
        plain.submodel(client=1)
