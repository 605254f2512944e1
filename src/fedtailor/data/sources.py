"""What a data set is, and how the known ones say which files they read: the registry behind ``load_dataset``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedtailor.data.batches import Examples
from fedtailor.data.download import RemoteFile
from fedtailor.errors import FedtailorError

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set before it is spread over clients.

    ``client_train`` and ``client_test`` say to which natural client (writer, role) each example belongs; a client
    that only the test part knows was never seen in training.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int  # 0 where the targets are no classes
    label_names: tuple[str, ...] = ()
    client_train: Array | None = None
    client_test: Array | None = None
    client_names: tuple[str, ...] | None = None  # names of the clients where the ids are positions in this list

    def __post_init__(self) -> None:
        for part, examples, ids in (
            ("train", self.train, self.client_train),
            ("test", self.test, self.client_test),
        ):
            check_labels(examples.targets, self.num_classes, f"{self.name} ({part})")
            if ids is not None and len(ids) != len(examples):
                raise FedtailorError(
                    f"client_{part} of {self.name} has {len(ids)} entries: expected {len(examples)}, one per example"
                )
        if len(self.train) == 0:
            raise FedtailorError(f"{self.name} has no training examples")


def check_labels(labels: Tensor, num_classes: int, where: str) -> None:
    """Refuse labels that a model with ``num_classes`` outputs cannot have; 0 classes means targets of another kind."""
    if num_classes == 0 or len(labels) == 0 or labels.is_floating_point():
        return
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        position = int((labels.reshape(len(labels), -1) == wrong).any(1).nonzero()[0])
        raise FedtailorError(f"label {wrong} of example {position} in {where}: expected 0 to {num_classes - 1}")


@dataclass(frozen=True)
class Layout:
    """One way in which a data set may lie in a folder: the paths that must all be there, and their reader."""

    paths: tuple[str, ...]
    read: Callable[..., Dataset]  # called with one Path per entry of `paths`, and the source's options by name


@dataclass(frozen=True)
class Source:
    """A known data set: what it is, the layouts it is read from, and where it can be downloaded."""

    name: str
    summary: str
    layouts: tuple[Layout, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # names and defaults
    remote: tuple[RemoteFile, ...] = ()
    advice: str = ""  # how to get the files where they cannot be downloaded

    def find(self, folders: list[Path]) -> tuple[Layout, list[Path]] | None:
        """The first layout that is complete, folders in the order of preference."""
        for folder in folders:
            for layout in self.layouts:
                paths = [folder / path for path in layout.paths]
                if all(path.exists() for path in paths):
                    return layout, paths
        return None

    @property
    def embedded(self) -> bool:
        """Whether the data comes with an installed package and needs no files."""
        return any(not layout.paths for layout in self.layouts)


_sources: dict[str, Source] = {}


def register(source: Source) -> Source:
    """Make a data set known by its name."""
    if source.name in _sources:
        raise FedtailorError(f"dataset {source.name!r} is registered twice: expected one source per name")
    _sources[source.name] = source
    return source


def known_sources() -> dict[str, Source]:
    """All known data sets by name."""
    return dict(_sources)
