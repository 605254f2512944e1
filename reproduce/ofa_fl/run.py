"""OFA-FL: the paper's tables and figures in small, and what a device gains from masks of single weights.

    FEDTAILOR_DATA=... python -m reproduce.ofa_fl.run [--list] [experiment ...]
    python -m reproduce.ofa_fl.run --draw

`mlp` and `cnn` compare OFA-FL, LTP and one-shot pruning (with and without rewinding), globally and layer by layer;
`dense` has the ratios of the paper's table 2, `ten` ten of them; `when` prunes before the network has converged, or
twice as often; `settled` goes on for 40 rounds after the last event; `cifar10` shows how accuracy drops and recovers;
`channels` trains networks without whole channels on the same images.
Call it again after an interruption: what is in results.json or finished below runs/ofa_fl is not repeated.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from fedtailor.record import RoundRecord, Tiers
from fedtailor.storage.run_folder import RunFolder
from reproduce.ofa_fl import tables
from reproduce.ofa_fl.device import device
from reproduce.shared import charts
from reproduce.shared.figures import accuracies, ending
from reproduce.shared.papers import Paper, Variants
from reproduce.shared.results import Result, Results

MLP = "reproduce/ofa_fl/mnist-mlp.toml"
CNN = "reproduce/ofa_fl/mnist-cnn-small.toml"
CIFAR10 = "reproduce/ofa_fl/cifar10-small.toml"

LTP = ("method.joint_loss=false",)
ONE_SHOT = (*LTP, "method.pruning=one-shot")
METHODS = {"ofa-fl": (), "ltp": LTP, "one-shot": (*ONE_SHOT, "method.rewind=false")}
GLOBAL = METHODS | {"one-shot-rewound": ONE_SHOT}
EVERY = GLOBAL | {f"{name}-layerwise": (*own, "method.layerwise=true") for name, own in METHODS.items()}
CONVOLUTIONS = {
    name: own for name, own in EVERY.items() if name not in ("ltp-layerwise", "one-shot-layerwise")
}


def moments(folder: RunFolder) -> Result:
    """The two rounds that the paper reports, the best on average and the last; and the rounds that began with an event.

    As in the paper, only rounds in which all densities take part are candidates for the best one.
    """
    records = folder.records()
    evaluated = [(record, record.tiers) for record in records if record.tiers]
    most = max(_supported(record) for record, _ in evaluated)
    complete = [(record, tiers) for record, tiers in evaluated if _supported(record) == most]
    best, tiers = max(complete, key=lambda pair: statistics.mean(accuracies(pair[1]).values()))
    grown = [record.round for before, record in pairwise(records) if _supported(record) > _supported(before)]
    return {
        "best": {**_moment(best.round, tiers), "accuracy": accuracies(tiers)},
        "final": _moment(evaluated[-1][0].round, evaluated[-1][1]),
        "events": grown,
    }


def _supported(record: RoundRecord) -> int:
    """How many densities have been pruned for."""
    return len(record.method["supported"])


def _moment(number: int, tiers: Tiers) -> Result:
    """The mean over the densities and the variance across them, in per cent and its square."""
    values = list(accuracies(tiers).values())
    spread = {"mean": round(statistics.mean(values), 3), "variance": round(statistics.pvariance(values), 4)}
    return {"round": number, **spread}


def series(folder: RunFolder) -> Result:
    """The accuracy of every density in every evaluated round, for figure 4."""
    return {
        "series": [
            {"round": record.round, "supported": _supported(record), "accuracy": accuracies(record.tiers)}
            for record in folder.records()
            if record.tiers
        ]
    }


def densities(*ratios: str) -> tuple[str, ...]:
    """The settings of a run with other ratios: a tier of the fleet for each."""
    tiers = ", ".join(f'{{name = "{ratio}", density = {ratio}}}' for ratio in reversed(ratios))
    return (f"method.ratios=[{', '.join(ratios)}]", f"fleet.tiers=[{tiers}]")


READ = (ending, moments)
DENSE = densities("1", "0.9", "0.8", "0.7", "0.6")
TEN = (
    *densities("1", "0.9", "0.8", "0.7", "0.6", "0.5", "0.4", "0.3", "0.2", "0.1"),
    "rounds=140",
    "data.limit=4000",
)
WHEN = {"early": ("method.first=3", "method.every=3"), "often": ("method.every=5",)}
SETTLED = {name: METHODS[name] for name in ("ofa-fl", "one-shot")}
CUT = ('method={name = "fjord", distillation = false}', 'fleet={name = "uniform-5"}')
EXPERIMENTS = (
    Variants("mlp", MLP, EVERY, 3, figures=(*READ, device)),
    Variants("dense", MLP, {"ofa-fl": (), "ltp": LTP}, 3, DENSE, READ),
    Variants("ten", MLP, METHODS, 3, TEN, READ),
    Variants("when", MLP, WHEN, 3, figures=READ),
    Variants(
        "convergence", MLP, {"ofa-fl": ("method.trigger=convergence", "data.validation=0")}, 3, figures=READ
    ),
    Variants("cnn", CNN, CONVOLUTIONS, 3, figures=(*READ, device)),
    Variants("settled", CNN, SETTLED, 3, ("rounds=110",), READ),
    Variants("channels", CNN, {"fjord": CUT}, 3, figures=(ending, device)),
    Variants("channels-mlp", MLP, {"fjord": CUT}, 3, figures=(ending, device)),
    Variants("cifar10", CIFAR10, METHODS, 3, figures=(*READ, series)),
)


# Figures


def draw(results: Results, folder: Path) -> None:
    """Every figure of which all runs are there, and the tables of what there is."""
    for name, number in (("mlp", 2), ("cnn", 3)):
        if runs := results.runs(name):
            panels: list[str] = []
            for when, called in (("best", "round of the best average"), ("final", "last round")):
                title = f"{name}, {called}: accuracy (%) by density"
                top = charts.HEIGHT * len(panels)
                panels.append(charts.lines(title, _by_density(runs, when), top, dashed="layer-wise"))
            charts.write(folder / f"ofa-figure-{number}.svg", panels)
    if runs := results.runs("ten"):
        lines = _by_density(runs, "final")
        charts.write(folder / "ofa-ten.svg", [charts.lines("ten networks: accuracy (%) by density", lines)])
    if row := results.runs("cifar10").get("ofa-fl"):
        title = "CIFAR-10: accuracy (%) of every density by round, seed 1"
        charts.write(folder / "ofa-figure-4.svg", [charts.lines(title, _by_round(row["1"]["series"]))])
    print("\n".join(_tables(results)))


def _tables(results: Results) -> Iterator[str]:
    for experiment in EXPERIMENTS:
        known = results.runs(experiment.name)
        found = {name: known[name] for name in experiment.methods if name in known}
        if experiment.name in ("when", "convergence") and found:  # what they differ from
            found = {"ofa-fl, as in mlp": results.runs("mlp")["ofa-fl"], **found}
        if found and moments in experiment.figures:
            for when in ("best", "final"):
                yield from ("", f"## {experiment.name}, {when}", "", *tables.evenness(found, when))
    if runs := results.runs("cifar10"):
        yield from ("", "## Events of OFA-FL on CIFAR-10", "", *tables.events(runs["ofa-fl"]))
        yield from ("", "## Peaks on CIFAR-10", "", *tables.peaks(runs))
    given = {
        f"{network}, {kind}": results.runs(experiment).get(method, {})
        for network, of in (("MLP", ("mlp", "channels-mlp")), ("CNN", ("cnn", "channels")))
        for experiment, method, kind in zip(
            of, ("ofa-fl", "fjord"), ("single weights", "channels"), strict=True
        )
    }
    if any(given.values()):
        there = {kind: row for kind, row in given.items() if row}
        yield from ("", "## Devices", "", *tables.devices(there))


def _by_density(runs: dict[str, dict[str, Result]], when: str) -> dict[str, list[tuple[float, float]]]:
    """The mean over the seeds: one line for each method and scope."""
    lines = {}
    for method in (name for name in EVERY if name in runs):
        found = [
            run["best"]["accuracy"] if when == "best" else run["accuracy"] for run in runs[method].values()
        ]
        points = [(float(tier), statistics.mean(each[tier] for each in found)) for tier in found[0]]
        lines[method.replace("-layerwise", ", layer-wise")] = sorted(points)
    return lines


def _by_round(series: list[Result]) -> dict[str, list[tuple[float, float]]]:
    """A density that has not been pruned for yet counts as 0, as in the paper."""
    lines: dict[str, list[tuple[float, float]]] = {tier: [] for tier in reversed(series[0]["accuracy"])}
    for point in series:
        for place, tier in enumerate(lines):
            there = place < point["supported"]
            lines[tier].append((point["round"], point["accuracy"][tier] if there else 0.0))
    return lines


if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS, draw).main()
