"""Data as users have it: tensors, a data set, a loader, or one of these for each client; made federated data.

(x, y)   {"pixels": x, "label": y}   TensorDataset   any map-style Dataset   DataLoader   Examples     one part
[{"input_ids": [5, 7], "labels": 1} ...]   examples as collators of transformers take them          one part
(train, test)   {"train": train, "test": test}                                                   two parts
[part, part ...]   {"anna": part, "ben": part ...}                                               a part for each client
{"dataset": any of these, "clients": 50, "partition": "dirichlet" ...}                           with settings of [data]
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Number
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from fedtailor.config import validated
from fedtailor.data.batches import TARGET_KEYS, Examples, map_tensors
from fedtailor.data.datasets import load_dataset
from fedtailor.data.federated import DataSettings, FederatedData, federate
from fedtailor.data.formats.images import of_bytes, only_input, taken_for_images
from fedtailor.data.formats.labels import TEST_EVERY
from fedtailor.data.formats.tables import LABELS
from fedtailor.data.sources import Dataset, Origin, own_dataset
from fedtailor.data.transforms import ImagePreparation
from fedtailor.errors import FedtailorError
from fedtailor.objective import OWN as OWN_TASK
from fedtailor.objective import LearningTask
from fedtailor.run.learning import of_task
from fedtailor.seeds import Seeds

WHAT_TO_PASS = (
    "the name of a data set, a path, (x, y), ((x_train, y_train), (x_test, y_test)), a data set with "
    "__len__ and __getitem__, a list or dict with one of these for each client, or FederatedData"
)
OWN = "own data"
TOKENS = "input_ids"  # the name under which tokenisers hand out a text


def validation_of(given: Any) -> Any:
    """The share that is kept back to choose by, where the data comes with settings that say so."""
    table = given if isinstance(given, Mapping) and "dataset" in given else {}
    return table.get("validation", "auto")


def read_once(given: Any) -> Any:
    """The same data, read: what ``federated`` then spreads over clients, once for every seed."""
    if isinstance(given, FederatedData | Dataset | str | Path):
        return given
    if isinstance(given, Mapping) and "dataset" in given:
        return {**given, "dataset": read_once(given["dataset"])}
    return _dataset(given)


def federated(given: Any, seeds: Seeds, task: LearningTask | None = None) -> FederatedData:
    """Federated data of whatever was given; what has no test part gives up every fifth example for one.

    Whole numbers are classes only if the ``task`` has classes, or nobody said which it is.
    """
    if isinstance(given, FederatedData):
        return given
    settings: dict[str, Any] = {}
    task = None if task == OWN_TASK else task  # a loss of one's own may want classes, too
    if isinstance(given, Mapping) and "dataset" in given:
        settings = {key: value for key, value in given.items() if key != "dataset"}
        given = given["dataset"]
    if isinstance(given, str | Path):
        chosen = validated(DataSettings, {**settings, "dataset": str(given)}, "data")
        return federate(of_task(load_dataset(chosen.dataset, **chosen.options), task), chosen, seeds)
    if settings.get("options"):
        names = ", ".join(settings["options"])
        raise FedtailorError(
            f"data.options ({names}) say how files are read; expected none beside data in memory: change the tensors"
        )
    dataset = of_task(given if isinstance(given, Dataset) else _dataset(given), task)
    if dataset.client_train is not None:
        everyone = len(np.unique(dataset.client_train))
        settings = {"partition": "natural", "clients": everyone, "min_examples": 1, **settings}
    chosen = validated(DataSettings, {**settings, "dataset": dataset.name}, "data")
    if "clients" not in settings:
        enough = max(1, len(dataset.train) // chosen.min_examples)
        chosen = replace(chosen, clients=min(chosen.clients, enough))
    return federate(dataset, chosen, seeds)


def _dataset(given: Any) -> Dataset:
    """The given parts as one data set that knows its clients, where they were told apart."""
    train, test = _train_and_test(given)
    parts = _clients(train)
    names = ["training"] if parts is None else list(parts)
    places = ["data"] if parts is None else [f"data of client {name!r}" for name in names]
    raw = [train] if parts is None else list(parts.values())
    if test is not None:
        places, raw = [*places, "data, the test part"], [*raw, test]
    numbered, classes = _numbered(raw, places)
    pairs = [_examples(part, where) for part, where in zip(numbered, places, strict=True)]
    common = pairs.pop() if test is not None else None
    split = [(each, None) if common is not None else _held_back(each) for each in pairs]
    trained = [each for each, _ in split]
    tested = [each for _, each in split if each is not None]
    examples = (
        trained[0] if parts is None else _joined(trained, names),
        common if common is not None else tested[0] if parts is None else _joined(tested, names),
    )
    if not any(isinstance(part, Examples) for part in raw):  # those are as their maker wants them
        examples = of_bytes(*examples)
    dataset = own_dataset(
        *examples,
        client_train=None if parts is None else _owners(trained),
        client_test=None if parts is None or common is not None else _owners(tested),
        name=OWN,
        label_names=classes,
        client_names=None if parts is None else np.array([str(name) for name in names]),
    )
    x = only_input(dataset.train)
    if x is None or x.dtype != torch.uint8 or not isinstance(dataset.train.preparation, ImagePreparation):
        return dataset
    otherwise = "To say otherwise: pass decimal numbers, or Examples.of(x, y, preparation=...)."
    return replace(dataset, origin=Origin(f"{OWN} is taken for {taken_for_images(x)}.", otherwise))


def _numbered(parts: Sequence[Any], places: Sequence[str]) -> tuple[list[Any], tuple[str, ...]]:
    """The parts with numbers for targets that are names, the same for all of them; and the names, in their order."""
    names = [_names(part) for part in parts]
    if all(each is None for each in names):
        return list(parts), ()
    for each, where in zip(names, places, strict=True):
        if each is None:
            raise FedtailorError(
                f"{where}: targets that are no names, though others are: expected names for all"
            )
    known = np.unique(np.concatenate([each for each in names if each is not None]))
    changed = [
        part if each is None else _with_target(part, np.searchsorted(known, each))
        for part, each in zip(parts, names, strict=True)
    ]
    return changed, tuple(map(str, known.tolist()))


def _names(part: Any) -> np.ndarray[Any, Any] | None:
    """The targets of a part, if they are names."""
    if isinstance(part, Mapping):
        key = next((key for key in TARGET_KEYS if key in part), None)
        target = None if key is None else part[key]
    else:
        columns = isinstance(part, tuple | list) and len(part) > 1 and all(_is_column(each) for each in part)
        target = part[-1] if columns else None
    if isinstance(target, Tensor) or not _is_column(target):
        return None
    if isinstance(target, list) and not all(isinstance(each, str) for each in target):
        return None
    found = np.asarray(target)
    named = found.dtype.kind in "US" or (
        found.dtype == object and all(isinstance(each, str) for each in found.flat)
    )
    return found.astype(str) if named and found.ndim == 1 else None


def _with_target(part: Any, target: np.ndarray[Any, Any]) -> Any:
    if isinstance(part, Mapping):
        return {**part, next(key for key in TARGET_KEYS if key in part): target}
    return (*part[:-1], target)


def _single(part: Examples) -> Examples:
    """The same with numbers of half precision in float32, the type of the models."""
    half = (torch.float16, torch.bfloat16)
    return replace(part, columns=map_tensors(part.columns, lambda x: x.float() if x.dtype in half else x))


def _train_and_test(given: Any) -> tuple[Any, Any]:
    """A pair of parts is a training and a test part; whatever else it is, is for training."""
    if isinstance(given, Mapping) and set(given) == {"train", "test"}:
        return given["train"], given["test"]
    if isinstance(given, tuple) and len(given) == 2 and not any(_is_column(each) for each in given):
        return given
    return given, None


def _clients(given: Any) -> dict[Any, Any] | None:
    """The parts of clients by name or number; nothing where the examples are in one part."""
    if isinstance(given, Mapping) and given and not any(_is_column(each) for each in given.values()):
        return dict(given)
    if isinstance(given, list) and given and not any(_is_column(each) or _is_example(each) for each in given):
        return dict(enumerate(given))
    return None


def _examples(part: Any, where: str) -> Examples:
    """One part as examples; what is wrong with it is said with where it is."""
    try:
        return part if isinstance(part, Examples) else _single(_read(part))
    except FedtailorError as error:
        raise FedtailorError(f"{where}: {error}") from None


def _read(part: Any) -> Examples:
    if isinstance(part, Examples):
        return part
    if isinstance(part, DataLoader):
        return Examples.from_dataset(_of_loader(part))
    if isinstance(part, IterableDataset):
        raise FedtailorError(
            f"a {type(part).__name__} has no length and no order; expected a map-style data set: "
            "`list(dataset)` makes one, where it fits into memory"
        )
    if isinstance(part, Mapping):
        return Examples.named(part)
    if isinstance(part, tuple | list) and all(_is_column(each) for each in part):
        lengths = {len(each) for each in part}
        if len(lengths) > 1:
            raise FedtailorError(
                f"tensors of lengths {', '.join(map(str, sorted(lengths)))}: expected (x, y) of equal length; "
                "with a test part ((x_train, y_train), (x_test, y_test))"
            )
        if _is_two_pairs(part):
            raise FedtailorError(
                "four tensors, of which the third is like the first and the fourth like the second; expected "
                "((x_train, y_train), (x_test, y_test)) if the last two are for testing"
            )
        return Examples.of(*part)
    if hasattr(part, "drop") and hasattr(part, "columns"):  # a DataFrame of pandas
        found = next((str(name) for name in part.columns if str(name).lower() in LABELS), "label")
        raise FedtailorError(
            f"a {type(part).__name__} does not say which column is the target: pass "
            f'(df.drop(columns="{found}"), df["{found}"]), or the path of a .csv or .parquet file of it'
        )
    if _is_column(part):
        raise FedtailorError(f"a {type(part).__name__} without targets: expected (x, y), the targets last")
    if hasattr(part, "__len__") and hasattr(part, "__getitem__"):
        return Examples.from_dataset(part)
    raise FedtailorError(f"an object of type {type(part).__name__}; expected {WHAT_TO_PASS}")


def _is_two_pairs(part: Sequence[Any]) -> bool:
    """Whether four columns look like training and test parts that were not put into pairs."""
    if len(part) != 4:
        return False
    x, y, x_test, y_test = (np.shape(each)[1:] for each in part)
    return (x, y) == (x_test, y_test) and x != y


def _of_loader(loader: DataLoader[Any]) -> Any:
    """The data set behind a loader; its batches and their order are not used, and that is said."""
    if isinstance(loader.dataset, IterableDataset):
        return _read(loader.dataset)
    if loader.collate_fn is not None and loader.collate_fn is not default_collate:
        raise FedtailorError(
            "a DataLoader with a collate_fn of its own makes examples that its data set does not have; "
            "expected the examples themselves: (x, y), or a data set whose items are what the model takes"
        )
    warnings.warn(
        "of a DataLoader the data set is used, and not its batches: clients draw their own, of "
        'training={"batch_size": ...}',
        stacklevel=2,
    )
    return loader.dataset


def _held_back(whole: Examples) -> tuple[Examples, Examples]:
    """Every fifth example is for testing; of fewer than five, the last."""
    rows = torch.arange(len(whole))
    test = rows % TEST_EVERY == TEST_EVERY - 1
    if len(whole) < TEST_EVERY:
        if len(whole) < 2:
            raise FedtailorError(
                f"data with {len(whole)} example(s): expected at least 2, one of them to test"
            )
        test = rows == len(whole) - 1
    return whole.subset(rows[~test]), whole.subset(rows[test])


def _joined(parts: Sequence[Examples], names: Sequence[Any]) -> Examples:
    """The examples of all clients, one after the other."""
    columns = [_columns(part) for part in parts]
    for name, each in zip(names, columns, strict=True):
        if each.keys() != columns[0].keys() or any(
            each[key].shape[1:] != value.shape[1:] or each[key].dtype != value.dtype
            for key, value in columns[0].items()
        ):
            raise FedtailorError(
                f"data of client {name!r} is {_shapes(each)}: expected {_shapes(columns[0])}, "
                f"like that of client {names[0]!r}"
            )
    if len({id(part.preparation) for part in parts}) > 1:
        raise FedtailorError("data of clients with different preparations: expected the same for all")
    joined = {key: torch.cat([each[key] for each in columns]) for key in columns[0]}
    named = isinstance(parts[0].columns, dict)
    return Examples(joined if named else tuple(joined.values()), preparation=parts[0].preparation)


def _columns(part: Examples) -> dict[Any, Tensor]:
    columns = part.columns if isinstance(part.columns, dict) else dict(enumerate(part.columns))
    rows = part.indices
    return {key: value if rows is None else value.index_select(0, rows) for key, value in columns.items()}


def _shapes(columns: Mapping[Any, Tensor]) -> str:
    return ", ".join(
        f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape[1:])}" for value in columns.values()
    )


def _owners(parts: Sequence[Examples]) -> np.ndarray[Any, Any]:
    return np.repeat(np.arange(len(parts)), [len(part) for part in parts])


def _is_column(value: Any) -> bool:
    """Whether something holds one entry for each example: a tensor, an array, a series, a list of numbers."""
    if isinstance(value, Tensor | np.ndarray):
        return value.ndim > 0
    if isinstance(value, list):
        return bool(value) and (isinstance(value[0], Number | str) or _is_column(value[0]))
    return hasattr(value, "__array__") and hasattr(value, "__len__")


def _is_example(value: Any) -> bool:
    """Whether something is one example, no part of a client: its target is a single number, or it is a text."""
    if isinstance(value, Mapping):
        if TOKENS in value:
            return np.ndim(value[TOKENS]) == 1
        return any(isinstance(each, Number) or _is_scalar(each) for each in value.values())
    return (
        isinstance(value, tuple | list)
        and bool(value)
        and (isinstance(value[-1], Number | str) or _is_scalar(value[-1]))
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, Tensor | np.ndarray | np.generic) and np.ndim(value) == 0
