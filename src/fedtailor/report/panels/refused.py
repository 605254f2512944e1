"""Whose updates were refused, how often and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from fedtailor.charts.grouping import Runs, by_setting
from fedtailor.charts.panel import Panel, ReportedRun, Row

MOST_CLIENTS = 20  # of one method, those with most refusals


def refused(runs: Runs) -> Panel:
    """A row per method, client and reason; nothing where every update was merged."""
    rows: list[Row] = []
    words: list[str] = []
    for setting, methods in by_setting(runs).items():
        at: Row = {"setting": setting} if setting else {}
        for variant, each in methods.items():
            found = sum((_of(run) for run in each), Counter[tuple[str, str]]())
            total = sum(sum(record.cohort.refused.values()) for run in each for record in run.records)
            asked = sum(record.cohort.asked for run in each for record in run.records)
            if total:
                where = f"With {setting}: " if setting else ""
                words.append(f"{where}{variant}: {total} refused, {asked} updates were asked for.")
            worst = Counter({client: 0 for client, _ in found})
            for (client, _), count in found.items():
                worst[client] += count
            shown = [client for client, _ in worst.most_common(MOST_CLIENTS)]
            told = sorted(found.items(), key=lambda item: (-item[1], item[0]))
            names = _names(each[0])
            rows += [
                {
                    "method": variant,
                    **at,
                    "client": names.get(client, client),
                    "reason": reason,
                    "times": times,
                }
                for (client, reason), times in told
                if client in shown
            ]
    if not words:
        return Panel("refused", "Refused updates")
    caption = f"Refused updates by client and reason, all seeds; at most {MOST_CLIENTS} clients of a method"
    return Panel("refused", "Refused updates", "\n".join(words), tables=[(caption, rows)] if rows else ())


def _of(run: ReportedRun) -> Counter[tuple[str, str]]:
    found: Counter[tuple[str, str]] = Counter()
    for record in run.records:
        for client, reasons in record.cohort.refused_by.items():
            found.update({(client, reason): times for reason, times in reasons.items()})
    return found


def _names(run: ReportedRun) -> Mapping[str, str]:
    """Client -> how it is called, where it has a name of its own."""
    rows = run.setup.get("data", {}).get("rows", ())
    known = {str(row["client"]): str(row["name"]) for row in rows}
    return {client: f"{client} ({name})" for client, name in known.items() if name != client}
