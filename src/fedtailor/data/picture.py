"""Who holds what: rows for programs, and a table with a picture of the label counts for a terminal."""

from __future__ import annotations

from typing import Any

import numpy as np
from rich.console import Group
from rich.table import Table
from rich.text import Text

from fedtailor.data.federated import FederatedData
from fedtailor.data.partitions import Array
from fedtailor.errors import visible

SHADES = " ░▒▓█"  # none, up to 1/4, 1/2, 3/4 and all of the darkest cell
BAR_WIDTH = 20
NAME_WIDTH = 16
MOST_COLUMNS = 40  # more classes than this share columns


def overview(data: FederatedData) -> dict[str, Any]:
    """The split in a few numbers; ``skew`` is 0 where every client is like the whole, and at most 1.

    ``skew`` is the mean over clients of the total variation distance between the client's share of each class
    and the share in all training data.
    """
    sizes = data.sizes
    numbers: dict[str, Any] = {
        "dataset": data.name,
        "clients": data.num_clients,
        "unseen_clients": 0 if data.unseen is None else len(data.unseen),
        "train_examples": int(sizes.sum()),
        **({} if data.validation is None else {"validation_examples": data.kept_back}),
        "test_examples": len(data.test),
        "classes": data.num_classes,
        "smallest_client": int(sizes.min()),
        "median_client": float(np.median(sizes)),
        "largest_client": int(sizes.max()),
    }
    if data.notices:
        numbers["notices"] = list(data.notices)
    if _has_classes(data):
        counts = data.label_counts()
        shares = counts / counts.sum(1, keepdims=True)
        whole = counts.sum(0) / counts.sum()
        numbers["mean_classes_per_client"] = float((counts > 0).sum(1).mean())
        numbers["skew"] = float(np.abs(shares - whole).sum(1).mean() / 2)
    return numbers


def rows(data: FederatedData, most: int | None = None) -> list[dict[str, Any]]:
    """One row per client: name, sizes, label counts; with ``most``, that many clients from small to large."""
    shown = _shown_clients(data.sizes, most)
    counts = data.label_counts() if _has_classes(data) else None
    tested = data.tests.partition.sizes if data.tests is not None else np.zeros(data.num_clients, np.int64)
    return [
        {
            "client": int(client),
            "name": data.client_name(int(client)),
            "examples": int(data.sizes[client]),
            "own_test_examples": int(tested[client]),
            "label_counts": [] if counts is None else counts[client].tolist(),
        }
        for client in shown
    ]


def label_counts(data: FederatedData) -> list[int]:
    """How many examples of each class all clients hold together; nothing where there are no classes."""
    counts: list[int] = data.label_counts().sum(axis=0).tolist() if _has_classes(data) else []
    return counts


def show(data: FederatedData, most: int = 20) -> Group:
    """For a terminal: one line per client, with one shaded cell per class and a bar for the size."""
    numbers = overview(data)
    listed = rows(data, most)
    sizes = f"{numbers['smallest_client']} / {numbers['median_client']:g} / {numbers['largest_client']}"
    choosing = (
        f"{numbers['validation_examples']:,} validation examples, " if data.validation is not None else ""
    )
    lines = [
        f"{data.name}: {numbers['clients']:,} clients, {numbers['train_examples']:,} training examples, {choosing}"
        f"{numbers['test_examples']:,} test examples, {numbers['classes']} classes",
        f"examples per client (smallest / median / largest): {sizes}",
    ]
    if "skew" in numbers:
        lines.append(
            f"classes per client: {numbers['mean_classes_per_client']:.1f} on average; "
            f"label skew {numbers['skew']:.2f} (0 = all alike)"
        )
    if numbers["unseen_clients"]:
        lines.append(f"clients never seen in training: {numbers['unseen_clients']:,}")
    lines += data.notices
    if len(listed) < data.num_clients:
        lines.append(f"{len(listed)} of them, from the smallest to the largest:")
    return Group(*(Text(visible(line)) for line in lines), *_table(data, listed))


def _table(data: FederatedData, listed: list[dict[str, Any]]) -> tuple[Table, Text]:
    """The table and its legend."""
    with_tests = data.tests is not None
    together = _classes_together(data.num_classes)
    cells = [_columns(row["label_counts"], together) for row in listed]
    darkest = max((max(counts, default=0) for counts in cells), default=0)
    largest = int(data.sizes.max())
    table = Table(box=None, pad_edge=False)
    table.add_column("client", no_wrap=True)
    table.add_column("examples", justify="right", no_wrap=True, min_width=8)
    if with_tests:
        table.add_column("own test", justify="right", no_wrap=True, min_width=8)
    table.add_column("classes", justify="right", no_wrap=True, min_width=7)
    table.add_column(_class_header(data), no_wrap=True)
    table.add_column("", no_wrap=True)
    for row, counts in zip(listed, cells, strict=True):
        entries = [_short(row["name"]), f"{row['examples']:,}"]
        entries += [f"{row['own_test_examples']:,}"] if with_tests else []
        entries += [str(sum(count > 0 for count in row["label_counts"])) if counts else ""]
        entries += [shades(counts, darkest), "━" * max(1, round(BAR_WIDTH * row["examples"] / largest))]
        table.add_row(*(Text(visible(entry)) for entry in entries))
    return table, Text(_legend(darkest, together))


def shades(counts: list[int], darkest: int) -> str:
    """One character per class; any example at all is visible.

    >>> shades([0, 1, 50, 100], darkest=100)
    ' ░▒█'
    """
    steps = len(SHADES) - 1
    return "".join(SHADES[-(-count * steps // max(darkest, 1))] for count in counts)


def _classes_together(num_classes: int) -> int:
    """How many classes share one column of the picture."""
    return max(1, -(-num_classes // MOST_COLUMNS))


def _columns(counts: list[int], together: int) -> list[int]:
    return [sum(counts[first : first + together]) for first in range(0, len(counts), together)]


def _class_header(data: FederatedData) -> Text:
    if not _has_classes(data):
        return Text("")
    if data.num_classes <= 10:
        return Text("".join(str(label) for label in range(data.num_classes)))
    return Text(f"0 ... {data.num_classes - 1}")


def _legend(darkest: int, together: int) -> str:
    if darkest == 0:
        return ""
    column = "class" if together == 1 else f"{together} classes"
    return f"one column per {column}: blank = none, {SHADES[-1]} = up to {darkest:,} examples"


def _short(name: str) -> str:
    return name if len(name) <= NAME_WIDTH else name[: NAME_WIDTH // 2] + "…" + name[1 - NAME_WIDTH // 2 :]


def _has_classes(data: FederatedData) -> bool:
    return data.num_classes > 0 and data.train.targets.dim() == 1 and not data.remote


def _shown_clients(sizes: Array, most: int | None) -> Array:
    """All clients in their order, or some spread evenly over the sizes."""
    if most is None or len(sizes) <= most:
        return np.arange(len(sizes))
    by_size = np.argsort(sizes, kind="stable")
    return by_size[np.linspace(0, len(sizes) - 1, most).round().astype(np.int64)]
