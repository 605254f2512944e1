"""How a client trains: the settings of SGD, its schedule over the rounds, and how long."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from fedtailor.errors import FedtailorError, require


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: SGD, its schedule over the rounds, and how long."""

    lr: float = 0.1
    """The learning rate of SGD at the start."""
    momentum: float = 0.0
    """Of SGD; it starts from zero in every round."""
    nesterov: bool = False
    """Nesterov's momentum."""
    weight_decay: float = 0.0
    """Added to the gradient, times the weights."""
    batch_size: int = 32
    """Examples of a step."""
    epochs: int = 1
    """How often a client goes through its examples in a round."""
    steps: int | None = None
    """A fixed number of steps instead of epochs, the same for every client."""
    clip_norm: float = math.inf
    """Largest gradient norm; inf does not clip."""
    proximal: float = 0.0
    """FedProx's mu: adds mu / 2 * |w - w_round|^2 to the loss of any method."""
    schedule: Literal["constant", "steps", "cosine", "exponential"] = "constant"
    """How the learning rate falls over the rounds."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Of schedule = "steps": rounds, or shares of all rounds below 1."""
    gamma: float = 0.1
    """The factor at a milestone, or per round (exponential)."""
    rounds: int | None = None  # all rounds of the run; set by the run itself

    def __post_init__(self) -> None:
        require(math.isfinite(self.lr) and self.lr > 0, "training.lr", self.lr, "a number above 0")
        require(0 <= self.momentum < 1, "training.momentum", self.momentum, "at least 0 and below 1")
        require(0 <= self.weight_decay < math.inf, "training.weight_decay", self.weight_decay, "at least 0")
        require(self.batch_size >= 1, "training.batch_size", self.batch_size, "at least 1")
        require(self.epochs >= 1, "training.epochs", self.epochs, "at least 1")
        require(self.steps is None or self.steps >= 1, "training.steps", self.steps, "at least 1")
        require(self.clip_norm > 0, "training.clip_norm", self.clip_norm, "above 0; inf does not clip")
        require(0 <= self.proximal < math.inf, "training.proximal", self.proximal, "at least 0")
        require(0 < self.gamma <= 1, "training.gamma", self.gamma, "above 0 and at most 1")
        require(
            not self.nesterov or self.momentum > 0,
            "training.nesterov",
            self.nesterov,
            "momentum above 0 with it",
        )
        later = all(0 < share < math.inf for share in self.milestones)
        require(later, "training.milestones", self.milestones, "rounds, or shares of all rounds, above 0")
        schedules = ("constant", "steps", "cosine", "exponential")
        require(
            self.schedule in schedules, "training.schedule", self.schedule, f"one of {', '.join(schedules)}"
        )

    def steps_for(self, examples: int) -> int:
        """How many steps a client with so many examples takes."""
        return self.steps if self.steps is not None else self.epochs * -(-examples // self.batch_size)

    def examples_for(self, examples: int) -> int:
        """How many examples a client with so many trains on, counted as often as it sees them."""
        return self.epochs * examples if self.steps is None else self.steps * self.batch_size

    def rate(self, round: int) -> float:
        """The learning rate of a round."""
        if self.schedule == "exponential":
            return self.lr * self.gamma**round
        if self.schedule == "constant":
            return self.lr
        if self.rounds is None:
            raise FedtailorError(
                f"training.schedule = {self.schedule!r} needs training.rounds, the length of the run"
            )
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, round / self.rounds)))
        # As decimals: 0.07 of 100 rounds is round 7, where floats give 7.000000000000001 and so round 8.
        milestones = [Fraction(str(share)) for share in self.milestones]
        passed = sum(round >= (share * self.rounds if share < 1 else share) for share in milestones)
        return self.lr * self.gamma**passed
