"""The folder of a run: resolved config, environment, one metrics row per round, final weights."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedtailor.errors import FedtailorError

RECORDED_PACKAGES = ("fedtailor", "torch", "numpy", "safetensors", "pydantic", "scikit-learn")


@dataclass(frozen=True)
class RunFolder:
    """Where a run writes; nothing that exists is ever overwritten."""

    path: Path

    @staticmethod
    def create(path: Path, config: str, environment: Mapping[str, Any]) -> RunFolder:
        """A new folder with the resolved config and the environment in it."""
        if path.exists():
            raise FedtailorError(f"run folder {path} exists already: choose another name (--set name=...) or remove it")
        try:
            path.mkdir(parents=True)
            folder = RunFolder(path)
            folder._write("config.toml", config)
            folder._write("environment.json", json.dumps(environment, indent=2) + "\n")
        except OSError as error:
            raise FedtailorError(f"run folder {path} cannot be written: {error.strerror or error}") from error
        return folder

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.path / "weights.safetensors").is_file()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one line to ``metrics.jsonl``."""
        with (self.path / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        """All metrics rows."""
        file = self.path / "metrics.jsonl"
        if not file.is_file():
            raise FedtailorError(f"{self.path}: no metrics.jsonl there; expected the folder of a run")
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def save_weights(self, weights: Mapping[str, Tensor], ties: Mapping[str, str]) -> None:
        """Write the final weights: all of them, or none."""
        target, temporary = self.path / "weights.safetensors", self.path / "weights.safetensors.part"
        values = {name: value.detach().cpu().contiguous() for name, value in weights.items()}
        save_file(values, temporary, metadata={"ties": json.dumps(dict(ties))})
        os.replace(temporary, target)

    def load_weights(self) -> dict[str, Tensor]:
        """The final weights."""
        file = self.path / "weights.safetensors"
        try:
            return load_file(file)
        except (OSError, SafetensorError) as error:
            raise FedtailorError(f"{file} cannot be read: {error}") from error

    def _write(self, name: str, text: str) -> None:
        (self.path / name).write_text(text, encoding="utf-8")


def describe_environment(threads: int, device: str) -> dict[str, Any]:
    """Versions and settings that may change the bits of a result."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "threads": threads,
        "device": device,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
