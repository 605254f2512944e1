"""FjORD's settings: budgets, policies, FjORD + eFD, configs, and Theorem 1."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fedtailor.client import training
from fedtailor.client.local_training import LocalTraining
from fedtailor.config import load_config, make_config, to_toml
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.selections import as_candidates, kept, prefix
from fedtailor.errors import FedtailorError
from fedtailor.fleet.presets import build_fleet
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.seeds import Seeds
from helpers import bits, client, cnn_model, held_mask, image_data, mlp_model, run, vectors

ROOT = Path(__file__).parents[3]
PLAIN = LocalTraining(lr=0.1, batch_size=4)


def assign(method, model, width, number=0, round=0):
    state = replace(method.init(model), round=round)
    return method.assign(state, client(number, width, examples=40), model, Seeds(0))


# Budgets


def test_a_budget_between_two_widths_gets_the_smaller_one():
    model, method = cnn_model(10, 15), FjORD()
    for width, tag in ((0.2, "1/5"), (0.39, "1/5"), (0.5, "2/5"), (1, "1")):
        assert method.cut_for(method.init(model), Budget(width=width), model).tag == tag
    macs = [model.cost(prefix(model.groups, width)).macs for width in as_candidates("uniform-5")]
    assert method.cut_for(method.init(model), Budget(macs=macs[2]), model).tag == "3/5"
    assert method.cut_for(method.init(model), Budget(macs=macs[2] - 1), model).tag == "2/5"
    assert method.cut_for(method.init(model), Budget(macs=macs[2], width=0.2), model).tag == "1/5"
    for budget in (Budget(width=0.1), Budget(macs=macs[0] - 1)):
        with pytest.raises(FedtailorError, match="no width of method.widths fits it; the smallest is 1/5"):
            method.cut_for(method.init(model), budget, model)


def test_equal_counts_of_a_narrow_layer_do_not_make_a_larger_width_affordable():
    """Of three channels both 1/2 and 3/5 keep two."""
    model = mlp_model(3)
    assert kept(Fraction(1, 2), 3) == kept(Fraction(3, 5), 3)
    assert FjORD().cut_for(FjORD().init(model), Budget(width=0.5), model).tag == "2/5"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"widths": "uniform5"}, "method.widths = 'uniform5': expected uniform-k, such as uniform-5"),
        ({"widths": "uniform-0"}, "method.widths = 'uniform-0': expected uniform-k, such as uniform-5"),
        ({"widths": ()}, "method.widths = (): expected at least one width, in ascending order"),
        ({"widths": (1, 0.5)}, "method.widths = (1, 0.5): expected at least one width, in ascending order"),
        (
            {"widths": (0.5, 0.5)},
            "method.widths = (0.5, 0.5): expected at least one width, in ascending order",
        ),
        ({"widths": (0.5, 2)}, "method.widths = 2: expected a number above 0 and at most 1"),
        (
            {"probabilities": (1.0,)},
            "method.probabilities = (1.0,): expected one number above 0 for each of the 5",
        ),
        (
            {"probabilities": (0.0, 1, 1, 1, 1)},
            "method.probabilities = (0.0, 1, 1, 1, 1): expected one number above 0",
        ),
        ({"alpha": 1.5}, "method.alpha = 1.5: expected a number from 0 to 1"),
        ({"temperature": 0}, "method.temperature = 0: expected a number above 0"),
        ({"random_drop": 1}, "method.random_drop = 1: expected at least 0 and below 1"),
        (
            {"random_drop": 0.25, "per_layer": True},
            "method.per_layer and method.random_drop: expected at most one",
        ),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, message):
    with pytest.raises(FedtailorError) as caught:
        FjORD(**settings)
    assert str(caught.value).startswith(message)


def test_candidates_are_exact():
    assert as_candidates("uniform-3") == (Fraction(1, 3), Fraction(2, 3), Fraction(1))
    assert as_candidates((0.2, 0.2 + 0.4, "4/5")) == (Fraction(1, 5), Fraction(3, 5), Fraction(4, 5))


# Momentum and weight decay outside a step's width: the policy is "held"


def narrow_steps(local: LocalTraining, steps: int):
    """Steps at width 1/5 of a client that holds everything."""
    model, data = mlp_model(10), vectors(8)
    method = FjORD(replace(local, steps=steps), probabilities=(1.0, *[1e-12] * 4), distillation=False)
    task = assign(method, model, 1)
    assert {method.step_cuts(task, step, model)[0].tag for step in range(steps)} == {"1/5"}
    patch, _ = training.train(method, task, data, model)
    inside = held_mask(model, prefix(model.groups, Fraction(1, 5)), "0.weight")
    return task.patch.values["0.weight"][~inside], patch.values["0.weight"][~inside]


def test_weight_decay_shrinks_all_that_a_client_holds():
    before, after = narrow_steps(replace(PLAIN, weight_decay=0.5), steps=3)
    torch.testing.assert_close(after, before * (1 - 0.1 * 0.5) ** 3)


@pytest.mark.parametrize("local", [PLAIN, replace(PLAIN, momentum=0.9)])
def test_without_decay_coordinates_that_no_step_touched_rest_bit_for_bit(local):
    before, after = narrow_steps(local, steps=3)
    assert bits(after) == bits(before)


# FjORD + eFD


def test_random_dropout_lends_units_of_the_next_width_and_credits_them():
    model, method = cnn_model(20, 40), FjORD(PLAIN, random_drop=0.25)
    task = assign(method, model, "2/5")
    lent = method.random_cut(task.client, 0, model, Seeds(0))
    for group, units in lent.channels.items():
        width = model.groups.counts[group]
        whole = kept(Fraction(3, 5), width)
        assert max(units) < whole
        assert len(units) == kept(Fraction(3, 4), whole)  # the cap binds: 2/3 would fit the budget
        assert set(task.patch.cut.channels[group]) == {*range(kept(Fraction(2, 5), width)), *units}
    drawn = [method.step_cuts(task, step, model) for step in range(300)]
    assert 60 < sum(cuts == [lent] for cuts in drawn) < 140  # one of three widths
    assert all(task.patch.cut.holds(cut) for cuts in drawn for cut in cuts)
    assert {cut.tag for cuts in drawn for cut in cuts if cuts != [lent]} == {"1/5", "2/5"}
    assert set(task.lease.names) == set(task.patch.values)
    assert task.lease.cut == task.patch.cut


def test_random_dropout_keeps_to_the_budget_where_the_cap_does_not_bind():
    model, method = cnn_model(20, 40), FjORD(PLAIN, random_drop=0.25)
    lent = method.random_cut(client(0, "4/5"), 0, model, Seeds(0))
    for group, units in lent.channels.items():
        assert len(units) == kept(Fraction(4, 5), model.groups.counts[group])
    assert method.random_cut(client(0, 1), 0, model, Seeds(0)) is None
    assert FjORD().random_cut(client(0, "2/5"), 0, model, Seeds(0)) is None


def test_random_dropout_is_drawn_anew_in_every_round_and_for_every_client():
    model, method = cnn_model(20, 40), FjORD(random_drop=0.25)
    drawn = {
        method.random_cut(client(n, "2/5"), round, model, Seeds(0)).key for n in (0, 1) for round in (0, 1)
    }
    assert len(drawn) == 4


def test_random_dropout_trains_without_touching_statistics_of_the_larger_width():
    model, data = cnn_model(10, 15), image_data((8, 8))
    state = run(FjORD(PLAIN, random_drop=0.25), model, data, "equal-2/5", rounds=2, every=1).state
    assert {name.partition("@")[2] for name in state.weights if "@" in name} == {"1/5", "2/5"}
    outside = ~held_mask(model, prefix(model.groups, Fraction(3, 5)), "4.weight")
    between = held_mask(model, prefix(model.groups, Fraction(3, 5)), "4.weight")
    between &= ~held_mask(model, prefix(model.groups, Fraction(2, 5)), "4.weight")
    before, after = model.weights()["4.weight"], state.weights["4.weight"]
    assert bits(after[outside]) == bits(before[outside])
    assert not torch.equal(after[between], before[between])


# Runs of the same command


def test_centralised_training_is_one_client_that_is_evaluated_at_every_width():
    model, data = cnn_model(10, 15), image_data((12,))
    result = run(FjORD(PLAIN), model, data, "full-5", every=1)
    assert list(result.records[-1].tiers) == ["0.2", "0.4", "0.6", "0.8", "1"]
    assert result.records[-1].cohort.asked == 1
    assert {name.partition("@")[2] for name in result.state.weights if "@" in name} == {
        "1/5",
        "2/5",
        "3/5",
        "4/5",
        "1",
    }


def test_settings_survive_being_written_and_read():
    table = {
        "method": {"name": "fjord", "widths": [0.25, 0.5, 1], "probabilities": [0.2, 0.2, 0.6], "alpha": 0.5}
    }
    config = make_config(table)
    assert config.built_method.candidates == (Fraction(1, 4), Fraction(1, 2), Fraction(1))
    import tomllib

    again = make_config(tomllib.loads(to_toml(config)))
    assert again.built_method == config.built_method


CONFIGS = sorted((ROOT / "reproduce" / "fjord").glob("*.toml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_read_and_opens_with_its_command(path):
    first = path.read_text(encoding="utf-8").splitlines()[0]
    assert first.startswith("# fedtailor ")
    assert f"reproduce/fjord/{path.name}" in first
    config = load_config(path)
    assert config.built_method.name == "fjord"
    assert build_fleet(config.fleet).tiers[-1].budget == Budget(width=1)


def test_there_is_a_config_for_each_of_the_papers_tasks_and_a_small_one():
    names = {path.stem for path in CONFIGS}
    assert {
        f"{task}{size}" for task in ("femnist", "cifar10", "shakespeare") for size in ("", "-small")
    } <= names


# Theorem 1


def test_ordered_dropout_recovers_the_singular_value_decomposition():
    spec = importlib.util.spec_from_file_location(
        "svd", ROOT / "examples" / "ordered_dropout_recovers_svd.py"
    )
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    a = example.matrix()
    assert torch.linalg.svdvals(a).tolist() == pytest.approx([4, 3, 2, 1])
    errors = example.recover(rounds=4, steps=700)[-1]
    assert set(errors) == {1, 2, 3, 4}
    assert max(errors.values()) < 1e-6
    assert example.picture([errors] * 3, 10).startswith("<svg")
