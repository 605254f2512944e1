"""A Flower app as a folder: what ``flwr run`` sends to the SuperLink and on to every node.

The run's configuration travels in the app, as text; the user's own code lies beside it.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtailor.config import RunConfig, make_config
from fedtailor.errors import FedtailorError, require

PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "{name}"
version = "1.0.0"
description = "Resource-adaptive federated learning with fedtailor"
license = "Apache-2.0"
dependencies = ["fedtailor[flower]"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "{publisher}"

[tool.flwr.app.components]
serverapp = "{package}.app:server"
clientapp = "{package}.app:client"

[tool.flwr.app.config]
# Where the server writes the run; empty: runs/<name of the run>, below the folder in which the SuperLink was started.
folder = {folder}
resume = {resume}           # true goes on with the run that lies there; for once: --run-config 'resume=true'
config = {config}
"""

APP = '''\
"""The server's and the clients' part of the run: both read ``config`` in pyproject.toml."""

from fedtailor.flower.apps import client, server

__all__ = ["client", "server"]
'''

MODEL = '''\
"""The network that is trained: a plain PyTorch module. fedtailor cuts it to what each device can run."""

from torch import nn


def build(input_shape: tuple[int, ...], num_classes: int, width: int = 32) -> nn.Module:
    """A small convolutional network; replace it by your own."""
    channels, height, breadth = input_shape
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (height // 2) * (breadth // 2), num_classes),
    )
'''

CONFIG = """\
name = "{name}"
rounds = 5
clients_per_round = 2    # a run waits for so many: with one device, 1
evaluate_every = 1

[data]
dataset = "digits"       # a device of its own says where its examples lie: --node-config 'dataset="photos/"'
clients = 4

[model]
name = "{package}.model:build"

[fleet]
name = "uniform-2"

[method]
name = "heterofl"

[training]
lr = 0.05
momentum = 0.9
batch_size = 16
epochs = 2

[engine]
deadline = 600           # seconds after which a round goes on without those that have not answered
"""

README = """\
# {name}

    flwr run . SUPERLINK --stream

`pyproject.toml` holds the run's configuration, `{package}/model.py` the network. Every SuperNode needs fedtailor, the
data that it trains on, and a line about itself:

    flower-supernode ... --node-config 'name="phone-17" dataset="photos/" tier="0.5"'
    flower-supernode ... --node-config 'partition-id=0 num-partitions=2'       # parts of the config's own data
"""


def write_app(folder: Path, config: str | None = None, run_folder: str = "", resume: bool = False) -> None:
    """A Flower app in a new folder; without a configuration, one to start from, with a network to replace."""
    if folder.exists() and any(folder.iterdir()):
        raise FedtailorError(f"{folder} is not empty: a new app needs a folder of its own")
    name = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")
    package = name.replace("-", "_")
    require(package.isidentifier(), "folder", folder.name, "a name that begins with a letter")
    text = CONFIG.replace("{package}", package).replace("{name}", name) if config is None else config
    tomllib.loads(text)
    project = PROJECT.format(
        name=name, package=package, publisher="fedtailor", folder=json.dumps(run_folder),
        resume=json.dumps(resume), config=as_text(text),
    )  # fmt: skip
    (folder / package).mkdir(parents=True)
    files = {
        "pyproject.toml": project,
        "README.md": README.format(name=name, package=package),
        f"{package}/__init__.py": "",
        f"{package}/app.py": APP,
        **({f"{package}/model.py": MODEL} if config is None else {}),
    }
    for place, content in files.items():
        (folder / place).write_text(content, encoding="utf-8")


def config_of(run: Mapping[str, Any]) -> RunConfig:
    """The configuration in an app's own settings (``context.run_config``)."""
    text = run.get("config")
    if not isinstance(text, str):
        raise FedtailorError(
            f"config = {text!r}: expected the text of a TOML file (fedtailor new-app writes it)"
        )
    try:
        return make_config(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise FedtailorError(f"the app's config is not valid TOML: {error}") from error


def as_text(config: str) -> str:
    """A configuration as a string of TOML over several lines, so that people can edit it there."""
    escaped = config.replace("\\", "\\\\").replace('"""', '\\"\\"\\"')
    return f'"""\n{escaped}"""'
