"""Six ways to choose the channels that a device trains, on Fashion-MNIST.

    FEDTAILOR_DATA=... python -m reproduce.channels.run [--list] [experiment ...]

The setting is FjORD's, and so are four of the methods: their runs are shared with reproduce.fjord.run, whichever comes
first. Call it again after an interruption: finished runs are not repeated.
"""

from __future__ import annotations

from pathlib import Path

from reproduce.fjord.run import FASHION, METHODS
from reproduce.shared.papers import Experiment, Paper

OTHERS = (
    "efd",
    "federated-dropout",
    "uniprob",
    "fedrolex",
    "fedrolex:phase=independent",
    "splitmix:base=1/5",
)
UNSCALED = ("uniprob:scaling=none",)  # what scaling does where nothing normalises

# What makes UniProb train where budgets are small.
BUDGETS = "reproduce/channels/small-budgets.toml"
BOTH = ("efd", "uniprob")
FORMS = (
    "uniprob:slowed_filters=false",
    "uniprob:sparse_start=0.5",
    "uniprob:scaling=eval",
    "uniprob:scaling=none",
    "uniprob:slowed_filters=false:sparse_start=0.5",
)

EXPERIMENTS = (
    Experiment("fashion-iid", FASHION, (*METHODS, *OTHERS, *UNSCALED), 3),
    Experiment("fashion-dirichlet", FASHION, (*METHODS, *OTHERS), 3, ("data.partition=dirichlet",)),
    Experiment("small-budgets", BUDGETS, BOTH, 3),
    Experiment("small-budgets-clipped", BUDGETS, (*BOTH, FORMS[0]), 3, ("training.clip_norm=1.0",)),
    Experiment("small-budgets-fast", BUDGETS, ("uniprob",), 2, ("training.lr=0.2",)),
    Experiment("small-budgets-forms", BUDGETS, FORMS, 1),
)

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS, runs="fjord").main()
