"""What holds for every method. A new method adds one line to ``SMALLEST`` and gets all of these tests."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import takewhile
from typing import Any

import pytest
import torch

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import FOR_ANY_METHOD
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.merging.optimising import to_deploy
from fedtailor.messages import Refused, Task, Update
from fedtailor.method import Method
from fedtailor.methods.registry import get_method, method_card, method_names
from fedtailor.server.evaluation import evaluate_tiers
from helpers import (
    Result,
    adapted_model,
    bits,
    cnn_model,
    deep_model,
    differing,
    held_mask,
    image_data,
    kind_of,
    run,
    setup_of,
    snapshot,
    timeless,
)

# The smallest settings with which each method shows what it does.
SMALLEST: dict[str, dict[str, Any]] = {
    "apfl": {"warmup": 1, "per_group": True},
    "depthfl": {"ramp": 2},
    "efd": {},
    "fedavg": {},
    "fedcs": {"warmup": 1, "search_at_once": 2},
    "federated-dropout": {"keep": 0.5},
    "fedpa": {"architectures": {"0": {"0": 1, "4": 3}, "1": {"0": 2, "4": 1}, "2": {"0": 4, "4": 2}}},
    "fedrolex": {},
    "feduniform": {},
    "fiarse": {},
    "fjord": {},
    "flado": {"sketch": 64},
    "flanc": {"widths": [0.5, 1]},
    "flexlora": {},
    "heterofl": {},
    "hetlora": {},
    "nefl": {"level_widths": [0.5, 1], "level_depths": [0.5, 1]},
    "ofa-fl": {"ratios": (1, "1/5"), "trigger": "schedule", "first": 0},
    "scalefl": {},
    "splitmix": {"base": 0.5},
    "tailor": {"widths": "uniform-5"},  # what a run settles before it asks a hook
    "uniprob": {},
}
METHODS_SEEN = 22

# Tensors that a merge makes anew as a whole, because of what was sent the product alone is merged.
REMADE = {"flexlora": {"2.up.weight", "2.down.weight"}}

# How many clients the rounds ask, where a method has stages (warm-up, search ...) of which two rounds do not show all.
COHORTS: dict[str, list[int]] = {"apfl": [2, 3, 1, 3, 3], "fedcs": [2, 2, 2]}
TRAINED = {"apfl": 8, "fedcs": 2}  # tasks of training among them
FLEET = "uniform-2"
LOCAL = LocalTraining(batch_size=4, momentum=0.9, weight_decay=0.01)


def test_the_table_covers_every_registered_method():
    assert sorted(SMALLEST) == method_names()
    assert len(method_names()) == METHODS_SEEN


@dataclass(frozen=True)
class Watching:
    """Keeps every task and answer."""

    inner: InProcess
    seen: list[tuple[Task, Update | Refused]]

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused]:
        pairs = list(zip(tasks, self.inner.run(tasks), strict=True))
        self.seen.extend(pairs)
        yield from (answer for _, answer in pairs)


@cache
def smallest(name: str) -> Method:
    """One object for all tests of a method: if a run left a trace on it, the next one would differ."""
    return get_method(name)(**{"local": LOCAL, **SMALLEST[name]})


MODEL = cnn_model()
MODELS = {"plain": MODEL, "adapted": adapted_model(), "deep": deep_model()}
MODULES = {id(model): snapshot(model.weights()) for model in MODELS.values()}  # before any run
DATA = image_data((6, 5, 7, 4))


def model_of(name: str) -> ElasticModel:
    """What a method is tested on: a small convolutional network, an adapted one, or one with exits."""
    return MODELS[kind_of(name)]


def cohorts(name: str) -> list[int]:
    return COHORTS.get(name, [3, 3])


def few_rounds(method: Method, seed: int = 0, **settings: Any) -> Result:
    """Two rounds, or as many as a method needs to show all of its stages."""
    rounds = len(cohorts(method.name))
    return run(method, model_of(method.name), DATA, FLEET, rounds=rounds, cohort=3, seed=seed, **settings)


@cache
def reference(name: str) -> tuple[Result, tuple[tuple[Task, Update | Refused], ...]]:
    """A few rounds, run once, and all that passed through the engine."""
    seen: list[tuple[Task, Update | Refused]] = []
    return few_rounds(smallest(name), engine=lambda inner: Watching(inner, seen)), tuple(seen)


every_method = pytest.mark.parametrize("name", method_names())


@every_method
def test_a_few_rounds_run_and_nobody_is_refused(name):
    result, seen = reference(name)
    assert result.state.round == len(cohorts(name))
    assert [record.cohort.asked for record in result.records] == cohorts(name)
    assert [record.cohort.refused for record in result.records] == [{} for _ in cohorts(name)]
    assert sum(task.action in ("train", "warm-up") for task, _ in seen) == TRAINED.get(name, 6)
    assert result.records[-1].tiers.keys() == {"0.5", "1"}
    assert differing(result.state.weights, smallest(name).init(model_of(name)).weights) != set()
    assert all(bool(value.isfinite().all()) for value in result.state.weights.values())


@every_method
def test_it_pickles_and_the_copy_does_the_same(name):
    method = smallest(name)
    loaded = pickle.loads(pickle.dumps(method))
    assert loaded == method
    assert differing(few_rounds(loaded).state.weights, reference(name)[0].state.weights) == set()


@every_method
def test_it_is_rebuilt_from_its_fields(name):
    method = smallest(name)
    fields = {field.name: getattr(method, field.name) for field in dataclasses.fields(method)}
    rebuilt = get_method(name)(**fields)
    assert rebuilt == method
    assert repr(rebuilt) == repr(method)


@every_method
def test_it_holds_numbers_only(name):
    """A method is frozen, a run leaves no trace on it, and its settings are plain values."""
    reference(name)
    method = smallest(name)
    assert vars(method) == vars(get_method(name)(**{"local": LOCAL, **SMALLEST[name]}))
    assert vars(method).keys() == {field.name for field in dataclasses.fields(method)}
    with pytest.raises(dataclasses.FrozenInstanceError):
        method.align = 2  # type: ignore[misc]
    assert not any(isinstance(value, torch.Tensor) for value in vars(method).values())


@every_method
def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(name):
    first = reference(name)[0]
    torch.manual_seed(123)  # the global generator is nobody's business
    second, other = few_rounds(smallest(name)), few_rounds(smallest(name), seed=1)
    assert differing(first.state.weights, second.state.weights) == set()
    assert timeless(first.records) == timeless(second.records)
    assert differing(first.state.weights, other.state.weights) != set()


@every_method
def test_the_order_in_which_clients_work_and_answer_does_not_matter(name):
    def shuffled(inner: InProcess) -> Any:
        class Reversed:
            def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused]:
                yield from inner.run(list(reversed(tasks)))

        return Reversed()

    other = few_rounds(smallest(name), engine=shuffled)
    assert differing(other.state.weights, reference(name)[0].state.weights) == set()


@every_method
def test_only_coordinates_that_a_client_sent_change(name):
    seen: list[tuple[Task, Update | Refused]] = []
    method = smallest(name)
    before = method.init(model_of(name)).weights
    after = run(
        method, model_of(name), DATA, FLEET, rounds=1, cohort=2, engine=lambda e: Watching(e, seen)
    ).state.weights
    updates = [answer for _, answer in seen if isinstance(answer, Update)]
    sent = {tensor for update in updates for tensor in update.patch.values}
    assert differing(before, after) <= sent
    for tensor in (differing(before, after) - REMADE.get(name, set())) & set(model_of(name).weights()):
        held = torch.zeros_like(before[tensor], dtype=torch.bool)
        for update in updates:
            if tensor in update.patch.values:
                held |= held_mask(model_of(name), update.patch.cut, tensor)
        assert bits(before[tensor][~held]) == bits(after[tensor][~held]), tensor


@every_method
def test_clients_send_no_more_than_they_were_leased(name):
    for task, answer in reference(name)[1]:
        assert isinstance(answer, Update)
        assert set(answer.patch.values) == set(task.lease.names)
        assert task.lease.cut.holds(answer.patch.cut)
        for tensor, value in answer.patch.values.items():
            assert not value.requires_grad
            leased = task.patch.values.get(tensor)
            if leased is not None:
                assert value.dtype == leased.dtype
                assert all(one <= other for one, other in zip(value.shape, leased.shape, strict=True))


@every_method
def test_types_and_shapes_of_the_state_never_change(name):
    before, after = smallest(name).init(model_of(name)).weights, reference(name)[0].state.weights
    assert set(before) <= set(after)
    for tensor, value in before.items():
        assert (after[tensor].dtype, after[tensor].shape) == (value.dtype, value.shape), tensor


@every_method
def test_neither_the_module_nor_the_old_state_is_written_to(name):
    method = smallest(name)
    state = method.init(model_of(name))
    start = snapshot(state.weights)
    updates = [
        answer
        for task, answer in reference(name)[1]
        if task.round == 0 and task.action in ("train", "warm-up")
    ]
    method.merge(state, updates, model_of(name))
    assert snapshot(state.weights) == start
    assert snapshot(model_of(name).weights()) == MODULES[id(model_of(name))]


@every_method
def test_evaluation_does_not_change_the_state(name):
    method, state = smallest(name), to_deploy(reference(name)[0].state)
    before = snapshot(state.weights)
    tiers = fleet_by_name(FLEET).tiers
    setup = setup_of(method, model_of(name), DATA, FLEET)
    first = evaluate_tiers(setup, state, tiers).tiers
    assert first == evaluate_tiers(setup, state, tiers).tiers
    if method.norm != "local":  # there the record says what clients measured themselves
        assert first == reference(name)[0].records[-1].tiers
    assert snapshot(state.weights) == before


@every_method
@pytest.mark.parametrize("policy", FOR_ANY_METHOD)
def test_a_normalisation_policy_works_or_is_refused_at_once(name, policy):
    """A policy that the method cannot follow must not fail, or leave statistics untrained, in the middle of a run."""
    settings = {"local": LOCAL, **SMALLEST[name], "norm": policy}
    if policy not in get_method(name).policies:
        with pytest.raises(FedtailorError, match=f"unknown normalisation policy '{policy}'"):
            get_method(name)(**settings)
        return
    method = get_method(name)(**settings)
    one, two = (
        run(method, model_of(name), DATA, FLEET, rounds=rounds, cohort=4).state.weights for rounds in (1, 2)
    )
    assert set(one) == set(two)  # the state does not grow with the rounds
    means = [tensor for tensor in model_of(name).weights() if tensor.endswith("running_mean")]
    state = dataclasses.replace(method.init(model_of(name)), weights=two)
    for tier in fleet_by_name(FLEET).tiers:
        for patch in method.deploy(state, tier.budget, model_of(name)).patches:
            untouched = [
                tensor for tensor in means if tensor in patch.values and not bool(patch.values[tensor].any())
            ]  # they start at zero
            assert untouched == [], f"statistics of width {patch.cut.tag} were never measured"


@every_method
def test_an_empty_round_changes_the_round_alone(name):
    method = smallest(name)
    state = method.init(model_of(name))
    after = method.merge(state, [], model_of(name))
    assert after.round == state.round + 1
    assert differing(after.weights, state.weights) == set()


@every_method
def test_what_is_deployed_runs_by_itself(name):
    method, state = smallest(name), reference(name)[0].state
    for tier in fleet_by_name(FLEET).tiers:
        patches = method.deploy(state, tier.budget, model_of(name)).patches
        assert patches
        for patch in patches:
            module = model_of(name).build(patch).eval()
            output = module(DATA.test.take(torch.arange(3))[0])
            assert output.shape == (3, 4)
            assert bool(output.isfinite().all())


@every_method
def test_it_has_a_card_with_front_matter(name):
    card = method_card(name)
    package, _, module = get_method(name).__module__.rpartition(".")
    file = resources.files(package) / f"{module}.md"
    assert file.is_file(), f"write {file}"
    _, front, body = card.split("---\n", 2)
    keys = dict(line.split(":", 1) for line in front.strip().splitlines())
    assert keys.keys() >= {"name", "summary", "paper"}
    assert name in keys["name"]
    others = {get_method(each) for each in method_names()} - {get_method(name)} | {Method}
    own: set[str] = set()
    for kind in takewhile(lambda kind: kind not in others, get_method(name).__mro__):
        own |= vars(kind).get("__annotations__", {}).keys()
    for setting in own & {field.name for field in dataclasses.fields(get_method(name))} - {"local"}:
        assert f"`{setting}`" in body, f"{file} says nothing about the setting {setting}"
