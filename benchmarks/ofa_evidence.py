"""Run OFA-FL's evidence run by run and write docs/evidence/11 as each run finishes; draw the paper's figures 2 to 4.

    FEDTAILOR_DATA=... python benchmarks/ofa_evidence.py [--list] [--workers N] [piece ...]

A piece is a network: `mlp`, `cnn`, `cifar10`; `convergence` is the rule instead of the schedule. Call it again after
an interruption: finished runs are skipped, a begun one goes on from its last round. `figures` draws what is there.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import records
from records import Result

import charts
from fedtailor.config import load_config
from fedtailor.storage.run_folder import RunFolder

RUNS = records.runs_of("11")
EVIDENCE = records.EVIDENCE / "11"

METHODS = {
    "ofa-fl": (),
    "ltp": ("method.joint_loss=false",),
    "one-shot": ("method.joint_loss=false", "method.rewind=false", "method.pruning=one-shot"),
}
SCOPES = {"global": (), "layerwise": ("method.layerwise=true",)}
SEEDS = (1, 2)


@dataclass(frozen=True)
class Trial:
    """One run."""

    piece: str
    config: str
    method: str
    scope: str
    seed: int
    overrides: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its folder and of its file."""
        return f"{self.piece}-{self.method}-{self.scope}-seed{self.seed}"

    @property
    def settings(self) -> list[str]:
        """The overrides of its config."""
        own = (*METHODS[self.method], *SCOPES[self.scope], *self.overrides)
        return [*own, f"seed={self.seed}", f"name={self.name}"]


def _grid(piece: str, config: str) -> list[Trial]:
    return [
        Trial(piece, config, method, scope, seed) for seed in SEEDS for scope in SCOPES for method in METHODS
    ]


PIECES = {
    "mlp": _grid("mlp", "ofa-mnist-mlp"),
    "cnn": _grid("cnn", "ofa-mnist-cnn-small"),
    "cifar10": [Trial("cifar10", "ofa-cifar10-small", "ofa-fl", "global", 1)],
    "convergence": [
        Trial("convergence", "ofa-mnist-mlp", "ofa-fl", "global", 1, ("method.trigger=convergence",))
    ],
}


def perform(trial: Trial, workers: list[str]) -> None:
    """Run a trial, or go on with it, and write what it gives."""
    target = EVIDENCE / f"{trial.name}.json"
    if target.exists():
        print(f"{trial.name}: done before")
        return
    started, folder = time.monotonic(), RUNS / trial.name
    config = load_config(records.ROOT / "configs" / f"{trial.config}.toml", [*trial.settings, *workers])
    records.run_or_resume(config, folder)
    records.write(target, result_of(trial, RunFolder(folder)))
    print(f"{trial.name}: {time.monotonic() - started:.0f} s")


def result_of(trial: Trial, folder: RunFolder) -> Result:
    """The accuracy of every ratio in every evaluated round, and the two rounds that the paper reports."""
    rounds = folder.records()
    series = [
        {
            "round": record.round,
            "supported": record.method["supported"],
            "accuracy": {tier: round(100 * values["accuracy"], 2) for tier, values in record.tiers.items()},
        }
        for record in rounds
        if record.tiers
    ]
    most = max(len(point["supported"]) for point in series)
    complete = [point for point in series if len(point["supported"]) == most]  # as in the paper
    best = max(complete, key=lambda point: statistics.mean(point["accuracy"].values()))
    overrides = " ".join(f"--set {setting}" for setting in trial.settings)
    return {
        "command": f"fedtailor run configs/{trial.config}.toml {overrides}",
        "method": trial.method,
        "scope": trial.scope,
        "seed": trial.seed,
        "best": _point(best),
        "final": _point(series[-1]),
        "bytes_down": sum(record.spent.bytes_down for record in rounds),
        "bytes_up": sum(record.spent.bytes_up for record in rounds),
        "seconds": round(sum(record.seconds for record in rounds)),
        "series": series,
    }


def _point(point: Result) -> Result:
    """One round with the mean over the ratios and their variance, in (per cent) and (per cent) squared."""
    values = list(point["accuracy"].values())
    spread = {"mean": round(statistics.mean(values), 3), "variance": round(statistics.pvariance(values), 4)}
    return {**point, **spread}


# Figures


def finished(piece: str) -> list[Result]:
    """The results of a piece that are there."""
    return records.read(EVIDENCE / f"{trial.name}.json" for trial in PIECES[piece])


def draw() -> None:
    """Every figure of which all runs are there, and a table of means and variances."""
    for piece, number in (("mlp", 2), ("cnn", 3)):
        results = finished(piece)
        if len(results) == len(PIECES[piece]):
            panels = []
            for when, called in (("best", "round of the best average"), ("final", "last round")):
                title = f"{piece}, {called}: accuracy (%) by density"
                top = charts.HEIGHT * len(panels)
                panels.append(charts.lines(title, _lines(results, when), top, dashed="layer-wise"))
                _table(results, when)
            charts.write(records.FIGURES / f"ofa-figure-{number}.svg", panels)
    for result in finished("cifar10"):
        panel = charts.lines("CIFAR-10: accuracy (%) of every density by round", _series(result))
        charts.write(records.FIGURES / "ofa-figure-4.svg", [panel])


def _series(result: Result) -> dict[str, list[tuple[float, float]]]:
    """A ratio that has not been pruned for yet counts as 0, as in the paper."""
    tiers = list(result["series"][0]["accuracy"])
    lines: dict[str, list[tuple[float, float]]] = {tier: [] for tier in reversed(tiers)}
    for point in result["series"]:
        for place, tier in enumerate(lines):
            there = place < len(point["supported"])
            lines[tier].append((point["round"], point["accuracy"][tier] if there else 0.0))
    return lines


def _lines(results: list[Result], when: str) -> dict[str, list[tuple[float, float]]]:
    """The mean over the seeds: one line for each method and scope."""
    lines = {}
    for scope in SCOPES:
        for method in METHODS:
            runs = [r[when]["accuracy"] for r in results if (r["method"], r["scope"]) == (method, scope)]
            points = [(float(tier), statistics.mean(run[tier] for run in runs)) for tier in runs[0]]
            lines[method if scope == "global" else f"{method}, layer-wise"] = sorted(points)
    return lines


def _table(results: list[Result], when: str) -> None:
    print(f"{when}: mean accuracy over ratios and seeds, mean variance across ratios")
    for scope in SCOPES:
        for method in METHODS:
            runs = [r[when] for r in results if (r["method"], r["scope"]) == (method, scope)]
            mean, variance = (statistics.mean(run[key] for run in runs) for key in ("mean", "variance"))
            print(f"  {method:9} {scope:10} {mean:6.2f}  {variance:9.4f}")


def main() -> None:
    """Run what is asked for, then draw."""
    parser = records.arguments(__doc__, [*PIECES, "figures"])
    parser.add_argument("--workers", help="Worker processes; the default is all cores.")
    options = parser.parse_args()
    workers = [f"engine.workers={options.workers}"] if options.workers else []
    started = time.monotonic()
    for piece in options.pieces or PIECES:
        for trial in PIECES.get(piece, []):
            if options.list:
                print(f"configs/{trial.config}.toml {' '.join(trial.settings)}")
            elif time.monotonic() - started < options.seconds:
                perform(trial, workers)
    if not options.list:
        draw()


if __name__ == "__main__":
    main()
