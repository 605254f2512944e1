"""FIARSE beside HeteroFL, FedRolex and the smallest network for all: the order of the paper's table, in small.

    FEDTAILOR_DATA=... python -m reproduce.fiarse.run [--list] [experiment ...]

Without names all experiments run. Call it again after an interruption: what is in results.json or finished below
runs/fiarse is not repeated. At one width FIARSE's channels cost what HeteroFL's do, in MACs and in parameters; its
single weights are as many as a network of that width has, and cost the MACs of the full one.
"""

from __future__ import annotations

from pathlib import Path

from reproduce.shared.figures import ending
from reproduce.shared.papers import Experiment, Paper

FASHION = "reproduce/fiarse/fashion-mnist-small.toml"
CHANNELS = "fiarse:granularity=channels"
# Without norms a factor of 64 on the smallest device's outputs trains nothing: nobody scales.
METHODS = (CHANNELS, "heterofl:scaler=false", "fedrolex:scaler=false", "fedavg:width=1/64", "fiarse")
FORMS = (
    "fiarse:biased_gradient=false",
    f"{CHANNELS}:biased_gradient=false",
    "fiarse:layerwise=true",
)

EXPERIMENTS = (
    Experiment("fashion-dirichlet", FASHION, METHODS, 3, figures=(ending,)),
    Experiment("fashion-forms", FASHION, FORMS, 3, figures=(ending,)),
    Experiment("fashion-iid", FASHION, METHODS, 3, ("data.partition=iid",), (ending,)),
)

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
