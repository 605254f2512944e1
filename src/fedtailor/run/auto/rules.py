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
    teaches: bool  # one network can learn from another's answers
    limits: frozenset[str]  # of all budgets: width, macs, memory ...
    # What tiers can pay for, ascending, each width once; none with limits on density or depth
    widths: tuple[Fraction, ...]
    smallest_share: Fraction  # of all clients, those of the smallest tier


@dataclass(frozen=True)
class Rule:
    """When it holds, what is taken, why, and what shows it."""

    holds: Callable[[Seen], bool]
    takes: Callable[[Seen], Table]
    why: str
    shown_by: str = ""  # empty: nothing yet


def _own_widths(seen: Seen) -> Table:
    """FjORD's list of widths: the fleet's own where budgets are widths."""
    own = seen.limits == {"width"}
    return {"widths": [str(width) for width in seen.widths] if own else "uniform-10"}


RULES = (
    Rule(
        lambda seen: len(seen.widths) == 1,
        lambda seen: {"name": "fedavg", "width": str(seen.widths[0])},
        "all devices run the same network, and there is nothing to cut",
        "tests: with one width for all, methods that cut channels are FedAvg bit for bit",
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
        lambda seen: seen.limits == {"macs"},
        lambda _: {"name": "fjord", "distillation": False, "mean_budget": True, "widths": "uniform-20"},
        "budgets are multiply-accumulates, and its steps cost exactly these on average",
        "reproduce/flado, everyone: 78.7 on the largest device, HeteroFL 75.7; its network fits every device, eFD's "
        "(77.8) only the largest",
    ),
    Rule(
        lambda seen: not seen.teaches,
        lambda seen: {"name": "fjord", "distillation": False, **_own_widths(seen)},
        "every size of device gets a network of its own; nothing says what outputs mean, so none can teach another",
        "reproduce/fjord: 81.3, 81.2 and 73.6 on the smallest tier, HeteroFL at best 79.4, 76.4 and 67.7",
    ),
    Rule(
        lambda seen: seen.smallest_share >= HALF,
        lambda seen: {"name": "fjord", "distillation": False, **_own_widths(seen)},
        "most devices are of the smallest tier, to which distillation brings nothing for twice the computation",
        "reproduce/fjord: -0.2 ± 1.0, -0.6 ± 1.9 and -1.7 ± 2.4 points there, at 2.3 times the multiply-accumulates",
    ),
    Rule(
        lambda _: True,
        lambda seen: {"name": "fjord", **_own_widths(seen)},
        "every size of device gets a network of its own, and the smallest loses least",
        "reproduce/fjord: 81.1, 80.6 and 71.9 on the smallest tier, HeteroFL at best 79.4, 76.4 and 67.7; level on the "
        "largest",
    ),
)
NORMS = "none of these networks has batch norm"  # said where the model has


def decide(seen: Seen) -> tuple[Table, str]:
    """The method that is taken, as a table of a config, and the reason as a sentence."""
    rule = next(rule for rule in RULES if rule.holds(seen))
    table = rule.takes(seen)
    settings = "".join(
        f":{key}={_word(value)}" for key, value in table.items() if key not in ("name", *PLAIN)
    )
    shown = rule.shown_by or "no recorded run decides this yet"
    doubt = f"; {NORMS}" if seen.statistics and rule.shown_by and table["name"] != "fedavg" else ""
    return table, f"method auto takes {table['name']}{settings}: {rule.why} ({shown}{doubt})"


def _word(value: Any) -> str:
    return f"[{','.join(value)}]" if isinstance(value, list) else str(value).lower()
