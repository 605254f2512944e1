"""fedtailor, as a user calls it: ``fedtailor.train`` with two workers, stopped after every round.

python benchmarks/rounds/ours.py W4 [together=50] [align=auto]
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import Any

import torch
from turns import Turns
from workloads import ADAMW_RATE, RATE, WORKLOADS

import fedtailor
from fedtailor.data import Examples, FederatedData
from fedtailor.record import RoundRecord

WARM = 2  # rounds: workers start, memory is laid out
FOREVER = 1_000_000
WORKERS = 2


class Enough(Exception):  # noqa: N818  (nobody asks for more rounds)
    """Ends the run."""


def main() -> None:
    """A round at a time."""
    workload, asked = WORKLOADS[sys.argv[1]], dict(word.split("=") for word in sys.argv[2:])
    inputs, labels = workload.data()
    examples = Examples.of(inputs, labels)
    parts = [
        list(range(client * workload.examples, (client + 1) * workload.examples))
        for client in range(workload.clients)
    ]
    few = Examples.of(inputs[: workload.batch], labels[: workload.batch])
    data = FederatedData.from_examples(examples, few, parts=parts, num_classes=workload.classes)
    turns = Turns()

    def between(record: RoundRecord) -> None:
        if record.round > WARM:
            turns.done()
        if record.round >= WARM and not turns.wait():
            raise Enough

    training: dict[str, Any] = {"batch_size": workload.batch, "lr": RATE}
    if workload.adamw:
        training |= {"optimiser": "adamw", "lr": ADAMW_RATE}
    training |= {key: int(value) for key, value in asked.items() if key == "together"}
    tiers = [{"name": f"{width:g}", "width": width, "share": 1} for width in workload.widths]
    several = len(tiers) > 1
    method: Any = {"name": "heterofl", "masked_loss": False, "label_rows": False} if several else "fedavg"
    if workload.nested:
        method = {
            "name": "fjord",
            "distillation": False,
            "widths": [f"{width:g}" for width in workload.widths],
        }
    if "align" in asked:
        method |= {"align": asked["align"]}
    torch.manual_seed(0)
    with suppress(Enough):
        fedtailor.train(
            workload.build(1.0), data, tiers, method, rounds=FOREVER, clients_per_round=workload.cohort,
            evaluate_every=FOREVER, engine={"workers": WORKERS}, training=training, on_round=between, progress=False,
        )  # fmt: skip


if __name__ == "__main__":
    main()
