"""From the arguments of ``train`` to a ``Setup``."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedtailor.config import RunConfig
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import unknown
from fedtailor.fleet import Fleet
from fedtailor.method import Method
from fedtailor.objective import Loss, Metric, Objective
from fedtailor.run.advice import advice
from fedtailor.run.arguments import ModuleLike, module_of, rounds_of
from fedtailor.run.choosing import Share, checked_share, share_for
from fedtailor.run.given_data import federated, validation_of
from fedtailor.run.learning import explained, report_what_is_known
from fedtailor.run.setup import OF_TRACING, pick_device, prepare
from fedtailor.seeds import Seeds
from fedtailor.server.setup import Setup
from fedtailor.server.stopping import Stopping
from fedtailor.steps import step


@dataclass(frozen=True)
class Learnt:
    """What is learnt, and by which examples is chosen; as ``train`` is given it."""

    task: str | None = None
    loss: Loss | str | None = None
    metrics: Mapping[str, Metric] | Sequence[str] | None = None
    validation: Share = "auto"
    model: Mapping[str, Any] | None = None  # what ``elastic`` is told about the module

    def __post_init__(self) -> None:
        for key in self.model or ():
            if key not in OF_TRACING:
                raise unknown("model", key, OF_TRACING)

    def share(self, data: Any, stopping: Stopping, method: Method) -> float:
        """How much of the training examples is kept back; the data may come with settings that say so."""
        wanted = self.validation if self.validation != "auto" else validation_of(data)
        return share_for(checked_share(wanted), stopping, method)

    def recognised(self, model: ElasticModel) -> Learnt:
        """With the task that the module's own loss told, if nobody else did."""
        told = model.objective.task
        return self if self.task or self.loss or told is None else replace(self, task=told.name)

    def words(self, share: float) -> dict[str, Any]:
        """As far as words can say it: functions of one's own are left out."""
        named = isinstance(self.metrics, list | tuple)
        objective = {
            "task": self.task,
            "loss": self.loss if isinstance(self.loss, str) else None,
            "metrics": list(self.metrics or ()) if named else None,
        }
        told = {"model": dict(self.model)} if self.model else {}
        return {"objective": objective, "validation": share, **told}


def make_setup(
    module: ModuleLike,
    data: Any,
    fleet: Fleet,
    method: Method,
    settings: RunConfig,
    clients_per_round: int | None,
    learnt: Learnt,
    device: str,
) -> Setup:
    """Everything built and checked; nothing is trained or written."""
    seeds, place = Seeds(settings.seed), pick_device(device)
    objective = Objective.of(learnt.task, learnt.loss, learnt.metrics)
    share = learnt.share(data, settings.stopping, method)
    step("reading data")
    held = federated(data, seeds, objective.task).to(place)
    for notice in held.findings if isinstance(data, FederatedData) else held.notices:
        warnings.warn(notice, stacklevel=3)
    held = held.with_validation(share, seeds)
    built = module_of(module, held, seeds, objective).to(place)
    step(f"tracing {type(built).__name__}")
    with explained(held):
        model = elastic(built, held.example(), objective=objective, **(learnt.model or {}))
    if learnt.metrics is None:
        report_what_is_known(model)
    setup = prepare(method, model, held, fleet, rounds_of(settings, clients_per_round, held), seeds)
    for sentence in advice(setup):
        warnings.warn(sentence, stacklevel=3)
    return setup
