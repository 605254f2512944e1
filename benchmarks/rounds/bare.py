"""The limit: nothing but training steps, in two processes, with every trick that fedtailor itself uses.

    python benchmarks/rounds/bare.py W1

Kept memory, channels_last, one fused optimiser call, weights set back by copying. Nothing is selected, sent, checked or
merged. Half of the clients train in each process, the longest first.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

import torch
from torch.nn.functional import cross_entropy
from turns import take_turns
from workloads import ADAMW_RATE, RATE, WORKLOADS, Workload

from fedtailor.client.stepping import clip_
from fedtailor.elasticity.running.strided import leave_out_pixels_first

PROCESSES = 2
HETEROFL_CLIPS = 1.0  # gradients, as fedtailor's HeteroFL does by default


@dataclass(frozen=True)
class Trainer:
    """The network of a width: set back for the next client, and moved by one step."""

    reset: Callable[[], None]
    step: Callable[[torch.Tensor, torch.Tensor], None]


def trainer(workload: Workload, width: float) -> Trainer:
    """A network of its own for each width; those of FjORD would be one, whose parts are taken and put back."""
    torch.manual_seed(0)
    network = workload.build(width)
    leave_out_pixels_first(network)
    clips = len(workload.widths) > 1 and not workload.nested
    if width < 1 and clips:
        _scale(network, 1 / width)
    weights: list[torch.Tensor] = list(network.parameters())
    for weight in weights:
        if weight.dim() == 4:
            weight.data = weight.data.clone(memory_format=torch.channels_last)  # strides, also of one channel
    start = [weight.detach().clone() for weight in weights]

    optimisers: list[torch.optim.Optimizer] = []

    def reset() -> None:
        with torch.no_grad():
            torch._foreach_copy_(weights, start)
        if workload.adamw:
            optimisers[:] = [torch.optim.AdamW(weights, lr=ADAMW_RATE, weight_decay=0.0)]

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        cross_entropy(network(inputs), labels).backward()
        if optimisers:
            optimisers[0].step()
        else:
            with torch.no_grad():
                found = [weight.grad for weight in weights if weight.grad is not None]
                if clips:
                    clip_(found, HETEROFL_CLIPS)
                torch._foreach_add_(weights, found, alpha=-RATE)
        for weight in weights:
            weight.grad = None

    return Trainer(reset, step)


def _scale(network: torch.nn.Module, factor: float) -> None:
    """HeteroFL's scaler, which is part of its step: outputs of all layers but the last are multiplied."""
    layers = [each for each in network.modules() if isinstance(each, torch.nn.Conv2d | torch.nn.Linear)]
    for layer in layers[:-1]:
        layer.register_forward_hook(lambda _layer, _inputs, output: output * factor)


def train(workload: Workload, trainers: Sequence[Trainer], columns: list[torch.Tensor]) -> None:
    """One client: an epoch, whose steps take its networks in turn."""
    for each in trainers:
        each.reset()
    for number, rows in enumerate(torch.randperm(workload.examples).split(workload.batch)):
        inputs, labels = (column.index_select(0, rows) for column in columns)
        trainers[number % len(trainers)].step(inputs, labels)


def half(workload: Workload, number: int) -> Callable[[], None]:
    """The clients of one process: those of every tier are dealt out in turn."""
    columns = workload.data()
    trainers = {width: trainer(workload, width) for width in workload.widths}
    widths = [workload.widths[place % len(workload.widths)] for place in range(workload.cohort)]
    order = sorted(range(workload.cohort), key=lambda place: -widths[place])[number::PROCESSES]
    rounds = count()

    def of(place: int) -> list[Trainer]:
        own = widths[place]
        return [trainers[each] for each in workload.widths if each == own or (workload.nested and each < own)]

    def round() -> None:
        now = next(rounds)
        for place in order:
            train(workload, of(place), workload.part(columns, workload.client(now, place)))

    return round


def main() -> None:
    """One child process for each part, told by a byte, and telling by a byte."""
    workload = WORKLOADS[sys.argv[1]]
    torch.set_num_threads(1)
    pipes = []
    for number in range(PROCESSES):
        (to_read, to_child), (from_child, to_write) = os.pipe(), os.pipe()
        if os.fork() == 0:
            os.close(to_child)
            round = half(workload, number)
            round()
            while os.read(to_read, 1):
                round()
                os.write(to_write, b".")
            os._exit(0)
        os.close(to_read)
        pipes.append((to_child, from_child))

    def both() -> None:
        for to_child, _ in pipes:
            os.write(to_child, b".")
        for _, from_child in pipes:
            os.read(from_child, 1)

    both()
    take_turns(both)


if __name__ == "__main__":
    main()
