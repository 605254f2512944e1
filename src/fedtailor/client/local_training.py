"""How a client trains: its optimiser, the learning rate over rounds and steps, and how long."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cache
from typing import Any, Literal

from fedtailor.client.optimisers import OF_TRAINING, Optimiser, check_options, optimiser_of
from fedtailor.client.precision import PRECISIONS, Precision
from fedtailor.errors import FedtailorError, require

SCHEDULES = ("constant", "steps", "cosine", "exponential")


@dataclass(frozen=True)
class LocalTraining:
    """How a client trains: its optimiser, the learning rate over rounds and steps, and how long.

    What an optimiser keeps (momentum, moments) starts afresh in every round.
    """

    optimiser: str = "sgd"
    """sgd, adam, adamw, or a class of torch.optim by import path: "torch.optim:RMSprop"."""
    options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """More settings of the optimiser, as PyTorch names them: { betas = [0.9, 0.95], eps = 1e-8 }."""
    lr: float = 0.1
    """The learning rate at the start; Adam and AdamW want about 0.001."""
    momentum: float = 0.0
    """Of SGD, and of other classes that have it; it starts from zero in every round."""
    nesterov: bool = False
    """Nesterov's momentum."""
    weight_decay: float = 0.0
    """Times the weights: added to the gradient, or taken off the weights by AdamW."""
    decayed: Literal["all", "matrices"] = "all"
    """What weight_decay acts on: all weights, or those of two and more axes alone, so that norms and biases rest."""
    batch_size: int = 32
    """Examples of a step."""
    accumulate: int = 1
    """Parts in which the batch of a step is computed, one after the other; their gradients are added up."""
    precision: Precision = "float32"
    """Of the forward pass: float32, bfloat16 (autocast), or auto: bfloat16 where the device has instructions for it."""
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
    schedule_every: Literal["round", "step"] = "round"
    """Whether the rate follows schedule and warm-up from round to round, or within rounds from step to step."""
    milestones: tuple[float, ...] = (0.5, 0.75)
    """Of schedule = "steps": rounds, or shares of all rounds below 1."""
    gamma: float = 0.1
    """The factor at a milestone, or per round (exponential)."""
    warmup: float = 0.0
    """Rounds over which the learning rate rises to its full height, from the first of the run on."""
    warmup_steps: int = 0
    """Steps over which it rises in every round anew, while the optimiser knows little of its gradients."""
    together: int = 1
    """Clients of one piece that are trained as one batch of networks, at most: pays for tiny ones; other rounding."""
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
        self._require_one_of("schedule", SCHEDULES)
        self._require_one_of("schedule_every", ("round", "step"))
        self._require_one_of("decayed", ("all", "matrices"))
        self._require_one_of("precision", PRECISIONS)
        require(0 <= self.warmup < math.inf, "training.warmup", self.warmup, "a number of rounds, at least 0")
        require(self.warmup_steps >= 0, "training.warmup_steps", self.warmup_steps, "at least 0")
        fine = 1 <= self.accumulate <= self.batch_size
        require(fine, "training.accumulate", self.accumulate, f"1 to {self.batch_size}, the batch_size")
        require(self.together >= 1, "training.together", self.together, "at least 1")
        check_options(self.optimiser, self.options)
        if (
            not self.is_sgd
        ):  # which was checked above, and is tried by nobody: that would load PyTorch's compiler
            self.built  # noqa: B018  (refuses what the optimiser does not know)

    def _require_one_of(self, name: str, known: tuple[str, ...]) -> None:
        value = getattr(self, name)
        require(value in known, f"training.{name}", value, f"one of {', '.join(known)}")

    @property
    def built(self) -> Optimiser:
        """The optimiser's class and its settings."""
        return optimiser_of(self.optimiser, {key: getattr(self, key) for key in OF_TRAINING}, self.options)

    @property
    def is_sgd(self) -> bool:
        """Whether steps are those of plain SGD, which has a way of its own through a step."""
        return self.optimiser == "sgd"

    @property
    def optimiser_slots(self) -> int:
        """Numbers that the optimiser keeps for each parameter: 1 with momentum, 2 with Adam."""
        return int(self.momentum > 0) if self.is_sgd else self.built.slots

    def steps_for(self, examples: int) -> int:
        """How many steps a client with so many examples takes."""
        return self.steps if self.steps is not None else self.epochs * -(-examples // self.batch_size)

    def examples_for(self, examples: int) -> int:
        """How many examples a client with so many trains on, counted as often as it sees them."""
        return self.epochs * examples if self.steps is None else self.steps * self.batch_size

    @property
    def same_in_round(self) -> bool:
        """Whether all steps of a round have one learning rate."""
        return self.schedule_every == "round" and self.warmup_steps == 0

    def rate(self, round: int, step: int = 0, steps: int = 1) -> float:
        """The learning rate of a round; of the step with this number among so many, where it changes with steps."""
        by_step = self.schedule_every == "step"
        rate = self._scheduled(round + step / steps if by_step else round)
        if self.warmup > 0:
            done = round + ((step + 1) / steps if by_step else 1)
            rate *= min(1.0, done / self.warmup)
        if self.warmup_steps > 0:
            rate *= min(1.0, (step + 1) / self.warmup_steps)
        return rate

    def _scheduled(self, at: float) -> float:
        """The learning rate after so many rounds, without warm-up."""
        if self.schedule == "exponential":
            return float(self.lr * self.gamma**at)
        if self.schedule == "constant":
            return self.lr
        if self.rounds is None:
            raise FedtailorError(
                f"training.schedule = {self.schedule!r} needs training.rounds, the length of the run"
            )
        if self.schedule == "cosine":
            return self.lr * 0.5 * (1 + math.cos(math.pi * min(1.0, at / self.rounds)))
        milestones = _decimals(self.milestones)
        passed = sum(at >= (share * self.rounds if share < 1 else share) for share in milestones)
        return self.lr * self.gamma**passed


@cache
def _decimals(numbers: tuple[float, ...]) -> tuple[Fraction, ...]:
    """As they are written: 0.07 of 100 rounds is round 7, where floats give 7.000000000000001 and so round 8."""
    return tuple(Fraction(str(number)) for number in numbers)
