"""What bad clients answer: an engine around another, which changes the answers of some clients on their way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedtailor.attacks.attack import POISONED, Attack
from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.protocol import Answer, Engine
from fedtailor.messages import Refused, Task


@dataclass(frozen=True)
class BadAnswers:
    """Runs tasks as the engine does; what the bad clients were asked to train comes back changed."""

    engine: Engine
    attack: Attack
    bad: frozenset[int]
    model: ElasticModel

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """One result per task, in the order of the engine."""
        asked = {task.client.id: task for task in tasks if task.action == "train"}
        for answer in self.engine.run(tasks):
            is_bad = answer is not None and answer.client in self.bad and answer.client in asked
            yield self._changed(asked[answer.client], answer) if answer is not None and is_bad else answer

    def _changed(self, task: Task, answer: Answer) -> Answer:
        if self.attack.kind == "absent":
            return Refused(task.client.id, task.round, "no-answer")
        if isinstance(answer, Refused):
            return answer
        patch = answer.patch
        sent = self.model.part(task.patch, patch.cut).values
        values = {
            name: self._bad(value, sent.get(name, torch.zeros_like(value)), task, name)
            if value.is_floating_point() and plain(name) in self.model.trainable
            else value
            for name, value in patch.values.items()
        }
        return replace(answer, patch=replace(patch, values=values))

    def _bad(self, value: Tensor, sent: Tensor, task: Task, name: str) -> Tensor:
        """One trained tensor; running statistics are sent as they were measured."""
        kind, times, step = self.attack.kind, self.attack.times, value - sent
        if kind == "nan":
            return torch.full_like(value, torch.nan)
        if kind == "noise":
            generator = task.seeds.torch(f"noise {name}", client=task.client.id, round=task.round)
            drawn = torch.randn(value.shape, generator=generator).to(value)
            return sent + times * step.square().mean().sqrt() * drawn
        if kind == "sign-flip":
            return sent - times * step
        assert kind == "scale" or kind in POISONED
        return value if times == 1 else sent + times * step
