"""What a choice goes by: early stopping, the best round and methods that watch evaluations look at validation examples.

Test examples decide nothing, unless ``data.validation = 0`` says so.
"""

from __future__ import annotations

from typing import Literal

from fedtailor.config import RunConfig
from fedtailor.errors import require
from fedtailor.method import Method
from fedtailor.server.stopping import Stopping

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
