"""Run APFL's evidence run by run and write docs/evidence/12 as each run finishes; draw the paper's figures 3 to 5.

    FEDTAILOR_DATA=... python benchmarks/apfl_evidence.py [--list] [--workers N] [--seconds N] [--seeds N] [piece ...]

A piece is a split and a fleet: `iid-high`, `dirichlet-high`, `iid-low`. In each: APFL, FedUniform and FedAvg at half
the width (the same for both fleets), two seeds. Call it again after an interruption: finished runs are skipped, a begun
one goes on from its last round. `figures` only draws. `--seconds` starts no run later than that. Processes side by side
must not share runs: give them different pieces or seeds.
"""

from __future__ import annotations

import time
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

import records
import torch
from records import Result

import charts
from fedtailor.client.evaluate import evaluate_patches
from fedtailor.config import RunConfig, make_config
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.record import RoundRecord
from fedtailor.report.accounting import course_of
from fedtailor.run.interface import Run
from fedtailor.storage.checkpoint import Checkpoint
from fedtailor.storage.run_folder import RunFolder

RUNS = records.runs_of("12")
EVIDENCE = records.EVIDENCE / "12"
CONFIG = "configs/apfl-cifar10-small.toml"

TRAINED = 30  # rounds of FedPA, and all rounds of the baselines
COMMON = 2000  # images of the common test set on which every network is evaluated in the end
PIECES = {
    "iid-high": {"data": {"partition": "iid"}, "fleet": {"name": "high"}},
    "dirichlet-high": {"data": {"partition": "dirichlet"}, "fleet": {"name": "high"}},
    "iid-low": {"data": {"partition": "iid"}, "fleet": {"name": "low"}},
}
METHODS: dict[str, dict[str, Any] | None] = {
    "apfl": None,  # as in the config
    "feduniform": {"name": "feduniform", "recalibrate": True},
    "fedavg-half": {
        "name": "fedavg",
        "width": "1/2",
        "norm": "static",
    },  # statistics measured, as in the others
}
SEEDS = (1, 2)
SAME = {("iid-low", "fedavg-half"): "iid-high"}  # whatever the fleet, everyone trains the same network


@dataclass(frozen=True)
class Trial:
    """One run."""

    piece: str
    method: str
    seed: int

    @property
    def name(self) -> str:
        """Of its folder and of its file."""
        return f"{self.piece}-{self.method}-{self.seed}"

    def config(self, workers: str | None) -> RunConfig:
        """The config of the run; the baselines have no warm-up and no search."""
        table = tomllib.loads((records.ROOT / CONFIG).read_text(encoding="utf-8"))
        for section, settings in PIECES[self.piece].items():
            table[section] |= settings
        table |= {"name": self.name, "seed": self.seed}
        chosen = METHODS[self.method]
        if chosen is not None:
            table |= {"method": chosen | {"align": table["method"]["align"]}, "rounds": TRAINED}
        return make_config(table, [f"engine.workers={workers}"] if workers else [])


def trials(pieces: list[str], seeds: Sequence[int] = SEEDS) -> list[Trial]:
    """All runs of some pieces."""
    every = [Trial(piece, method, seed) for piece in pieces for seed in seeds for method in METHODS]
    return [trial for trial in every if (trial.piece, trial.method) not in SAME]


def perform(trial: Trial, workers: str | None) -> None:
    """Run a trial, or go on with it, and write what it gives."""
    target = EVIDENCE / f"{trial.name}.json"
    if target.exists():
        print(f"{trial.name}: done before", flush=True)
        return
    started, folder = time.monotonic(), RUNS / trial.name
    run = records.run_or_resume(trial.config(workers), folder)
    result = result_of(trial, run, RunFolder(folder).records())
    records.write(target, result)
    print(f"{trial.name}: {time.monotonic() - started:.0f} s {result['mean']}", flush=True)


def result_of(trial: Trial, run: Run, rounds: list[RoundRecord]) -> Result:
    """What every client's networks reach on its own and on common images, what they cost, and how the run went."""
    one = None if run.method.norm == "local" else run.deploy(run.fleet.tiers[0].budget).patches[0]
    clients = [_client(run, number, one) for number in range(run.data.num_clients)]
    keys = ("macs", "params", *clients[0]["accuracy"])
    mean = {key: fmean(each["accuracy"].get(key, each.get(key, 0)) for each in clients) for key in keys}
    fleet = run.fleet.capacity(run.data.sizes, 0, run.seeds)
    return {
        "config": CONFIG,
        "piece": trial.piece,
        "method": trial.method,
        "seed": trial.seed,
        "mean": {key: round(value, 4) for key, value in mean.items()},
        "distance": {tier.name: _distance(clients, fleet, tier.name) for tier in run.fleet.tiers},
        "bytes": sum(record.spent.bytes for record in rounds),
        "seconds": round(sum(record.seconds for record in rounds)),
        "seconds_by_stage": _by_stage(rounds),
        "bytes_before": sum(record.spent.bytes for record in rounds if _before_training(record)),
        "course": _course(clients, rounds),
        "clients": clients,
    }


def _client(run: Run, number: int, one: Patch | None) -> Result:
    """*Loc* and *Glo* of one client; FedAvg gives everyone the same ``one`` network, so both are that.

    *Loc* once more with the statistics that the client tracked in its last training, which is what the paper does.
    """
    fleet, model = run.fleet.capacity(run.data.sizes, run.state.round, run.seeds), run.model
    own_images = run.data.examples_for(number, "evaluate")
    common = run.data.test.subset(torch.arange(COMMON).numpy())
    if one is None:
        own = run.personal(number)
        kept = Checkpoint(run.state, run.memories).memory_of(number)[1]
        networks = {"loc": own}
        if own.cut != Cut.everything():
            networks["glo"] = _super_network(run, number)
        tracked = {"loc (tracked), own images": accuracy(model, norm.with_own(model, own, kept), own_images)}
    else:
        own = one
        networks, tracked = {"loc": own}, {}
    found = {
        network: (accuracy(model, patch, own_images), accuracy(model, patch, common))
        for network, patch in networks.items()
    }
    found.setdefault("glo", found["loc"])  # of the same network
    scores = {
        f"{network}, {place} images": found[network][index]
        for index, place in enumerate(("own", "common"))
        for network in ("loc", "glo")
    } | tracked
    cost, groups = run.model.cost(own.cut), run.model.groups
    units = {group: own.cut.count(group, groups.counts[group]) for group in groups.elastic}
    shrunk = [round(count / groups.counts[group], 4) for group, count in units.items()]
    return {
        "client": number, "tier": fleet[number].tier, "macs": cost.macs, "params": cost.params, "accuracy": scores,
        "units": units, "ratios": shrunk,
    }  # fmt: skip


def accuracy(model: ElasticModel, patch: Patch, images: Examples) -> float:
    """Of one network."""
    return round(evaluate_patches(model, [patch], images)["accuracy"], 4)


def _super_network(run: Run, number: int) -> Patch:
    """The whole network, its norms calibrated on the client's training images."""
    model = run.model
    patch = model.cut(run.state.weights, Cut.everything(), norm.travelling(model, "local"))
    data = run.data.client(number)
    statistics, _ = norm.measure_statistics(model, patch, data, run.method.local.batch_size)
    return norm.with_own(model, patch, statistics)


def _distance(clients: list[Result], fleet: Any, tier: str) -> float | None:
    """The mean L2 distance between the shrink ratios of two clients of a tier."""
    ratios = [torch.tensor(c["ratios"]) for c in clients if fleet[c["client"]].tier == tier]
    pairs = [float(torch.linalg.vector_norm(one - other)) for one, other in combinations(ratios, 2)]
    return round(fmean(pairs), 4) if pairs else None


def _before_training(record: RoundRecord) -> bool:
    """Warm-up and search: they cost, but their networks are not those that are trained in the end."""
    return record.method.get("stage", "fedpa") != "fedpa"


def _course(clients: list[Result], rounds: list[RoundRecord]) -> list[Result]:
    """What had been spent at every evaluation of the training, and the mean of *Loc* over clients."""
    share = {tier: count / len(clients) for tier, count in Counter(c["tier"] for c in clients).items()}
    training = {record.round for record in rounds if not _before_training(record)}
    courses = [course_of(rounds, tier=tier) for tier in share]
    return [
        {
            **at[0].figures(),
            "value": round(sum(n * each.value for n, each in zip(share.values(), at, strict=True)), 4),
        }
        for at in zip(*courses, strict=True)
        if at[0].round in training
    ]


def _by_stage(rounds: list[RoundRecord]) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for record in rounds:
        stage = record.method.get("stage", "training")
        seconds[stage] = round(seconds.get(stage, 0.0) + record.seconds, 1)
    return seconds


# Figures


def finished(piece: str, method: str) -> list[Result]:
    """The results of the seeds that are there."""
    run = SAME.get((piece, method), piece)
    return records.read(EVIDENCE / f"{Trial(run, method, seed).name}.json" for seed in SEEDS)


def draw() -> None:
    """What can be drawn of what is there, and a table."""
    found = {(p, m): finished(p, m) for p in PIECES for m in METHODS}
    there = {key: results for key, results in found.items() if results}
    for (piece, method), results in there.items():
        keys = results[0]["mean"]
        print(
            f"{piece:15} {method:12}", {key: round(fmean(r["mean"][key] for r in results), 4) for key in keys}
        )
        if method == "apfl":
            print(f"{piece:15} distance    ", [result["distance"] for result in results])
    _architectures(there)
    _costs(there)
    _traffic(there)


def _architectures(there: dict[tuple[str, str], list[Result]]) -> None:
    """Figure 3: the shrink ratio of every group for each client of a tier below the largest."""
    searched = [(piece, results[0]) for (piece, method), results in there.items() if method == "apfl"]
    panels = []
    for piece, result in searched:
        tier = "0.75" if piece.endswith("high") else "0.5"
        series = {
            f"client {c['client']}": list(enumerate(c["ratios"]))
            for c in result["clients"]
            if c["tier"] == tier
        }
        title = f"{piece}, tier {tier}: share of units kept, by channel group"
        panels.append(charts.lines(title, series, charts.HEIGHT * len(panels)))
    if panels:
        charts.write(records.FIGURES / "apfl-figure-3.svg", panels)


def _costs(there: dict[tuple[str, str], list[Result]]) -> None:
    """Figure 5: mean MACs and parameters of the clients' networks."""
    panels = []
    for key, unit, size in (("macs", "million MACs", 1e6), ("params", "thousand parameters", 1e3)):
        groups: dict[str, dict[str, float]] = {}
        for (piece, method), results in there.items():
            groups.setdefault(piece, {})[method] = fmean(r["mean"][key] for r in results) / size
        if groups:
            panels.append(
                charts.bars(f"mean {unit} of a client's network", groups, charts.HEIGHT * len(panels))
            )
    if panels:
        charts.write(records.FIGURES / "apfl-figure-5.svg", panels)


def _traffic(there: dict[tuple[str, str], list[Result]]) -> None:
    """Figure 4: megabytes until clients reach an accuracy, with warm-up and search and, as in the paper, without."""
    panels = []
    for piece in PIECES:
        groups: dict[str, dict[str, float]] = {}
        for target in (0.2, 0.25, 0.3, 0.35):
            found = groups.setdefault(f"{100 * target:g} %", {})
            for (_, method), results in ((key, each) for key, each in there.items() if key[0] == piece):
                reached = [_bytes_to(result["course"], target) for result in results]
                known = [value for value in reached if value is not None]
                if len(known) < len(results):
                    continue
                found[method] = fmean(known) / 1e6
                before = fmean(result["bytes_before"] for result in results)
                if before:
                    found[f"{method}, training alone"] = (fmean(known) - before) / 1e6
        if any(groups.values()):
            title = f"{piece}: megabytes until clients reach an accuracy"
            panels.append(charts.bars(title, groups, charts.HEIGHT * len(panels)))
    if panels:
        charts.write(records.FIGURES / "apfl-figure-4.svg", panels)


def _bytes_to(course: list[Result], target: float) -> float | None:
    return next((float(point["bytes"]) for point in course if point["value"] >= target), None)


def main() -> None:
    """Run what is asked for, then draw."""
    parser = records.arguments(__doc__, [*PIECES, "figures"])
    parser.add_argument("--workers", help="Worker processes; the default is all cores.")
    parser.add_argument(
        "--seeds", type=int, nargs="+", choices=SEEDS, default=SEEDS, help="Which of the seeds."
    )
    options = parser.parse_args()
    started = time.monotonic()
    for trial in trials([piece for piece in options.pieces or PIECES if piece in PIECES], options.seeds):
        if options.list:
            config = trial.config(options.workers)
            print(trial.name, config.method, config.rounds, "rounds")
        elif time.monotonic() - started < options.seconds:
            perform(trial, options.workers)
    if not options.list:
        draw()


if __name__ == "__main__":
    main()
