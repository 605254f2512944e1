"""Who is there, of a run on other machines: connected or not, which tier, the last answer, traffic, refused and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from fedtailor.charts.grouping import Runs
from fedtailor.charts.panel import Panel, Row
from fedtailor.elasticity.costing.budget import amount
from fedtailor.record import RoundRecord

KEY = "devices"
MOST_CLIENTS = 100  # in the table: those who answered last


def devices(runs: Runs) -> Panel:
    """The devices of the first run that has such."""
    for run in runs:
        if run.devices:
            return devices_panel(run.devices, run.records)
    return Panel(KEY, "Devices")


def devices_panel(found: Mapping[str, Any], records: Sequence[RoundRecord] = ()) -> Panel:
    """A row per client, a row per tier, and nodes that were not taken in."""
    clients = list(found["clients"])
    refused = _refused(records)
    latest = sorted(clients, key=lambda row: (row["last_answer"] or "", row["connected"]), reverse=True)
    shown = sorted(latest[:MOST_CLIENTS], key=lambda row: int(row["client"]))
    caption = f"Clients at {clock(found['when'])}"
    if len(clients) > MOST_CLIENTS:
        caption += f": the {MOST_CLIENTS} of {len(clients):,} that answered last"
    tables: list[tuple[str, Sequence[Row]]] = [(caption, _filled([_client(row, refused) for row in shown]))]
    traffic = [{"tier": tier or "unknown", **_spent(spent)} for tier, spent in found["tiers"].items()]
    tables += [("Traffic by tier, all that was sent and received", traffic)] if traffic else []
    strangers = [{"node": node, "why": reason} for node, reason in found["refused"].items()]
    tables += [("Nodes that were not taken in", strangers)] if strangers else []
    return Panel(KEY, "Devices", tables=tables)


def connected_in_words(found: Mapping[str, Any]) -> str:
    """How many clients are there.

    >>> connected_in_words({"clients": [{"connected": True}, {"connected": False}]})
    '1 of 2 clients connected'
    """
    clients = found["clients"]
    return f"{sum(bool(row['connected']) for row in clients):,} of {len(clients):,} clients connected"


def clock(when: str) -> str:
    """The time of day, in the words of the file.

    >>> clock("2026-03-01T12:30:05+00:00")
    '12:30:05 UTC'
    """
    return f"{when[11:19]} UTC"


def _client(row: Mapping[str, Any], refused: Mapping[int, Counter[str]]) -> Row:
    why = refused.get(int(row["client"]), Counter())
    return {
        "client": row["name"],
        "connected": "yes" if row["connected"] else "no",
        "tier": row["tier"],
        "last answer": row["last_answer"][11:19] if row["last_answer"] else "none yet",
        "refused": ", ".join(f"{count} x {reason}" for reason, count in why.most_common()),
        **_spent(row),
        "examples": f"{row['examples']:,}",
        "limits": row["limits"],
    }


def _filled(rows: Sequence[Row]) -> list[Row]:
    """The same without columns that say nothing in any row."""
    said = {name for row in rows for name, value in row.items() if value != ""}
    return [{name: value for name, value in row.items() if name in said} for row in rows]


def _spent(row: Mapping[str, Any]) -> Row:
    return {
        "asked": f"{row['asked']:,}",
        "answered": f"{row['answered']:,}",
        "sent to": amount("bytes", row["down"]),
        "received": amount("bytes", row["up"]),
    }


def _refused(records: Sequence[RoundRecord]) -> dict[int, Counter[str]]:
    found: dict[int, Counter[str]] = {}
    for record in records:
        for client, reasons in record.cohort.refused_by.items():
            found.setdefault(int(client), Counter()).update(reasons)
    return found
