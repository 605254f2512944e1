"""Data sets by name: found on this machine, or downloaded; or by path, for one's own."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from fedtailor.data import catalogue as catalogue
from fedtailor.data.files import DATA_VARIABLE, search_folders
from fedtailor.data.sources import Dataset, Source, known_sources
from fedtailor.errors import FedtailorError, unknown

__all__ = ["Dataset", "dataset_names", "describe", "load_dataset"]


def dataset_names() -> list[str]:
    """The names of all known data sets."""
    return sorted(known_sources())


def load_dataset(name: str, **options: Any) -> Dataset:
    """The data set of that name, looked for in ``FEDTAILOR_DATA``, the cache and system folders."""
    source = _source(name)
    found = source.find(search_folders())
    if found is None:
        raise missing(source)
    layout, paths = found
    return layout.read(*paths, **options)


def describe(name: str) -> str:
    """One line: what the data set is, and whether it is embedded, found, or would be downloaded."""
    source = _source(name)
    found = source.find(search_folders())
    if source.embedded:
        state = "embedded"
    elif found is not None:
        state = f"found at {found[1][0].parent}"
    elif source.remote:
        size = sum(file.size for file in source.remote) / 2**20
        state = f"not here, would be downloaded ({size:.0f} MiB)"
    else:
        state = f"not here; {source.advice}"
    return f"{source.summary} [{state}]"


def _source(name: str) -> Source:
    sources = known_sources()
    if name not in sources:
        raise unknown("dataset", name, sources)
    return sources[name]


def missing(source: Source) -> FedtailorError:
    """The error for a data set that is not on this machine: which files it wants, and where it looked."""
    wanted = "; or ".join(", ".join(layout.paths) for layout in source.layouts)
    looked = ", ".join(map(str, search_folders()))
    return FedtailorError(
        f"data set {source.name} was not found. It wants {wanted}. Looked in {looked}. "
        f"Put the files in one of these, or set {DATA_VARIABLE} to their folder"
    )
