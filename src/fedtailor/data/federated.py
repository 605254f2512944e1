"""A data set spread over clients."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch

from fedtailor.data.batches import Batch, Examples
from fedtailor.data.partitions import Array, Partition
from fedtailor.data.scan import bad_rows, findings, with_bad_rows
from fedtailor.data.sources import Dataset, Origin, own_dataset, together
from fedtailor.data.splits import (
    DataSettings,
    class_labels,
    hold_back,
    hold_back_for_all,
    split,
    split_by_id,
)
from fedtailor.data.transforms import Deployable, Plain, deployable, stored_tensors
from fedtailor.errors import FedtailorError
from fedtailor.seeds import Seeds

__all__ = ["DataSettings", "FederatedData", "Parts", "federate"]


@dataclass(frozen=True, eq=False)
class Parts:
    """Examples with one part for each client."""

    examples: Examples
    partition: Partition
    names: Array | None = None

    def __len__(self) -> int:
        return len(self.partition)

    def part(self, client: int) -> Examples:
        """The examples of one client; the columns are shared with all others."""
        return self.examples.subset(self.partition[client])

    @property
    def whole(self) -> Examples:
        """The examples of all clients together."""
        return self.examples.subset(self.partition.order)

    def examples_for(self, client: int, action: str, measured: Measured) -> Examples:
        """What a client works on: its training examples; to measure, its own examples for that or the common ones."""
        if action not in measured:
            return self.part(client)
        own, common = measured[action]
        return own.part(client) if own is not None and own.partition.sizes[client] else common


Measured = Mapping[
    str, tuple[Parts | None, Examples]
]  # action -> the clients' own examples, and those for all


@dataclass(frozen=True, eq=False)
class FederatedData:
    """A data set spread over clients: one part of the training examples each, one test set for all."""

    name: str
    train: Examples
    test: Examples
    partition: Partition
    num_classes: int
    label_names: tuple[str, ...] = ()
    client_names: Array | None = None
    tests: Parts | None = None  # the clients' own test sets, as many parts as clients
    validation: Parts | None = None  # what clients keep back of their training examples, to choose by
    unseen: Parts | None = None  # clients never seen in training, with test examples only
    origin: Origin = field(default_factory=Origin)  # the file that it was read from
    findings: tuple[str, ...] = ()  # what is odd about the examples, one sentence each
    remote: ClassVar[bool] = False  # whether training examples lie elsewhere, with their clients

    def __post_init__(self) -> None:
        empty = np.flatnonzero(self.partition.sizes == 0)
        if len(empty):
            raise FedtailorError(
                f"client {self.client_name(int(empty[0]))} has no data: expected at least 1 example"
            )
        last = int(self.partition.order.max())
        if last >= len(self.train):
            raise FedtailorError(f"example {last} of the partition: expected 0 to {len(self.train) - 1}")

    @property
    def num_clients(self) -> int:
        """How many clients take part in training."""
        return len(self.partition)

    @property
    def sizes(self) -> Array:
        """How many training examples each client holds."""
        return self.partition.sizes

    def client_name(self, client: int) -> str:
        """The name of a natural client, or its number."""
        return str(client if self.client_names is None else self.client_names[client])

    def client(self, client: int) -> Examples:
        """The training examples of one client."""
        return self.train.subset(self.partition[client])

    def examples_for(self, client: int, action: str) -> Examples:
        """What a client works on when it is asked to do something."""
        return Parts(self.train, self.partition).examples_for(client, action, self.measured)

    def count_for(self, client: int, action: str) -> int:
        """How many examples that are."""
        return len(self.examples_for(client, action))

    @cached_property
    def measured(self) -> Measured:
        """What scores are measured on: test examples, and those that choose where there are such."""
        choosing = {} if self.validation is None else {"validate": (self.validation, self.validation.whole)}
        return {"evaluate": (self.tests, self.test), **choosing}

    @property
    def kept_back(self) -> int:
        """How many examples clients keep back to choose by."""
        return 0 if self.validation is None else len(self.validation.partition.order)

    def with_validation(self, share: float, seeds: Seeds, min_examples: int = 2) -> FederatedData:
        """The same data, of which every client keeps a random ``share`` back to choose by."""
        if share == 0 or self.validation is not None:
            return self
        partition, held = hold_back_for_all(self.partition, share, min_examples, seeds)
        if len(held.order) == 0:
            raise FedtailorError(
                f"data.validation = {share}: no client of {self.name} has more than {min_examples} examples, so none "
                "can be kept back; 0 chooses by the test examples"
            )
        parts = Parts(self.train, held, self.client_names)
        return dataclasses.replace(self, partition=partition, validation=parts)

    def client_test(self, client: int) -> Examples | None:
        """The client's own test examples, where the data set has such."""
        if self.tests is None or self.tests.partition.sizes[client] == 0:
            return None
        return self.tests.part(client)

    def example(self, count: int = 2) -> Batch:
        """A small prepared batch, for tracing a model; of examples that are numbers, if there are such."""
        rows = torch.arange(min(count, len(self.train)))
        if bool(bad_rows(self.train.subset(rows)).any()):
            good = (~bad_rows(self.train)).nonzero().flatten()[:count]
            rows = good if len(good) else rows
        return self.train.take(rows)

    @property
    def notices(self) -> tuple[str, ...]:
        """What a user should know before a run: what a file was taken for, and what is odd about it."""
        return (*self.origin.sentences, *(f"{each}." for each in self.findings))

    @property
    def preparation(self) -> Deployable | None:
        """What raw inputs go through before a network sees them, as far as it can be deployed with the network."""
        return deployable(self.train.preparation)

    def inputs(self) -> dict[str, Any]:
        """How raw inputs become what a network sees, and what its outputs mean: plain values, for a file."""
        return self.origin.inputs(self.preparation, self.label_names)

    def label_counts(self) -> Array:
        """How many examples of each class each client holds, int64 (clients, classes)."""
        labels = class_labels(self.train, self.num_classes, "label counts")
        owners = np.repeat(np.arange(self.num_clients), self.sizes)
        cells = owners * self.num_classes + labels[self.partition.order]
        return np.bincount(cells, minlength=self.num_clients * self.num_classes).reshape(self.num_clients, -1)

    def to(self, device: torch.device | str) -> FederatedData:
        """The same data on another device; parts that share their examples go on sharing them."""
        moved = {id(examples): examples.to(device) for examples in (self.train, self.test)}

        def parts(old: Parts | None) -> Parts | None:
            if old is None:
                return None
            return dataclasses.replace(old, examples=moved.get(id(old.examples)) or old.examples.to(device))

        return dataclasses.replace(
            self,
            train=moved[id(self.train)],
            test=moved[id(self.test)],
            tests=parts(self.tests),
            validation=parts(self.validation),
            unseen=parts(self.unseen),
        )

    def fingerprint(self) -> str:
        """``data-split``: a hash of all examples and one of who holds which, to notice a change."""
        data = hashlib.blake2b(digest_size=8)
        for examples in (self.train, self.test):
            for tensor in stored_tensors(examples):
                data.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
                data.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        split = hashlib.blake2b(digest_size=8)
        kept = () if self.validation is None else (self.validation.partition.order,)
        for array in (self.partition.order, self.partition.offsets, *kept):
            split.update(np.ascontiguousarray(array, dtype=np.int64).data)
        return f"{data.hexdigest()}-{split.hexdigest()}"

    def check_fingerprint(self, saved: str) -> None:
        """Refuse to go on with data that is not the data of a saved run."""
        now = self.fingerprint()
        if now == saved:
            return
        what = "the examples" if now.split("-")[0] != saved.split("-")[0] else "the split over clients"
        raise FedtailorError(
            f"data set {self.name} changed since the run was saved: {what} differ "
            f"(fingerprint {now}, saved {saved})"
        )

    @classmethod
    def from_examples(
        cls,
        train: Examples,
        test: Examples,
        *,
        parts: list[Array] | list[list[int]] | None = None,
        client_train: object = None,
        client_test: object = None,
        num_classes: int | None = None,
        seeds: Seeds | None = None,
        **settings: Any,
    ) -> FederatedData:
        """One's own examples as federated data, split in one of three ways.

        ``parts``: for each client, the positions of its training examples. ``client_train`` (and
        ``client_test``): for each example, the id of its client, a number or a name; an id that only
        ``client_test`` has is a client never seen in training. Otherwise ``clients``, ``partition`` and the
        other fields of ``DataSettings`` say how the examples are spread. ``dataset`` is a name for the data.
        """
        name = settings.setdefault("dataset", "own data")
        dataset = own_dataset(
            train,
            test,
            client_train=client_train,
            client_test=client_test,
            num_classes=num_classes,
            name=name,
        )
        if parts is not None:
            partition = Partition.from_parts(parts)
            data = cls(name, train, test, partition, dataset.num_classes, findings=findings(dataset))
            data = _with_holders(data)
            share = settings.get("validation", "auto")
            return data if share == "auto" else data.with_validation(share, seeds or Seeds(0))
        if dataset.client_train is not None:
            everyone = len(np.unique(dataset.client_train))
            settings = {"partition": "natural", "clients": everyone, "min_examples": 1, **settings}
        return federate(dataset, DataSettings(**settings), seeds or Seeds(0))


def federate(dataset: Dataset, settings: DataSettings, seeds: Seeds) -> FederatedData:
    """Spread a data set over clients.

    The same data, settings and seed give the same split; where the data set knows who made which example
    and the partition is natural, clients keep their own test examples, and clients that only
    the test part knows (or that were not drawn) are the unseen ones.
    """
    if settings.partition == "natural" and settings.makers_per_client > 1:
        dataset = together(dataset, settings.makers_per_client, seeds)
    train, ids = dataset.train, dataset.client_train
    if not settings.augment and train.preparation is not None:
        train = train.prepared_by(Plain(train.preparation))
    train, ids = _some(train, ids, settings.limit, seeds.numpy("limit"))
    test, test_ids = _some(dataset.test, dataset.client_test, settings.test_limit, seeds.numpy("test limit"))
    names: Array | None = None
    tests: Parts | None = None
    unseen: Parts | None = None
    if settings.partition == "natural":
        partition, chosen = split_by_id(dataset.name, ids, settings, seeds)
        names = _names_of(chosen, dataset)
        if test_ids is not None:
            tests, unseen = _tests_by_id(dataset, test, test_ids, chosen)
    else:
        partition = split(train, dataset.num_classes, settings, seeds)
    if settings.local_test > 0:
        partition, held_back = hold_back(partition, settings.local_test, settings.min_examples, seeds)
        tests = Parts(train, held_back, names)
    data = FederatedData(
        name=dataset.name,
        train=train,
        test=test,
        partition=partition,
        num_classes=dataset.num_classes,
        label_names=dataset.label_names,
        client_names=names,
        tests=tests,
        unseen=unseen,
        origin=dataset.origin,
        findings=findings(dataset),
    )
    data = _with_holders(data)
    if settings.validation == "auto":
        return data
    return data.with_validation(settings.validation, seeds, settings.min_examples)


def _with_holders(data: FederatedData) -> FederatedData:
    """With one more finding where examples are no numbers: whose they are."""
    holders = with_bad_rows(data.train, data.partition, data.client_name) if data.findings else ""
    return dataclasses.replace(data, findings=(*data.findings, holders)) if holders else data


def _some(
    examples: Examples, ids: Array | None, limit: int | None, generator: np.random.Generator
) -> tuple[Examples, Array | None]:
    """At most ``limit`` of the examples, drawn at random, in their order; and who made them."""
    if limit is None or limit >= len(examples):
        return examples, ids
    kept = np.sort(generator.permutation(len(examples))[:limit])
    return examples.subset(kept), None if ids is None else ids[kept]


def _tests_by_id(dataset: Dataset, test: Examples, ids: Array, chosen: Array) -> tuple[Parts, Parts | None]:
    """The test examples of the chosen clients (sorted ids), and those of everyone else."""
    position = np.searchsorted(chosen, ids)
    known = position < len(chosen)
    known[known] = chosen[position[known]] == ids[known]
    tests = Parts(
        test,
        Partition.from_owners(np.where(known, position, -1), len(chosen)),
        _names_of(chosen, dataset),
    )
    if known.all():
        return tests, None
    others, owners = np.unique(ids[~known], return_inverse=True)
    all_owners = np.full(len(ids), -1)
    all_owners[~known] = owners.reshape(-1)
    return tests, Parts(test, Partition.from_owners(all_owners, len(others)), _names_of(others, dataset))


def _names_of(ids: Array, dataset: Dataset) -> Array:
    return ids if dataset.client_names is None else np.asarray(dataset.client_names[ids])
