"""What the server makes of the merged difference, as settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from fedtailor.errors import FedtailorError, require, unknown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RATES = {"sgd": 1.0, "adagrad": 0.1, "adam": 0.01, "yogi": 0.01}
BETAS, EPSILON = (0.9, 0.99), 1e-3


@dataclass(frozen=True)
class ServerSettings:
    """What the server does with the mean of the updates: FedOpt's optimisers, and an average over the rounds.

    The optimisers take the merged difference, negated, as a gradient. As they are, settings change nothing: the global
    weights are the mean itself.
    """

    optimiser: Literal["sgd", "adagrad", "adam", "yogi"] = "sgd"
    """sgd (with momentum: FedAvgM), adagrad, adam or yogi (FedAdagrad, FedAdam, FedYogi)."""
    lr: float | None = None
    """The server's learning rate; 1 for sgd, 0.1 for adagrad, 0.01 for adam and yogi if nothing is said."""
    momentum: float = 0.0
    """Of sgd."""
    betas: tuple[float, float] = BETAS
    """Of adam and yogi: how much of the first and of the second moment stays from round to round."""
    eps: float = EPSILON
    """Of adagrad, adam and yogi: added to the root of the second moment (the paper's tau)."""
    average: float = 0.0
    """How much of the weights' average over rounds stays in a round; it is evaluated and deployed. 0: no average."""

    def __post_init__(self) -> None:
        if self.optimiser not in RATES:
            raise unknown("server.optimiser", self.optimiser, RATES)
        fine = self.lr is None or (math.isfinite(self.lr) and self.lr > 0)
        require(fine, "server.lr", self.lr, "a number above 0")
        require(0 <= self.momentum < 1, "server.momentum", self.momentum, "at least 0 and below 1")
        betas = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        require(betas, "server.betas", self.betas, "two numbers, at least 0 and below 1")
        require(0 < self.eps < math.inf, "server.eps", self.eps, "a number above 0")
        require(0 <= self.average < 1, "server.average", self.average, "at least 0 and below 1")
        of = {"momentum": ("sgd",), "betas": ("adam", "yogi"), "eps": ("adagrad", "adam", "yogi")}
        refuse_what_is_of_others(self, "server", "optimiser", of)

    @property
    def rate(self) -> float:
        """The learning rate, where it is said and where not."""
        return RATES[self.optimiser] if self.lr is None else self.lr

    @property
    def optimises(self) -> bool:
        """Whether the next weights are anything but the mean: SGD of rate 1 without momentum steps exactly there."""
        return not (self.optimiser == "sgd" and self.rate == 1 and self.momentum == 0)

    @property
    def active(self) -> bool:
        """Whether anything has to be done after a merge."""
        return self.optimises or self.average > 0

    def __str__(self) -> str:
        """The settings that differ from their defaults, as in a config."""
        return as_in_config(self, "server")


def refuse_what_is_of_others(
    settings: DataclassInstance, section: str, choice: str, of: Mapping[str, Sequence[str]]
) -> None:
    """A setting that does nothing with what was chosen is a mistake; ``of``: setting -> choices that know it."""
    name, usual = getattr(settings, choice), {item.name: item.default for item in fields(settings)}
    for key, owners in of.items():
        value = getattr(settings, key)
        expected = f"{usual[key]} with {section}.{choice} = {name!r}; it is a setting of {', '.join(owners)}"
        require(name in owners or value == usual[key], f"{section}.{key}", value, expected)


def as_in_config(settings: DataclassInstance, section: str) -> str:
    """The settings that differ from their defaults, as in a config."""
    changed = {item.name: getattr(settings, item.name) for item in fields(settings)}
    usual = {item.name: item.default for item in fields(settings)}
    return ", ".join(f"{section}.{key} = {value!r}" for key, value in changed.items() if value != usual[key])


def refuse_own_merge(settings: ServerSettings, method: str) -> None:
    """The error for a method whose merge is its own: there is no one difference that an optimiser could take."""
    if settings.active:
        raise FedtailorError(
            f"{settings}: {method} merges in its own way, and [server] acts on the shared merge alone; expected no "
            "settings of [server], or a method that merges by the mean over holders"
        )
