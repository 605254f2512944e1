"""Adapters of rank 2, 4 and 8 by device, on a small frozen Llama and Shakespeare by role.

    FEDTAILOR_DATA=... python -m reproduce.adapters.run [--list] [experiment ...]

Needs the extra: pip install 'fedtailor[adapters]'. The network is made first, by a short training on the roles that no
client is, below runs/adapters. One rank for all is rank 2, which every device can train, and rank 8, which only a third
of them could: the bound. Call it again after an interruption: what is in results.json is not repeated.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from fedtailor.errors import FedtailorError
from fedtailor.storage.run_folder import RunFolder
from reproduce.adapters.backbone import prepare
from reproduce.shared.figures import ending, perplexity
from reproduce.shared.papers import Experiment, Paper
from reproduce.shared.results import Result

CONFIG = "reproduce/adapters/shakespeare-small.toml"
PLAIN = "hetlora:sparsity_weights=false:zero_padding=false:self_pruning=false"  # every rank averaged over its holders
METHODS = ("hetlora", "flexlora", "fedavg:width=1/4", "fedavg:width=1", PLAIN, "hetlora:self_pruning=false")


def traffic(folder: RunFolder) -> Result:
    """Bytes down and up of one client in one round, by its tier: the mean over the run."""
    spent: dict[str, list[int]] = {}
    for record in folder.records():
        for tier, each in record.by_tier.items():
            down, up, asked = spent.setdefault(tier, [0, 0, 0])
            spent[tier] = [down + each.bytes_down, up + each.bytes_up, asked + each.asked]
    return {"traffic": {tier: [down // asked, up // asked] for tier, (down, up, asked) in spent.items()}}


EXPERIMENTS = (Experiment("shakespeare", CONFIG, METHODS, 3, figures=(ending, perplexity, traffic)),)

if __name__ == "__main__":
    if "--list" not in sys.argv and "--tables" not in sys.argv:
        home = Path("runs/adapters")
        try:
            prepare(Path(os.environ.get("FEDTAILOR_DATA", "")) / "shakespeare.jsonl", home)
        except FedtailorError as error:
            sys.exit(f"error: {error}")
        os.environ["FEDTAILOR_DATA"] = str(home / "data")
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
