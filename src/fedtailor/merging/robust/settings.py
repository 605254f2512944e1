"""By which rule updates are merged, as settings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.merging.settings import as_in_config, refuse_what_is_of_others

RULES = ("mean", "clip", "trimmed-mean", "median", "krum")


@dataclass(frozen=True)
class MergeSettings:
    """What stands in the place of the mean over holders, where some clients may send bad updates.

    As they are, settings change nothing: the mean itself, to the bit.
    """

    rule: Literal["mean", "clip", "trimmed-mean", "median", "krum"] = "mean"
    """mean; clip (steps that are far too long are shortened), trimmed-mean and median (coordinate by coordinate), krum
    (of every tier those clients that are closest to each other)."""
    bound: float = 1.5
    """How long a step may be, in medians of the steps of all who hold the same coordinates; of all rules but mean."""
    trim: float = 0.2
    """Of trimmed-mean: the share of holders that is left out at each end of every coordinate, at least one."""
    attackers: float = 0.2
    """Of krum: the share of a tier's clients that may be bad, at least one."""

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise unknown("merge.rule", self.rule, RULES)
        require(0 < self.bound < float("inf"), "merge.bound", self.bound, "a number above 0")
        require(0 < self.trim < 0.5, "merge.trim", self.trim, "a share above 0 and below 0.5")
        require(0 < self.attackers < 0.5, "merge.attackers", self.attackers, "a share above 0 and below 0.5")
        of = {"bound": RULES[1:], "trim": ("trimmed-mean",), "attackers": ("krum",)}
        refuse_what_is_of_others(self, "merge", "rule", of)

    @property
    def active(self) -> bool:
        """Whether anything but the mean is asked for."""
        return self.rule != "mean"

    def __str__(self) -> str:
        """The settings that differ from their defaults, as in a config."""
        return as_in_config(self, "merge")


def refuse_own_rule(settings: MergeSettings, method: str) -> None:
    """The error for a method whose merge is its own: a rule that it does not ask would protect nobody."""
    if settings.active:
        raise FedtailorError(
            f"{settings}: {method} merges in its own way, and [merge] acts on the shared merge alone; expected "
            "merge.rule = 'mean', or a method that merges coordinate by coordinate"
        )
