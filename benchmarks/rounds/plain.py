"""What people write first: a loop over clients, a deep copy of the model for each, and a mean of state dicts.

    python benchmarks/rounds/plain.py W1

Clients of smaller tiers train the first channels of every layer; the mean of a coordinate is over those who hold it.
"""

from __future__ import annotations

import copy
import sys
from itertools import count

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from turns import take_turns
from workloads import ADAMW_RATE, RATE, WORKLOADS


def main() -> None:
    """A round at a time."""
    workload = WORKLOADS[sys.argv[1]]
    torch.manual_seed(0)
    whole, columns = workload.build(1.0), workload.data()
    small = {width: workload.build(width) for width in workload.widths}

    def local(width: float) -> nn.Module:
        network = copy.deepcopy(small[width])
        held = {n: whole.state_dict()[n][_corner(v)] for n, v in network.state_dict().items()}
        network.load_state_dict(held)
        return network

    rounds = count()

    def round() -> None:
        now = next(rounds)
        sums = {n: torch.zeros_like(value) for n, value in whole.state_dict().items()}
        counts = {n: torch.zeros_like(value) for n, value in sums.items()}
        for place in range(workload.cohort):
            network = local(workload.widths[place % len(workload.widths)])
            rate, kind = (ADAMW_RATE, torch.optim.AdamW) if workload.adamw else (RATE, torch.optim.SGD)
            optimiser = kind(network.parameters(), lr=rate)
            part = workload.part(columns, workload.client(now, place))
            for rows in torch.randperm(workload.examples).split(workload.batch):
                inputs, labels = (column[rows] for column in part)
                optimiser.zero_grad()
                cross_entropy(network(inputs), labels).backward()
                optimiser.step()
            for name, value in network.state_dict().items():
                sums[name][_corner(value)] += value
                counts[name][_corner(value)] += 1
        old = whole.state_dict()
        whole.load_state_dict(
            {n: torch.where(counts[n] > 0, sums[n] / counts[n].clamp(min=1), old[n]) for n in sums}
        )

    round()
    take_turns(round)


def _corner(value: torch.Tensor) -> tuple[slice, ...]:
    return tuple(slice(size) for size in value.shape)


if __name__ == "__main__":
    main()
