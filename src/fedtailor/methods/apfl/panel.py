"""The architectures that clients found, for a report: the paper's figures 3 and 5, and how far apart they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

from fedtailor.charts.grouping import by_setting, round_to, setting_filter
from fedtailor.charts.panel import Chart, Panel, ReportedRun, Row, axis, bars, heat, lines, panel

ALL = "all"  # clients of every tier

Found = Mapping[str, Any]  # of one client: macs, params, and the share of units kept of every group


@panel("fedcs")
@panel("apfl")
def architectures(runs: Sequence[ReportedRun]) -> Panel | None:
    """Which layers clients kept, and what their networks cost beside one width for all layers."""
    kept: list[Row] = []
    costs: list[Row] = []
    summary: list[Row] = []
    for setting, methods in by_setting(runs).items():
        for variant, each in methods.items():
            at = {"method": variant, **({"setting": setting} if setting else {})}
            kept += [{**at, **row} for row in _kept(each[0])]
            tiers = [_by_tier(run) for run in each]
            for tier in dict.fromkeys(tier for found in tiers for tier in found):
                seeds = [(found[tier], run) for found, run in zip(tiers, each, strict=True) if tier in found]
                mean = _mean_costs(tier, seeds)
                costs += [{**at, "tier": tier, **row} for row in mean]
                summary.append({**at, **_summary(tier, seeds, mean)})
    if not kept:
        return None
    group, client = axis("group", "channel group", "nominal", sort=None), axis("client", "client", "ordinal")
    share = axis("kept", "units kept (%)", scale={"domain": [0, 100]})
    shown = Chart(
        "architectures", "Share of units kept, by channel group",
        "One seed. Where clients of a class differ, their data asked for different layers.",
        kept, {"clients": heat(group, client, share), "lines": lines(group, share, series="client")},
        ("method", "tier", *setting_filter(runs)),
    )  # fmt: skip
    by_tier = axis("tier", "device class", "ordinal", sort=None)
    views = {
        "MACs": bars(by_tier, axis("megamacs", "million MACs of a prediction"), series="network"),
        "parameters": bars(by_tier, axis("parameters", "parameters"), series="network"),
    }
    text = "Mean over clients and seeds. 'uniform' has one width for all layers, the widest within the same budget."
    beside = Chart(
        "architecture-costs", "What a client's network costs", text, costs, views,
        ("method", *setting_filter(runs)),
    )  # fmt: skip
    caption = (
        "Networks found; distance is the mean L2 distance between the kept shares of two clients of a class"
    )
    return Panel(
        "architectures", "Channel search: architectures", charts=[shown, beside], tables=[(caption, summary)]
    )


def _found(run: ReportedRun) -> dict[str, Found]:
    """Client -> what it found."""
    rounds = (record.method.get("architectures", {}) for record in run.records)
    return {client: found for each in rounds for client, found in each.items()}


def _tier(run: ReportedRun, client: str) -> str:
    return str(run.setup.get("members", {}).get(client, ALL))


def _by_tier(run: ReportedRun) -> dict[str, list[Found]]:
    """Tier -> what its clients found, in the order of tiers, then all clients."""
    tiers: dict[str, list[Found]] = {tier["name"]: [] for tier in run.setup.get("tiers", ())}
    for client, found in _found(run).items():
        tiers.setdefault(_tier(run, client), []).append(found)
    everyone = list(_found(run).values())
    return {tier: found for tier, found in {**tiers, ALL: everyone}.items() if found}


def _kept(run: ReportedRun) -> list[Row]:
    found = sorted(_found(run).items(), key=lambda item: int(item[0]))
    return [
        {"tier": tier, "client": client, "group": group, "kept": round_to(100 * share)}
        for client, each in found
        for tier in dict.fromkeys((_tier(run, client), ALL))
        for group, share in each["kept"].items()
    ]


def _mean_costs(tier: str, seeds: Sequence[tuple[list[Found], ReportedRun]]) -> list[Row]:
    """The networks found, and those of one width for all layers at the same budgets."""
    found = [each for networks, _ in seeds for each in networks]
    rows = [_cost("found", fmean(f["macs"] for f in found), fmean(f["params"] for f in found))]
    tiers = {each["name"]: each for each in seeds[0][1].setup.get("tiers", ())}
    same = [tiers[tier]] * tiers[tier]["clients"] if tier in tiers else []
    if tier == ALL:
        same = [each for each in tiers.values() for _ in range(each["clients"])]
    if same:
        rows.append(_cost("uniform", fmean(t["macs"] for t in same), fmean(t["params"] for t in same)))
    return rows


def _cost(network: str, macs: float, params: float) -> Row:
    return {"network": network, "megamacs": round_to(macs / 1e6, 4), "parameters": round(params)}


def _summary(tier: str, seeds: Sequence[tuple[list[Found], ReportedRun]], costs: Sequence[Row]) -> Row:
    """One row of the table."""
    row: Row = {"device class": tier, "clients": len(seeds[0][0])}
    for cost in costs:
        row |= {f"million MACs, {cost['network']}": cost["megamacs"]}
        row |= {f"parameters, {cost['network']}": cost["parameters"]}
    distances = [mean_distance(found) for found, _ in seeds]
    known = [each for each in distances if each is not None]
    return {**row, "distance": round_to(fmean(known), 3) if known and tier != ALL else "-"}


def mean_distance(found: Sequence[Found]) -> float | None:
    """Between the kept shares of two clients, over all pairs; None where there is no pair."""
    shares = [list(each["kept"].values()) for each in found]
    pairs = [math.dist(one, other) for one, other in combinations(shares, 2)]
    return fmean(pairs) if pairs else None
