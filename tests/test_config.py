"""The configuration: what it accepts, what it refuses, and what it writes back."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path

import pytest

from fedtailor.config import RunConfig, load_config, make_config, to_toml
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.methods.fedavg import FedAvg
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.run.setup import prepare_config


def test_defaults_are_a_valid_config():
    config = make_config({})
    assert config == RunConfig()
    assert isinstance(config.built_method, HeteroFL)


def test_override_reaches_nested_key_and_keeps_its_type():
    config = make_config(
        {"data": {"partition": "dirichlet"}}, ["data.alpha=0.1", "name=skewed", "training.lr=1"]
    )
    assert (config.data.alpha, config.data.partition, config.name) == (0.1, "dirichlet", "skewed")
    assert config.built_method.local.lr == 1.0


def test_training_overrides_only_what_it_names():
    """HeteroFL clips at 1 by default; [training] may lift that."""
    assert make_config({"method": {"name": "heterofl"}}).built_method.local.clip_norm == 1.0
    lifted = make_config({"method": {"name": "heterofl"}, "training": {"clip_norm": math.inf}})
    assert lifted.built_method.local.clip_norm == math.inf
    assert make_config({"method": {"name": "fedavg"}}).built_method.local.clip_norm == math.inf


def test_names_with_dots_are_written_so_that_they_are_read_back():
    ranks = {"stages.1.0.conv2.weight": (8, 32)}
    config = make_config(
        {"method": {"name": "flanc", "ranks": ranks}, "model": {"name": "cnn", "keep": ["features.0"]}}
    )
    again = make_config(tomllib.loads(to_toml(config)))
    assert again.built_method == config.built_method
    assert again.built_method.ranks == ranks
    assert again.model == config.model


def test_kept_layers_are_as_wide_at_every_width():
    model = {"name": "cnn", "channels": [8, 8], "norm": "none", "keep": ["features.0"]}
    prepared = prepare_config(make_config({"model": model, "data": {"dataset": "digits"}}))
    half = prepared.method.cut_for(prepared.start.state, Budget(width=0.5), prepared.model)
    assert prepared.model.shape("features.0.weight", half)[0] == 8
    assert prepared.model.shape("classifier.weight", half)[1] == 4


def test_rounds_reach_the_learning_rate_schedule():
    local = make_config({"rounds": 8, "training": {"schedule": "cosine"}}).built_method.local
    assert local.rate(0) == pytest.approx(0.1)
    assert local.rate(4) == pytest.approx(0.05)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rouds=3", ["'rouds'", "did you mean 'rounds'"]),
        ("data.alhpa=1", ["[data]", "did you mean 'alpha'"]),
        ("training.lrr=1", ["[training]", "did you mean 'lr'"]),
        ("fleet.nam=a1", ["[fleet]", "did you mean 'name'"]),
        ("method.widht=1", ["method fedavg", "did you mean 'width'"]),
        ("method.name=heterfl", ["unknown method 'heterfl'", "did you mean 'heterofl'"]),
        ("fleet.name=uniforn-5", ["unknown fleet", "did you mean 'uniform-5'"]),
        ("fleet.name=a1-f1", ["level 'f'", "a, b, c, d, e"]),
        ("method.width=0", ["method.width = 0", "above 0 and at most 1"]),
        ("method.width=-0.5", ["-0.5", "above 0 and at most 1"]),
        ("method.width=1.5", ["1.5", "above 0 and at most 1"]),
        ("method.width=nan", ["nan", "above 0 and at most 1"]),
        ("data.alpha=0", ["alpha = 0", "above 0"]),
        ("data.alpha=-1", ["alpha = -1", "above 0"]),
        ("data.clients=two", ["data.clients = 'two'", "integer"]),
        ("data.partition=diriclet", ["unknown partition", "did you mean 'dirichlet'"]),
        ("training.lr=-1", ["training.lr = -1", "above 0"]),
        ("training.lr=fast", ["training.lr = 'fast'", "number"]),
        ("training.momentum=1", ["training.momentum = 1", "below 1"]),
        ("training.schedule=linear", ["training.schedule", "'constant', 'steps', 'cosine'"]),
        ("method.norm=group", ["method.norm", "averaged"]),
        ("rounds=0", ["rounds = 0", "at least 1"]),
        ("clients_per_round=0", ["clients_per_round = 0", "at least 1"]),
        ("threads=0", ["threads = 0", "at least 1"]),
        ("device=tpu", ["device = 'tpu'", "auto, cpu, cuda or mps"]),
        ("name=../outside", ["name = '../outside'", "letters, digits"]),
        ("data=3", ["data"]),
        ("data.alpha", ["--set 'data.alpha'", "key=value"]),
        ("rounds.more=3", ["rounds", "not a table"]),
    ],
)
def test_bad_value_is_named_with_what_would_be_right(override, words):
    with pytest.raises(FedtailorError) as error:
        make_config({"rounds": 5, "method": {"name": "fedavg"}}, [override])
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_missing_and_broken_files_are_one_sentence(tmp_path: Path):
    with pytest.raises(FedtailorError, match="no such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(
        FedtailorError, match="is a folder: expected a TOML file; `fedtailor init` writes one"
    ):
        load_config(tmp_path)
    broken = tmp_path / "broken.toml"
    broken.write_text("rounds = = 3")
    with pytest.raises(FedtailorError, match="not valid TOML"):
        load_config(broken)
    with pytest.raises(FedtailorError, match=f"is a folder: expected a TOML file, such as {broken}"):
        load_config(tmp_path)


@pytest.mark.parametrize(
    "table",
    [
        {},
        {"method": {"name": "fedavg", "width": "1/5"}, "training": {"clip_norm": math.inf, "lr": 0.05}},
        {"fleet": {"tiers": [{"name": "board", "width": 0.25}, {"name": "phone", "macs": 0.5, "share": 2}]}},
        {"model": {"name": "cnn", "channels": [8, 16]}, "data": {"partition": "dirichlet", "limit": 100}},
        {"name": "half", "fleet": {"name": "uniform-5", "drop_scale": 0.5, "capacity": "dynamic"}},
    ],
)
def test_resolved_config_reads_back_to_the_same_run(tmp_path: Path, table):
    config = make_config(table)
    file = tmp_path / "config.toml"
    file.write_text(to_toml(config))
    again = load_config(file)
    assert again.built_method == config.built_method
    assert to_toml(again) == to_toml(config)
    assert (again.data, again.fleet, again.model, again.seed) == (
        config.data,
        config.fleet,
        config.model,
        config.seed,
    )


def test_width_is_exact_in_the_method():
    method = make_config({"method": {"name": "fedavg", "width": 0.6000000000000001}}).built_method
    assert isinstance(method, FedAvg)
    assert str(method.width) == "3/5"


def test_shipped_configs_are_valid():
    """Every config of the repository loads, and its first line is the command that runs it."""
    root = Path(__file__).parent.parent
    files = sorted([*root.glob("configs/*.toml"), *root.glob("reproduce/*/*.toml")])
    assert root / "configs" / "demo.toml" in files
    assert len({file.parent for file in files}) >= 6  # the demo, and a folder for each paper
    for file in files:
        first = file.read_text().splitlines()[0]
        assert first.startswith("# fedtailor "), file
        assert file.relative_to(root).as_posix() in first, file
        load_config(file)


@pytest.mark.parametrize(
    ("override", "section", "left", "said"),
    [
        ("model.name=char-lstm", "model", {"name": "char-lstm"}, "model.channels = [4, 8]"),
        ("method.name=fjord", "method", {"name": "fjord"}, 'method.width = "1/5"'),
        ("data.dataset=mnist", "data", {"dataset": "mnist", "clients": 7}, "data.options = "),
        ("fleet.name=uniform-2", "fleet", {"name": "uniform-2"}, "fleet.tiers = "),
        ("training.optimiser=sgd", "training", {"optimiser": "sgd", "lr": 0.01}, "training.options = "),
        ("server.optimiser=yogi", "server", {"optimiser": "yogi", "average": 0.9}, "server.momentum = 0.5"),
    ],
)
def test_another_choice_drops_what_belonged_to_the_first_and_says_so(override, section, left, said):
    table = {
        "data": {"dataset": "digits", "clients": 7, "options": {"a": 1}},
        "model": {"name": "cnn", "channels": [4, 8]},
        "method": {"name": "fedavg", "width": "1/5"},
        "fleet": {"tiers": [{"name": "board", "width": 0.25}]},
        "training": {"optimiser": "adam", "lr": 0.01, "options": {"eps": 1e-6}},
        "server": {"momentum": 0.5, "average": 0.9},
    }
    notices: list[str] = []
    config = make_config(table, [override], notices.append)
    found = getattr(config, section)
    fields = found if isinstance(found, dict) else {key: getattr(found, key) for key in left}
    assert fields == left
    (notice,) = notices
    assert notice.startswith(override.replace("=", " = "))
    assert said in notice


def test_the_same_choice_keeps_its_options_and_new_options_stay():
    table = {"model": {"name": "cnn", "channels": [4, 8]}}
    notices: list[str] = []
    assert make_config(table, ["model.name=cnn"], notices.append).model == table["model"]
    assert notices == []
    other = make_config(table, ["model.name=mlp", "model.hidden=[9]"], notices.append)
    assert other.model == {"name": "mlp", "hidden": [9]}
    assert len(notices) == 1


def test_paths_in_a_file_start_from_the_file_and_those_of_overrides_from_here(tmp_path, monkeypatch):
    project, here = tmp_path / "project", tmp_path / "here"
    for folder in (project, here):
        (folder / "photos").mkdir(parents=True)
        (folder / "mine.npz").touch()
        (folder / "start.safetensors").touch()
    (here / "only.npz").touch()
    file = project / "run.toml"
    monkeypatch.chdir(here)

    def read(line: str, *overrides: str) -> tuple[str, str]:
        file.write_text(f'[data]\n{line}\n[model]\nname = "cnn"\nweights = "start.safetensors"\n')
        config = load_config(file, overrides)
        return config.data.dataset, config.model["weights"]

    assert read('dataset = "mine.npz"') == (
        str(project / "mine.npz"),
        str(project / "start.safetensors"),
    )
    assert read('dataset = "photos"')[0] == str(project / "photos")
    assert read('dataset = "digits"')[0] == "digits"
    assert read('dataset = "only.npz"')[0] == "only.npz"  # as it was before: from here, where it is
    assert read('dataset = "none.npz"')[0] == str(project / "none.npz")
    assert read("", "data.dataset=mine.npz")[0] == str(here / "mine.npz")
    again = tmp_path / "config.toml"
    again.write_text(to_toml(load_config(file, ["data.dataset=mine.npz"])))
    assert load_config(again).data.dataset == str(here / "mine.npz")


def test_code_in_a_file_is_found_from_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir("/")
    (tmp_path / "mine.py").touch()
    (tmp_path / "run.toml").write_text('[model]\nname = "mine.py:build"\n')
    assert load_config(tmp_path / "run.toml").model["name"] == f"{tmp_path}/mine.py:build"


@pytest.mark.parametrize("name", ["größe", "测试", "हिन्दी", "𠮷野家", "naïve-2.1_b"])
def test_names_of_all_languages_are_names(name, tmp_path):
    config = make_config({}, [f"name={name}"])
    assert config.name == name
    (tmp_path / "config.toml").write_text(to_toml(config), encoding="utf-8")
    assert load_config(tmp_path / "config.toml").name == name


@pytest.mark.parametrize("name", ["", "a/b", "a b", ".hidden", "...", "tab\t", "测" * 67, "a\u202eb"])
def test_names_that_are_no_folders_are_refused(name):
    with pytest.raises(FedtailorError, match="name = .*expected letters, digits"):
        make_config({"name": name})
