"""Which runs a comparison consists of."""

from __future__ import annotations

import json

import pytest

from commands import small_config
from fedtailor.config import to_toml
from fedtailor.errors import FedtailorError
from fedtailor.sweep.plan import COMPARISON, grid_cells, make_plan, split_list


@pytest.fixture
def config(tmp_path):
    return small_config(tmp_path)


def plan_of(config, methods="heterofl,fedavg", seeds=2, grid=(), overrides=()):
    return make_plan(config, methods, seeds, grid, overrides, config.parent / "runs")


def test_a_run_for_every_method_seed_and_cell(config):
    plan = plan_of(config, grid=["data.alpha=0.1,1", "training.lr=0.05"])
    assert len(plan.runs) == 8
    assert len({run.folder.path for run in plan.runs}) == 8
    place = plan.runs[0].folder.path.relative_to(config.parent)
    assert str(place) == "runs/small/data.alpha-0.1/training.lr-0.05/heterofl-seed3"
    assert [run.config.data.alpha for run in plan.runs] == [0.1] * 4 + [1.0] * 4
    assert {run.config.seed for run in plan.runs} == {3, 4}
    assert plan.runs[0].title == "heterofl, seed 3, data.alpha=0.1, training.lr=0.05"


def test_runs_of_one_seed_differ_in_their_method_alone(config):
    first, _, third, _ = plan_of(config).runs
    assert (first.seed, third.seed) == (3, 3)

    def rest(run):
        lines = to_toml(run.config).split("[method]")[0].splitlines()
        return [line for line in lines if not line.startswith("name =")]

    assert rest(first) == rest(third)


def test_a_plan_is_left_beside_its_runs(config):
    plan = plan_of(config, methods="efd:global_width=each", seeds=1, overrides=["fleet.name=uniform-2"])
    plan.write()
    table = json.loads((plan.folder / COMPARISON).read_text())
    assert [run["tier"] for run in table["runs"]] == ["0.5", "1"]
    assert {run["variant"] for run in table["runs"]} == {"efd:global_width=each"}
    assert table["runs"][0]["folder"] == "efd-global_width-1-2-seed3"


def test_lists_may_hold_commas_in_brackets_and_quotes():
    assert split_list("[4, 8], 'a,b' ,{x = 1, y = 2}") == ["[4, 8]", "'a,b'", "{x = 1, y = 2}"]
    assert grid_cells([]) == ((),)
    assert grid_cells(["model.channels=[4, 8],[8, 16]"])[1] == (("model.channels", "[8, 16]"),)


@pytest.mark.parametrize(
    ("grid", "words"),
    [
        (["data.alpha"], "key=value,value"),
        (["data.alpha="], "key=value,value"),
        (["data.alpha=1,1"], "every value once"),
        (["data.alpha=1", "data.alpha=2"], "every key once"),
        (["seed=1,2"], "--seeds"),
        (["method.norm=static"], "--methods"),
        (["data.alfa=1"], "did you mean 'alpha'"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_by_name(config, grid, words):
    with pytest.raises(FedtailorError, match=words):
        plan_of(config, grid=grid)
    assert not (config.parent / "runs").exists()


def test_two_runs_never_share_a_folder(config):
    with pytest.raises(FedtailorError, match="would share"):
        plan_of(config, grid=["model.channels=[4, 8],[4 ,8]"])


def test_methods_are_compared_under_the_same_rules(config):
    """Two methods with equal settings differ in nothing but their own hooks: what is not said is the same for all."""
    runs = {
        run.variant: run.config.built_method
        for run in plan_of(config, "heterofl,fedrolex,fedavg,uniprob").runs
    }
    assert len({method.local for method in runs.values()}) == 1
    assert {method.weighting for method in runs.values()} == {"samples"}
    assert not any(getattr(method, "masked_loss", False) for method in runs.values())
    assert not any(getattr(method, "label_rows", False) for method in runs.values())


def test_a_preset_of_the_paper_is_asked_for_by_name(config):
    found = plan_of(config, "heterofl:preset=paper,heterofl,heterofl:masked_loss=true", seeds=1)
    paper, neutral, own = (run.config.built_method for run in found.runs)
    assert (paper.local.clip_norm, paper.weighting, paper.masked_loss, paper.label_rows) == (
        1.0,
        "count",
        True,
        True,
    )
    assert (neutral.local.clip_norm, neutral.weighting) == (float("inf"), "samples")
    assert (own.masked_loss, own.label_rows) == (True, False)
    assert paper.norm == neutral.norm == "static"  # a method depends on its norm policy
    with pytest.raises(FedtailorError, match="unknown preset 'papre': did you mean 'paper'"):
        plan_of(config, "heterofl:preset=papre")


def test_what_the_config_says_about_training_holds_for_all(config):
    runs = plan_of(config, "heterofl,fedavg", overrides=["training.clip_norm=2.0"]).runs
    assert {run.config.built_method.local.clip_norm for run in runs} == {2.0}
