"""What bad clients send, what their examples look like, and what becomes of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from fedtailor.attacks.attack import Attack
from fedtailor.attacks.bad_answers import BadAnswers
from fedtailor.attacks.poison import STAMP, poisoned, success
from fedtailor.attacks.trial import absent, outcome, rule_tables
from fedtailor.cli.main import app
from fedtailor.config import make_config
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.errors import FedtailorError
from fedtailor.messages import Refused, Task, Update
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.run.setup import prepare_config
from helpers import CONV1, NORM1, bits, cnn_model, image_data, setup_of

SMALL: dict[str, Any] = {
    "rounds": 8, "clients_per_round": 10, "evaluate_every": 8, "seed": 1,
    "data": {"dataset": "digits", "clients": 10, "limit": 400},
    "model": {"name": "mlp", "hidden": [32]},
    "fleet": {"tiers": [{"name": "narrow", "width": 0.5}, {"name": "wide", "width": 1}]},
    "method": {"name": "heterofl"},
    "training": {"lr": 0.1, "momentum": 0.9, "batch_size": 20, "epochs": 2},
    "engine": {"workers": 0},
}  # fmt: skip


@dataclass(frozen=True)
class Honest:
    """Answers with what was sent, one further."""

    def run(self, tasks: Sequence[Task]) -> Iterator[Update | Refused | None]:
        yield None
        for task in tasks:
            values = {name: value + 1 for name, value in task.patch.values.items()}
            yield Update(task.client.id, task.round, task.round, Patch(values, task.patch.cut), 1.0)


def answers(attack: Attack, bad: frozenset[int] = frozenset({1})) -> tuple[list[Task], list[Any]]:
    setup = setup_of(HeteroFL(norm="averaged"), cnn_model(), image_data(), "uniform-5")
    state, clients = setup.start.state, list(setup.clients(0))[:3]
    tasks = [setup.method.assign(state, client, setup.model, setup.seeds) for client in clients]
    nothing, *found = BadAnswers(Honest(), attack, bad, setup.model).run(tasks)
    assert nothing is None
    return tasks, found


@pytest.mark.parametrize(("kind", "went"), [("scale", 100.0), ("sign-flip", -5.0), ("backdoor", 1.0)])
def test_a_bad_client_goes_so_many_times_its_own_step_and_all_others_none(kind, went):
    tasks, found = answers(Attack(kind))
    name, mean = f"{CONV1}.weight", f"{NORM1}.running_mean"
    step = found[1].patch.values[name] - tasks[1].patch.values[name]
    assert torch.allclose(step, torch.full_like(step, went), atol=1e-3)
    assert bits(found[1].patch.values[mean]) == bits(tasks[1].patch.values[mean] + 1)
    for other in (0, 2):
        assert bits(found[other].patch.values[name]) == bits(tasks[other].patch.values[name] + 1)


def test_noise_has_the_size_of_the_step_and_is_the_same_again():
    name = f"{CONV1}.weight"
    (tasks, found), (_, again) = answers(Attack("noise", factor=10)), answers(Attack("noise", factor=10))
    drawn = found[1].patch.values[name] - tasks[1].patch.values[name]
    assert 5 < float(drawn.std()) < 20
    assert bits(found[1].patch.values[name]) == bits(again[1].patch.values[name])


def test_absent_clients_never_answer_and_nan_is_nan():
    assert answers(absent(Attack("scale", factor=7)))[1][1] == Refused(1, 0, "no-answer")
    assert bool(answers(Attack("nan"))[1][1].patch.values[f"{CONV1}.weight"].isnan().all())


def test_poison_is_in_the_examples_of_bad_clients_alone():
    data = image_data((6,) * 6)
    flipped = poisoned(data, Attack("label-flip"), frozenset({2}))
    stamped = poisoned(data, Attack("backdoor", target=3), frozenset({2}))
    assert flipped.client(2).targets.tolist() == (3 - data.client(2).targets).tolist()
    assert stamped.client(2).targets.tolist()[::2] == [3, 3, 3]
    assert stamped.client(2).targets.tolist()[1::2] == data.client(2).targets.tolist()[1::2]
    images, white = stamped.client(2).raw[0], data.train.columns[0].max()
    assert bool((images[::2, :, -STAMP:, -STAMP:] == white).all())
    for client in (0, 1, 3, 4, 5):
        for other in (flipped, stamped):
            assert all(
                bits(one) == bits(two)
                for one, two in zip(other.client(client).raw, data.client(client).raw, strict=True)
            )


def test_who_is_bad_is_drawn_from_the_seed_inside_the_tier():
    setup = prepare_config(make_config(SMALL))
    wide = Attack(share=0.2, tier="wide").bad_clients(setup)
    tiers = {client.id: client.tier for client in setup.clients(0)}
    assert len(wide) == 2
    assert {tiers[client] for client in wide} == {"wide"}
    assert wide == Attack("nan", share=0.2, tier="wide").bad_clients(setup)
    assert len(Attack(share=0.01).bad_clients(setup)) == 1


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (lambda: Attack("flip"), "unknown attack 'flip'"),
        (lambda: Attack(share=0.0), "share = 0.0: expected a share above 0"),
        (lambda: Attack(factor=-1.0), "factor = -1.0: expected a number above 0"),
        (lambda: Attack("nan", factor=3.0), "factor = 3.0: expected none with nan"),
        (lambda: Attack(tier="x").bad_clients(prepare_config(make_config(SMALL))), "unknown tier 'x'"),
        (lambda: Attack(share=0.6, tier="wide").bad_clients(prepare_config(make_config(SMALL))), "share = 0.6: 6 of"),
        (lambda: poisoned(image_data(), Attack("backdoor", target=9), frozenset({0})), "target = 9: expected a class"),
        (lambda: poisoned(replace(image_data(), num_classes=0), Attack("label-flip"), frozenset({0})), "attack label"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(made, message):
    with pytest.raises(FedtailorError) as caught:
        made()
    assert str(caught.value).startswith(message)


def test_settings_of_a_config_go_to_the_rule_they_were_chosen_for():
    own = {"rule": "clip", "bound": 3.0}
    assert rule_tables(["median", "clip"], own) == [{"rule": "median"}, own]
    assert rule_tables(["mean", "median"], {}) == [{"rule": "mean"}, {"rule": "median"}]
    with pytest.raises(FedtailorError, match="unknown merge.rule 'medain'"):
        rule_tables(["mean", "medain"], {})


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["clip", "trimmed-mean", "median", "krum"])
def test_a_rule_saves_the_run_that_one_client_ruins_under_the_mean(rule):
    attack = Attack("sign-flip", 0.1, 20)
    without, ruined, saved = (
        outcome(make_config({**SMALL, "merge": {"rule": name}}), each)
        for name, each in (("mean", absent(attack)), ("mean", attack), (rule, attack))
    )
    assert ruined.mean < without.mean - 0.3
    assert saved.mean > without.mean - 0.2
    assert ruined.refused == 0
    assert saved.restrained == 8 or rule in ("median", "trimmed-mean")


@pytest.mark.slow
def test_a_backdoor_of_half_the_clients_works_and_the_task_is_learnt_all_the_same():
    found = outcome(make_config({**SMALL, "rounds": 12, "evaluate_every": 12}), Attack("backdoor", 0.5))
    assert found.backdoor is not None
    assert min(found.backdoor.values()) > 0.9
    assert found.mean > 0.5


def test_a_network_that_answers_the_target_to_everything_has_the_backdoor():
    setup = setup_of(HeteroFL(norm="averaged"), cnn_model(), image_data(), "equal")
    weights = {name: value.clone() for name, value in setup.start.state.weights.items()}
    weights["8.bias"] = torch.tensor([0.0, 0.0, 1e6, 0.0])
    state = replace(setup.start.state, weights=weights)
    assert set(success(setup, state, Attack("backdoor", target=2)).values()) == {1.0}
    assert set(success(setup, state, Attack("backdoor", target=1)).values()) == {0.0}


def test_the_command_shows_a_table_of_80_columns_and_json(tmp_path, monkeypatch):
    config = tmp_path / "run.toml"
    config.write_text(
        'rounds = 1\nclients_per_round = 5\n[data]\nclients = 5\nlimit = 100\n[model]\nname = "mlp"\nhidden = [8]\n'
        '[fleet]\nname = "equal"\n[engine]\nworkers = 0\n'
    )
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.chdir(tmp_path)
    asked = ["attack", str(config), "--kind", "nan", "--share", "0.2", "--rule", "median"]
    found = CliRunner().invoke(app, asked)
    assert found.exit_code == 0, found.output
    assert max(map(len, found.output.splitlines())) <= 80
    assert "without them" in found.output
    told = json.loads(CliRunner().invoke(app, [*asked, "--json"]).stdout)
    assert [(each["rule"], each["clients"]) for each in told["outcomes"]] == [
        ("mean", "absent"), ("median", "honest"), ("median", "attacked"),
    ]  # fmt: skip
    assert told["outcomes"][2]["refused"] == 1
    assert math.isclose(told["outcomes"][0]["mean"], told["outcomes"][2]["mean"], abs_tol=0.5)
    assert list(tmp_path.iterdir()) == [config]
