"""``fedtailor run``: train one global model over unequal clients and show the result."""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedtailor.cli.flower import Where, run_there
from fedtailor.cli.grouping import grouped
from fedtailor.cli.output import (
    JsonOption,
    RoundProgress,
    SetOption,
    TrackOption,
    console,
    load_torch,
    messages,
    notice,
    print_json,
    stoppable,
)
from fedtailor.cli.timing import Times, timed
from fedtailor.errors import FedtailorError, visible
from fedtailor.storage.files import refuse_existing

if TYPE_CHECKING:
    from fedtailor.run.result import Run

MOST_CLIENTS = 10  # that are named
MOST_ERRORS = 5  # that clients' code raised and that are told


@grouped
def run(
    config: Annotated[Path, typer.Argument(help="A TOML file; `fedtailor init` writes one.")],
    overrides: SetOption = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds all runs.")] = Path("runs"),
    watch: Annotated[
        bool, typer.Option("--watch", help="Show the run in the browser while it goes on.")
    ] = False,
    track: TrackOption = None,
    profile: Annotated[bool, typer.Option("--profile", help="Say where the time of a round goes.")] = False,
    as_json: JsonOption = False,
    *,
    where: Where,
) -> None:
    """Train one global model over unequal clients, and show the accuracy of every tier."""
    there = where.on_flower
    if there and (watch or track or profile or as_json):
        raise FedtailorError(
            "--watch, --track, --profile and --json belong to runs on this machine, not to --engine flower"
        )
    name = _name(config, overrides or [])
    if name is not None:
        refuse_existing(runs / name)
    load_torch()
    from fedtailor.config import load_config, to_toml
    from fedtailor.report.likeness import flat
    from fedtailor.run.interface import both, run_config
    from fedtailor.trackers import tracking

    settings = load_config(config, overrides or [], notice)
    folder = runs / settings.name
    if there:
        with stoppable(folder, f"fedtailor resume {folder} {where.options}"):
            run_there(to_toml(settings), folder, where)
        return
    title = f"{settings.name} ({settings.method['name']})"
    command = f"fedtailor resume {folder}"
    known = flat(tomllib.loads(to_toml(settings)))
    with (
        stoppable(folder, command),
        _watched(folder) if watch else nullcontext(),
        RoundProgress(title, settings.rounds) as progress,
        tracking(track or [], folder, known, progress) as on_round,
        timed() if profile else nullcontext() as times,
    ):
        finished = run_config(settings, folder, both(on_round, times.note if times else None), notice)
    show(finished, folder, as_json, times)


@contextmanager
def _watched(folder: Path) -> Iterator[None]:
    from fedtailor.report.live import watching

    with watching(folder) as server:
        messages.print(f"Watch it at {server.url}", markup=False)
        yield
    messages.print(f"The page has ended with the run: fedtailor watch {folder} shows it again", markup=False)


def show(finished: Run, folder: Path, as_json: bool, times: Times | None = None) -> None:
    """The end of a run, for a person or a program; with it where the time went, if that was measured."""
    from fedtailor.run.summary import choice_in_words, run_summary, tier_table

    failed = failed_clients(finished)
    summary = {**run_summary(finished), "refused_by": refused_clients(finished), "failed": failed}
    if as_json:
        print_json({"folder": str(folder), **summary, **({"profile": times.value()} if times else {})})
        return
    console.print(tier_table(f"{finished.method.name} on {finished.data.name}", finished))
    if choice := choice_in_words(finished):
        console.print(choice, markup=False)
    if summary["refused"]:
        counted = ", ".join(f"{count} x {reason}" for reason, count in summary["refused"].items())
        console.print(f"Refused updates: {counted}{visible(_by_client(summary['refused_by']))}", markup=False)
    for error, clients in list(failed.items())[:MOST_ERRORS]:
        console.print(f"Failed: {visible(_listed(clients))}, {visible(error)}", markup=False, soft_wrap=True)
    if "too_small" in summary:
        tiers, clients = ", ".join(summary["too_small"]["tiers"]), summary["too_small"]["clients"]
        console.print(f"Left out, because no piece fits: {clients} clients (tier {tiers})", markup=False)
    if summary["abandoned"]:
        console.print(
            f"Abandoned for want of a quorum and tried again: {summary['abandoned']} x", markup=False
        )
    if summary["resting"]:
        console.print(f"Clients not asked any more after refused updates: {summary['resting']}", markup=False)
    console.print(
        f"Files: {folder}/  (config.toml, environment.json, metrics.jsonl, weights.safetensors)", markup=False
    )
    if times is not None:
        times.show(console)


def refused_clients(finished: Run) -> dict[str, dict[str, int]]:
    """How often each client was refused for which reason, by the names of the clients."""
    found: dict[str, Counter[str]] = {}
    for record in finished.history:
        for client, reasons in record.cohort.refused_by.items():
            found.setdefault(_called(finished, client), Counter()).update(reasons)
    return {name: dict(reasons) for name, reasons in found.items()}


def failed_clients(finished: Run) -> dict[str, list[str]]:
    """What clients' code raised, and the names of the clients whose it did, the commonest error first."""
    found: dict[str, Counter[str]] = {}
    for record in finished.history:
        for error, clients in record.failed.items():
            found.setdefault(error, Counter()).update(_called(finished, client) for client in clients)
    often = sorted(found.items(), key=lambda item: -item[1].total())
    return {error: list(clients) for error, clients in often}


def _called(finished: Run, client: str) -> str:
    """The name of a client; an answer may come under a number that nobody has."""
    data = finished.data
    known = client.isdecimal() and int(client) < data.num_clients
    return data.client_name(int(client)) if known else client


def _by_client(refused: Mapping[str, Mapping[str, int]]) -> str:
    """Who was refused most often, for the end of a sentence."""
    times = Counter({name: sum(reasons.values()) for name, reasons in refused.items()})
    shown = [f"{name} ({count} x)" for name, count in times.most_common(MOST_CLIENTS)]
    more = f" and {len(times) - MOST_CLIENTS:,} more" if len(times) > MOST_CLIENTS else ""
    return f"; of client{'s' if len(times) > 1 else ''} {', '.join(shown)}{more}" if shown else ""


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_CLIENTS:,} more" if len(names) > MOST_CLIENTS else ""
    return f"client{'s' if len(names) > 1 else ''} {', '.join(names[:MOST_CLIENTS])}{more}"


def _name(config: Path, overrides: list[str]) -> str | None:
    """The run's name as far as it can be told without PyTorch; what is wrong with the config is said later."""
    try:
        name = tomllib.loads(config.read_text(encoding="utf-8")).get("name", "run")
    except (OSError, ValueError, RecursionError):
        return None
    for override in overrides:
        key, _, value = override.partition("=")
        name = value.strip().strip("\"'") if key.strip() == "name" else name
    return str(name)
