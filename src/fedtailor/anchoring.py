"""Paths in a configuration, made absolute: a run that is resumed elsewhere finds its files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedtailor.data.datasets import dataset_names
from fedtailor.data.own import looks_like_path

Table = dict[str, Any]

DEEPEST = 20  # tables in tables
TABLES = (".toml", ".csv")  # files of devices


def anchored(table: Mapping[str, Any], folder: Path, above: str = "") -> Table:
    """The table with its paths to files made absolute; relative ones start from ``folder``."""
    return {
        key: anchored(value, folder, f"{above}{key}.")
        if isinstance(value, Mapping) and above.count(".") < DEEPEST
        else anchored_value(f"{above}{key}", value, folder)
        for key, value in table.items()
    }


def anchored_value(key: str, value: Any, folder: Path) -> Any:
    """A setting that is a path, or names code in a file (``my_file.py:build``), with the whole path; others as is."""
    if not isinstance(value, str):
        return value
    if ".py:" in value:
        file, _, name = value.partition(".py:")
        return f"{_whole(f'{file}.py', folder)}:{name}"
    own = key == "data.dataset" and value not in dataset_names()
    is_path = own and (looks_like_path(value) or os.path.isdir(folder / value))
    named = key in ("model.weights", "fleet.trace", "audit.key") or (
        key == "fleet.devices" and value.endswith(TABLES)
    )
    return _whole(value, folder) if is_path or (named and value) else value


def _whole(path: str, folder: Path) -> str:
    """The path seen from ``folder``, if that is where it leads; else, if it leads somewhere from here, as it is."""
    given = os.path.expanduser(path)
    beside = os.path.join(folder, given)
    return path if not os.path.exists(beside) and os.path.exists(given) else os.path.abspath(beside)
