"""A run is written, read again, reported and shown."""

from __future__ import annotations

import json
import tempfile

import pytest
import torch
from torch import Tensor, nn

import fedtailor
from fedtailor import FedtailorError, Run
from fedtailor.config import load_config, make_config
from fedtailor.run.interface import run_config
from fedtailor.storage.run_folder import CALL, COVERAGE, METRICS
from helpers import differing, image_data, tiny_cnn, tiny_mlp, vector_data, vectors
from odd_networks import Sized

QUICK = {"rounds": 2, "evaluate_every": 1, "engine": {"workers": 0}}
INPUTS = vectors(3).take(torch.arange(3))[0]


def trained(folder=None, module: nn.Module | type[nn.Module] = Sized, **settings) -> Run:
    settings = {"fleet": "uniform-2", "method": "fedavg", **QUICK, **settings}
    return fedtailor.train(module, vector_data(), folder=folder, **settings)


def same(first: Run, second: Run) -> bool:
    answers: list[Tensor] = [run.submodel(0.5)(INPUTS) for run in (first, second)]
    assert [record.as_row() for record in first.history] == [record.as_row() for record in second.history]
    assert (first.tiers, first.best_round) == (second.tiers, second.best_round)
    return torch.equal(*answers)


def test_a_run_from_python_is_loaded_from_its_folder_alone(tmp_path):
    run = trained(tmp_path / "run", fleet=[{"macs": "60%", "share": 3}, {"width": 1}])
    loaded = Run.load(tmp_path / "run")
    assert same(run, loaded)
    assert loaded.fleet == run.fleet
    assert loaded.method == run.method
    assert not differing(loaded.state.weights, run.state.weights)


def test_a_run_of_a_config_is_loaded_and_an_unfinished_one_too(tmp_path):
    config = make_config({
        "rounds": 2, "data": {"clients": 4, "limit": 60}, "fleet": {"name": "uniform-2"},
        "model": {"name": "cnn", "channels": [4, 8]}, "engine": {"workers": 0},
    })  # fmt: skip
    run = run_config(config, tmp_path / "run")
    loaded = Run.load(str(tmp_path / "run"))
    assert not differing(loaded.state.weights, run.state.weights)
    assert loaded.tiers == run.tiers
    with pytest.raises(FedtailorError, match="config.toml says what its module, data and method are"):
        Run.load(tmp_path / "run", tiny_cnn())
    (tmp_path / "run" / "weights.safetensors").unlink()
    assert Run.load(tmp_path / "run").state.round == 2


def test_what_words_cannot_say_is_asked_for(tmp_path):
    run = trained(tmp_path / "plain", tiny_mlp())
    with pytest.raises(FedtailorError, match=r"plain: only its module knows .*Run.load\(folder, module=Net"):
        Run.load(tmp_path / "plain")
    assert same(run, Run.load(tmp_path / "plain", tiny_mlp(seed=5)))
    with pytest.raises(FedtailorError, match="the module has other tensors than the one that was trained"):
        Run.load(tmp_path / "plain", tiny_mlp(hidden=7))
    trained(tmp_path / "wide", Sized(12))
    with pytest.raises(FedtailorError, match="the module has other tensors"):
        Run.load(tmp_path / "wide")

    class Local(fedtailor.FedAvg):
        pass

    trained(tmp_path / "local", method=Local())
    with pytest.raises(FedtailorError, match="the class of its method cannot be imported: pass it"):
        Run.load(tmp_path / "local")
    assert Run.load(tmp_path / "local", method=Local()).method.name == "Local"
    with pytest.raises(FedtailorError, match="no such run folder"):
        Run.load(tmp_path / "nowhere")
    with pytest.raises(FedtailorError, match="expected the folder of a run"):
        Run.load(tmp_path)


def test_without_its_data_a_run_measures_nothing(tmp_path):
    data = image_data()
    run = fedtailor.train(tiny_cnn(), data, "uniform-2", "heterofl", folder=tmp_path / "run", **QUICK)
    loaded = Run.load(tmp_path / "run", tiny_cnn(seed=3))
    assert loaded.tiers == run.tiers
    with pytest.raises(
        FedtailorError, match="heterofl measures norm statistics on the clients' data, which was"
    ):
        loaded.submodel(0.5)
    with pytest.raises(FedtailorError, match="this is the clients' data, which was not loaded"):
        _ = loaded.data
    whole = Run.load(tmp_path / "run", tiny_cnn(), data)
    images = data.test.take(torch.arange(4))[0]
    assert torch.equal(whole.submodel(0.5)(images), run.submodel(0.5)(images))


def test_pictures_are_deployed_without_them(tmp_path):
    """How bytes become numbers is written down with the run."""
    pixels = torch.randint(0, 256, (60, 1, 4, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    run = fedtailor.train(
        tiny_cnn(), (pixels, torch.arange(60) % 3), "uniform-2", "fjord", folder=tmp_path / "run", **QUICK
    )
    loaded = Run.load(tmp_path / "run", tiny_cnn(seed=3))
    assert torch.equal(loaded.submodel(0.4)(pixels[:4]), run.submodel(0.4)(pixels[:4]))


def test_what_clients_kept_back_is_kept_back_again(tmp_path):
    """Norm statistics are measured on training examples: with others among them, another network would be deployed."""
    data = image_data((12,) * 6)
    settings = {"validation": 0.25, "folder": tmp_path / "run", **QUICK}
    run = fedtailor.train(tiny_cnn(), data, "uniform-2", "heterofl", **settings)
    loaded = Run.load(tmp_path / "run", tiny_cnn(), data)
    assert loaded.data.sizes.tolist() == run.data.sizes.tolist() == [9] * 6
    images = data.test.take(torch.arange(4))[0]
    assert torch.equal(loaded.submodel(0.5)(images), run.submodel(0.5)(images))


def test_a_task_by_name_is_loaded_with_the_run(tmp_path):
    trained(tmp_path / "run", task="classification", metrics=["accuracy"])
    assert Run.load(tmp_path / "run").model.learning_task.name == "classification"


def test_other_data_than_the_run_was_trained_on_is_said(tmp_path):
    trained(tmp_path / "run")
    with pytest.warns(UserWarning, match="the data is not what the run was trained on"):
        Run.load(tmp_path / "run", data=vector_data((5,) * 6))


@pytest.mark.parametrize(
    "stopping", [pytest.param(None, marks=pytest.mark.slow), {"patience": 1, "restore_best": True}]
)
def test_a_run_that_was_not_saved_is_saved_later_to_the_same_bytes(tmp_path, stopping):
    settings = {"stopping": stopping, "rounds": 4, "training": {"lr": 2.0}}
    run, saved = trained(**settings), trained(tmp_path / "saved", **settings)
    run.save(tmp_path / "later")
    for name in (METRICS, COVERAGE, CALL):
        assert (tmp_path / "later" / name).read_bytes() == (tmp_path / "saved" / name).read_bytes()
    assert same(saved, Run.load(tmp_path / "later"))
    assert same(run, Run.load(tmp_path / "saved"))
    assert stopping is None or run.state.round < run.history[-1].round  # it ends with an earlier round
    with pytest.raises(FedtailorError, match="exists already"):
        run.save(tmp_path / "later")


def test_a_run_writes_its_report(tmp_path):
    run = trained()
    text = run.report(tmp_path / "report.md").read_text(encoding="utf-8")
    with pytest.raises(FedtailorError, match=r"exists already: .*overwrite=True"):
        run.report(tmp_path / "report.md")
    with pytest.raises(FedtailorError, match="a browser prints the page as PDF"):
        run.report(tmp_path / "report.pdf")
    assert text.startswith("# fedavg")
    assert "| not saved |" in text
    assert tempfile.gettempdir() not in text.replace(str(tmp_path), "")
    run.save(tmp_path / "run")
    again = Run.load(tmp_path / "run").report(str(tmp_path / "again.md")).read_text(encoding="utf-8")
    assert again.startswith("# run")
    results = slice(2, 12)  # the answer in words, and the table of results
    assert again.splitlines()[results] == text.splitlines()[results]


def test_a_run_shows_itself_in_a_few_words_and_in_a_notebook():
    run = trained()
    accuracy = run.tiers["1"]["accuracy"]
    assert repr(run).startswith("<Run: fedavg on own data, 2 rounds; 0.5: accuracy ")
    shown = run._repr_html_()
    assert f"{100 * accuracy:.1f} %" in shown
    assert shown.count("<polyline") == 2  # a line for each tier
    assert shown.count("<circle") == 4  # and a point for each evaluation
    assert "<script" not in shown


def test_a_call_says_what_it_can(tmp_path):
    trained(tmp_path / "run", method={"name": "fedavg", "width": "1/2"})
    words = json.loads((tmp_path / "run" / CALL).read_text())
    assert (words["module"], words["data"]) == ("odd_networks:Sized", None)
    assert words["method"]["name"] == "fedavg"
    assert words["method"]["width"] == "1/2"


def test_a_config_may_be_named_by_a_text(tmp_path):
    (tmp_path / "small.toml").write_text("rounds = 3\n", encoding="utf-8")
    assert load_config(str(tmp_path / "small.toml")).rounds == 3
    with pytest.raises(FedtailorError, match="nowhere.toml: no such file"):
        load_config("nowhere.toml")
    with pytest.raises(FedtailorError, match="config = 5: expected the path of a TOML file"):
        load_config(5)  # type: ignore[arg-type]
