"""The common benchmark: which runs results lead to, and the page that is made of them; nothing is trained."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedtailor.config import load_config

ROOT = Path(__file__).parents[1]
TIERS = ("0.2", "0.4", "0.6", "0.8", "1")
MADE = {"commands": ["fedtailor run"], "versions": ["none"]}


@pytest.fixture
def common(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(ROOT)
    names = {name: importlib.import_module(f"reproduce.common.{name}") for name in ("plan", "tables", "run")}
    return SimpleNamespace(**names, results=importlib.import_module("reproduce.shared.results").Results)


def figures(*accuracy: float, sent: int = 2_000_000) -> dict[str, Any]:
    mean = sum(accuracy) / len(accuracy)
    return {
        "accuracy": dict(zip(TIERS, accuracy, strict=False)), "bytes": sent, "macs": 3_000_000_000,
        "course": [[10, sent // 2, 10**9, mean - 5], [20, sent, 3 * 10**9, mean]],
    }  # fmt: skip


def with_rates(common: Any, folder: Path, task: str = "fashion-mnist", **levels: float) -> Any:
    """Results of all rates of a task: the middle one is best, methods are as good as ``levels`` says, or 40 %."""
    runs: dict[str, Any] = {}
    for method in common.plan.able(task, "uniform"):
        level = levels.get(method.replace("-", "_"), 40.0)
        for place, rate in enumerate(common.plan.GRID[task]):
            runs[f"{method}-{rate}"] = {"1": figures(*[level - 5 * abs(place - 1)] * 5)}
    results = common.results(folder / "results.json")
    results.write({f"{task}-rates": {"runs": runs}})
    return results


def runs_of(common: Any, results: Any, name: str) -> list[tuple[str, int]]:
    (chosen,) = (each for each in common.plan.experiments(results) if each.name == name)
    return [(method, seed) for method, seed, _ in chosen.every()]


def test_before_anything_is_run_there_are_rates_alone(common, tmp_path):
    results = common.results(tmp_path / "results.json")
    counts = {each.name: len(list(each.every())) for each in common.plan.experiments(results)}
    assert [name for name, count in counts.items() if count] == [
        f"{task}-rates" for task in common.plan.TASKS
    ]
    assert counts["cifar10-rates"] == 3 * 16
    assert len(counts) == 4 + 12 + 4


def test_the_best_rate_of_each_method_is_taken_and_its_run_is_the_first_seed(common, tmp_path):
    results = with_rates(common, tmp_path, fjord=80.0)
    assert common.plan.best_rates("fashion-mnist", results)["fjord"] == "0.1"
    assert common.plan.rows("fashion-mnist", "uniform", results)["fjord"]["1"]["accuracy"]["0.2"] == 80.0
    assert runs_of(common, results, "fashion-mnist-few-strong").count(("fjord", 1)) == 1
    assert ("fjord", 1) not in runs_of(common, results, "fashion-mnist-uniform")  # it is there already
    (cell,) = (e for e in common.plan.experiments(results) if e.name == "fashion-mnist-few-strong")
    assert "training.lr=0.1" in cell.methods["fjord"]


def test_a_run_that_broke_down_is_never_the_best_rate_and_has_no_row(common, tmp_path):
    results = with_rates(common, tmp_path)
    results.add("fashion-mnist-rates", "efd-0.1", 1, {"failed": "round 3 never had a quorum"}, MADE)
    assert common.plan.best_rates("fashion-mnist", results)["efd"] == "0.03"
    results.add("fashion-mnist-flops", "efd", 1, {"failed": "round 3 never had a quorum"}, MADE)
    assert "efd" not in common.plan.rows("fashion-mnist", "flops", results)


def test_who_is_far_behind_on_every_tier_is_left_at_one_seed(common, tmp_path):
    results = with_rates(common, tmp_path, heterofl=80.0, flanc=77.5, flado=76.0, tailor=50.0)
    further = {method for method, seed in runs_of(common, results, "fashion-mnist-uniform") if seed > 1}
    assert further == {"heterofl", "flanc", "tailor", "fjord", "fedavg-smallest"}
    results.add("fashion-mnist-few-strong", "heterofl", 1, figures(80, 80), MADE)
    few = runs_of(common, results, "fashion-mnist-few-strong")
    assert {seed for _, seed in few} == {1}  # as long as the first seed of others is not known
    ahead_on_one = {"a": {"1": figures(80, 60)}, "b": {"1": figures(60, 80)}, "c": {"1": figures(60, 60)}}
    assert common.plan.survivors(ahead_on_one) == {"a", "b"}


def test_who_is_hopeless_where_rates_are_found_is_not_run_on_other_fleets(common, tmp_path):
    results = with_rates(common, tmp_path, heterofl=80.0, flanc=74.5, flado=73.5, tailor=50.0)
    chosen = {"heterofl", "flanc", "tailor", "fjord", "fedavg-smallest"}
    assert set(common.plan.tried_on("fashion-mnist", "few-strong", results)) == chosen
    assert {method for method, _ in runs_of(common, results, "fashion-mnist-few-strong")} == chosen
    assert len(common.plan.tried_on("fashion-mnist", "uniform", results)) == 16
    results.add("fashion-mnist-few-strong", "efd", 1, figures(10, 10), MADE)  # it stays where it has been run
    found = common.plan.rows("fashion-mnist", "few-strong", results)
    (line,) = (
        x for x in common.tables._missing("fashion-mnist", "few-strong", found, results) if "6 points" in x
    )
    assert "`flado`" in line
    assert "`efd`" not in line


def test_a_run_is_a_config_of_its_fleet_with_the_steps_of_equal_compute(common, tmp_path):
    results = with_rates(common, tmp_path)
    (cell,) = (each for each in common.plan.experiments(results) if each.name == "fashion-mnist-flops")
    config = load_config(ROOT / cell.config, cell.methods["fjord"])
    counted = common.plan.computed()["fashion-mnist-flops"]["methods"]
    assert config.training["steps"] == counted["fjord"]["steps"] < counted["heterofl"]["steps"] == 10
    assert (config.fleet.name, config.method["widths"]) == ("flops-0.04-0.64", "uniform-10")
    assert cell.commands(Path("runs/common"))[0].startswith(
        "fedtailor run reproduce/common/fashion-mnist.toml"
    )


def test_the_able_alone_have_a_row_in_which_they_are_asked_no_more_often_than_others(common, tmp_path):
    results = with_rates(common, tmp_path)
    asked = {}
    for fleet in common.plan.FLEETS:
        cell = common.plan.cell("fashion-mnist", fleet, results)
        configs = {name: load_config(ROOT / cell.config, settings) for name, settings in cell.methods.items()}
        assert configs["fedavg-able"].clients_per_round == configs["tailor"].clients_per_round == 10
        asked[fleet] = configs["fedavg-able-equal"].clients_per_round
    assert asked == {"uniform": 2, "few-strong": 1, "flops": 6}
    beyond = {
        name
        for name in common.plan.able("fashion-mnist", "uniform")
        if not common.plan.at_equal_compute("fashion-mnist", "uniform", name)
    }
    assert beyond == {"fedavg-able", "fiarse"}


def test_who_computes_more_than_others_has_no_rank_and_is_said_beside_the_verdict(common, tmp_path):
    found = {
        "tailor": three_seeds(70, 80), "fedavg-able": three_seeds(60, 90), "fjord": three_seeds(69, 79),
        "fedavg-smallest": three_seeds(68, 68),
    }  # fmt: skip
    cells = {("cifar10", "uniform"): found}
    lines = list(common.tables.ranks(cells))
    assert not any("fedavg-able" in line for line in lines)
    assert "| `tailor` | 1.0 | 1.0 | 1.0 | 2 of 2 tiers | 1 | 0 |" in lines
    *_, row = common.tables.verdicts(cells)
    assert row.startswith("| cifar10, uniform | 2 of 2 tiers | 1 |")
    missing = common.tables._missing("cifar10", "uniform", found, with_rates(common, tmp_path, "cifar10"))
    assert any("`fedavg-able` (5.0 times as often asked)" in line for line in missing)


def test_methods_without_a_row_are_named_with_their_reason(common):
    from fedtailor.methods.registry import method_names

    told = {name for names in common.plan.LEFT_OUT for name in names.split(", ")}
    rows = {spec.partition(":")[0] for spec in common.plan.METHODS.values()}
    assert told | rows == set(method_names())
    page = common.run.PAGE.read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in told)
    assert all(reason in " ".join(page.split()) for reason in common.plan.LEFT_OUT.values())


# Tables


def test_a_method_is_far_behind_only_where_all_have_been_tried(common, tmp_path):
    results = with_rates(common, tmp_path, heterofl=80.0, flanc=77.5)
    results.add("fashion-mnist-few-strong", "heterofl", 1, figures(80, 80), MADE)

    def said_of(fleet):
        found = common.plan.rows("fashion-mnist", fleet, results)
        return list(common.tables._missing("fashion-mnist", fleet, found, results))

    (behind,) = (line for line in said_of("uniform") if "far behind" in line)
    assert "`flado`" in behind
    assert "`flanc`" not in behind
    (waiting,) = (line for line in said_of("uniform") if line.startswith("Not run yet"))
    assert "`flanc`" in waiting
    assert "`flado`" not in waiting
    assert not any("far behind" in line for line in said_of("few-strong"))
    assert any("`heterofl`" in line for line in said_of("few-strong") if line.startswith("Not run yet"))


def three_seeds(*levels: float, shift: float = 0.0) -> dict[str, dict[str, Any]]:
    return {
        str(seed): figures(*(level + 0.1 * seed + shift * seed for level in levels)) for seed in (1, 2, 3)
    }


def test_ranks_and_who_leads(common):
    found = {
        "tailor": three_seeds(70, 80),
        "fjord": three_seeds(60, 81),
        "fedavg-smallest": three_seeds(70, 70),
        "heterofl": {"1": figures(75, 85)},  # one seed: it is ranked, and leads nowhere
    }
    places = common.tables.placed(found)
    assert places["smallest"] == {"tailor": 2.5, "fjord": 4.0, "fedavg-smallest": 2.5, "heterofl": 1.0}
    assert [common.tables.leads(found, name) for name in found] == [1, 1, 1, 0]
    lines = list(common.tables.ranks({("fashion-mnist", "uniform"): found}))
    assert "| `tailor` | 2.5 | 3.0 | 2.0 | 1 of 2 tiers | 1 | 0 |" in lines
    assert "| `heterofl` | 1.0 | 1.0 | 1.0 | 0 of 2 tiers | 1 | 1 |" in lines


def test_a_network_that_devices_cannot_run_leads_none_of_their_tiers(common):
    large = {seed: {**run, "beyond": ["0.2"]} for seed, run in three_seeds(90, 90).items()}
    found = {"tailor": three_seeds(70, 80), "fedrolex": large, "fjord": three_seeds(69, 79)}
    assert common.tables.placed(found) == {
        "smallest": {"tailor": 1.0, "fjord": 2.0},
        "largest": {"tailor": 2.0, "fjord": 3.0, "fedrolex": 1.0},
        "mean": {"tailor": 1.0, "fjord": 2.0},
    }
    assert [common.tables.leads(found, name) for name in found] == [1, 1, 0]
    behind = {"a": {"1": figures(80, 70)}, "b": {"1": {**figures(90, 60), "beyond": ["0.2"]}}}
    assert common.plan.survivors(behind) == {"a"}
    cells = {("fashion-mnist", "uniform"): found}
    assert "| `fedrolex` | none | 1.0 | none | 1 of 2 tiers | 1 | 0 |" in list(common.tables.ranks(cells))


def test_verdicts_compare_tailor_with_the_smallest_network_and_the_papers(common):
    found = {
        "tailor": three_seeds(70, 80), "fedavg-smallest": three_seeds(68, 68), "fjord": three_seeds(66, 76),
        "flanc": three_seeds(60, 70),
    }  # fmt: skip
    *_, row = common.tables.verdicts({("cifar10", "uniform"): found})
    assert row == "| cifar10, uniform | 2 of 2 tiers | 2 | +2.0 ± 0.0 | +4.0 ± 0.0 (`fjord`) | 1.00 |"


def test_parts_are_compared_with_the_whole(common, tmp_path):
    results = common.results(tmp_path / "results.json")
    for part, level in (("all", 70.0), ("without-sandwich", 68.0)):
        for seed in (1, 2, 3):
            results.add("cifar10-uniform-parts", part, seed, figures(level + seed, level + 10 + seed), MADE)
    *_, row = common.tables.ablations(results)
    assert row == "| `without-sandwich` | -2.0 ± 0.0 | -2.0 ± 0.0 |"


def test_a_page_without_results_says_so_and_one_with_some_shows_them(common, tmp_path):
    results = common.results(tmp_path / "empty.json")
    common.run.draw(results, tmp_path)
    text = (tmp_path / "which-method.md").read_text(encoding="utf-8")
    assert text.count("Nothing has been run yet.") == 5
    assert not (tmp_path / "which-method.svg").exists()
    common.run.draw(with_rates(common, tmp_path, fjord=80.0), tmp_path)
    text = (tmp_path / "which-method.md").read_text(encoding="utf-8")
    assert "### fashion-mnist, uniform" in text
    assert "To a mean over tiers of 40.0 %" in text
    assert "left at that: " in text
    assert "figures/which-method.svg" in text
    assert (tmp_path / "which-method.svg").read_text(encoding="utf-8").count("<circle") == 16
