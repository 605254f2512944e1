"""``fedtailor resume``: go on with a run that was interrupted."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import typer

from fedtailor.cli.flower import Where, run_there
from fedtailor.cli.grouping import grouped
from fedtailor.cli.output import (
    JsonOption,
    RoundProgress,
    TrackOption,
    load_torch,
    notice,
    refuse_if_in_use,
    stoppable,
)
from fedtailor.cli.run import show
from fedtailor.errors import FedtailorError
from fedtailor.storage.files import CLIENTS


@grouped
def resume(
    folder: Annotated[Path, typer.Argument(help="The folder of the run, e.g. runs/first.")],
    allow_drift: Annotated[
        bool,
        typer.Option(
            "--allow-drift", help="Go on although config, model, data, versions or threads changed."
        ),
    ] = False,
    track: TrackOption = None,
    as_json: JsonOption = False,
    *,
    where: Where,
) -> None:
    """Go on with an interrupted run after its last saved round, to the result it would have had."""
    there = where.on_flower
    refuse_if_in_use(folder)
    if there != (folder / CLIENTS).is_file():
        told = (
            "ran on Flower: say where with --engine flower --superlink"
            if not there
            else "did not run on Flower"
        )
        raise FedtailorError(f"{folder} {told}")
    if there:
        with stoppable(folder, f"fedtailor resume {folder} {where.options}"):
            run_there((folder / "config.toml").read_text(encoding="utf-8"), folder, where, resume=True)
        return
    load_torch()
    from fedtailor.config import load_config, to_toml
    from fedtailor.report.likeness import flat
    from fedtailor.run.interface import resume as go_on
    from fedtailor.storage.run_folder import CONFIG
    from fedtailor.trackers import tracking

    settings = load_config(folder / CONFIG) if (folder / CONFIG).is_file() else None
    rounds = settings.rounds if settings else 0
    known = flat(tomllib.loads(to_toml(settings))) if settings else {}
    with (
        stoppable(folder, f"fedtailor resume {folder}"),
        RoundProgress(folder.name, rounds) as progress,
        tracking(track or [], folder, known, progress) as on_round,
    ):
        finished = go_on(
            folder, allow_drift=allow_drift, on_round=on_round, on_notice=notice, on_begin=progress.count
        )
    show(finished, folder, as_json)
