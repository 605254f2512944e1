"""The rules of ``auto``, in their order: the first whose condition holds decides.

Each names the recorded runs of this repository that it rests on, or says that there are none; then it takes what is
least surprising. A rule changes when records do, with its test.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

Table = dict[str, Any]  # as [method] of a config

HALF = Fraction(1, 2)
# HeteroFL as it was recorded: under the rules of any method.
PLAIN: Table = {"masked_loss": False, "label_rows": False, "weighting": "samples"}


@dataclass(frozen=True)
class Seen:
    """What is looked at: the model, the fleet, and what limits its budgets."""

    statistics: bool  # norm layers keep running statistics
    limits: frozenset[str]  # of all budgets: width, macs, memory ...
    # What tiers can pay for, ascending, each width once; none with limits on density or depth
    widths: tuple[Fraction, ...]
    smallest_share: Fraction  # of all clients, those of the smallest tier
    all_fit: bool = True  # whether every tier can pay for some piece


@dataclass(frozen=True)
class Rule:
    """When it holds, what is taken, why, and what shows it."""

    holds: Callable[[Seen], bool]
    takes: Callable[[Seen], Table]
    why: str
    shown_by: str = ""  # empty: nothing yet


RULES = (
    Rule(
        lambda seen: len(seen.widths) == 1 and seen.all_fit,
        lambda seen: {"name": "fedavg", "width": str(seen.widths[0])},
        "all devices run the same network, and there is nothing to cut",
        "tests: with one width for all and the same [server], methods that cut channels are FedAvg bit for bit",
    ),
    Rule(
        lambda seen: "density" in seen.limits,
        lambda _: {"name": "fiarse", "layerwise": True, "weighting": "samples"},
        "budgets limit single weights, and it keeps to such a limit in every round",
    ),
    Rule(
        lambda seen: "depth" in seen.limits,
        lambda _: {"name": "depthfl", "weighting": "samples"},
        "budgets limit depth, and it trains the first blocks",
    ),
    Rule(
        lambda seen: bool({"memory", "step_time"} & seen.limits) and not seen.statistics,
        lambda _: {"name": "heterofl", "scaler": False, **PLAIN},
        "budgets limit memory or time, and it runs one network in a step; there are no norms, so without its factor",
        "reproduce/fjord: without the factor 79.4 instead of 69.2, 76.4 instead of 65.2 and 67.7 instead of 28.8 on "
        "the smallest tier",
    ),
    Rule(
        lambda seen: bool({"memory", "step_time"} & seen.limits),
        lambda _: {"name": "heterofl", **PLAIN},
        "budgets limit memory or time, and it runs one network in a step",
    ),
    Rule(
        lambda seen: seen.limits != {"width"},
        lambda _: {"name": "tailor"},
        "every size of device gets a network of its own, as large as its budget allows",
        "reproduce/common, flops: Fashion-MNIST +2.7 ± 2.1, FEMNIST +4.2 ± 2.3, CIFAR-10 +2.7 ± 1.8 and Shakespeare "
        "+1.7 ± 0.7 points above the best of the papers' methods, mean over tiers",
    ),
    Rule(
        lambda seen: seen.smallest_share >= HALF,
        lambda _: {"name": "tailor"},
        "most devices are of the smallest tier, where it is above the smallest network trained by everyone",
        "reproduce/common, few-strong: Fashion-MNIST +2.4 ± 4.4, FEMNIST +2.4 ± 2.2, CIFAR-10 +0.9 ± 4.1 and "
        "Shakespeare +3.8 ± 1.7 points there",
    ),
    Rule(
        lambda _: True,
        lambda _: {"name": "tailor"},
        "every size of device gets a network of its own, and in the mean over sizes none is ahead beyond noise",
        "reproduce/common, uniform: Fashion-MNIST +2.3 ± 2.8, FEMNIST +3.0 ± 0.7, CIFAR-10 +2.0 ± 4.0 and "
        "Shakespeare +1.4 ± 0.6 points above the best of the papers' methods, mean over tiers",
    ),
)
UNDECIDED = "no recorded run decides this yet"
NORMS = "of these networks, CIFAR-10's has batch norm"  # said where the model has it


def decide(seen: Seen) -> tuple[Table, str]:
    """The method that is taken, as a table of a config, and the reason as a sentence."""
    rule = next(rule for rule in RULES if rule.holds(seen))
    table = rule.takes(seen)
    settings = "".join(
        f":{key}={_word(value)}" for key, value in table.items() if key not in ("name", *PLAIN)
    )
    shown = rule.shown_by or UNDECIDED
    doubt = f"; {NORMS}" if seen.statistics and table["name"] == "tailor" else ""
    return table, f"method auto takes {table['name']}{settings}: {rule.why} ({shown}{doubt})"


def is_said(why: str) -> bool:
    """Whether a sentence is one of these rules, and of no others that an earlier version had."""
    return any(f": {rule.why} ({rule.shown_by or UNDECIDED}" in why for rule in RULES)


def _word(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()
