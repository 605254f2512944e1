"""APFL: the paper's table and its figures 3 to 5 in small, on FEMNIST.

    FEDTAILOR_DATA=... python -m reproduce.apfl.run [--list] [--workers N] [experiment ...]
    python -m reproduce.apfl.run --draw

An experiment is a split and a fleet: APFL, FedUniform, and FedAvg at half and at full width, which are the same for
both fleets. ``apfl-inherit`` goes on from the warm-up's weights instead of new ones.
Call it again after an interruption: what is in results.json or finished below runs/apfl is not repeated. Scripts side
by side must not share runs: give them different experiments.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path
from statistics import fmean

import torch

from fedtailor.client.evaluate import evaluate_patches
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running import norm
from fedtailor.elasticity.running.norm import POLICIES
from fedtailor.methods.apfl.fedcs import SPENT
from fedtailor.record import RoundRecord
from fedtailor.report.accounting import Reached, course_of
from fedtailor.report.targets import Records
from fedtailor.run.interface import resume
from fedtailor.run.result import Run
from fedtailor.storage.checkpoint import Checkpoint
from fedtailor.storage.run_folder import RunFolder
from reproduce.apfl import tables
from reproduce.shared import charts
from reproduce.shared.figures import costs, percent
from reproduce.shared.papers import Paper, Variants
from reproduce.shared.results import Result, Results
from reproduce.shared.tables import Row

CONFIG = "reproduce/apfl/femnist-small.toml"
COMMON = 800  # images of the common test set on which every network is evaluated in the end
TARGETS = (0.4, 0.5, 0.6, 0.65)  # accuracies whose price in bytes is asked for

APFL = {"apfl": (), "apfl-inherit": ("method.inherit=true",)}
FEDAVG = {  # statistics measured, as in the others
    f"fedavg-{name}": (f'method={{name = "fedavg", width = "{width}", norm = "static"}}', "rounds=24")
    for name, width in (("half", "1/2"), ("full", "1"))
}
METHODS = {  # the baselines have no warm-up and no search: as many rounds as FedPA has
    **APFL,
    "feduniform": ('method={name = "feduniform", recalibrate = true}', "rounds=24"),
    **FEDAVG,
}


# What a finished run says


def networks(folder: RunFolder) -> Result:
    """What every client's networks reach on its own and on common images, and what they cost; means over clients."""
    run, records = resume(folder.path), folder.records()
    own = run.method.policy.kept_by_clients
    common = run.data.test.subset(torch.arange(COMMON).numpy())
    one = None if own else run.deploy(run.fleet.tiers[0].budget).patches[0]
    everyone = None if one is None else (one, accuracy(run.model, one, common))
    clients = [_client(run, number, common, everyone) for number in range(run.data.num_clients)]
    tiers = {
        tier.name: [client for client in clients if client["tier"] == tier.name] for tier in run.fleet.tiers
    }
    known = {tier: each for tier, each in tiers.items() if each}
    before = [record for record in records if _before_training(record)]
    return {
        **_mean(clients),
        **costs(records),
        "tiers": {
            tier: {"clients": len(each), **_mean(each), **_architectures(each)}
            for tier, each in known.items()
        },
        "bytes_before_training": sum(record.spent.bytes for record in before),
        "bytes_to_reach": _bytes_to_reach(clients, records),
        "seconds_by_stage": _by_stage(records),
        **_searched(records),
    }


def _client(run: Run, number: int, common: Examples, everyone: tuple[Patch, float] | None) -> Result:
    """*Loc* and *Glo* of one client; FedAvg gives ``everyone`` the same network, so both are that.

    *Loc* once more with the statistics that the client tracked in its last training, which is what the paper does.
    """
    clients, model = run.setup.clients(run.state.round), run.model
    own_images, tracked = run.data.examples_for(number, "evaluate"), {}
    if everyone is None:
        own = run.personal(number)
        kept = Checkpoint(run.state, run.memories).memory_of(number)[1]
        found = {"loc": own}
        if own.cut != Cut.everything():
            found["glo"] = _super_network(run, number)
        tracked = {"loc (tracked), own images": accuracy(model, norm.with_own(model, own, kept), own_images)}
        scores = {
            network: (accuracy(model, patch, own_images), accuracy(model, patch, common))
            for network, patch in found.items()
        }
    else:
        own, on_common = everyone
        scores = {"loc": (accuracy(model, own, own_images), on_common)}
    scores.setdefault("glo", scores["loc"])  # of the same network
    cost, groups = model.cost(own.cut), model.groups
    return {
        "client": number,
        "tier": clients[number].tier,
        "macs": cost.macs,
        "params": cost.params,
        "accuracy": {
            f"{network}, {place} images": scores[network][index]
            for index, place in enumerate(("own", "common"))
            for network in ("loc", "glo")
        }
        | tracked,
        "ratios": [
            round(own.cut.count(group, groups.counts[group]) / groups.counts[group], 4)
            for group in groups.elastic
        ],
    }


def accuracy(model: ElasticModel, patch: Patch, images: Examples) -> float:
    """Of one network, in per cent."""
    return percent(evaluate_patches(model, [patch], images)["accuracy"])


def _super_network(run: Run, number: int) -> Patch:
    """The whole network, its norms calibrated on the client's training images."""
    model = run.model
    patch = model.cut(run.state.weights, Cut.everything(), POLICIES["local"].travelling(model))
    data = run.data.client(number)
    statistics, _ = norm.measure_statistics(model, patch, data, run.method.local.batch_size)
    return norm.with_own(model, patch, statistics)


def _mean(clients: list[Result]) -> Result:
    """Over some clients: accuracies, and what a network costs."""
    names = clients[0]["accuracy"]
    return {
        "accuracy": {name: round(fmean(each["accuracy"][name] for each in clients), 2) for name in names},
        "network": {key: round(fmean(each[key] for each in clients)) for key in ("macs", "params")},
    }


def _architectures(clients: list[Result]) -> Result:
    """The mean L2 distance between the shrink ratios of two clients, and the ratios where clients differ."""
    ratios = [torch.tensor(client["ratios"]) for client in clients]
    pairs = [float(torch.linalg.vector_norm(one - other)) for one, other in combinations(ratios, 2)]
    distance = round(fmean(pairs), 4) if pairs else None
    shown = {"ratios": {str(client["client"]): client["ratios"] for client in clients}} if distance else {}
    return {"distance": distance, **shown}


def _before_training(record: RoundRecord) -> bool:
    """Warm-up and search: they cost, but their networks are not those that are trained in the end."""
    return bool(record.method.get("stage", "fedpa") != "fedpa")


def _bytes_to_reach(clients: list[Result], records: Records) -> dict[str, int | None]:
    """What had been sent when the mean of *Loc* over clients first reached an accuracy in an evaluation of training."""
    share = {tier: count / len(clients) for tier, count in Counter(c["tier"] for c in clients).items()}
    training = {record.round for record in records if not _before_training(record)}
    courses = [course_of(records, tier=tier) for tier in share]

    def value(at: tuple[Reached, ...]) -> float:
        return round(sum(part * each.value for part, each in zip(share.values(), at, strict=True)), 4)

    course = [at for at in zip(*courses, strict=True) if at[0].round in training]
    return {
        f"{100 * target:g}": next((at[0].bytes for at in course if value(at) >= target), None)
        for target in TARGETS
    }


def _by_stage(records: Records) -> dict[str, float]:
    seconds: dict[str, float] = {}
    for record in records:
        stage = record.method.get("stage", "training")
        seconds[stage] = round(seconds.get(stage, 0.0) + record.seconds, 1)
    return seconds


def _searched(records: Records) -> Result:
    """Of the networks that clients found: how well they did before training, and what they spend of their MACs."""
    rounds = [record for record in records if record.method.get("stage") == "search"]
    found = {client: each for record in rounds for client, each in record.reported.items()}
    if not found:
        return {}
    spent = {client: each for record in rounds for client, each in record.method["architectures"].items()}
    return {
        "accuracy_in_search": {client: percent(each["accuracy"]) for client, each in found.items()},
        "share_of_budget": {
            client: round(each[SPENT], 4) for client, each in spent.items() if each[SPENT] is not None
        },
    }


READ = (networks,)
OF_FLEET = {name: METHODS[name] for name in ("apfl", "feduniform")}  # to FedAvg both fleets are the same
SPLITS = {  # of about equal parts, so that every client holds enough images back
    "iid": (),
    "dirichlet": ("data.partition=dirichlet", "data.balanced=true", "data.limit=9000"),
    "writers": ("data.partition=natural", "data.makers_per_client=5", "data.limit=10000"),
}
EXPERIMENTS = tuple(
    Variants(f"{split}-{fleet}", CONFIG, methods, 3, (*own, f"fleet.name={fleet}"), READ)
    for split, own in SPLITS.items()
    for fleet, methods in (("high", METHODS), ("low", OF_FLEET))
)


# Figures

Found = dict[tuple[str, str], Row]  # setting, method -> seed -> figures
PAIRS = [
    ("apfl", "feduniform"),
    ("apfl", "fedavg-half"),
    ("feduniform", "fedavg-half"),
    ("apfl", "fedavg-full"),
    ("apfl-inherit", "apfl"),
]


def draw(results: Results, folder: Path) -> None:
    """What can be drawn of what is there, and the tables."""
    found: Found = {}
    for experiment in EXPERIMENTS:
        runs = results.runs(experiment.name)
        other = results.runs(experiment.name.replace("-low", "-high"))
        runs |= {method: other[method] for method in FEDAVG if method in other}
        found |= {(experiment.name, method): runs[method] for method in METHODS if runs.get(method)}
    if not found:
        return
    for number, panels in {3: _kept(found), 4: _traffic(found), 5: _network_costs(found)}.items():
        if panels:
            charts.write(folder / f"apfl-figure-{number}.svg", panels)
    for title, rows in {
        "Accuracy": tables.accuracies(found),
        "Differences": tables.differences(found, PAIRS),
        "HIGH minus LOW": tables.fleets(found, ("apfl", "feduniform")),
        "The own network against the whole one": tables.own_against_global(found),
        "Architectures": tables.architectures(found),
        "Megabytes": tables.traffic(found),
    }.items():
        print("\n".join(["", f"## {title}", "", *rows]))


def _kept(found: Found) -> list[str]:
    """Figure 3: the share of units kept of every group, for each client of a tier below the largest, first seed."""
    panels: list[str] = []
    for (setting, method), runs in found.items():
        if method == "apfl":
            tier = "0.75" if setting.endswith("high") else "0.5"
            ratios = next(iter(runs.values()))["tiers"][tier]["ratios"]
            series = {f"client {client}": list(enumerate(kept)) for client, kept in ratios.items()}
            title = f"{setting}, tier {tier}: share of units kept, by channel group"
            panels.append(charts.lines(title, series, charts.HEIGHT * len(panels)))
    return panels


def _network_costs(found: Found) -> list[str]:
    """Figure 5: mean MACs and parameters of the clients' networks."""
    panels: list[str] = []
    for key, unit, size in (("macs", "million MACs", 1e6), ("params", "thousand parameters", 1e3)):
        groups: dict[str, dict[str, float]] = {}
        for (setting, method), runs in found.items():
            groups.setdefault(setting, {})[method] = (
                fmean(run["network"][key] for run in runs.values()) / size
            )
        if groups:
            title = f"mean {unit} of a client's network"
            panels.append(charts.bars(title, groups, charts.HEIGHT * len(panels)))
    return panels


def _traffic(found: Found) -> list[str]:
    """Figure 4: megabytes until clients reach an accuracy, with warm-up and search and, as in the paper, without."""
    panels: list[str] = []
    for setting in dict.fromkeys(setting for setting, _ in found):
        groups: dict[str, dict[str, float]] = {f"{100 * target:g} %": {} for target in TARGETS}
        for target, method in (
            (target, method) for target in TARGETS for at, method in found if at == setting
        ):
            runs = found[setting, method]
            reached = [run["bytes_to_reach"][f"{100 * target:g}"] for run in runs.values()]
            if None in reached:
                continue
            bars = groups[f"{100 * target:g} %"]
            bars[method] = fmean(reached) / 1e6
            before = fmean(run["bytes_before_training"] for run in runs.values())
            if before:
                bars[f"{method}, training alone"] = (fmean(reached) - before) / 1e6
        if any(groups.values()):
            title = f"{setting}: megabytes until clients reach an accuracy"
            panels.append(charts.bars(title, groups, charts.HEIGHT * len(panels)))
    return panels


if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS, draw).main()
