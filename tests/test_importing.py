"""Methods and models of the user's own: from a file, from a package, and by the entry points of an installed one."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import fedtailor
from commands import call, small_config
from fedtailor.config import make_config, split_spec
from fedtailor.errors import FedtailorError
from fedtailor.methods.registry import get_method, method_names, name_of
from fedtailor.models import build_model, model_names
from helpers import tiny_mlp, vector_data

TIMID = '''
from dataclasses import dataclass

from torch import nn

from fedtailor import FedAvg, Method


@dataclass(frozen=True)
class {name}(FedAvg):
    """Trains less than it could."""

    share: float = 0.5


class Forgotten(Method):
    share: float = 0.5


class Other:
    pass


def build(input_shape, num_classes, hidden=6):
    return nn.Sequential(nn.Flatten(), nn.Linear(8 * 8, hidden), nn.ReLU(), nn.Linear(hidden, num_classes))
'''


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A file in the current folder with a method and a model; its name is new for every test."""
    name = f"own_{abs(hash(request.node.name))}"
    (tmp_path / f"{name}.py").write_text(TIMID.format(name="Timid"), encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def test_a_method_is_found_in_a_file_and_in_a_module(own):
    method = get_method(f"{own}.py:Timid")
    assert method is get_method(f"{own}:Timid")
    assert method.name == "Timid"  # and not that of the method which it extends
    assert name_of(method) == f"{own}:Timid"
    config = make_config({"method": {"name": f"{own}.py:Timid", "share": 0.25}})
    assert config.built_method.share == 0.25
    with pytest.raises(FedtailorError, match="unknown setting of method Timid 'shere': did you mean 'share'"):
        make_config({"method": {"name": f"{own}.py:Timid", "shere": 1}})
    run = fedtailor.train(
        tiny_mlp(), vector_data(), "equal", f"{own}.py:Timid:share=0.3", rounds=1, engine={"workers": 0}
    )
    assert (run.method.name, run.method.share) == ("Timid", 0.3)


def test_a_file_elsewhere_is_found_by_its_path(own, tmp_path, monkeypatch):
    (tmp_path / "deeper").mkdir()
    monkeypatch.chdir(tmp_path / "deeper")
    assert get_method(f"../{own}.py:Timid").__name__ == "Timid"
    assert get_method(f"{tmp_path}/{own}.py:Timid").__name__ == "Timid"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("{own}.py:Timmid", "method '{own}.py:Timmid': module '{own}' .* has no 'Timmid'"),
        ("{own}.py:Other", "is a class Other: expected a class that extends fedtailor.Method"),
        ("{own}.py:build", "is of type function: expected a class that extends fedtailor.Method"),
        ("{own}.py:Forgotten", r"has settings: expected @dataclass\(frozen=True\) above its class"),
        ("nowhere.py:Timid", "there is no file nowhere.py in"),
        ("nowhere:Timid", "there is no module 'nowhere'; it must be installed or lie in"),
        ("json.py:Timid", "Python has another module 'json' .*; rename the file"),
        ("fedavg:width", "method 'fedavg:width': expected name:key=value, such as fedavg:width=1/5"),
    ],
)
def test_what_is_no_method_is_refused_by_name(own, tmp_path, name, words):
    (tmp_path / "json.py").write_text("", encoding="utf-8")
    with pytest.raises(FedtailorError, match=words.format(own=own)):
        get_method(split_spec(name.format(own=own))[0])


def test_an_unknown_name_says_that_it_may_be_an_import_path():
    with pytest.raises(
        FedtailorError, match="did you mean 'fedavg'.*or an import path such as .*my_file.py:Timid"
    ):
        get_method("fedavgg")


def test_own_files_in_a_comparison_on_the_command_line(own, tmp_path, monkeypatch, capsys):
    methods = f"{own}.py:Timid:share=0.3,fedavg"
    words = ["compare", str(small_config(tmp_path, rounds=1)), "--methods", methods, "--jobs", "1"]
    words += ["--set", f"model={{name = '{own}.py:build', hidden = 7}}", "--set", "engine.workers=0"]
    assert call(monkeypatch, *words) == 0
    assert f"{own}.py:Timid" in capsys.readouterr().out.replace("\n", "")
    assert len(list((tmp_path / "runs" / "small").glob("*/weights.safetensors"))) == 2


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package as an installer leaves it, in a folder of its own: its code and its dist-info."""
    site = tmp_path / "site"
    (site / "timid_methods").mkdir(parents=True)
    (site / "timid_methods" / "__init__.py").write_text(TIMID.format(name="Shy"), encoding="utf-8")
    info = site / "timid_methods-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: timid-methods\nVersion: 1.0\n", encoding="utf-8"
    )
    (info / "entry_points.txt").write_text(
        "[fedtailor.methods]\nshy = timid_methods:Shy\nbroken = timid_methods:Nobody\n"
        "[fedtailor.models]\nshy-net = timid_methods:build\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(sys, "path", [*sys.path, str(site)])


def test_an_installed_package_offers_methods_and_models_by_name(installed, monkeypatch, capsys):
    assert {"shy", "fedavg"} <= set(method_names())
    assert "shy-net" in model_names()
    assert make_config({"method": {"name": "shy", "share": 0.1}}).built_method.share == 0.1
    assert build_model("shy-net", input_shape=(64,), num_classes=3, hidden=5)[1].out_features == 5
    with pytest.raises(FedtailorError, match="method 'broken' of package timid-methods: loading"):
        get_method("broken")
    with pytest.raises(FedtailorError, match="unknown method 'shyy': did you mean 'shy'"):
        get_method("shyy")
    assert call(monkeypatch, "methods", "shy") == 0
    assert "Trains less than it could" in capsys.readouterr().out


def test_without_packages_nothing_is_offered():
    assert "shy" not in method_names()
