"""Data sets by name (found on this machine, or downloaded) and by path (one's own)."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedtailor.data import catalogue as catalogue
from fedtailor.data.download import OFFLINE_VARIABLE, Progress, download, offline
from fedtailor.data.federated import FederatedData, federate
from fedtailor.data.files import DATA_VARIABLE, cache_folder, search_folders
from fedtailor.data.own import looks_like_path, read_own
from fedtailor.data.sources import Dataset, Edition, Source, check_options, known_sources
from fedtailor.data.splits import DataSettings
from fedtailor.errors import FedtailorError, unknown
from fedtailor.seeds import Seeds

__all__ = ["Dataset", "dataset_names", "describe", "load_dataset", "load_federated"]


def dataset_names() -> list[str]:
    """The names of all known data sets."""
    return sorted(known_sources())


def load_dataset(name: str, **options: Any) -> Dataset:
    """The data set of that name, or the user's own at that path (.csv, .jsonl, .npz, .parquet, a folder of images).

    A known set is looked for in ``FEDTAILOR_DATA``, in the user's cache and in system folders, and downloaded
    into the cache if it is in none of them, unless ``FEDTAILOR_OFFLINE`` is set.
    """
    if looks_like_path(name) and name not in known_sources():
        return read_own(Path(name), **options)
    source = _source(name)
    check_options(name, options, source.options)
    edition, paths = source.find(search_folders()) or _downloaded(source)
    return edition.read(*paths, **{**source.options, **options})


def load_federated(settings: DataSettings, seeds: Seeds) -> FederatedData:
    """The data that the settings name, spread over clients as they say."""
    return federate(load_dataset(settings.dataset, **settings.options), settings, seeds)


def describe(name: str) -> str:
    """One line: what the data set is, and whether it is embedded, found, or would be downloaded."""
    summary, state = summary_and_state(name)
    return f"{summary} [{state}]"


def summary_and_state(name: str) -> tuple[str, str]:
    """What the data set is; whether it is embedded, found and where, or not here."""
    source = _source(name)
    found = source.find(search_folders())
    if source.embedded:
        state = "embedded"
    elif found is not None:
        state = f"found: {found[1][0]}"
    elif source.remote:
        state = f"not here; {_mebibytes(source)} would be downloaded"
    else:
        state = f"not here; {source.advice}"
    return source.summary, state


def _source(name: str) -> Source:
    sources = known_sources()
    if name not in sources:
        raise unknown(
            "dataset",
            name,
            sources,
            hint="; or the path of a .csv, .jsonl, .npz or .parquet file or a folder of images, and there is none "
            f"called {name!r} in {Path.cwd()}",
        )
    return sources[name]


def _mebibytes(source: Source) -> str:
    return f"{sum(file.size for file in source.remote) / 2**20:.0f} MiB"


def _downloaded(source: Source) -> tuple[Edition, list[Path]]:
    """Bring the files of the data set into the cache and find them there."""
    if not source.remote or offline():
        raise _missing(source, "")
    for file in source.remote:
        if not os.path.exists(cache_folder() / file.path):
            try:
                with _progress_bar(file.path) as progress:
                    download(file, cache_folder(), progress=progress)
            except FedtailorError as error:
                sentence = str(error)
                raise _missing(source, f" {sentence[0].upper()}{sentence[1:]}.") from error
    found = source.find([cache_folder()])
    if found is None:
        raise _missing(source, "")
    return found


def _missing(source: Source, reason: str) -> FedtailorError:
    """The error for a data set that is not on this machine: which files it wants, and where it looked."""
    wanted = "; or ".join(" + ".join(edition.paths) for edition in source.editions)
    looked = ", ".join(map(str, search_folders()))
    forbidden = (
        f" {OFFLINE_VARIABLE} is set, so nothing was downloaded." if source.remote and offline() else ""
    )
    advice = f" {source.advice[0].upper()}{source.advice[1:]}." if source.advice else ""
    return FedtailorError(
        f"data set {source.name} was not found.{reason}{forbidden} "
        f"It wants {wanted}. Looked in {looked}.{advice} "
        f"Put the files in one of these folders, or set {DATA_VARIABLE} to the folder that holds them"
    )


@contextmanager
def _progress_bar(name: str) -> Iterator[Progress | None]:
    """A bar on a terminal; nothing where the output goes to a file."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn(name), BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(name)
        yield lambda have, total: bar.update(task, completed=have, total=total)
