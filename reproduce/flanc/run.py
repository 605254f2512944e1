"""FLANC: table 1 and figures 3, 4 and 6 of the paper in small, and the recurrent case.

    FEDTAILOR_DATA=... python -m reproduce.flanc.run [--list] [experiment ...]

Without names all experiments run. Call it again after an interruption: what is in results.json or finished below
runs/flanc is not repeated. Each run of FLANC also says how orthogonal its bases are at the end.
"""

from __future__ import annotations

from pathlib import Path

import torch

from fedtailor.storage.run_folder import RunFolder
from reproduce.shared.figures import ending, perplexity
from reproduce.shared.papers import Experiment, Paper
from reproduce.shared.results import Result

FASHION = "reproduce/flanc/fashion-mnist-small.toml"
SHAKESPEARE = "reproduce/flanc/shakespeare-small.toml"

FLANC = "flanc:form=composed:biases=false"  # "composed": the same weights in half the time; no biases: as the authors
METHODS = (FLANC, "heterofl", "fjord:widths=uniform-4:distillation=false")
ABLATED = (*METHODS, f"{FLANC}:regulariser=off")


def bases(folder: RunFolder) -> Result:
    """How orthogonal the bases are at the end of a run (the paper's figure 6); nothing for other methods."""
    found: dict[str, dict[str, float]] = {}
    for name, table in folder.load_diagnostics().items():
        kind, _, weight = name.partition("/")
        if kind == "gram":
            errors = table - torch.eye(len(table))
            lengths = table.diagonal().sqrt()
            cosines = (table / lengths.outer(lengths)).fill_diagonal_(0)
            figures = {"mean_squared_error": errors.square().mean(), "largest_cosine": cosines.abs().max()}
            found[weight] = {key: float(f"{float(value):.4g}") for key, value in figures.items()}
    return {"bases": found} if found else {}


READ = (ending, bases)
EXPERIMENTS = (
    Experiment("fashion-dynamic-iid", FASHION, ABLATED, 3, figures=READ),
    Experiment("fashion-dynamic-classes", FASHION, METHODS, 3, ("data.partition=classes",), READ),
    Experiment("fashion-static-iid", FASHION, METHODS, 3, ("fleet.capacity=static",), READ),
    Experiment("fashion-two-25-75", FASHION, METHODS, 3, ("fleet.name=two-25-75",), READ),
    Experiment("fashion-two-75-25", FASHION, METHODS, 3, ("fleet.name=two-75-25",), READ),
    Experiment("shakespeare", SHAKESPEARE, ("flanc",), figures=(ending, perplexity, bases)),
)

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
