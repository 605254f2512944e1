"""Run the comparisons of FjORD, FLANC and other methods piece by piece, and write docs/evidence as each finishes.

    FEDTAILOR_DATA=... python benchmarks/evidence.py [--list] [piece ...]

Without names all pieces run, one after the other, each on all cores. Call it again after an interruption: finished runs
are skipped, begun ones go on from their last round, finished pieces are left alone. Pieces of one experiment share
their runs. Of FjORD's, `centralised-mnist` is the authors' notebook, `isolated-mnist` the paper's figure 3, the others
its federated tables on data that fits here; `channels-*` sets beside it all methods that choose channels otherwise. Of
FLANC's, whose names begin with `flanc`, each also says what the bases look like at the end.
"""

from __future__ import annotations

import csv
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import records
import torch

from fedtailor.storage.run_folder import RunFolder

METHODS = "fjord,fjord:distillation=false,heterofl,fedavg:width=1/5"
CHANNELS = f"{METHODS},efd,federated-dropout,uniprob,fedrolex,fedrolex:phase=independent,splitmix:base=1/5"
UNSCALED = (
    "heterofl:scaler=false,uniprob:inverted_scaling=false"  # what scaling does where nothing normalises
)
ISOLATED = ",".join(f"fedavg:width={width}" for width in ("1/5", "2/5", "3/5", "4/5", "1"))
COMPOSED = "flanc,heterofl,fjord:widths=uniform-4:distillation=false"
ABLATED = f"{COMPOSED},flanc:regulariser=off"


@dataclass(frozen=True)
class Piece:
    """One call of ``fedtailor compare``."""

    issue: int  # the folder of the results
    experiment: str  # the folder of the runs: the same runs may serve several pieces
    config: str
    methods: str
    seeds: int
    overrides: tuple[str, ...] = ()

    @property
    def runs(self) -> Path:
        """Where its runs lie."""
        return records.runs_of("9") if self.issue == 9 else records.ROOT / "runs" / "evidence"

    def line(self) -> list[str]:
        """The call."""
        settings = (*self.overrides, f"name={self.experiment}")
        return records.compare_line(self.config, self.methods, self.runs, settings, self.seeds)


CENTRAL, FASHION, FEMNIST = "fjord-centralised-mnist", "fjord-fashion-mnist-small", "fjord-femnist-small"
FLANC = "flanc-fashion-mnist-small"
SKEWED = ("data.partition=dirichlet",)
PIECES = {
    "centralised-mnist": Piece(8, "centralised-mnist", CENTRAL, "fjord:distillation=false", 3),
    "fashion-iid": Piece(8, "fashion-iid", FASHION, METHODS, 2),
    "fashion-dirichlet": Piece(8, "fashion-dirichlet", FASHION, METHODS, 2, SKEWED),
    "channels-iid": Piece(13, "fashion-iid", FASHION, f"{CHANNELS},{UNSCALED}", 2),
    "channels-dirichlet": Piece(13, "fashion-dirichlet", FASHION, CHANNELS, 2, SKEWED),
    "femnist-writers": Piece(8, "femnist-writers", FEMNIST, METHODS, 2, ("rounds=100", "evaluate_every=10")),
    "fashion-uniform-10": Piece(
        8, "fashion-uniform-10", FASHION, "fjord:widths=uniform-10", 1, ("fleet.name=uniform-10",)
    ),
    "fashion-drop-scale": Piece(8, "fashion-drop-scale", FASHION, "fjord", 1, ("fleet.drop_scale=0.5",)),
    "fashion-random-drop": Piece(8, "fashion-random-drop", FASHION, "fjord:random_drop=0.25", 1),
    "shakespeare": Piece(8, "shakespeare", "fjord-shakespeare-small", "fjord", 1),
    "isolated-mnist": Piece(8, "centralised-mnist", CENTRAL, f"{ISOLATED},fjord", 3),
    "flanc-dynamic-iid": Piece(9, "fashion-dynamic-iid", FLANC, ABLATED, 2),
    "flanc-dynamic-classes": Piece(
        9, "fashion-dynamic-classes", FLANC, ABLATED, 2, ("data.partition=classes", "training.lr=0.02")
    ),
    "flanc-static-iid": Piece(9, "fashion-static-iid", FLANC, COMPOSED, 2, ("fleet.capacity=static",)),
    "flanc-two-25-75": Piece(9, "fashion-two-25-75", FLANC, COMPOSED, 2, ("fleet.name=two-25-75",)),
    "flanc-two-75-25": Piece(9, "fashion-two-75-25", FLANC, COMPOSED, 2, ("fleet.name=two-75-25",)),
    "flanc-shakespeare": Piece(9, "shakespeare", "flanc-shakespeare-small", "flanc", 1),
}


def run(name: str) -> None:
    """Run a piece, or go on with it, and write what it gives."""
    piece = PIECES[name]
    target = records.EVIDENCE / str(piece.issue) / f"{name.removeprefix('flanc-')}.json"
    if target.exists():
        print(f"{name}: done before")
        return
    started, line = time.monotonic(), piece.line()
    result = {"command": records.shown(line), "methods": records.call(line)["methods"]}
    folders = sorted(file.parent for file in (piece.runs / piece.experiment).glob("*/metrics.jsonl"))
    if bases := {folder.name: found for folder in folders if (found := bases_of(folder))}:
        result["bases"] = bases
    target.parent.mkdir(parents=True, exist_ok=True)
    write_curve(folders, target.with_suffix(".csv"))
    records.write(target, result)
    print(f"{name}: {time.monotonic() - started:.0f} s")


def bases_of(folder: Path) -> dict[str, dict[str, float]]:
    """How orthogonal FLANC's bases are at the end of a run, and how large the coefficients (its figures 5 and 6)."""
    found: dict[str, dict[str, float]] = {}
    for name, table in RunFolder(folder).load_diagnostics().items():
        if name.startswith("gram/"):
            errors = table - torch.eye(len(table))
            lengths = table.diagonal().sqrt()
            cosines = (table / lengths.outer(lengths)).fill_diagonal_(0)
            figures = {"mean_squared_error": errors.square().mean(), "largest_cosine": cosines.abs().max()}
        elif name.startswith("coefficients/"):
            figures = {"mean_coefficient": table.mean(), "smallest": table.min(), "largest": table.max()}
        else:
            continue
        found[name] = {key: float(f"{float(value):.4g}") for key, value in figures.items()}
    return found


def write_curve(folders: list[Path], target: Path) -> None:
    """Every evaluation of every run: one row per round and tier; bytes are those of the round, both ways."""
    with target.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(["run", "round", "tier", "accuracy", "loss", "perplexity", "bytes_down", "bytes_up"])
        for folder in folders:
            for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                row = json.loads(line)
                for tier, values in (row.get("tiers") or {}).items():
                    figures = (values["accuracy"], values["loss"], math.exp(values["loss"]))
                    accuracy, loss, perplexity = (f"{figure:.5g}" for figure in figures)
                    sent = (row["bytes_down"], row["bytes_up"])
                    rows.writerow([folder.name, row["round"], tier, accuracy, loss, perplexity, *sent])


def main() -> None:
    """Run the pieces that were named, or all."""
    options = records.arguments(__doc__, PIECES).parse_args()
    started = time.monotonic()
    for name in options.pieces or PIECES:
        if options.list:
            print(records.shown(PIECES[name].line()))
        elif time.monotonic() - started < options.seconds:
            run(name)


if __name__ == "__main__":
    main()
