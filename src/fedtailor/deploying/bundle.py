"""A bundle: one file for every network and format, ``manifest.json`` that describes them, and ``card.md``."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedtailor.deploying.card import card
from fedtailor.deploying.formats import format_named
from fedtailor.deploying.making import Maker
from fedtailor.deploying.wanted import SWITCHABLE, Wanted
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import CorruptError, FedtailorError, require
from fedtailor.run.result import Run
from fedtailor.storage.files import PART, disk_errors, replace_file, sync_folder
from fedtailor.storage.rows import table_in
from fedtailor.storage.run_folder import RunFolder

FORMAT = "fedtailor-bundle-1"
MANIFEST, CARD = "manifest.json", "card.md"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Written:
    """What a call of ``deploy`` left: the bundle, and the entries of its manifest that are new."""

    folder: Path
    networks: list[dict[str, Any]]
    notices: list[str] = field(default_factory=list)


def deploy(run: Run, wanted: Wanted, folder: Path | str | None = None, *, overwrite: bool = False) -> Written:
    """Write networks of a finished run as files that devices run; a bundle that is there is added to.

    Every network is compared with the training form before it is written, and every file once more by running it.
    Nothing is put in place before all of it is made and checked.
    """
    place = _place(run, folder)
    if run.folder is not None and not RunFolder(run.folder).finished:
        raise FedtailorError(
            f"{run.folder} has not come to its end: `fedtailor resume {run.folder}` goes on with it, and what it ends "
            "with is deployed"
        )
    formats = [format_named(name) for name in dict.fromkeys(wanted.formats)]
    for each in formats:
        each.require()
    known = read_manifest(place) if (place / MANIFEST).is_file() else None
    names = _names(run, wanted)
    _refuse_existing(place, [wanted.file(name, each) for name in names for each in formats], overwrite)
    maker = Maker(run, wanted, formats)
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}{PART}")
    with disk_errors(place, 0):
        part.mkdir(parents=True)
    try:
        if wanted.switchable:
            entries = [maker.switchable(part)]
        else:
            entries = [maker.entry(name, asked, part) for name, asked in names.items()]
        manifest = _joined(known, {"format": FORMAT, **maker.common()}, entries)
        _put_in_place(part, place, manifest)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Written(place, entries, maker.notices)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle."""
    file = folder / MANIFEST
    if not file.is_file():
        raise FedtailorError(f"{folder}: no {MANIFEST} there; expected a bundle of fedtailor deploy")
    found = table_in(file)
    if found.get("format") != FORMAT:
        raise CorruptError(f"{file}: expected the manifest of a bundle, format {FORMAT!r}")
    return found


def _place(run: Run, folder: Path | str | None) -> Path:
    if folder is not None:
        return Path(folder)
    if run.folder is None:
        raise FedtailorError("deploy: this run has no folder; say where, deploy(run, wanted, folder)")
    return run.folder / "deploy"


def _names(run: Run, wanted: Wanted) -> dict[str, tuple[Budget | None, int | None]]:
    """What the networks are called, and for which budget or client each is."""
    if wanted.client is not None:
        return {f"client-{wanted.client}": (None, wanted.client)}
    if wanted.switchable:
        return {SWITCHABLE: (None, None)}
    if wanted.budget is not None:
        limits = [f"{name}-{limit}" for name, limit in wanted.budget.limits.items()]
        require(len(limits) > 0, "budget", wanted.budget, "at least one limit")
        return {"-".join(limits): (wanted.budget, None)}
    return {tier.name: (tier.budget, None) for tier in run.fleet.tiers}


def _refuse_existing(place: Path, files: Sequence[str], overwrite: bool) -> None:
    there = [name for name in files if (place / name).exists()]
    if there and not overwrite:
        raise FedtailorError(f"{place / there[0]} exists already: --overwrite replaces it")
    if place.exists() and not place.is_dir():
        raise FedtailorError(f"{place} is a file: expected the folder of a bundle")


def _put_in_place(part: Path, place: Path, manifest: Manifest) -> None:
    """Move finished files to their place; the manifest, which vouches for them, comes last."""
    with disk_errors(place, 0):
        place.mkdir(parents=True, exist_ok=True)
        for file in sorted(part.iterdir()):
            os.replace(file, place / file.name)
        sync_folder(place)
    replace_file(place / CARD, [card(manifest).encode()])
    replace_file(place / MANIFEST, [json.dumps(manifest, indent=2).encode() + b"\n"])


def _joined(known: Manifest | None, manifest: Manifest, entries: list[dict[str, Any]]) -> Manifest:
    """The manifest with new entries in place of older ones of the same name; other files stay."""
    if known is not None and known["run"] != manifest["run"]:
        raise FedtailorError(
            f"this bundle is of another run ({known['run']['name']}, {known['run']['method']}, "
            f"{known['run']['rounds']} rounds): choose another folder with --output"
        )
    networks = {each["name"]: each for each in (known or {}).get("networks", [])}
    for entry in entries:
        files = {each["file"]: each for each in networks.get(entry["name"], {}).get("files", [])}
        files |= {each["file"]: each for each in entry["files"]}
        networks[entry["name"]] = {**entry, "files": list(files.values())}
    kept = {key: known[key] for key in ("licence", "notes") if known and not manifest[key]}
    ordered = sorted(networks.values(), key=lambda each: (each["macs"], each["name"]))
    return {**manifest, **kept, "networks": ordered}
