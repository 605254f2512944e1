"""The settings that say how a data set is spread over clients, and the table of partitions by name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from fedtailor.data import partitions
from fedtailor.data.batches import Examples
from fedtailor.data.partitions import Array, Partition
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.seeds import Seeds


@dataclass(frozen=True)
class DataSettings:
    """Which data set, and how it is spread over clients."""

    dataset: str = "digits"
    """A known name (see `fedtailor datasets`), or a path: a .csv, .jsonl, .npz or .parquet file, or a folder of
    images."""
    clients: int = 20
    """How many clients; with partition = "natural", how many of the writers or roles are drawn."""
    partition: str = "iid"
    """iid, dirichlet, classes, shards, quantity, overlapping or natural."""
    alpha: float = 0.5
    """dirichlet: small = each class with few clients, large = close to iid."""
    balanced: bool = False
    """dirichlet: stop giving to clients that hold their fair share of examples."""
    classes_per_client: int = 2
    """classes: how many classes each client holds."""
    shards_per_client: int = 2
    """shards: how many pieces of the examples sorted by label each client holds."""
    skew: float = 1.0
    """quantity: spread of the log-normal law of the sizes; 0 = equal sizes."""
    examples_per_client: int = 20
    """overlapping: how many examples each client draws; other clients may hold them too."""
    makers_per_client: int = 1
    """natural: how many writers or roles, drawn at random, are one client together."""
    min_examples: int = 2
    """No client has fewer examples than this; natural clients that do are left out."""
    local_test: float = 0.0
    """Share of each client's examples that is kept back as its own test set."""
    validation: float | Literal["auto"] = "auto"
    """Share of each client's training examples that is kept back to choose by (early stopping, the best round, methods
    that watch evaluations); auto: 0.1 where something is chosen, else 0."""
    limit: int | None = None
    """Use only this many training examples, drawn at random."""
    test_limit: int | None = None
    """Evaluate on only this many test examples, drawn at random."""
    augment: bool = True
    """Crop and flip training images where the data set is trained that way."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the data set, such as window = 80 for shakespeare."""

    def __post_init__(self) -> None:
        if self.partition not in KINDS:
            raise unknown("partition", self.partition, KINDS)
        require(self.clients >= 1, "clients", self.clients, "1 or more")
        require(0 < self.alpha <= partitions.LARGEST_ALPHA, "alpha", self.alpha, partitions.ALPHA_RANGE)
        require(self.classes_per_client >= 1, "classes_per_client", self.classes_per_client, "1 or more")
        require(self.shards_per_client >= 1, "shards_per_client", self.shards_per_client, "1 or more")
        require(0 <= self.skew <= 100, "skew", self.skew, "0 (equal sizes) to 100")
        require(self.examples_per_client >= 1, "examples_per_client", self.examples_per_client, "1 or more")
        require(self.makers_per_client >= 1, "makers_per_client", self.makers_per_client, "1 or more")
        require(self.min_examples >= 1, "min_examples", self.min_examples, "1 or more")
        require(0 <= self.local_test < 1, "local_test", self.local_test, "a share from 0 to below 1")
        share = 0 if self.validation == "auto" else self.validation
        require(0 <= share < 1, "validation", self.validation, "auto, or a share from 0 to below 1")
        for name, limit in (("limit", self.limit), ("test_limit", self.test_limit)):
            require(limit is None or limit >= 1, name, limit, "1 or more, or nothing")


Split = Callable[[Array, int, DataSettings, np.random.Generator], Partition]


@dataclass(frozen=True)
class Kind:
    """One named way of spreading examples."""

    split: Split | None  # (labels, num_classes, settings, generator); None: not from labels but from ids
    needs_classes: bool = False


KINDS: dict[str, Kind] = {
    "iid": Kind(lambda labels, _, s, generator: partitions.iid(len(labels), s.clients, generator)),
    "dirichlet": Kind(
        lambda labels, _, s, generator: partitions.dirichlet(
            labels, s.clients, s.alpha, generator, min_examples=s.min_examples, balanced=s.balanced
        ),
        needs_classes=True,
    ),
    "classes": Kind(
        lambda labels, num_classes, s, generator: partitions.classes(
            labels, s.clients, s.classes_per_client, num_classes, generator
        ),
        needs_classes=True,
    ),
    "shards": Kind(
        lambda labels, _, s, generator: partitions.shards(labels, s.clients, s.shards_per_client, generator),
        needs_classes=True,
    ),
    "quantity": Kind(
        lambda labels, _, s, generator: partitions.quantity(
            len(labels), s.clients, s.skew, generator, min_examples=s.min_examples
        )
    ),
    "overlapping": Kind(
        lambda labels, _, s, generator: partitions.overlapping(
            len(labels), s.clients, s.examples_per_client, generator
        )
    ),
    "natural": Kind(None),
}


def split(examples: Examples, num_classes: int, settings: DataSettings, seeds: Seeds) -> Partition:
    """Spread the examples as the settings say; every client gets at least ``min_examples``."""
    kind = KINDS[settings.partition]
    if kind.split is None:
        raise FedtailorError(f"partition = {settings.partition!r}: expected ids of clients, see split_by_id")
    labels = examples.targets.cpu().numpy()
    if kind.needs_classes:
        labels = class_labels(examples, num_classes, f"partition = {settings.partition!r}")
    partition = kind.split(labels, num_classes, settings, seeds.numpy("partition"))
    smallest = int(partition.sizes.argmin())
    if partition.sizes[smallest] < settings.min_examples:
        raise FedtailorError(
            f"client {smallest} has {partition.sizes[smallest]} example(s): "
            f"expected at least min_examples = {settings.min_examples}"
        )
    return partition


def class_labels(examples: Examples, num_classes: int, asker: str) -> Array:
    """The class of each example as an int64 array, for those who need classes."""
    labels = examples.targets
    if num_classes == 0 or labels.dim() != 1:
        raise FedtailorError(f"{asker}: expected one class per example, but the targets are no classes")
    return labels.cpu().numpy()


def split_by_id(
    name: str, ids: Array | None, settings: DataSettings, seeds: Seeds
) -> tuple[Partition, Array]:
    """One client per id, ``settings.clients`` of them drawn at random; the partition and the drawn ids."""
    if ids is None:
        raise FedtailorError(
            f'partition = "natural": expected a data set that says who made each example, but {name} does not'
        )
    whole, found = partitions.natural(ids)
    large = np.flatnonzero(whole.sizes >= settings.min_examples)
    if settings.clients > len(large):
        left_out = len(found) - len(large)
        small = (
            f", and {left_out} more with fewer than min_examples = {settings.min_examples}"
            if left_out
            else ""
        )
        raise FedtailorError(
            f"clients = {settings.clients}: expected at most {len(large)}, "
            f"the natural clients of {name} with enough examples{small}"
        )
    chosen = np.sort(seeds.numpy("natural").permutation(large)[: settings.clients])
    return whole.select(chosen), found[chosen]


def hold_back(
    partition: Partition, share: float, min_examples: int, seeds: Seeds, purpose: str = "local test"
) -> tuple[Partition, Partition]:
    """Split every client's part into one to train with and a random ``share`` to test with, or to choose by.

    Each keeps at least ``min_examples`` to train with, so that a small client may have no second part.
    """
    sizes = partition.sizes
    tested = np.minimum(np.ceil(sizes * share).astype(np.int64), np.maximum(sizes - min_examples, 0))
    shuffled = seeds.numpy(purpose).permutation(len(partition.order))
    owners = np.repeat(np.arange(len(partition)), sizes)
    by_owner = shuffled[np.argsort(owners[shuffled], kind="stable")]  # a random order within each client
    rank = np.arange(len(by_owner)) - np.repeat(partition.offsets[:-1], sizes)
    to_test = rank < np.repeat(tested, sizes)
    order = partition.order[by_owner]
    train = Partition(order[~to_test], np.concatenate([[0], np.cumsum(sizes - tested)]))
    return train, Partition(order[to_test], np.concatenate([[0], np.cumsum(tested)]))


def hold_back_for_all(
    partition: Partition, share: float, min_examples: int, seeds: Seeds
) -> tuple[Partition, Partition]:
    """As ``hold_back``, but what one client holds back nobody trains with: clients may share examples."""
    order, owners = partition.order, np.repeat(np.arange(len(partition)), partition.sizes)
    _, first = np.unique(order, return_index=True)
    if len(first) == len(order):
        return hold_back(partition, share, min_examples, seeds, "validation")
    own = np.zeros(len(order), dtype=bool)
    own[first] = True  # of an example that several hold, the first one decides
    _, held = hold_back(_of_owners(order[own], owners[own], len(partition)), share, 0, seeds, "validation")
    left = ~np.isin(order, held.order)
    train = _of_owners(order[left], owners[left], len(partition))
    smallest = int(train.sizes.argmin())
    if train.sizes[smallest] < min_examples:
        raise FedtailorError(
            f"data.validation = {share}: client {smallest} would be left with {train.sizes[smallest]} example(s), as "
            f"clients share examples; expected at least {min_examples}"
        )
    return train, held


def _of_owners(order: Array, owners: Array, clients: int) -> Partition:
    """The partition of examples that lie in the order of their owners."""
    return Partition(order, np.concatenate([[0], np.cumsum(np.bincount(owners, minlength=clients))]))
