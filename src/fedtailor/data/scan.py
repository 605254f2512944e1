"""One look through a user's examples before anything is trained on them: every finding is a sentence with its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from fedtailor.data.batches import Batch, Examples, inputs_of
from fedtailor.data.formats.labels import places
from fedtailor.data.partitions import Array, Partition
from fedtailor.data.sources import Dataset, in_words, looks_like_quantity
from fedtailor.data.transforms import TextWindows
from fedtailor.errors import counted

BLOCK = 2048  # examples that are looked at together
LARGE = 100.0  # decimal numbers beyond it make the first steps of training too long
RARE, RARE_SHARE = (
    10,
    0.1,
)  # a class is rare below so many examples, if others have ten times as many on average
SMALL, FAR = 0.01, 10.0  # deviations and means of targets between them need no scaling
MOST_NAMED = 5
MOST_CLIENTS = 10


def findings(dataset: Dataset) -> tuple[str, ...]:
    """What is odd about the examples; nothing where they are of a known data set, which has been looked at."""
    if not dataset.own:
        return ()
    parts = {"training": dataset.train, "test": dataset.test}
    found = [
        sentence for part in parts if len(parts[part]) for sentence in _not_finite(dataset, part, parts[part])
    ]
    found += _ranges(dataset)
    found += _constant(dataset)
    found += _targets(dataset)
    return tuple(found)


def bad_rows(examples: Examples) -> Tensor:
    """Which of the held examples have an input or a target that is NaN or infinite; bool (examples,)."""
    bad = torch.zeros(len(examples), dtype=torch.bool)
    for _, column in _columns(examples.columns):
        if column.is_floating_point():
            for first, block in _blocks(examples, column):
                bad[first : first + len(block)] |= ~block.flatten(1).isfinite().all(1).cpu()
    return bad


def with_bad_rows(examples: Examples, partition: Partition, name_of: Callable[[int], str]) -> str:
    """The clients that hold such examples, as a sentence; empty where nobody does."""
    bad = bad_rows(examples).numpy()
    if not bad.any():
        return ""
    owners = np.repeat(np.arange(len(partition)), partition.sizes)[bad[partition.order]]
    clients = [name_of(int(client)) for client in np.unique(owners)]
    more = f" and {len(clients) - MOST_CLIENTS:,} more" if len(clients) > MOST_CLIENTS else ""
    word = "client" if len(clients) == 1 else "clients"
    return f"examples that are no numbers are held by {word} {', '.join(clients[:MOST_CLIENTS])}{more}"


def _columns(columns: Batch) -> list[tuple[str, Tensor]]:
    """Inputs and target, by what they are called in a sentence."""
    args, kwargs = inputs_of(columns)
    several = len(args) > 1
    named = [(f"input {place}" if several else "the inputs", column) for place, column in enumerate(args)]
    named += [(f"input {name}", column) for name, column in kwargs.items()]
    target = next(value for value in _values(columns) if all(value is not column for _, column in named))
    return [*named, ("the targets", target)]


def _values(columns: Batch) -> list[Tensor]:
    return list(columns.values()) if isinstance(columns, Mapping) else list(columns)


def _blocks(examples: Examples, column: Tensor) -> Iterator[tuple[int, Tensor]]:
    """The held rows of a column, some at a time, (rows, ...) with at least two axes; and where they begin."""
    for first in range(0, len(examples), BLOCK):
        last = min(first + BLOCK, len(examples))
        rows = column[first:last] if examples.indices is None else column[examples.indices[first:last]]
        yield first, rows.reshape(len(rows), -1)


def _where(dataset: Dataset, part: str, rows: Array) -> str:
    """Where some examples of a part are: by the lines of the file, or by their place in the part, from 0."""
    origin = dataset.origin
    if origin.lines is None:
        return places(rows, "row")
    return places(origin.lines[part == "test"][rows], origin.line_word)


def _not_finite(dataset: Dataset, part: str, examples: Examples) -> Iterator[str]:
    meaning = (
        "a client that trains on them is refused in every round"
        if part == "training"
        else "loss and metrics of every tier will be no numbers"
    )
    tests = {"NaN": torch.isnan, "infinite numbers": torch.isinf}
    for what, column in _columns(examples.columns):
        for name, test in tests.items() if column.is_floating_point() else ():
            rows, features = _found(examples, column, test)
            if len(rows):
                which = (
                    f" ({_named(dataset, features)})" if column.dim() == 2 and what != "the targets" else ""
                )
                several = "s" if len(rows) > 1 else ""
                yield (
                    f"{dataset.name} has {name} in {what}{which} of {len(rows):,} {part} example{several} "
                    f"({_where(dataset, part, rows)}): {meaning}; correct them or leave them out"
                )


def _found(examples: Examples, column: Tensor, test: Callable[[Tensor], Tensor]) -> tuple[Array, list[int]]:
    """The examples, and the features, in which something is found."""
    rows: list[int] = []
    features: set[int] = set()
    for first, block in _blocks(examples, column):
        found = test(block)
        rows += (first + found.any(1).nonzero().flatten()).tolist()
        features.update(found.any(0).nonzero().flatten().tolist())
    return np.array(rows, dtype=np.int64), sorted(features)


def _named(dataset: Dataset, features: list[int]) -> str:
    names = dataset.origin.columns
    shown = [names[feature] if names else str(feature) for feature in features[:MOST_NAMED]]
    more = f" and {len(features) - MOST_NAMED:,} more" if len(features) > MOST_NAMED else ""
    word = ("column" if names else "feature") + ("s" if len(features) > 1 else "")
    return f"{word} {', '.join(shown)}{more}"


def _ranges(dataset: Dataset) -> Iterator[str]:
    """Inputs that no network likes: pixels as floats from 0 to 255, large numbers, tokens below zero."""
    examples = dataset.train
    if examples.preparation is not None:  # which may scale them
        return
    for what, column in _columns(examples.columns)[:-1]:
        lowest, highest, low, high = np.inf, -np.inf, 0, 0
        for first, block in _blocks(examples, column):
            values = block.flatten(1).double().nan_to_num(0.0, 0.0, 0.0)
            smallest, largest = values.min(1).values, values.max(1).values
            if float(smallest.min()) < lowest:
                lowest, low = float(smallest.min()), first + int(smallest.argmin())
            if float(largest.max()) > highest:
                highest, high = float(largest.max()), first + int(largest.argmax())
        spread = f"{what} of {dataset.name} go from {lowest:g} to {highest:g}"
        if column.is_floating_point() and max(-lowest, highest) > LARGE:
            row = high if highest > -lowest else low
            yield (
                f"{spread} ({_where(dataset, 'training', np.array([row]))}): networks learn badly from numbers beyond "
                f"{LARGE:g}; scale them, and scale what the deployed network is given in the same way"
            )
        elif (
            not column.is_floating_point() and column.dtype != torch.bool and lowest < 0 and column.dim() == 2
        ):
            yield (
                f"{spread} ({_where(dataset, 'training', np.array([low]))}): an embedding takes whole numbers from 0; "
                "measurements have to be stored as decimal numbers"
            )


def _constant(dataset: Dataset) -> Iterator[str]:
    """Features that are the same in every training example; of images and tokens, only if all of them are."""
    examples = dataset.train
    if isinstance(examples.preparation, TextWindows) or len(examples) < 2:
        return
    for what, column in _columns(examples.columns)[:-1]:
        alike: Tensor | None = None
        start: Tensor | None = None
        for _, block in _blocks(examples, column):
            start = block[:1] if start is None else start
            same = (block == start).all(0)
            alike = same if alike is None else alike & same
        assert alike is not None
        features = alike.nonzero().flatten().tolist()
        if len(features) == len(alike):
            yield f"{what} of {dataset.name} are the same in every training example: nothing can be learnt from them"
        elif features and column.is_floating_point() and column.dim() == 2:
            word = "is" if len(features) == 1 else "are"
            yield (
                f"{_named(dataset, features)} of {dataset.name} {word} the same in every training example: "
                f"nothing can be learnt from {'it' if len(features) == 1 else 'them'}"
            )


def _targets(dataset: Dataset) -> Iterator[str]:
    """Classes without examples, classes with next to none, and decimal numbers that look like classes."""
    labels = dataset.train.targets.cpu()
    few = labels.is_floating_point() and len(labels.unique()) <= max(2, len(labels) // 10)
    if few and labels.dim() == 1 and bool((labels == labels.round()).all()):
        yield (
            f"the targets of {dataset.name} are decimal numbers that are all whole: taken for quantities; if they "
            "are classes, store them as whole numbers"
        )
    if labels.is_floating_point() or dataset.num_classes == 0:
        yield from _size_of_targets(dataset, labels)
        return
    if quantity := looks_like_quantity(labels):
        yield f"the targets of {dataset.name} {quantity}"
        return
    if labels.dim() != 1:
        return
    counts = np.bincount(labels.numpy(), minlength=dataset.num_classes)
    yield from _classes(dataset, labels.numpy(), counts)


def _size_of_targets(dataset: Dataset, labels: Tensor) -> Iterator[str]:
    """Numbers to be told that are far from 1, of which the default learning rate makes steps that are far too long."""
    numbers = labels.reshape(len(labels), -1).double()
    numbers = numbers[numbers.isfinite().all(1)]
    if bool(((numbers == 0) | (numbers == 1)).all()):  # labels that hold or do not
        return
    means, deviations = numbers.mean(0), numbers.std(0, correction=0)
    worst = int(torch.maximum(means.abs(), deviations).argmax())
    mean, deviation = float(means[worst]), float(deviations[worst])
    if max(abs(mean), deviation) <= FAR and not 0 < float(deviations.max()) < SMALL:
        return
    scaling = (
        "[data] options = { standardise_targets = true } scales them" if dataset.origin.taken_for
        else "scale them, (y - mean) / deviation"
    )  # fmt: skip
    yield (
        f"the targets of {dataset.name} have mean {in_words(mean)} and deviation {in_words(deviation)}: "
        f"networks and learning rates are made for numbers of about 1; {scaling}"
    )


def _classes(dataset: Dataset, labels: Array, counts: Array) -> Iterator[str]:
    total, there = len(counts), np.flatnonzero(counts)
    empty = np.flatnonzero(counts == 0)
    scarce = [int(c) for c in there if counts[c] < min(RARE, RARE_SHARE * len(labels) / len(there))]
    if len(empty):
        tested = (
            np.isin(dataset.test.targets.cpu().numpy(), empty) if len(dataset.test) else np.zeros(0, bool)
        )
        last = int(there[-1])
        stray = (
            f"; class {_class(dataset, last)}, the highest, has {counts[last]} "
            f"({_where(dataset, 'training', np.flatnonzero(labels == last))}), which may be a mistake"
            if last in scarce and last == total - 1
            else ""
        )
        yield (
            f"of the {total:,} classes of {dataset.name}, {counted(len(empty), 'has', 'have')} no training example "
            f"({_several(dataset, empty.tolist())}), though the network gets an output for each{stray}"
        )
        if tested.any():
            yield (
                f"of the test examples of {dataset.name}, {counted(int(tested.sum()), 'is', 'are')} of classes that "
                f"training never shows ({_where(dataset, 'test', np.flatnonzero(tested))})"
            )
        scarce = [each for each in scarce if not (stray and each == last)]
    for each in scarce[:MOST_NAMED]:
        rows = np.flatnonzero(labels == each)
        yield (
            f"class {_class(dataset, each)} of {dataset.name} has {counted(int(counts[each]), 'training example')} of "
            f"{len(labels):,} ({_where(dataset, 'training', rows)})"
        )
    if len(scarce) > MOST_NAMED:
        yield f"{len(scarce) - MOST_NAMED:,} more classes of {dataset.name} are as rare"


def _class(dataset: Dataset, number: int) -> str:
    return dataset.label_names[number] if number < len(dataset.label_names) else str(number)


def _several(dataset: Dataset, classes: list[int]) -> str:
    """Classes by name, or as ranges of numbers: ``3 to 8``."""
    if dataset.label_names:
        shown = [_class(dataset, each) for each in classes[:MOST_NAMED]]
        return ", ".join(shown) + (
            f" and {len(classes) - MOST_NAMED:,} more" if len(classes) > MOST_NAMED else ""
        )
    ranges = np.split(np.array(classes), np.flatnonzero(np.diff(classes) > 1) + 1)
    shown = [str(each[0]) if len(each) == 1 else f"{each[0]} to {each[-1]}" for each in ranges[:MOST_NAMED]]
    return ", ".join(shown) + (" and more" if len(ranges) > MOST_NAMED else "")
