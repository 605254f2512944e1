"""APFL's tables, written from results.json: its table 1, how far architectures differ, and what networks cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from statistics import fmean

from reproduce.shared.results import Result
from reproduce.shared.tables import Row, between, line, lines, mean_and_deviation

SCORES = ("loc, own images", "glo, own images", "loc, common images", "glo, common images")

Found = Mapping[tuple[str, str], Row]  # setting, method -> seed -> figures


def accuracies(found: Found) -> Iterator[str]:
    """Mean over clients and seeds, deviation over seeds; what a client's network costs; megabytes of the run."""
    names = [name.replace(" images", "") for name in SCORES]
    yield from lines(["setting", "method", *names, "million MACs", "thousand parameters", "MB"])
    for (setting, method), row in found.items():
        cells = [mean_and_deviation(_of(row, "accuracy", score)) for score in SCORES]
        macs, params = (fmean(_of(row, "network", key)) for key in ("macs", "params"))
        sent = fmean(run["bytes"] for run in row.values()) / 1e6
        yield line([setting, method, *cells, f"{macs / 1e6:.2f}", f"{params / 1e3:.1f}", f"{sent:.0f}"])


def differences(found: Found, pairs: list[tuple[str, str]]) -> Iterator[str]:
    """One method minus another in every setting that has both, with the 95 % interval."""
    yield from lines(["setting", "difference", *(name.replace(" images", "") for name in SCORES)])
    for setting in dict.fromkeys(setting for setting, _ in found):
        for one, other in pairs:
            if (setting, one) in found and (setting, other) in found:
                cells = _compared(found[setting, other], found[setting, one])
                yield line([setting, f"{one} − {other}", *cells])


def fleets(found: Found, methods: tuple[str, ...]) -> Iterator[str]:
    """HIGH minus LOW, for every split and method."""
    yield from lines(["split", "method", *(name.replace(" images", "") for name in SCORES)])
    for split in dict.fromkeys(setting.rpartition("-")[0] for setting, _ in found):
        for method in methods:
            high, low = found.get((f"{split}-high", method)), found.get((f"{split}-low", method))
            if high and low:
                yield line([split, method, *_compared(low, high)])


def own_against_global(found: Found) -> Iterator[str]:
    """*Loc* minus *Glo*, on a client's own images."""
    yield from lines(["setting", "method", "Loc − Glo, own images"])
    for (setting, method), row in found.items():
        own, whole = (_of(row, "accuracy", f"{name}, own images") for name in ("loc", "glo"))
        if own != whole:
            yield line([setting, method, between(whole, own)])


def architectures(found: Found) -> Iterator[str]:
    """How far two clients' networks differ by tier, what they spend, and what they cost beside a uniform width."""
    head = [
        "setting",
        "tier",
        "distance by seed",
        "least share of MACs spent",
        "parameters beside FedUniform",
    ]
    yield from lines(head)
    for (setting, method), row in found.items():
        if method != "apfl":
            continue
        uniform = found.get((setting, "feduniform"), {})
        for tier in next(iter(row.values()))["tiers"]:
            tiers = {seed: run["tiers"].get(tier, {}) for seed, run in row.items()}
            if not any(each.get("distance") for each in tiers.values()):
                continue
            distances = ", ".join(
                f"{each['distance']:.2f}" for each in tiers.values() if each.get("distance")
            )
            spent = min(_spent(run, tier) for run in row.values())
            shares = [
                100 * each["network"]["params"] / uniform[seed]["tiers"][tier]["network"]["params"] - 100
                for seed, each in tiers.items()
                if seed in uniform and each
            ]
            parameters = f"{mean_and_deviation(shares)} %" if shares else ""
            yield line([setting, tier, distances, f"{100 * spent:.1f} %", parameters])


def traffic(found: Found) -> Iterator[str]:
    """Megabytes until the mean over clients reached an accuracy; behind the stroke without warm-up and search."""
    targets = list(next(iter(next(iter(found.values())).values()))["bytes_to_reach"])
    yield from lines(["setting", "method", *(f"{target} %" for target in targets)])
    for (setting, method), row in found.items():
        before = fmean(run["bytes_before_training"] for run in row.values()) / 1e6
        cells = []
        for target in targets:
            reached = [run["bytes_to_reach"][target] for run in row.values()]
            if None in reached:
                cells.append("not by all")
                continue
            sent = fmean(reached) / 1e6
            cells.append(f"{sent:.1f} / {sent - before:.1f}" if before else f"{sent:.1f}")
        yield line([setting, method, *cells])


def _of(row: Row, part: str, key: str) -> list[float]:
    return [run[part][key] for run in row.values()]


def _compared(first: Row, second: Row) -> list[str]:
    """``second`` minus ``first`` for every score, over the seeds that both have."""
    seeds = [seed for seed in first if seed in second]
    return [
        between([first[s]["accuracy"][score] for s in seeds], [second[s]["accuracy"][score] for s in seeds])
        for score in SCORES
    ]


def _spent(run: Result, tier: str) -> float:
    """The least that a client of a tier spends of the MACs that its budget allows."""
    clients = run["tiers"].get(tier, {}).get("ratios", {})
    return min((run["share_of_budget"][client] for client in clients), default=1.0)
