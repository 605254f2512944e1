"""The top of a report: which data, fleet and network, how many rounds, which seeds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from fedtailor.charts.grouping import Runs
from fedtailor.charts.panel import Panel, ReportedRun
from fedtailor.errors import counted
from fedtailor.report.amounts import short_name
from fedtailor.report.likeness import dataset_of

MOST = 3  # different values that are told of one thing


def about(runs: Runs) -> Panel:
    """What the runs have in common, in a few words each; what they do not have is told as so many values."""
    methods = list(dict.fromkeys(run.variant for run in runs))
    compared = f"{len(methods)} methods, {counted(len(runs), 'run')}" if len(methods) > 1 else methods[0]
    facts = [
        ("Method" if len(methods) == 1 else "Compared", compared),
        ("Data", _values(runs, _data)),
        ("Fleet", _values(runs, _fleet)),
        ("Network", _values(runs, lambda run: short_name(str(run.config.get("model", {}).get("name", ""))))),
        ("Rounds", _rounds(runs)),
        ("Seeds", _seeds(run.seed for run in runs)),
    ]
    return Panel("about", "About", facts=[(name, value) for name, value in facts if value])


def _values(runs: Runs, tell: Callable[[ReportedRun], str]) -> str:
    found = [value for value in dict.fromkeys(map(tell, runs)) if value]
    more = f"; {len(found) - MOST} more" if len(found) > MOST else ""
    return "; ".join(found[:MOST]) + more


def _data(run: ReportedRun) -> str:
    found, settings = run.setup.get("data", {}), run.config.get("data", {})
    told = [counted(found["clients"], "client")] if "clients" in found else []
    if found.get("own_examples"):
        told.append("with examples of their own")
    elif "partition" in settings:
        alpha = f", alpha {settings['alpha']}" if "dirichlet" in str(settings["partition"]) else ""
        told.append(f"{settings['partition']} split{alpha}")
    if found.get("train_examples"):
        tested = f" and {found['test_examples']:,} test" if found.get("test_examples") else ""
        told.append(f"{found['train_examples']:,} training{tested} examples")
    told += [f"{found['classes']} classes"] if found.get("classes") else []
    return ": ".join(filter(None, (dataset_of(run), ", ".join(told))))


def _fleet(run: ReportedRun) -> str:
    tiers = run.setup.get("tiers", ())
    names, counts = [tier["name"] for tier in tiers], [tier.get("clients", 0) for tier in tiers]
    told = ", ".join(f"{count} x {name}" for name, count in zip(names, counts, strict=True))
    if len(tiers) > 1 and len(set(counts)) == 1:
        told = f"{len(tiers)} tiers of {counted(counts[0], 'client')} each, {names[0]} to {names[-1]}"
    fleet = run.config.get("fleet", {})
    name = str(fleet.get("devices") or fleet.get("name", ""))
    name = "" if fleet.get("tiers") else name  # tiers of one's own have no name together
    return ": ".join(filter(None, (name, told)))


def _rounds(runs: Runs) -> str:
    """``6 or 10, 5 clients in each``."""
    done = list(dict.fromkeys(map(_done, runs)))
    asked = dict.fromkeys(run.config.get("clients_per_round") for run in runs)
    told = f", {' or '.join(map(str, asked))} clients in each" if all(asked) else ""
    return " or ".join(done[:MOST]) + (" and others" if len(done) > MOST else "") + told


def _done(run: ReportedRun) -> str:
    done, planned = run.records[-1].round, run.config.get("rounds")
    return f"{done} of {planned}" if run.state != "finished" and planned and planned != done else str(done)


def _seeds(found: Iterable[int]) -> str:
    """``1 to 5``; gaps are shown.

    >>> _seeds([3, 1, 2, 1]), _seeds([1, 2]), _seeds([7])
    ('1 to 3', '1, 2', '7')
    """
    seeds: Sequence[int] = sorted(set(found))
    if len(seeds) > 2 and seeds[-1] - seeds[0] == len(seeds) - 1:
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))
