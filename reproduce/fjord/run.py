"""FjORD: the authors' notebook without federation, and the paper's tables on data that fits here.

    FEDTAILOR_DATA=... python -m reproduce.fjord.run [--list] [experiment ...]

Without names all experiments run, one run after the other, each on all cores. Call it again after an interruption:
what is in results.json or finished below runs/fjord is not repeated. `centralised-mnist` is the authors' notebook,
`isolated-mnist` the paper's figure 3, the others are its federated tables.
"""

from __future__ import annotations

from pathlib import Path

from reproduce.shared.figures import ending, perplexity
from reproduce.shared.papers import Experiment, Paper

CENTRAL = "reproduce/fjord/centralised-mnist.toml"
FASHION = "reproduce/fjord/fashion-mnist-small.toml"
FEMNIST = "reproduce/fjord/femnist-small.toml"
SHAKESPEARE = "reproduce/fjord/shakespeare-small.toml"

METHODS = ("fjord", "fjord:distillation=false", "heterofl", "heterofl:scaler=false", "fedavg:width=1/5")
FIGURE = (*METHODS, "fjord:random_drop=0.25", "efd:global_width=each")  # the paper's main figure
ISOLATED = tuple(f"fedavg:width={width}" for width in ("1/5", "2/5", "3/5", "4/5", "1"))

EXPERIMENTS = (
    Experiment("centralised-mnist", CENTRAL, ("fjord:distillation=false",), 3),
    Experiment("fashion-iid", FASHION, FIGURE, 3),
    Experiment("fashion-dirichlet", FASHION, METHODS, 3, ("data.partition=dirichlet",)),
    Experiment("femnist-writers", FEMNIST, FIGURE, 3, ("rounds=100", "evaluate_every=20")),
    Experiment("fashion-uniform-10", FASHION, ("fjord:widths=uniform-10",), 1, ("fleet.name=uniform-10",)),
    Experiment("fashion-drop-scale", FASHION, ("fjord",), 1, ("fleet.drop_scale=0.5",)),
    Experiment("shakespeare", SHAKESPEARE, ("fjord",), figures=(ending, perplexity)),
    Experiment("isolated-mnist", CENTRAL, (*ISOLATED, "fjord"), 3),
)

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
