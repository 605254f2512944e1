"""What a signed log says of a round: who was leased what, what became of it, digests of all that was merged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedtailor.messages import ServerState
from fedtailor.server.faults import Try

MERGED, ABANDONED = "merged", "abandoned"


def audited(
    tries: Sequence[Try], state: ServerState, masked: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Leases and verdicts of all tries in their order; updates of the last, which was merged, and the new model.

    ``masked`` are the digests of updates that came under masks.
    """
    plain = {update.client: digest_of(update.patch.values) for update in tries[-1].updates if masked is None}
    return {
        "leases": [
            {
                "client": task.client.id,
                "tier": task.client.tier,
                "cut": task.lease.cut.digest,
                "tensors": len(task.lease.names),
                "bytes": task.nbytes,
                "try": number,
            }
            for number, tried in enumerate(tries, 1)
            for task in tried.tasks
        ],
        "verdicts": [
            {"client": client, "verdict": verdict, "try": number}
            for number, tried in enumerate(tries, 1)
            for client, verdict in _verdicts(tried, last=number == len(tries))
        ],
        "updates": {str(client): digest for client, digest in (plain if masked is None else masked).items()},
        "model": digest_of(state.weights),
    }


def _verdicts(tried: Try, last: bool) -> list[tuple[int, str]]:
    """What became of every answer, by client: several where more than one came under a name."""
    fine = [(update.client, MERGED if last else ABANDONED) for update in tried.updates]
    return sorted([*fine, *((each.client, each.reason) for each in tried.refused)])


def digest_of(values: Mapping[str, Tensor]) -> str:
    """SHA-256 over names, types, shapes and bits, in the order of the names."""
    found = hashlib.sha256()
    for name in sorted(values):
        value = values[name].detach().cpu().contiguous()
        found.update(f"{name} {value.dtype} {tuple(value.shape)}\n".encode())
        found.update(value.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()
