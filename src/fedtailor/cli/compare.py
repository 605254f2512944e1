"""``fedtailor compare``: several methods and seeds on the same data, fleet and budgets."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.cli.output import (
    JsonOption,
    RoundProgress,
    SetOption,
    console,
    messages,
    print_json,
    stoppable,
)
from fedtailor.cli.resume import notice
from fedtailor.errors import FedtailorError, require

if TYPE_CHECKING:
    from fedtailor.config import RunConfig
    from fedtailor.fleet import Tier


def compare(
    config: Annotated[Path, typer.Argument(help="A TOML file; its [method] is replaced by --methods.")],
    methods: Annotated[
        str,
        typer.Option(
            help="Names with settings behind colons, e.g. heterofl,fedavg:width=1/5; "
            "efd:global_width=each runs one model per tier and joins them into one row."
        ),
    ],
    seeds: Annotated[int, typer.Option(help="Repeat every method with this many seeds.")] = 1,
    overrides: SetOption = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds all runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compare methods: each run has its own folder, finished ones are skipped, interrupted ones go on."""
    from fedtailor.config import load_config
    from fedtailor.fleet.names import build_fleet
    from fedtailor.report.tables import comparison_rows, comparison_table, join_by_tier

    require(seeds >= 1, "--seeds", seeds, "at least 1")
    base = load_config(config, overrides or [])
    specs = [spec.strip() for spec in methods.split(",") if spec.strip()]
    require(len(specs) > 0, "--methods", methods, "at least one name, such as heterofl,fedavg")
    require(len(set(specs)) == len(specs), "--methods", methods, "every method once")
    tiers = build_fleet(base.fleet).tiers
    planned = {
        spec: [
            {
                tier: load_config(config, [*(overrides or []), *_overrides(one, base.seed + number)])
                for tier, one in expanded(spec, tiers).items()
            }
            for number in range(seeds)
        ]
        for spec in specs
    }
    folder = runs / base.name
    results = {
        spec: [
            join_by_tier(
                {tier: _rows_of(one, folder, "the same command") for tier, one in runs_of_seed.items()}
            )
            for runs_of_seed in each
        ]
        for spec, each in planned.items()
    }
    if as_json:
        print_json({"folder": str(folder), "methods": comparison_rows(results)})
        return
    repeated = "1 seed" if seeds == 1 else f"{seeds} seeds"
    title = f"{base.name}: {base.data.dataset}, {base.rounds} rounds, {repeated}"
    console.print(comparison_table(title, results))
    console.print(f"Files: {folder}/", markup=False)


def expanded(spec: str, tiers: Sequence[Tier]) -> dict[str, str]:
    """A setting ``each`` stands for every tier's width: one run for each tier, which together are one row."""
    if not any(setting.endswith("=each") for setting in spec.split(":")[1:]):
        return {"": spec}
    if any(tier.budget.width is None for tier in tiers):
        raise FedtailorError(
            f"--methods {spec!r}: each needs a fleet whose tiers have widths, such as uniform-5"
        )
    return {tier.name: spec.replace("=each", f"={tier.budget.width}") for tier in tiers}


def _overrides(spec: str, seed: int) -> list[str]:
    """``fedavg:width=1/5`` as config overrides; settings of the file's own method are dropped with it."""
    name, *settings = spec.split(":")
    for setting in settings:
        if "=" not in setting:
            raise FedtailorError(f"--methods {spec!r}: expected name:key=value, such as fedavg:width=1/5")
    pairs = "".join(
        f", {key} = {_value(value)}" for key, _, value in (text.partition("=") for text in settings)
    )
    return [f'method={{name = "{name}"{pairs}}}', f"seed={seed}", f'name="{_folder(spec)}-seed{seed}"']


def _value(text: str) -> str:
    """A setting as TOML: numbers and booleans as they are, everything else as a string."""
    import tomllib

    try:
        tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return f'"{text}"'
    return text


def _folder(spec: str) -> str:
    return "".join(character if character.isalnum() or character in "-_." else "-" for character in spec)


def _rows_of(settings: RunConfig, parent: Path, command: str) -> list[dict[str, Any]]:
    """Run one configuration, go on with what an earlier call began, or read what it finished."""
    from fedtailor.config import load_config, to_toml
    from fedtailor.run import resume, run_config
    from fedtailor.server.run_folder import CONFIG, RunFolder

    folder = RunFolder(parent / settings.name)
    title = settings.name.replace("-seed", ", seed ")
    there = folder.path.exists()
    if there and to_toml(load_config(folder.path / CONFIG)) != to_toml(settings):
        raise FedtailorError(
            f"{folder.path} holds a run of another configuration: choose another name (--set name=...) or remove it"
        )
    if folder.finished:
        messages.print(f"{title}: finished before, skipped", markup=False)
        return _ending(folder.rows(), settings)
    with stoppable(folder.path, command), RoundProgress(title, settings.rounds) as progress:
        if there:
            messages.print(f"{title}: interrupted before, going on", markup=False)
            resume(folder.path, on_row=progress, on_notice=notice)
        else:
            run_config(settings, folder.path, progress)
    return _ending(folder.rows(), settings)


def _ending(rows: list[dict[str, Any]], settings: RunConfig) -> list[dict[str, Any]]:
    """The rows, the last of them with the figures of the round that the run ended with."""
    last = rows[-1]
    if settings.stopping.restore_best:
        best = next(row for row in rows if row["round"] == last["best_round"])
        last = {**last, "tiers": best["tiers"]}
    return [*rows[:-1], last]
