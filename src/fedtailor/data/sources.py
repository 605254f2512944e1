"""What a data set is, and the registry of known ones: which files they read, where to get them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedtailor.data.batches import Examples
from fedtailor.data.download import RemoteFile
from fedtailor.data.transforms import Deployable
from fedtailor.data.vocabulary import Vocabulary
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.seeds import Seeds

Array = np.ndarray[Any, np.dtype[Any]]
UNLABELLED = (
    -100
)  # the class of a position of a sequence that has no label (padding); PyTorch's own number for it


MANY, GAPS = 20, 10  # from so many values on, and so many numbers for each of them, labels are hardly classes


@dataclass(frozen=True, eq=False)
class Origin:
    """What is known of the file that the examples were read from; for people, and for whoever deploys a network."""

    taken_for: str = ""  # one sentence, for the user to see before a run
    otherwise: str = ""  # how to say otherwise
    lines: tuple[Array, Array] | None = None  # in the file, of the training and of the test examples
    line_word: str = "line"
    columns: tuple[str, ...] = ()  # names of the features, in their order
    vocabulary: Vocabulary | None = None
    symbols: int | None = None  # how many different tokens the inputs may hold
    decoding: Mapping[str, Any] = field(default_factory=dict)  # how image files became pixels
    targets: Mapping[str, Any] = field(
        default_factory=dict
    )  # mean and std by which numbers to be told were scaled

    @property
    def sentences(self) -> tuple[str, ...]:
        """What the file was taken for, and how to say otherwise; nothing where there is nothing to say."""
        return tuple(filter(None, (self.taken_for, self.otherwise)))

    def inputs(self, preparation: Deployable | None, label_names: tuple[str, ...]) -> dict[str, Any]:
        """How raw inputs become what a network sees, and what its outputs mean: plain values."""
        known = {
            "preparation": None if preparation is None else preparation.as_data(),
            "vocabulary": None if self.vocabulary is None else self.vocabulary.as_data(),
            "columns": list(self.columns),
            "images": dict(self.decoding),
            "labels": list(label_names),
            "targets": dict(self.targets),
        }
        return {name: value for name, value in known.items() if value}


@dataclass(frozen=True, eq=False)
class Dataset:
    """A data set before it is spread over clients.

    ``client_train`` and ``client_test`` say to which natural client (writer, role) each example belongs; a
    client that only the test part knows was never seen in training.
    """

    name: str
    train: Examples
    test: Examples
    num_classes: int  # 0 where the targets are no classes
    label_names: tuple[str, ...] = ()
    client_train: Array | None = None
    client_test: Array | None = None
    client_names: Array | None = None  # of the clients, where the ids are positions in it
    origin: Origin = field(default_factory=Origin)
    own: bool = False  # the user's own examples: looked through for what is odd about them

    def __post_init__(self) -> None:
        if len(self.train) == 0:
            raise FedtailorError(f"{self.name} has no training examples")
        require(
            self.num_classes <= MOST_CLASSES, "number of classes", self.num_classes,
            f"at most {MOST_CLASSES:,}; num_classes = 0 says that targets are no classes",
        )  # fmt: skip
        check_labels(self.train.targets, self.num_classes, f"{self.name} (train)")
        check_labels(self.test.targets, self.num_classes, f"{self.name} (test)")
        self._check_ids("client_train", self.client_train, len(self.train))
        self._check_ids("client_test", self.client_test, len(self.test))
        both = [ids.dtype.kind in "US" for ids in (self.client_train, self.client_test) if ids is not None]
        if len(set(both)) == 2:
            raise FedtailorError(
                f"client_train and client_test of {self.name} are numbers and names: expected the same kind"
            )

    def _check_ids(self, field: str, ids: Array | None, count: int) -> None:
        if ids is None:
            return
        where = f"{field} of {self.name}"
        if len(ids) != count:
            raise FedtailorError(f"{where} has {len(ids)} entries: expected {count}, one per example")
        if ids.ndim != 1 or ids.dtype.kind not in "iuUS":
            raise FedtailorError(f"{where} is of type {ids.dtype}: expected whole numbers or names")
        if (
            self.client_names is not None
            and count
            and not 0 <= ids.min() <= ids.max() < len(self.client_names)
        ):
            raise FedtailorError(
                f"{where} goes from {ids.min()} to {ids.max()}: expected 0 to {len(self.client_names) - 1}, "
                f"as there are {len(self.client_names)} names"
            )


def together(dataset: Dataset, makers: int, seeds: Seeds) -> Dataset:
    """The data set with so many natural clients, drawn at random, as one; those that training lacks stay as they are.

    Where writers have too few examples each, some of them make a client that can be tested on its own data.
    """
    trained, tested = dataset.client_train, dataset.client_test
    if trained is None:
        return dataset
    known = np.unique(trained)
    only_tested = np.setdiff1d(np.unique(tested), known) if tested is not None else known[:0]
    groups = np.array_split(seeds.numpy("makers").permutation(known), range(makers, len(known), makers))
    groups += [only_tested[place : place + 1] for place in range(len(only_tested))]
    number = {maker: place for place, group in enumerate(groups) for maker in group.tolist()}

    def numbered(ids: Array) -> Array:
        return np.array([number[maker] for maker in ids.tolist()], dtype=np.int64)

    names = dataset.client_names
    called = {maker: str(maker if names is None else names[maker]) for maker in number}
    return replace(
        dataset,
        client_train=numbered(trained),
        client_test=None if tested is None else numbered(tested),
        client_names=np.array(["+".join(called[maker] for maker in group.tolist()) for group in groups]),
    )


MOST_CLASSES = 1_000_000  # what is counted by class must fit in memory


def own_dataset(
    train: Examples,
    test: Examples,
    *,
    client_train: object = None,
    client_test: object = None,
    num_classes: int | None = None,
    name: str = "own data",
    label_names: tuple[str, ...] = (),
    client_names: Array | None = None,
) -> Dataset:
    """A user's examples as a data set; ``num_classes`` defaults to what the labels show, 0: they are no classes."""
    fine = num_classes is None or (type(num_classes) is int and num_classes >= 0)
    require(fine, "num_classes", num_classes, "0 (no classes) or more")
    if num_classes is None:
        targets = [part.targets for part in (train, test) if len(part)]
        whole = all(not part.is_floating_point() for part in targets)
        highest = max((int(part.max()) for part in targets if whole), default=-1)
        num_classes = max(highest + 1, len(label_names), 1) if whole else 0
    return Dataset(
        name=name,
        train=train,
        test=test,
        num_classes=num_classes,
        label_names=label_names,
        client_train=None if client_train is None else np.asarray(client_train),
        client_test=None if client_test is None else np.asarray(client_test),
        client_names=client_names,
        own=True,
    )


def check_labels(labels: Tensor, num_classes: int, where: str) -> None:
    """Refuse labels outside 0 to ``num_classes`` - 1; with 0 classes, targets are of another kind.

    A position of a sequence may have no label.
    """
    if num_classes == 0 or len(labels) == 0 or labels.is_floating_point():
        return
    if labels.dim() > 1:
        labels = labels.where(labels != UNLABELLED, 0)
    lowest, highest = int(labels.min()), int(labels.max())
    if lowest < 0 or highest >= num_classes:
        wrong = lowest if lowest < 0 else highest
        position = int((labels.reshape(len(labels), -1) == wrong).any(1).nonzero()[0])
        raise FedtailorError(
            f"label {wrong} of example {position} in {where}: expected 0 to {num_classes - 1}; "
            "num_classes = 0 says that they are no classes"
        )


def looks_like_quantity(labels: Tensor) -> str:
    """What whole-number targets are like that are clearly no classes, and what to do; "" where they may be classes.

    Many different values with large gaps between them are a price or a year; also where hardly any value comes twice.
    """
    if labels.is_floating_point() or labels.dim() != 1 or len(labels) == 0:
        return ""
    different, highest = len(labels.unique()), int(labels.max())
    gaps = GAPS if different <= len(labels) / 2 else 2
    if different < MANY or highest + 1 <= gaps * different:
        return ""
    return (
        f"look like a quantity ({different:,} different whole numbers in {len(labels):,} examples, up to {highest:,}): "
        "set objective.task = 'regression' (task='regression' in Python); if they are classes, number them from 0 "
        'without gaps (of a table, options = { targets = "names" })'
    )


def targets_in_words(dataset: Dataset) -> str:
    """What the targets of a user's file are taken for."""
    targets, scale = dataset.train.targets, dataset.origin.targets
    if targets.dim() > 1 and dataset.label_names:
        return f"{len(dataset.label_names)} labels of 0 or 1 each (objective.task = 'multi-label')"
    if looks_like_quantity(targets):
        return f"whole numbers up to {int(targets.max()):,}"
    if dataset.num_classes:
        named = f" ({', '.join(dataset.label_names)})" if 0 < len(dataset.label_names) <= 8 else ""
        return f"{dataset.num_classes} classes{named}"
    if scale:
        each = zip(scale["mean"], scale["std"], strict=True)
        scales = ", ".join(f"(y - {in_words(mean)}) / {in_words(std)}" for mean, std in each)
        return f"a number (objective.task = 'regression'), scaled: {scales}; losses and errors are of what is scaled"
    return "a number (objective.task = 'regression')" if targets.dim() == 1 else "several numbers each"


def in_words(number: float) -> str:
    """A number of any size for a sentence.

    >>> in_words(384824.2), in_words(0.0123456)
    ('384,824', '0.01235')
    """
    return f"{number:,.0f}" if abs(number) >= 1000 else f"{number:.4g}"


@dataclass(frozen=True)
class Edition:
    """One way in which a data set may lie in a folder: the paths that must all be there, and their reader."""

    paths: tuple[str, ...]
    read: Callable[
        ..., Dataset
    ]  # called with one Path per entry of `paths`, and the source's options by name


@dataclass(frozen=True)
class Source:
    """A known data set: what it is, the editions it is read from, and where it can be downloaded."""

    name: str
    summary: str
    editions: tuple[Edition, ...]
    options: Mapping[str, Any] = field(default_factory=dict)  # names and defaults
    remote: tuple[RemoteFile, ...] = ()
    advice: str = ""  # how to get the files where they cannot be downloaded

    def find(self, folders: list[Path]) -> tuple[Edition, list[Path]] | None:
        """The first edition that is complete, folders in the order of preference."""
        for folder in folders:
            for edition in self.editions:
                paths = [folder / path for path in edition.paths]
                if all(map(os.path.exists, paths)):  # false, not an error, where a folder may not be read
                    return edition, paths
        return None

    @property
    def embedded(self) -> bool:
        """Whether the data comes with an installed package and needs no files."""
        return any(not edition.paths for edition in self.editions)


def check_options(owner: str, given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Refuse options that ``owner`` does not have, and values of another type than their defaults."""
    for option, value in given.items():
        if option not in defaults:
            raise unknown(f"option of {owner}", option, defaults)
        default = defaults[option]
        fits = type(value) is type(default) or (isinstance(default, float) and type(value) is int)
        if default is not None and not fits:
            raise FedtailorError(
                f"{option} = {value!r} of {owner}: expected a value like {default!r}, its default"
            )


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
