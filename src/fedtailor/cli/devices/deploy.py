"""``fedtailor deploy``: the files that devices run, and which of them is for which device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.grouping import grouped
from fedtailor.cli.output import JsonOption, console, load_torch, notice, print_json, refuse_if_in_use
from fedtailor.errors import FedtailorError

if TYPE_CHECKING:
    from fedtailor.deploying.bundle import Written
    from fedtailor.deploying.wanted import Wanted


@dataclass(frozen=True)
class Which:
    """Which networks of a run."""

    budget: Annotated[
        str | None, typer.Option(help="Limits of a device, e.g. macs=0.2 or macs=5M,bytes=200kB.")
    ] = None
    all_tiers: Annotated[
        bool, typer.Option("--all-tiers", help="One network for each tier of the fleet.")
    ] = False
    client: Annotated[
        int | None,
        typer.Option(help="The own network of this client, where clients have such (apfl, fedpa)."),
    ] = None
    switchable: Annotated[
        bool,
        typer.Option(
            "--switchable", help="All tiers in one file (onnx, pte); the width is chosen while it runs."
        ),
    ] = False
    pick: Annotated[
        str | None,
        typer.Option(
            metavar="PROFILE",
            help="Write nothing: name the file of the bundle for a device, by limits (macs=5M,memory=20MB) or by "
            "the device's file (phone.toml, which bench-device writes).",
        ),
    ] = None


@dataclass(frozen=True)
class How:
    """In which form."""

    form: Annotated[
        list[str] | None,
        typer.Option(
            "--format",
            help="safetensors, pt2, onnx, pte, or sparse (ofa-fl). Repeatable; default: safetensors.",
        ),
    ] = None
    quantize: Annotated[
        str | None, typer.Option(help="int8: smaller numbers; accuracy before and after is shown.")
    ] = None
    licence: Annotated[str, typer.Option(help="Of the files, for manifest and card, e.g. apache-2.0.")] = ""
    notes: Annotated[str, typer.Option(help="On the data and the use, for manifest and card.")] = ""


@grouped
def deploy(
    run: Annotated[Path, typer.Argument(help="The folder of a finished run, or with --pick a bundle.")],
    which: Which,
    how: How,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="The bundle; default: deploy/ in the run's folder.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace files that are there already.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write networks of a finished run as files that devices run, with a manifest and a card."""
    if which.pick is not None:
        _pick(which, how, output or run, as_json)
        return
    refuse_if_in_use(run)
    load_torch()
    from fedtailor.deploying.bundle import deploy as write
    from fedtailor.run.result import Run

    wanted = _wanted(which, how)
    _refuse_unfinished(run)
    written = write(Run.load(run, device="cpu"), wanted, output, overwrite=overwrite)
    for sentence in written.notices:
        notice(sentence)
    print_json({"folder": str(written.folder), "networks": written.networks}) if as_json else _show(written)


def _refuse_unfinished(folder: Path) -> None:
    """Before data is read and a network traced."""
    from fedtailor.storage.run_folder import METRICS, RunFolder

    if (folder / METRICS).is_file() and not RunFolder(folder).finished:
        raise FedtailorError(
            f"{folder} has not come to its end: `fedtailor resume {folder}` goes on with it, and what it ends with "
            "is deployed"
        )


def _wanted(which: Which, how: How) -> Wanted:
    from fedtailor.deploying.wanted import Wanted
    from fedtailor.elasticity.costing.budget import Budget

    if sum([which.budget is not None, which.all_tiers, which.client is not None, which.switchable]) != 1:
        raise FedtailorError("expected one of --budget, --all-tiers, --client, --switchable or --pick")
    budget = None if which.budget is None else Budget.parse(which.budget)
    forms = tuple(how.form or ["safetensors"])
    return Wanted(
        budget, which.all_tiers, which.client, which.switchable, forms, how.quantize, how.licence, how.notes
    )


def _pick(which: Which, how: How, place: Path, as_json: bool) -> None:
    load_torch()
    from fedtailor.deploying.bundle import MANIFEST, read_manifest
    from fedtailor.deploying.picking import pick
    from fedtailor.elasticity.costing.budget import Budget
    from fedtailor.flower.device_file import device_limits

    assert which.pick is not None
    folder = place if (place / MANIFEST).is_file() else place / "deploy"
    forms = how.form or []
    if len(forms) > 1:
        raise FedtailorError("--pick names one file: expected at most one --format")
    limits = device_limits(Path(which.pick)) if which.pick.endswith(".toml") else Budget.parse(which.pick)
    network, file = pick(read_manifest(folder), limits, next(iter(forms), None))
    if as_json:
        print_json({"file": str(folder / file["file"]), "network": network["name"], **file})
    else:
        typer.echo(folder / file["file"])


def _show(written: Written) -> None:
    from fedtailor.report.amounts import short, size

    scores = [each["score"]["metrics"] for each in written.networks if each["score"]]
    metric = next(iter(scores[0]), None) if scores else None
    table = plain_table()
    int8 = {file["int8"] for network in written.networks for file in network["files"] if "int8" in file}
    last = "before int8" if int8 else "differs by"
    for column in ("network", "format", "size", "params", "MACs", "memory", metric or "score", last):
        named = column in ("network", "format")
        table.add_column(column, justify="left" if named else "right", no_wrap=True)
    for network in written.networks:
        for file in network["files"]:
            table.add_row(
                network["name"], file["format"], size(file["size"]), short(network["params"]),
                short(network["macs"]), size(network["peak_memory"]), *_judged(network, file, metric),
            )  # fmt: skip
    console.print(Titled(f"Deployed to {written.folder}/", table))
    for words in sorted(int8):
        console.print(f"int8: {words}", markup=False)


def _judged(network: dict[str, Any], file: dict[str, Any], metric: str | None) -> tuple[str, str]:
    """The first metric, and how far answers are from those of the training form; of int8, the metric before."""
    plain = (network["score"] or {}).get("metrics", {}).get(metric)
    if "int8" not in file:
        return ("-" if plain is None else f"{plain:.4f}"), f"{file['difference']:.0e}"
    after = (file["score"] or {}).get("metrics", {}).get(metric)
    return ("-", "not measured") if after is None else (f"{after:.4f}", f"{plain:.4f}")
