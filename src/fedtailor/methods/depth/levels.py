"""What methods with pieces of several depths share: a table of levels, and the largest level that a budget pays for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

from fedtailor.data.batches import Batch
from fedtailor.elasticity.costing.budget import LIMITS, Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, meets
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.pieces import Weights
from fedtailor.messages import Client, ServerState, Task
from fedtailor.method import Method
from fedtailor.seeds import Seeds


@dataclass(frozen=True)
class Level:
    """One size of device: what it trains, and the part of that which it runs afterwards, under one tag."""

    trained: Cut
    deployed: Cut


@dataclass(frozen=True)
class LevelMethod(Method, ABC):
    """Every device trains the largest of some fixed pieces that its budget pays for.

    A limit on depth is a limit on the share of blocks. A limit on width pays for as many multiply-accumulates as the
    piece of that width takes, so that fleets which are given by widths mean the same for methods that cut depth.
    """

    honours: ClassVar[frozenset[str] | None] = frozenset(LIMITS) - {"density"}

    @abstractmethod
    def levels(self, model: ElasticModel) -> tuple[Level, ...]:
        """All pieces that devices train, the smallest first."""

    def level(self, budget: Budget, model: ElasticModel) -> Level:
        """The largest level that a budget pays for."""
        levels: tuple[Level, ...] = model.once(("levels", self), lambda: self.levels(model))

        def find() -> Level:
            for level in reversed(levels):
                if self.pays_for(budget, level.trained, model):
                    return level
            least = model.cost(levels[0].trained)
            raise TooSmallError(
                f"{budget}: no level of {self.name} fits it; the smallest has {least.params:,} parameters and takes "
                f"{least.macs:,} multiply-accumulates (earlier exits: model.exits)"
            )

        found: Level = model.once(("level", self, budget), find)  # clients share few budgets
        return found

    def pays_for(self, budget: Budget, cut: Cut, model: ElasticModel) -> bool:
        """Whether a device of this budget can train a piece."""
        if budget.depth is not None and (cut.depth or 1) > Fraction(budget.depth):
            return False
        if budget.width is not None:
            whole = prefix(model.groups, as_width(budget.width), self.grid)
            if model.cost(cut).macs > model.cost(whole).macs:
                return False
        return meets(model.costs, cut, budget, self.workload)

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        return self.level(budget, model).deployed

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """What a client trains has more exits than what it runs in the end."""
        return self.level(client.budget, model).trained

    def forward(self, weights: Weights, cut: Cut, batch: Batch, task: Task, model: ElasticModel) -> Any:
        """What every exit of the piece answers, the deepest last."""
        return model.forward(weights, cut, batch, mode="train", all_exits=True)
