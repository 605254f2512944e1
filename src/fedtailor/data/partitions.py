"""How examples are spread over clients: pure functions from labels and a generator to a ``Partition``.

Every function gives each example to exactly one client (``overlapping`` says otherwise), takes a NumPy
generator, and gives the same split for the same labels and the same generator state.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedtailor.data.files import write_atomically
from fedtailor.errors import FedtailorError, require

Array = np.ndarray[Any, np.dtype[Any]]

LARGEST_ALPHA = 1e9  # beyond it the draw overflows, long after it has become the same as iid
ALPHA_RANGE = "a number above 0, at most 1e9 (which is as good as iid)"


@dataclass(frozen=True, eq=False)
class Partition:
    """Which examples each client holds: client ``i`` holds ``order[offsets[i]:offsets[i + 1]]``.

    Two flat arrays, so that a million clients cost a few MiB and no Python object each.

    >>> partition = Partition.from_owners(np.array([1, 0, 1]), clients=2)
    >>> partition[1].tolist(), partition.sizes.tolist()
    ([0, 2], [1, 2])
    """

    order: Array  # int32 (examples,) or int64 where there are more than 2**31 - 1 of them
    offsets: Array  # int64 (clients + 1,)

    def __post_init__(self) -> None:
        rising = self.offsets.ndim == 1 and len(self.offsets) > 1 and bool((np.diff(self.offsets) >= 0).all())
        if not rising or self.offsets[0] != 0 or self.offsets[-1] != len(self.order) or self.order.ndim != 1:
            raise FedtailorError("partition offsets: expected to rise from 0 to the number of held examples")
        if len(self.order) and int(self.order.min()) < 0:
            raise FedtailorError("partition order: expected positions of examples, all 0 or more")

    @classmethod
    def from_owners(cls, owners: Array, clients: int) -> Partition:
        """The partition in which example ``i`` belongs to client ``owners[i]``; negative means to nobody."""
        held = np.flatnonzero(owners >= 0)
        owners = owners[held]
        order = held[np.argsort(owners, kind="stable")]
        sizes = np.bincount(owners, minlength=clients)
        return cls(_compact(order), np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    @classmethod
    def from_parts(cls, parts: list[Array] | list[list[int]]) -> Partition:
        """The partition with the given examples for each client, in order."""
        arrays = [np.asarray(part, dtype=np.int64).reshape(-1) for part in parts]
        if not arrays:
            raise FedtailorError("parts = []: expected at least one client")
        offsets = np.concatenate([[0], np.cumsum([len(part) for part in arrays])]).astype(np.int64)
        return cls(_compact(np.concatenate(arrays)), offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Array:
        if not 0 <= client < len(self):
            raise FedtailorError(f"client = {client}: expected 0 to {len(self) - 1}")
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    @property
    def sizes(self) -> Array:
        """How many examples each client holds, int64 (clients,)."""
        return np.diff(self.offsets)

    def select(self, clients: Array) -> Partition:
        """The partition with only these clients, in the given order."""
        sizes = self.sizes[clients]
        starts = np.repeat(self.offsets[:-1][clients] - (np.cumsum(sizes) - sizes), sizes)
        positions = np.arange(int(sizes.sum())) + starts
        return Partition(self.order[positions], np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64))

    def save(self, path: Path) -> None:
        """Write the partition as safetensors; the file appears whole or not at all."""
        content = save({"order": np.ascontiguousarray(self.order), "offsets": self.offsets})
        write_atomically(path, content)

    @classmethod
    def load(cls, path: Path) -> Partition:
        """The partition that ``save`` wrote."""
        try:
            arrays = load(path.read_bytes())
            return cls(arrays["order"], arrays["offsets"])
        except (OSError, SafetensorError, KeyError) as error:
            raise FedtailorError(f"cannot read the partition {path}: {error}") from error


def iid(examples: int, clients: int, generator: np.random.Generator) -> Partition:
    """A random split into parts that differ in size by at most one."""
    _check_enough(examples, clients, 1)
    offsets = np.arange(clients + 1, dtype=np.int64) * examples // clients
    return Partition(_compact(generator.permutation(examples)), offsets)


def dirichlet(
    labels: Array,
    clients: int,
    alpha: float,
    generator: np.random.Generator,
    *,
    min_examples: int = 1,
    balanced: bool = False,
) -> Partition:
    """Each class is shared out in proportions drawn from Dirichlet(alpha) over the clients.

    Small ``alpha`` gives each class to few clients. The proportions are drawn once and never again: clients
    that end below ``min_examples`` are then topped up with random examples of the largest clients, all of
    which are lowered to one common size. So the function ends after a fixed amount of work whatever
    ``alpha`` is, and clients that the draw left above the minimum and below that size hold exactly what was
    drawn.

    ``balanced`` leaves a client out of the draw of further classes once it holds its fair share
    (examples / clients), as several published splits do.
    """
    require(0 < alpha <= LARGEST_ALPHA, "alpha", alpha, ALPHA_RANGE)
    _check_enough(len(labels), clients, min_examples)
    owners = np.empty(len(labels), dtype=np.int32)
    held = np.zeros(clients, dtype=np.int64)
    for members in examples_by_class(labels):
        members = generator.permutation(members)
        open_to = np.flatnonzero(held < len(labels) / clients) if balanced else np.arange(clients)
        shares = generator.dirichlet(np.full(len(open_to), alpha))
        ends = np.rint(np.cumsum(shares) / shares.sum() * len(members)).astype(np.int64)
        counts = np.diff(ends, prepend=0)
        owners[members] = np.repeat(open_to, counts)
        held[open_to] += counts
    return Partition.from_owners(_top_up(owners, clients, min_examples, generator), clients)


def classes(
    labels: Array, clients: int, classes_per_client: int, num_classes: int, generator: np.random.Generator
) -> Partition:
    """Each client holds exactly ``classes_per_client`` classes; each class is shared evenly by its holders.

    Classes are dealt from shuffled decks, so that the numbers of holders of two classes differ by at most
    one.
    """
    by_class = examples_by_class(labels, num_classes)
    require(
        1 <= classes_per_client <= num_classes,
        "classes_per_client",
        classes_per_client,
        f"1 to {num_classes}",
    )
    if clients * classes_per_client < num_classes:
        raise FedtailorError(
            f"classes_per_client = {classes_per_client} with {clients} clients: "
            f"expected to cover all {num_classes} classes; take more of either"
        )
    dealt = _deal(clients, classes_per_client, num_classes, generator)  # (clients, classes_per_client)
    owners = np.empty(len(labels), dtype=np.int32)
    slots = np.argsort(dealt.reshape(-1), kind="stable")  # holders of class 0, then of class 1, ...
    ends = np.cumsum(np.bincount(dealt.reshape(-1), minlength=num_classes))
    for label, members in enumerate(by_class):
        holders = slots[ends[label - 1] if label else 0 : ends[label]] // classes_per_client
        if len(members) < len(holders):
            raise FedtailorError(
                f"class {label} has {len(members)} example(s) for {len(holders)} clients to hold: "
                f"expected at least one each; take fewer clients or fewer classes per client"
            )
        shared = np.arange(len(members)) * len(holders) // len(members)
        owners[generator.permutation(members)] = generator.permutation(holders)[shared]
    return Partition.from_owners(owners, clients)


def shards(labels: Array, clients: int, shards_per_client: int, generator: np.random.Generator) -> Partition:
    """Examples sorted by label and cut into equal shards, which are dealt at random (McMahan et al.)."""
    require(shards_per_client >= 1, "shards_per_client", shards_per_client, "1 or more")
    count = clients * shards_per_client
    _check_enough(len(labels), clients, shards_per_client)
    shuffled = generator.permutation(
        len(labels)
    )  # so that shards of one class do not follow the file's order
    by_label = shuffled[np.argsort(labels[shuffled], kind="stable")]
    owner_of_shard = (generator.permutation(count) // shards_per_client).astype(np.int32)
    owners = np.empty(len(labels), dtype=np.int32)
    owners[by_label] = owner_of_shard[np.arange(len(labels)) * count // len(labels)]
    return Partition.from_owners(owners, clients)


def quantity(
    examples: int, clients: int, skew: float, generator: np.random.Generator, *, min_examples: int = 1
) -> Partition:
    """Random examples, but unequal amounts: sizes follow a log-normal law of spread ``skew`` (0 = equal).

    Everyone gets ``min_examples``; what is left is shared in the drawn proportions.
    """
    require(skew >= 0 and np.isfinite(skew), "skew", skew, "a number of 0 or more")
    _check_enough(examples, clients, min_examples)
    logs = skew * generator.standard_normal(clients)
    shares = np.exp(logs - logs.max())
    left = examples - clients * min_examples
    ends = np.rint(np.cumsum(shares) / shares.sum() * left).astype(np.int64)
    offsets = np.concatenate([[0], ends + min_examples * np.arange(1, clients + 1)])
    return Partition(_compact(generator.permutation(examples)), offsets)


def natural(ids: Array) -> tuple[Partition, Array]:
    """One client per distinct id (a writer, a role), and the ids in the order of the clients."""
    names, owners = np.unique(ids, return_inverse=True)
    return Partition.from_owners(owners.reshape(-1), len(names)), names


def overlapping(
    examples: int, clients: int, examples_per_client: int, generator: np.random.Generator
) -> Partition:
    """Each client draws its own random examples and others may hold them too: for more clients than examples.

    Clients are dealt from shuffled decks of all examples, so that no client holds an example twice and all
    examples are used about equally often.
    """
    require(
        1 <= examples_per_client <= examples, "examples_per_client", examples_per_client, f"1 to {examples}"
    )
    per_deck = examples // examples_per_client  # clients that one shuffled deck serves
    order = np.empty(clients * examples_per_client, dtype=_index_type(examples))
    deck = np.arange(examples, dtype=order.dtype)
    for first in range(0, clients, per_deck):
        generator.shuffle(deck)
        piece = order[first * examples_per_client : (first + per_deck) * examples_per_client]
        piece[:] = deck[: len(piece)]
    return Partition(order, np.arange(clients + 1, dtype=np.int64) * examples_per_client)


def examples_by_class(labels: Array, num_classes: int | None = None) -> list[Array]:
    """The positions of the examples of each class; given ``num_classes``, none of them may be empty."""
    order = np.argsort(labels, kind="stable")
    counts = np.bincount(labels, minlength=num_classes or 0)
    if num_classes is not None and (counts == 0).any():
        empty = np.flatnonzero(counts == 0).tolist()
        raise FedtailorError(
            f"classes {empty} have no examples: expected some of every class for this partition"
        )
    return [members for members in np.split(order, np.cumsum(counts)[:-1]) if len(members)]


def _top_up(owners: Array, clients: int, minimum: int, generator: np.random.Generator) -> Array:
    """Move random examples from the largest clients to those below ``minimum``; no loop over clients."""
    sizes = np.bincount(owners, minlength=clients)
    missing = np.maximum(minimum - sizes, 0)
    needed = int(missing.sum())
    if needed == 0:
        return owners
    level = _common_level(sizes, needed, minimum)
    given = np.maximum(sizes - level, 0)
    excess = int(given.sum()) - needed  # lowering all to the level may free a few too many
    givers = np.flatnonzero(given)
    given[givers[:excess]] -= 1
    shuffled = generator.permutation(len(owners))
    by_owner = shuffled[np.argsort(owners[shuffled], kind="stable")]
    rank = np.arange(len(owners)) - np.repeat(np.cumsum(sizes) - sizes, sizes)  # position within its owner
    freed = by_owner[rank < np.repeat(given, sizes)]
    owners[generator.permutation(freed)] = np.repeat(np.arange(clients), missing)
    return owners


def _common_level(sizes: Array, needed: int, minimum: int) -> int:
    """The highest size to which the largest clients must come down to free ``needed`` examples."""
    low, high = minimum, int(sizes.max())  # at `low` enough is freed, at `high` nothing is
    while high - low > 1:
        middle = (low + high) // 2
        if int(np.maximum(sizes - middle, 0).sum()) >= needed:
            low = middle
        else:
            high = middle
    return low


def _deal(clients: int, each: int, kinds: int, generator: np.random.Generator) -> Array:
    """``each`` distinct kinds for every client, every kind about equally often: int32 (clients, each)."""
    dealt = np.empty(clients * each, dtype=np.int32)
    filled = 0
    while filled < len(dealt):
        deck = generator.permutation(kinds).astype(np.int32)
        begun = dealt[filled - filled % each : filled]  # the hand that the last deck left unfinished
        fresh = ~np.isin(deck, begun)
        if filled % each:
            deck = np.concatenate([deck[fresh], deck[~fresh]])
        piece = dealt[filled : filled + kinds]
        piece[:] = deck[: len(piece)]
        filled += len(piece)
    return dealt.reshape(clients, each)


def _check_enough(examples: int, clients: int, each: int) -> None:
    require(clients >= 1, "clients", clients, "1 or more")
    require(each >= 0, "min_examples", each, "0 or more")
    if clients * max(each, 1) > examples:
        raise FedtailorError(
            f"clients = {clients} with at least {max(each, 1)} example(s) each: "
            f"expected at most {examples // max(each, 1)} for {examples} training examples"
        )


def _index_type(examples: int) -> type[np.signedinteger[Any]]:
    return np.int32 if examples <= np.iinfo(np.int32).max else np.int64


def _compact(order: Array) -> Array:
    return order.astype(_index_type(int(order.max(initial=0))), copy=False)
