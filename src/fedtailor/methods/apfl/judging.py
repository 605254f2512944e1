"""Which of some sub-networks a client's examples like best, with no more of them run than the answer needs.

All candidates differ in few channel groups from one network, so each starts where it parts from that (``reuse``). They
are compared example block by example block: a candidate that is clearly worse than the best one so far is not run on
the batches that are left, and those that the examples cannot tell apart at the end are a tie.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from fedtailor.data.batches import Batch, Examples, batch_size, map_tensors
from fedtailor.elasticity.costing.curves import Counts
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.layout import to_run
from fedtailor.elasticity.running.reuse import Reuse

BATCH = 128  # examples that are run at once, whose statistics norm layers use
BLOCK = 8  # examples that are judged together, at least: noise is seen from block to block
CLEAR = 3.0  # standard errors by which a candidate is worse that is not run any further
TIED = 1.0  # standard errors within which candidates are a tie

By = Literal["loss", "accuracy"]
Blocks = NDArray[np.float64]  # the badness of one network for each block, the lower the better


@dataclass
class Judge:
    """Sub-networks of a super-network on a client's examples; norm layers use the statistics of the batch."""

    model: ElasticModel
    patch: Patch  # the full super-network
    data: Examples
    by: By = "loss"
    macs: int = 0  # of all networks that were run, over all examples; what was used again is counted, too
    _batches: list[Batch] = field(init=False)

    def __post_init__(self) -> None:
        places = torch.arange(len(self.data)).split(BATCH)
        if len(places) > 1 and len(places[-1]) == 1:  # one example has no variance
            places = (*places[:-2], torch.cat(places[-2:]))
        self._batches = [self.data.take(chosen) for chosen in places]
        self._reuse = Reuse(self.model)

    def best(
        self,
        now: Counts,
        candidates: Sequence[Counts],
        prefer: Callable[[Counts], float],
        price: Callable[[Counts], float] = lambda _: 1.0,
    ) -> Counts:
        """The candidate that is least worse than ``now``, or most better, per ``price``; of a tie the preferred one."""
        alive, seen = list(range(len(candidates))), [np.zeros(0)] * len(candidates)
        prices = [price(candidate) for candidate in candidates]
        for number, batch in enumerate(self._batches):
            before = self._blocks(self._run(now, None, batch), batch)
            for place in alive:
                blocks = self._blocks(self._run(candidates[place], now, batch), batch)
                seen[place] = np.append(seen[place], (blocks - before) / prices[place])
            if number + 1 < len(self._batches):
                alive = _within(alive, seen, CLEAR)
                if len(alive) == 1:
                    break
        tied = _within(alive, seen, TIED)
        return candidates[max(tied, key=lambda place: prefer(candidates[place]))]

    def metrics(self, size: Counts) -> dict[str, float]:
        """Mean loss and metrics of a size over all examples."""
        totals: dict[str, float] = {}
        for batch in self._batches:
            output = self._run(size, None, batch)
            values = {"loss": self.model.objective.loss(output, batch).item()}
            for name, metric in self.model.objective.metrics.items():
                values[name] = float(metric(output, batch))
            for name, value in values.items():
                totals[name] = totals.get(name, 0.0) + value * batch_size(batch)
        return {name: total / len(self.data) for name, total in totals.items()}

    def _run(self, size: Counts, from_: Counts | None, batch: Batch) -> Any:
        """The output of a size; of one that comes from the size before, what both share is not run again."""
        cut = self.model.costs.cut(size)
        weights = to_run(self.model, self.model.narrow(self.patch, cut)).values
        self.macs += self.model.costs.measure("macs", size) * batch_size(batch)
        if from_ is None:
            return self._reuse.record(weights, cut, batch, "calibrate")
        groups = self.model.groups.elastic
        differing = [group for group, one, other in zip(groups, size, from_, strict=True) if one != other]
        return self._reuse.run(weights, cut, batch, "calibrate", differing)

    @torch.no_grad()
    def _blocks(self, output: Any, batch: Batch) -> Blocks:
        """Loss, or minus accuracy, of each block of examples; one number where outputs cannot be taken apart."""
        count, objective = batch_size(batch), self.model.objective
        metric = objective.metrics.get("accuracy") if self.by == "accuracy" else None

        def badness(answers: Any, examples: Batch) -> float:
            return float(objective.loss(answers, examples) if metric is None else -metric(answers, examples))

        if not isinstance(output, torch.Tensor) or len(output) != count:
            return np.array([badness(output, batch)])
        places = torch.arange(count).tensor_split(max(1, count // BLOCK))  # of one size: each counts the same
        return np.array([badness(output[at], map_tensors(batch, itemgetter(at))) for at in places])


def _within(alive: Sequence[int], seen: Sequence[Blocks], errors: float) -> list[int]:
    """Those that are not worse than the best one by more than so many standard errors of their difference."""
    best = min(alive, key=lambda place: float(seen[place].mean()))
    kept = []
    for place in alive:
        behind = seen[place] - seen[best]
        noise = float(behind.std(ddof=1)) / len(behind) ** 0.5 if len(behind) > 1 else 0.0
        if float(behind.mean()) <= errors * noise:
            kept.append(place)
    return kept
