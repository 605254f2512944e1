"""What a choice goes by: early stopping, the best round and methods that watch evaluations look at validation examples.

Test examples decide nothing, unless ``data.validation = 0`` says so.
"""

from __future__ import annotations

from typing import Literal

from fedtailor.config import RunConfig
from fedtailor.errors import require
from fedtailor.method import Method
from fedtailor.record import headline
from fedtailor.run.result import Run
from fedtailor.server.stopping import MEAN, Stopping

USUAL_SHARE = 0.1

Share = float | Literal["auto"]


def share_for(wanted: Share, stopping: Stopping, method: Method) -> float:
    """How much of the training examples is kept back: as wanted, or a tenth where something is chosen by them."""
    if wanted != "auto":
        return wanted
    return USUAL_SHARE if stopping.chooses or method.chooses else 0.0


def checked_share(wanted: Share) -> Share:
    """The share as it was given, if it is one."""
    known = wanted == "auto" or (isinstance(wanted, int | float) and 0 <= wanted < 1)
    require(known, "validation", wanted, "auto, or a share from 0 to below 1")
    return wanted


def chooses(config: RunConfig) -> bool:
    """Whether evaluations decide anything in a run."""
    return config.stopping.chooses or config.built_method.chooses


def choice_in_words(run: Run) -> str:
    """What was chosen, by which examples; nothing where no choice was made and nothing kept back for one."""
    stopping, kept = run.setup.settings.stopping, run.data.validation
    choosing = stopping.chooses or run.method.chooses
    if kept is None and not choosing:
        return ""
    tiers = next(record.tiers for record in run.history if record.tiers)
    metric = headline(tiers) if stopping.metric == "auto" else stopping.metric
    whose = f"mean {metric}" if stopping.tier == MEAN else f"{metric} of tier {stopping.tier}"
    best = f"Round {run.best_round} is the best by {whose} on"
    if kept is None:
        return f"{best} the test examples, which decided: its figures are a little too good (data.validation = 0)."
    count = len(kept.partition.order)
    decided = "which decided; test examples decided nothing" if choosing else "kept back from training"
    return f"{best} {count:,} validation examples, {decided}."
