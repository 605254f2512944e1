"""Data that lies with its clients: the server has test examples, and what clients say of the rest."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Protocol

import numpy as np

from fedtailor.data.batches import Examples
from fedtailor.data.federated import FederatedData, Measured, Parts
from fedtailor.data.partitions import Array, Partition
from fedtailor.data.transforms import stored_tensors
from fedtailor.errors import FedtailorError

NOTHING = Partition(np.zeros(0, np.int64), np.zeros(2, np.int64))  # of a client whose examples lie elsewhere


class Holders(Protocol):
    """Those who hold the training examples."""

    @property
    def sizes(self) -> Array:
        """How many training examples each of them holds."""
        ...

    def name(self, number: int) -> str:
        """How users call one of them."""
        ...

    def tests(self, number: int) -> int:
        """How many examples of its own one of them evaluates on."""
        ...

    def kept(self, number: int) -> int:
        """How many examples one of them keeps back to choose by."""
        ...


@dataclass(frozen=True, eq=False)
class RemoteData(FederatedData):
    """A data set of which the server holds the test examples alone; clients come and go, so sizes may change."""

    holders: Holders | None = None
    remote: ClassVar[bool] = True

    @classmethod
    def of(cls, data: FederatedData, holders: Holders, *, validated: bool = False) -> RemoteData:
        """What the server keeps of a data set: nothing that is trained on, and nothing that clients choose by."""
        test = data.test.prepared_by(data.train.preparation)
        kept = ("name", "num_classes", "label_names", "origin")
        known = {name: getattr(data, name) for name in kept}
        elsewhere = Parts(test, NOTHING) if validated else None
        return cls(
            train=test, test=data.test, partition=Partition.from_parts([[0]]), holders=holders,
            validation=elsewhere, **known,
        )  # fmt: skip

    @property
    def _holders(self) -> Holders:
        if self.holders is None:
            raise FedtailorError("data that lies with its clients: expected to know who they are")
        return self.holders

    @property
    def num_clients(self) -> int:
        """How many clients have joined."""
        return len(self.sizes)

    @property
    def sizes(self) -> Array:
        """How many training examples each client says it holds."""
        return np.asarray(self._holders.sizes)

    def client_name(self, client: int) -> str:
        """How a client calls itself."""
        return self._holders.name(client)

    def examples_for(self, client: int, action: str) -> Examples:
        """Nothing: they lie with the client."""
        raise FedtailorError(
            f"client {self.client_name(client)} holds its examples itself: the server cannot {action} on them"
        )

    def count_for(self, client: int, action: str) -> int:
        """How many examples a client says it works on."""
        if action == "validate":
            return self._holders.kept(client)
        if action in self.measured:
            return self._holders.tests(client) or len(self.test)
        return int(self.sizes[client])

    @cached_property
    def measured(self) -> Measured:
        """What the server itself can measure on: test examples."""
        return {"evaluate": (None, self.test)}

    @property
    def kept_back(self) -> int:
        """How many examples clients say they keep back to choose by."""
        return sum(map(self._holders.kept, range(self.num_clients)))

    def fingerprint(self) -> str:
        """A hash of the test examples; nobody knows what clients train on."""
        data = hashlib.blake2b(digest_size=8)
        for tensor in stored_tensors(self.test):
            data.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
            data.update(tensor.detach().cpu().contiguous().view(-1).numpy().tobytes())
        return f"{data.hexdigest()}-remote"
