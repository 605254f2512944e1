"""What a run needs to go on as if nothing had happened, as a value: the state, clients' memories, the loop's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedtailor.errors import CorruptError
from fedtailor.messages import Flight, ServerState, UnderWay, Update
from fedtailor.record import Best
from fedtailor.storage.wire import Buffer, decode, encode, settled

REMEMBERED_ROUNDS = 2
MEMORY_DEPTH = 3  # how deep in a checkpoint a memory lies

Memory = dict[str, Any]
Memories = Mapping[int, Mapping[int, Memory]]  # client -> round in which it was kept -> what was kept


@dataclass(frozen=True)
class Checkpoint:
    """Everything that one round hands to the next. Randomness is derived from the round, so none of it is here."""

    state: ServerState
    memories: Memories = field(default_factory=dict)
    best: Best | None = None
    strikes: Mapping[int, int] = field(default_factory=dict)  # client -> how many of its updates were refused
    under_way: UnderWay = field(default_factory=UnderWay)  # in simulated time

    def memory_of(self, client: int) -> tuple[int, Memory]:
        """What a client kept before this round, and in which round: (-1, {}) if it kept nothing.

        Keyed by round, because a client that keeps its memory itself may be a round ahead of a server that was resumed.
        """
        kept = {
            round: memory
            for round, memory in self.memories.get(client, {}).items()
            if round < self.state.round
        }
        return (max(kept), dict(kept[max(kept)])) if kept else (-1, {})

    def after(
        self,
        state: ServerState,
        updates: Sequence[Update],
        best: Best | None,
        strikes: Mapping[int, int] | None = None,
        under_way: UnderWay | None = None,
    ) -> Checkpoint:
        """The checkpoint at the end of a round, as it would be read back from a file."""
        memories = dict(self.memories)
        for update in updates:
            if update.memory:
                kept = {
                    **memories.get(update.client, {}),
                    self.state.round: settled(update.memory, "update.memory", MEMORY_DEPTH),
                }
                memories[update.client] = newest_rounds(kept)
        strikes = self.strikes if strikes is None else strikes
        sky = self.under_way if under_way is None else under_way
        return replace(
            self, state=settle(state), memories=memories, best=best, strikes=strikes, under_way=sky
        )


def newest_rounds(kept: Mapping[int, Memory]) -> dict[int, Memory]:
    """What stays of all that a client ever kept."""
    return {round: kept[round] for round in sorted(kept)[-REMEMBERED_ROUNDS:]}


def settle(state: ServerState) -> ServerState:
    """The state as it would be read back from a file; what cannot be saved is refused by name."""
    weights = settled(dict(state.weights), "state.weights")
    memory = settled(dict(state.memory), "state.memory", MEMORY_DEPTH)
    moments = settled(dict(state.moments), "state.moments", MEMORY_DEPTH)
    return replace(state, weights=weights, memory=memory, moments=moments)


def encode_checkpoint(checkpoint: Checkpoint) -> list[Buffer]:
    """The frame of a checkpoint, in pieces."""
    state, best = checkpoint.state, checkpoint.best
    clock = {} if checkpoint.under_way == UnderWay() else {"clock": _clock_value(checkpoint.under_way)}
    return encode(
        {
            "round": state.round,
            "weights": dict(state.weights),
            "memory": dict(state.memory),
            "memories": {client: dict(kept) for client, kept in sorted(checkpoint.memories.items())},
            "best": None if best is None else [best.round, best.value, best.since],
            "strikes": dict(checkpoint.strikes),
            **clock,
            # Only where there are some: earlier versions go on reading what has none.
            **({"moments": dict(state.moments)} if state.moments else {}),
        }
    )


def decode_checkpoint(data: Buffer, device: torch.device | str = "cpu") -> Checkpoint:
    """The checkpoint of a frame."""
    value = decode(data, device)
    try:
        state = ServerState(value["round"], value["weights"], value["memory"], value.get("moments", {}))
        best = None if value["best"] is None else Best(*value["best"])
        under_way = _under_way(value["clock"]) if "clock" in value else UnderWay()
        return Checkpoint(state, value["memories"], best, value["strikes"], under_way)
    except (KeyError, TypeError) as error:
        raise CorruptError(
            f"the checkpoint was written by another version of fedtailor: {error!r}"
        ) from error


def _clock_value(sky: UnderWay) -> Memory:
    flights = [[each.ends, each.client, each.tier, each.base, each.began, each.late] for each in sky.flights]
    bases = {
        round: {"weights": dict(base.weights), "memory": dict(base.memory)}
        for round, base in sky.bases.items()
    }
    return {"now": sky.now, "flights": flights, "bases": bases}


def _under_way(value: Memory) -> UnderWay:
    bases = {
        round: ServerState(round, each["weights"], each["memory"]) for round, each in value["bases"].items()
    }
    return UnderWay(value["now"], tuple(Flight(*each) for each in value["flights"]), bases)
