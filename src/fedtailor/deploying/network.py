"""A network that is about to be deployed: as it was trained, as it will run, and how both are compared."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.client.evaluate import mean_output
from fedtailor.data.batches import Examples
from fedtailor.deploying.inputs import Inputs, answers_of, as_given, flat_answers, names_of
from fedtailor.elasticity.costing.budget import Budget, amount, limit_text
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.costing.fitting import absolute_limits
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.prepared import with_preparation
from fedtailor.errors import FedtailorError
from fedtailor.objective.answers import ANSWER, answer_of
from fedtailor.run.result import Run

TOLERANCE = 1e-4  # of outputs, or of their largest number where that is above 1
COMPARED = 8  # examples on which a file is compared with the training form
COUNTED = (
    "macs",
    "params",
    "bytes",
)  # limits on what a network costs where it runs; others speak of training


@dataclass(frozen=True, eq=False)
class Network:
    """What the devices of one budget, or one client, are given."""

    name: str  # of the tier, the limits or the client: files are called after it
    patches: tuple[Patch, ...]
    model: ElasticModel
    module: nn.Module  # answers raw inputs; what it is called with has names
    example: Inputs
    expected: tuple[Tensor, ...]  # what the training form answers to the example
    about: dict[str, Any] = field(default_factory=dict)  # what a reader of a file has to know of its inputs
    budget: Budget | None = None

    @property
    def input_names(self) -> list[str]:
        """What the inputs are called."""
        return names_of(self.module, self.example)

    @property
    def cost(self) -> Cost:
        """What one answer costs; members of an ensemble add up."""
        costs = [self.model.cost(patch.cut) for patch in self.patches]
        return sum(costs[1:], costs[0])

    def over_budget(self) -> list[str]:
        """The limits on cost that it breaks, as words; methods that look at no budget give everyone the same."""
        if self.budget is None:
            return []
        allowed = absolute_limits(self.model.costs, Budget(**_counted(self.budget)))
        return [
            f"{name} {amount(name, getattr(self.cost, name))} where {limit_text(name, _counted(self.budget)[name])} "
            "is allowed"
            for name, limit in allowed.items()
            if getattr(self.cost, name) > limit
        ]


def _counted(budget: Budget) -> dict[str, Any]:
    return {name: limit for name, limit in budget.limits.items() if name in COUNTED}


def network_for(run: Run, name: str, budget: Budget | None = None, client: int | None = None) -> Network:
    """The network of a run for a budget or for a client, checked against the training form."""
    patches = (run.personal(client),) if client is not None else run.deploy(_given(budget)).patches
    data, model = run.setup.data, run.model
    preparation = data.preparation
    source = data.test if len(data.test) else data.train
    rows = torch.arange(min(COMPARED, len(source)))
    module = run.build(patches).cpu()
    example = Inputs.of(as_given(source, preparation).take(rows))
    if preparation is None:
        answer = ANSWER if returns_object(module, example) else None
        module = with_preparation(module, None, None, model.example, answer).eval()
    with torch.no_grad():
        expected = flat_answers(mean_output(model, patches, source.take(rows)))
    if any(bool(each.isnan().any()) for each in expected if each.is_floating_point()):
        raise FedtailorError(
            f"the network for {name} answers with NaN: the run has blown up; nothing was written"
        )
    network = Network(
        name, tuple(patches), model, module, example, expected, dict(data.inputs()), budget,
    )  # fmt: skip
    refuse_other_answers(answers_of(module, network.example), network, "the extracted network")
    return network


@torch.no_grad()
def returns_object(module: nn.Module, inputs: Inputs) -> bool:
    """Whether a module returns its answer in an object, beside what no file needs."""
    output = module(*inputs.args, **inputs.kwargs)
    return answer_of(output) is not output


def _given(budget: Budget | None) -> Budget:
    assert budget is not None
    return budget


def difference(answers: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest difference of two answers, relative to the largest number where that is above 1."""
    if [tuple(each.shape) for each in answers] != [tuple(each.shape) for each in expected]:
        return math.inf
    worst = 0.0
    for one, other in zip(answers, expected, strict=True):
        if other.numel() == 0:
            continue
        scale = max(1.0, float(other.double().abs().max()))
        apart = float((one.double() - other.double()).abs().max()) / scale
        worst = math.inf if math.isnan(apart) else max(worst, apart)
    return worst


def refuse_other_answers(answers: Sequence[Tensor], network: Network, what: str) -> float:
    """The difference from the training form; one above the tolerance is refused."""
    found = difference(answers, network.expected)
    if found > TOLERANCE:
        raise FedtailorError(
            f"{what} for {network.name} answers otherwise than the network that was trained: outputs differ by "
            f"{found:.2g}, expected at most {TOLERANCE:g}; nothing was written"
        )
    return found


def examples_given(run: Run, examples: Examples, most: int) -> Examples:
    """At most so many examples, spread evenly, as a deployed network is given them."""
    given = as_given(examples, run.setup.data.preparation)
    if len(given) > most:
        given = given.subset(torch.linspace(0, len(given) - 1, most).long())
    return given.to("cpu")
