"""FjORD: the authors' notebook without federation, and the paper's tables on data that fits here.

    FEDTAILOR_DATA=... python -m reproduce.fjord.run [--list] [experiment ...]

Without names all experiments run, one run after the other, each on all cores. Call it again after an interruption:
what is in results.json or finished below runs/fjord is not repeated. `centralised-mnist` is the authors' notebook,
`isolated-mnist` the paper's figure 3, the others are its federated tables. `--draw` draws its figure 4.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

from reproduce.shared import charts
from reproduce.shared.figures import ending, perplexity
from reproduce.shared.papers import Experiment, Paper
from reproduce.shared.results import Results
from reproduce.shared.tables import rows_of

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

SHOWN = {
    "fjord": "FjORD with distillation",
    "fjord:distillation=false": "without distillation",
    "fjord:random_drop=0.25": "FjORD + eFD",
    "efd:global_width=each": "eFD, a model per width",
}


def draw(results: Results, folder: Path) -> None:
    """The paper's figure 4: accuracy against width, means over the seeds."""
    panels: list[str] = []
    for name, title in (("fashion-iid", "Fashion-MNIST, IID"), ("femnist-writers", "FEMNIST by writer")):
        rows = rows_of(results.runs(name), list(SHOWN))
        series = {
            SHOWN[method]: [
                (float(tier), fmean(run["accuracy"][tier] for run in row.values()))
                for tier in next(iter(row.values()))["accuracy"]
            ]
            for method, row in rows.items()
        }
        if series:
            panels.append(
                charts.lines(f"{title}: accuracy against width", series, charts.HEIGHT * len(panels))
            )
    if panels:
        charts.write(folder / "fjord-figure-4.svg", panels)


if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS, draw).main()
