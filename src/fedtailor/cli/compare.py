"""``fedtailor compare``: several methods and seeds on the same data, fleet and budgets."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from fedtailor.cli.output import JsonOption, RoundProgress, SetOption, console, messages, print_json
from fedtailor.errors import FedtailorError, require


def compare(
    config: Annotated[Path, typer.Argument(help="A TOML file; its [method] is replaced by --methods.")],
    methods: Annotated[
        str,
        typer.Option(help="Names with settings behind colons, e.g. heterofl,fedavg:width=1/5."),
    ],
    seeds: Annotated[int, typer.Option(help="Repeat every method with this many seeds.")] = 1,
    overrides: SetOption = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds all runs.")] = Path("runs"),
    as_json: JsonOption = False,
) -> None:
    """Compare methods: each run has its own folder, finished ones are skipped, a table of all ends it."""
    from fedtailor.config import load_config
    from fedtailor.report.tables import comparison_rows, comparison_table

    require(seeds >= 1, "--seeds", seeds, "at least 1")
    base = load_config(config, overrides or [])
    specs = [spec.strip() for spec in methods.split(",") if spec.strip()]
    require(len(specs) > 0, "--methods", methods, "at least one name, such as heterofl,fedavg")
    require(len(set(specs)) == len(specs), "--methods", methods, "every method once")
    planned = {
        spec: [
            load_config(config, [*(overrides or []), *_overrides(spec, base.seed + number)])
            for number in range(seeds)
        ]
        for spec in specs
    }
    results = {
        spec: [_rows_of(spec, settings, runs / base.name) for settings in each]
        for spec, each in planned.items()
    }
    if as_json:
        print_json({"folder": str(runs / base.name), "methods": comparison_rows(results)})
        return
    console.print(
        comparison_table(f"{base.name}: {base.data.dataset}, {base.rounds} rounds, {seeds} seed(s)", results)
    )
    console.print(f"Files: {runs / base.name}/", markup=False)


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


def _rows_of(spec: str, settings: Any, parent: Path) -> list[dict[str, Any]]:
    """Run one configuration, or read what an earlier call has finished."""
    from fedtailor.config import to_toml
    from fedtailor.run import run_config
    from fedtailor.server.run_folder import RunFolder

    folder = RunFolder(parent / settings.name)
    if folder.finished:
        if (folder.path / "config.toml").read_text(encoding="utf-8") != to_toml(settings):
            raise FedtailorError(
                f"{folder.path} holds a finished run of another configuration: choose another name (--set name=...) "
                "or remove it"
            )
        messages.print(f"{spec}, seed {settings.seed}: finished before, skipped", markup=False)
        return folder.rows()
    if folder.path.exists():
        shutil.rmtree(folder.path)  # an earlier call was interrupted before this run came to its end
    with RoundProgress(f"{spec}, seed {settings.seed}", settings.rounds) as progress:
        run_config(settings, folder.path, progress)
    return folder.rows()
