"""How long a training step takes: measured on this machine, not computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from fedtailor.data.batches import map_tensors
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.running.layout import Layouts, laid_out
from fedtailor.elasticity.running.pieces import Pieces

SECONDS_PER_MEASUREMENT = 0.2


def step_time(
    model: Pieces,
    cut: Cut,
    workload: Workload,
    seconds: float = SECONDS_PER_MEASUREMENT,
    threads: int = 1,
    clock: Callable[[], float] | None = None,
) -> int:
    """Nanoseconds of one training step (forward, backward, update) of a cut, on some threads of this machine.

    The fastest of repeated steps counts: everything else that runs here makes steps slower, never faster. Without a
    ``clock`` that is PyTorch's, which waits for an accelerator to be done.
    """
    # Not at the top: it brings along what builds extensions, which every client on Flower would wait for.
    from torch.utils.benchmark import Timer

    weights = laid_out(model.cut(model.weights(), cut).values, Layouts(model).at(cut))
    trained = [
        weights[name].requires_grad_()
        for name in model.parameters
        if name in model.trainable & weights.keys()
    ]
    # Any optimiser that keeps two numbers and more for each parameter works about as long as AdamW.
    optimiser: torch.optim.Optimizer = (
        torch.optim.AdamW(trained, lr=1e-6)
        if workload.optimiser_slots > 1
        else torch.optim.SGD(trained, lr=1e-6, momentum=0.9 if workload.optimiser_slots else 0.0)
    )
    rows = torch.arange(workload.at_once)
    batch = map_tensors(model.example, lambda column: column.detach().index_select(0, rows % len(column)))

    def step() -> None:
        for _ in range(workload.parts):
            output = model.forward(weights, cut, batch, mode="train")
            model.objective.loss(output, batch).backward()
        optimiser.step()
        optimiser.zero_grad()

    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        step()  # the first step makes kernels, buffers and caches
        own: dict[str, Any] = {} if clock is None else {"timer": clock}
        timer = Timer("step()", globals={"step": step}, num_threads=threads, **own)
        fastest = min(timer.blocked_autorange(min_run_time=seconds).times)
    return round(fastest * 1e9)
