"""Models by name or by import path, and what is said when that goes wrong."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedtailor.errors import FedtailorError
from fedtailor.models import build_model, model_names
from fedtailor.models.registry import register

OWN = """
from torch import nn

NUMBER = 3
NET = nn.Linear(2, 2)

def build(input_shape, num_classes, width=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.Linear(width, num_classes))

def bare():
    return nn.Linear(2, 2)

def anything(**options):
    module = nn.Linear(2, 2)
    module.options = options
    return module

def needs(depth):
    return nn.Linear(2, depth)

def wrong():
    return {"layers": 3}

def broken():
    raise RuntimeError("my own mistake")

class Net(nn.Linear):
    def __init__(self, num_classes):
        super().__init__(4, num_classes)

    @staticmethod
    def tiny():
        return Net(1)
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the current folder, which is not on the import path."""
    (tmp_path / "own_networks.py").write_text(OWN)
    (tmp_path / "own_broken.py").write_text("import no_such_library_at_all\n")
    (tmp_path / "own_syntax.py").write_text("def build(:\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    for module in ("own_networks", "own_broken", "own_syntax"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    return "own_networks"


def build(name: Any, **options: Any) -> nn.Module:
    given = {"input_shape": (1, 8, 8), "num_classes": 10} | options
    return build_model(name, **given)


def refusal(name: Any, **options: Any) -> str:
    with pytest.raises(FedtailorError) as caught:
        build(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_listing() -> None:
    assert model_names() == sorted(model_names())
    assert {"cnn", "resnet18", "transformer"} <= set(model_names())


def test_unknown_name() -> None:
    message = refusal("resnet81")
    assert message.startswith(
        "unknown model 'resnet81': did you mean 'resnet18'? Known: adapted, char-lstm, cnn,"
    )
    assert "my_package.my_module:build" in message


def test_registering_twice_is_refused() -> None:
    with pytest.raises(FedtailorError, match="'cnn' is registered twice"):
        register("cnn")


def test_unknown_option_names_option_model_and_nearest() -> None:
    assert refusal("cnn", chanels=(8, 8)) == (
        "unknown option 'chanels': did you mean 'channels'? Known: channels, groups, norm"
        " (options of model 'cnn')"
    )


def test_fields_of_a_dataclass_are_options_of_the_model() -> None:
    message = refusal("transformer", input_shape=(8,), embeding=16)
    assert message == (
        "unknown option 'embeding': did you mean 'embedding'? Known: depth, dropout, embedding, heads, hidden,"
        " predict, vocabulary (options of model 'transformer')"
    )
    every = {"embedding": 8, "heads": 2, "hidden": 6, "depth": 3, "dropout": 0.5, "predict": "every"}
    module = build("transformer", input_shape=(5,), vocabulary=7, **every)
    assert module.embedding.weight.shape == (7, 8)
    assert len(module.blocks) == 3 + 1
    assert module.blocks[0].dropout.p == 0.5
    assert module(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 5, 10)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("cnn", {"channels": 64}, "channels = 64: expected a list of positive whole numbers"),
        ("cnn", {"channels": "64"}, "channels = '64': expected a list of positive whole numbers"),
        ("cnn", {"channels": ()}, "channels = (): expected a list of positive whole numbers"),
        ("cnn", {"channels": (8, 0)}, "channels = (8, 0): expected a list of positive whole numbers"),
        ("cnn", {"channels": (8, 2.5)}, "channels = (8, 2.5): expected a list of positive whole numbers"),
        ("cnn", {"norm": "btach"}, "unknown norm 'btach': did you mean 'batch'? Known: batch, group, none"),
        ("cnn", {"norm": "group", "channels": (6,)}, "groups = 4: expected a divisor of the 6 channels"),
        ("cnn", {"norm": "group", "groups": 0}, "groups = 0: expected a positive whole number"),
        ("resnet18", {"widths": (8, 8)}, "widths = (8, 8): expected a list of 4 positive whole numbers"),
        ("resnet18", {"stem": True}, "stem = True: expected a positive whole number"),
        ("mobilenetv2", {"width": 0}, "width = 0: expected a positive number"),
        ("mobilenetv2", {"last": 0}, "last = 0: expected a positive whole number"),
        ("vgg9", {"start": "He"}, "unknown start 'He'"),
        ("vgg9", {"norm": "layer"}, "unknown norm 'layer'"),
        ("vgg9", {"dropout": 1}, "dropout = 1: expected a number from 0 to below 1"),
        ("vit", {"heads": 5}, "heads = 5: expected a divisor of embedding = 128"),
        (
            "vit",
            {"patch": 3},
            "input_shape = (1, 8, 8): expected a height and width that are multiples of patch",
        ),
        (
            "transformer",
            {"input_shape": (8,), "predict": "first"},
            "unknown predict 'first'; known: every, last",
        ),
        ("lenet5", {"input_shape": (1, 28, 28), "padding": 9}, "padding = 9: expected 0, 1 or 2"),
        ("cnn", {"num_classes": 0}, "num_classes = 0: expected a positive whole number"),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], expected: str) -> None:
    assert expected in refusal(name, **options)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("femnist-cnn", (1, 8, 8), "input_shape = (1, 8, 8): expected at least 16 x 16 pixels"),
        ("cnn", (1, 4, 28), "input_shape = (1, 4, 28): expected at least 8 x 8 pixels"),
        ("cnn", (28, 28), "input_shape = (28, 28): expected (channels, height, width)"),
        ("cnn", 28, "input_shape = 28: expected (channels, height, width)"),
        ("resnet18", (3, 0, 8), "input_shape = (3, 0, 8): expected (channels, height, width)"),
        ("char-lstm", (1, 8, 8), "input_shape = (1, 8, 8): expected (length,) of a text such as (80,)"),
        ("mlp", (), "input_shape = (): expected a list of positive whole numbers"),
    ],
)
def test_unsuitable_input_shape(name: str, shape: Any, expected: str) -> None:
    message = refusal(name, input_shape=shape)
    assert message.startswith(expected)
    if name != "mlp":
        assert f"model {name!r}" in message


def test_options_as_a_config_file_gives_them() -> None:
    module = build("cnn", channels=[4, 8], input_shape=[1, 8, 8])
    assert module(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_own_function(own: str) -> None:
    assert build(f"{own}:build")[1].out_features == 8
    assert build(f"{own}:build", width=5)[2].in_features == 5
    assert build(f"{own}:bare").in_features == 2
    assert build(f"{own}:Net").out_features == 10
    assert build(f"{own}:Net.tiny").out_features == 1
    assert build(f"{own}:needs", depth=4).out_features == 4
    assert build(f"{own}:anything", a=1).options == {"input_shape": (1, 8, 8), "num_classes": 10, "a": 1}


@pytest.mark.parametrize(
    ("path", "options", "expected"),
    [
        (
            "{own}:build",
            {"widht": 3},
            "unknown option 'widht': did you mean 'width'? Known: width (options of",
        ),
        ("{own}:bare", {"width": 3}, "unknown option 'width'; known: none (options of model '{own}:bare')"),
        ("{own}:needs", {}, "model '{own}:needs': missing a required argument: 'depth'"),
        ("{own}:nothing", {}, "model '{own}:nothing': module '{own}' ("),
        ("{own}:build.nothing", {}, "has no 'build.nothing'"),
        (
            "{own}:NUMBER",
            {},
            "model '{own}:NUMBER' is of type int: expected a function that builds the network",
        ),
        ("{own}:NET", {}, "model '{own}:NET' is a network already built"),
        (
            "{own}:wrong",
            {},
            "model '{own}:wrong' returned an object of type dict: expected a torch.nn.Module",
        ),
        ("no_such_package.module:build", {}, "there is no module 'no_such_package'"),
        ("{own}.deeper:build", {}, "there is no module '{own}.deeper'"),
        ("own_broken:build", {}, "importing 'own_broken' failed with ModuleNotFoundError: No module named"),
        ("own_syntax:build", {}, "importing 'own_syntax' failed with SyntaxError"),
        ("{own}:", {}, "expected an import path such as 'my_package.my_module:build'"),
        (":build", {}, "expected an import path such as"),
        ("./{own}-.py:build", {}, "model './{own}-.py:build': there is no file {own}-.py in"),
        ("a:b:c", {}, "expected an import path such as"),
    ],
)
def test_own_function_that_cannot_be_used(
    own: str, path: str, options: dict[str, Any], expected: str
) -> None:
    assert expected.format(own=own) in refusal(path.format(own=own), **options)


def test_errors_of_the_own_function_are_not_hidden(own: str) -> None:
    with pytest.raises(RuntimeError, match="my own mistake"):
        build(f"{own}:broken")
