"""tailor: FjORD's nested widths, of which the smallest gets what it needs, at the computation that a budget allows.

No paper's: parts that are known from others, each behind a setting of its own. With all of them off it is FjORD, bit
for bit. Symbols are FjORD's: P = ``widths``, p_max = the largest of them within a client's budget.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from operator import mul
from typing import Any, get_args

from torch import Tensor

from fedtailor.client.stepping import JointMean
from fedtailor.data.batches import Batch
from fedtailor.elasticity.costing.expected import allowed_macs
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.errors import require, unknown
from fedtailor.merging import WEIGHTINGS
from fedtailor.merging.settings import ServerSettings
from fedtailor.messages import ServerState, Task, Update
from fedtailor.methods.fjord.draws import drawn_width, largest_width
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.methods.nested import FLEET, Widths
from fedtailor.methods.registry import register
from fedtailor.methods.tailor.slowing import slowed
from fedtailor.methods.tailor.spending import sandwich_of, share_within, with_floor


@register("tailor")
@dataclass(frozen=True)
class Tailor(FjORD):
    """Nested widths of the fleet's own sizes; where a client can pay for it, a step trains several of them jointly."""

    server: ServerSettings = ServerSettings(momentum=0.5)
    widths: Widths = FLEET
    distillation: bool = False
    alpha: float = 0.5
    smallest_share: float = 0.0  # the smallest width is drawn at least so often; 0: as ``probabilities`` say
    sandwich: bool = True  # joint steps train the largest, a drawn and the smallest width; false: FjORD's two
    compute: float = 1.0  # mean MACs of a step, in those of the budget; inf: every step is a joint one
    # A joint step moves a coordinate by the mean of the networks that hold it, or of all of them
    joint_mean: JointMean = "holders"
    ahead: bool = True  # the largest network with a lower loss teaches; where there is none, labels do
    few_holders: float = 0.0  # power of the share of holders by which a coordinate is slowed; 0: none is

    def __post_init__(self) -> None:
        super().__post_init__()
        fine = 0 <= self.smallest_share < 1
        require(fine, "method.smallest_share", self.smallest_share, "at least 0 and below 1")
        require(self.compute >= 1, "method.compute", self.compute, "at least 1; inf: no limit")
        if self.joint_mean not in get_args(JointMean):
            raise unknown("method.joint_mean", self.joint_mean, get_args(JointMean))
        require(0 <= self.few_holders <= 1, "method.few_holders", self.few_holders, "a number from 0 to 1")
        for name in ("per_layer", "mean_budget", "random_drop"):
            value = getattr(self, name)
            require(not value, f"method.{name}", value, "nothing with tailor: it is a setting of fjord")

    # On the server

    def merge(self, state: ServerState, updates: Sequence[Update], model: ElasticModel) -> ServerState:
        """FjORD's, after coordinates of few holders were drawn back."""
        if self.few_holders and updates:
            weight = WEIGHTINGS[self.weighting]
            updates = slowed(state.weights, updates, model, weight, self.few_holders)
        return super().merge(state, updates, model)

    @property
    def only_shared_merge(self) -> bool:
        return not self.few_holders

    # On the client

    def shares_for(self, task: Task, model: ElasticModel) -> Sequence[float]:
        shares = super().shares_for(task, model)
        if not self.smallest_share:
            return shares
        count = len(self._admissible(task))
        return with_floor(shares[:count] or [1.0] * count, self.smallest_share)

    def step_cuts(self, task: Task, step: int, model: ElasticModel) -> list[Cut]:
        """One width alone, or, as often as the client can pay for it, several that teach each other."""
        share = self.joint_share(task, model)
        chance = task.seeds.numpy("joint", client=task.client.id, round=task.round, step=step)
        joint = share == 1 or chance.random() < share
        if joint and not self.sandwich:
            return super().step_cuts(task, step, model)
        widths = self._admissible(task)
        generator = task.seeds.numpy("width", client=task.client.id, round=task.round, step=step)
        drawn = drawn_width(widths, self.shares_for(task, model), generator)
        chosen = self._joint(drawn, widths) if joint else [drawn]
        return [self.cut_at(width, model) for width in chosen]

    def joint_share(self, task: Task, model: ElasticModel) -> float:
        """How many of a client's steps run several networks: as many as keep the mean step within its budget."""
        widths, budget = self._admissible(task), task.client.budget

        def solve() -> float:
            macs = {width: float(model.cost(self.cut_at(width, model)).macs) for width in widths}
            shares = self.shares_for(task, model)[: len(widths)] or [1.0] * len(widths)

            def mean(networks: Callable[[Fraction], Sequence[Fraction]]) -> float:
                costs = [sum(macs[each] for each in networks(drawn)) for drawn in widths]
                total: float = sum(map(mul, shares, costs))
                return total / sum(shares)

            own = macs[widths[-1]] if budget.macs is None else allowed_macs(model.costs, budget)
            joint = mean(lambda drawn: self._joint(drawn, widths))
            return share_within(mean(lambda drawn: [drawn]), joint, self.compute * own)

        return model.once(("joint", self, widths, budget), solve)  # a client's steps all ask the same

    def _joint(self, drawn: Fraction, widths: Sequence[Fraction]) -> list[Fraction]:
        """The widths of a step that runs several networks, the largest first."""
        if self.sandwich:
            return sandwich_of(drawn, widths)
        taught = self.distillation and not (drawn == widths[-1] and self.alpha == 1)
        return [widths[-1], drawn] if taught and len(widths) > 1 else [drawn]

    def _admissible(self, task: Task) -> tuple[Fraction, ...]:
        largest = largest_width(task.patch.cut)
        return tuple(width for width in self.candidates if width <= largest)

    def loss(
        self, outputs: list[Any], weights: list[Weights], batch: Batch, task: Task, model: ElasticModel
    ) -> Tensor:
        """The largest network learns from the labels, the others from a larger one or from the labels: their mean.

        A sum would move what the networks of a joint step share two or three times as far as any other step.
        """
        if not (self.sandwich or self.ahead or self.joint_mean == "holders"):
            return super().loss(outputs, weights, batch, task, model)
        losses = [model.objective.loss(output, batch) for output in outputs]
        total = losses[0]
        for place in range(1, len(outputs)):
            teacher = self._teacher(losses[: place + 1])
            if teacher is None or self.alpha < 1:
                total = total + (1 if teacher is None else 1 - self.alpha) * losses[place]
            if teacher is not None:
                taught = model.learning_task.taught(outputs[place], outputs[teacher], batch, self.temperature)
                total = total + self.alpha * taught
        return total / len(outputs)

    def _teacher(self, losses: Sequence[Tensor]) -> int | None:
        """Who teaches the last of the networks: the largest, or the largest of those that are ahead of it."""
        if not self.distillation or self.alpha == 0:
            return None
        if not self.ahead:
            return 0
        own = losses[-1].item()
        return next((place for place, loss in enumerate(losses[:-1]) if loss.item() < own), None)
