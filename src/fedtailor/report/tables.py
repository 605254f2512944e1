"""Tables of results for the terminal."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from fedtailor.charts.grouping import named, percent
from fedtailor.charts.terminal import Titled, table_of_methods
from fedtailor.record import RoundRecord, Spent, TierSpent, headline
from fedtailor.report.amounts import size
from fedtailor.report.targets import Records, Results, last_evaluation


def totals(records: Records) -> dict[str, Any]:
    """What all rounds together cost, training and measuring."""
    spent = sum((record.spent for record in records), Spent())
    refused = sum((Counter(record.cohort.refused) for record in records), Counter[str]())
    return {
        "rounds": records[-1].round,
        "bytes_down": spent.bytes_down,
        "bytes_up": spent.bytes_up,
        "macs": spent.macs,
        "seconds": round(sum(record.seconds for record in records), 2),
        "refused": dict(sorted(refused.items())),
        "abandoned": sum(record.cohort.abandoned for record in records),
        "resting": records[-1].cohort.resting,
    }


def comparison_table(
    title: str, results: Results, beyond: Mapping[str, Sequence[str]] | None = None
) -> Titled:
    """One row per method, one column per tier: the mean over seeds, and the deviation where there are several.

    ``beyond``: the tiers, for each method, that cannot run the network that they were evaluated on.
    """
    first = next(iter(results.values()))
    tiers = last_evaluation(first[0])
    metric = headline(tiers)
    spread_over = ", mean ± deviation over seeds" if len(first) > 1 else ""
    brackets = "; (in brackets): more than the tier can run" if any((beyond or {}).values()) else ""
    table = table_of_methods(results)
    for tier in tiers:
        table.add_column(tier, justify="right", no_wrap=True)
    table.add_column("sent", justify="right", no_wrap=True)
    for method, runs in results.items():
        ends = [last_evaluation(records) for records in runs]
        out_of_reach = (beyond or {}).get(method, ())
        texts = {tier: spread(metric, [end[tier][metric] for end in ends]) for tier in tiers}
        cells = [f"({text})" if tier in out_of_reach else text for tier, text in texts.items()]
        sent = statistics.mean(sum(record.spent.bytes for record in records) for records in runs)
        table.add_row(method, *cells, size(sent))
    return Titled(title, table, f"{named(metric)} per tier at the end{spread_over}{brackets}")


def join_by_tier(runs: Mapping[str, Records]) -> Records:
    """Several runs as one: each tier's figures from the run that was made for it, the costs of all together."""
    if len(runs) == 1:
        return next(iter(runs.values()))
    rounds = zip(*runs.values(), strict=True)
    return [_joined(dict(zip(runs, records, strict=True))) for records in rounds]


def _joined(by_tier: Mapping[str, RoundRecord]) -> RoundRecord:
    """One round of several runs; what a run has to show of itself alone is left out."""
    records = list(by_tier.values())
    refused = sum((Counter(record.cohort.refused) for record in records), Counter[str]())
    return replace(
        records[0],
        cohort=replace(records[0].cohort, refused=dict(refused), refused_by=_joined_refusals(records)),
        training=sum((record.training for record in records), Spent()),
        measuring=sum((record.measuring for record in records), Spent()),
        by_tier=_joined_tiers(records),
        tiers={tier: record.tiers[tier] for tier, record in by_tier.items() if record.tiers} or None,
        validation={tier: each.validation[tier] for tier, each in by_tier.items() if each.validation} or None,
        deployed={tier: each.deployed[tier] for tier, each in by_tier.items() if tier in each.deployed},
        method={},
        coverage=(),
        seconds=sum(record.seconds for record in records),
    )


def _joined_refusals(records: Records) -> dict[str, dict[str, int]]:
    """Client -> reason -> how often, in several runs together."""
    found: dict[str, Counter[str]] = {}
    for record in records:
        for client, reasons in record.cohort.refused_by.items():
            found.setdefault(client, Counter()).update(reasons)
    return {client: dict(reasons) for client, reasons in found.items()}


def _joined_tiers(records: Records) -> dict[str, TierSpent]:
    """What a client spent in several runs together: the same clients took part in each, with the same examples."""
    tiers = dict.fromkeys(tier for record in records for tier in record.by_tier)
    parts = {tier: [each.by_tier[tier] for each in records if tier in each.by_tier] for tier in tiers}
    return {
        tier: replace(
            sum(each, TierSpent()),
            asked=max(part.asked for part in each),
            answered=max(part.answered for part in each),
            examples=max(part.examples for part in each),
        )
        for tier, each in parts.items()
    }


def comparison_rows(results: Results) -> list[dict[str, Any]]:
    """The comparison as plain data: mean and sample deviation of every metric and tier."""
    answer = []
    for method, runs in results.items():
        ends = [last_evaluation(records) for records in runs]
        tiers = {
            tier: {
                metric: mean_and_deviation([end[tier][metric] for end in ends]) for metric in ends[0][tier]
            }
            for tier in ends[0]
        }
        answer.append(
            {
                "method": method,
                "seeds": len(runs),
                "tiers": tiers,
                "runs": [totals(records) for records in runs],
            }
        )
    return answer


def mean_and_deviation(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and sample standard deviation; one value has none."""
    deviation = statistics.stdev(values) if len(values) > 1 else None
    return {"mean": statistics.mean(values), "deviation": deviation}


def spread(metric: str, values: Sequence[float]) -> str:
    """``97.1±0.3``: five of them fit beside each other in a terminal of 80 columns."""
    factor = percent(metric)
    digits = 1 if factor > 1 else 3
    text = f"{factor * statistics.mean(values):.{digits}f}"
    return f"{text}±{factor * statistics.stdev(values):.{digits}f}" if len(values) > 1 else text


def shown(metric: str, value: float) -> str:
    """A metric for people: accuracy in per cent, everything else as a number."""
    if not math.isfinite(value):
        return str(value)
    return f"{percent(metric) * value:.1f} %" if percent(metric) > 1 else f"{value:.4g}"
