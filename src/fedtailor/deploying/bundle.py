"""A bundle: one file for every network and format, ``manifest.json`` that describes them, and ``card.md``."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_structure

import fedtailor
from fedtailor.config import RunConfig
from fedtailor.data.batches import Examples
from fedtailor.deploying.card import card
from fedtailor.deploying.formats import Format, format_named
from fedtailor.deploying.inputs import Inputs, answers_of, input_specification, output_specification
from fedtailor.deploying.memory import peak_memory
from fedtailor.deploying.network import Network, examples_given, network_for, refuse_other_answers
from fedtailor.deploying.scoring import MOST_EXAMPLES, Meaning, Score, score
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import CorruptError, FedtailorError, require, unknown
from fedtailor.run.result import Run
from fedtailor.steps import step
from fedtailor.storage.files import PART, disk_errors, replace_file, sync_folder, write_file
from fedtailor.storage.run_folder import RunFolder

FORMAT = "fedtailor-bundle-1"
MANIFEST, CARD = "manifest.json", "card.md"
CALIBRATED_ON = 64  # training examples that ranges of int8 activations are taken from
QUANTISATIONS = ("int8",)

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Wanted:
    """Which networks of a run, in which formats; and what a manifest says that a run does not know."""

    budget: Budget | None = None
    all_tiers: bool = False
    client: int | None = None
    formats: tuple[str, ...] = ("safetensors",)
    quantize: str | None = None
    licence: str = ""  # of the files, for the manifest and the card
    notes: str = ""  # where the data is from, what the network is not for

    def __post_init__(self) -> None:
        chosen = [self.budget is not None, self.all_tiers, self.client is not None]
        if sum(chosen) != 1:
            raise FedtailorError("deploy: expected one of a budget, all tiers or a client")
        require(len(self.formats) > 0, "format", self.formats, "at least one")
        for name in self.formats:
            format_named(name)
        if self.quantize is not None and self.quantize not in QUANTISATIONS:
            raise unknown("quantisation", self.quantize, QUANTISATIONS)


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
    _refuse_existing(place, [_file(name, each, wanted) for name in names for each in formats], overwrite)
    maker = _Maker(run, wanted, formats)
    part = place.with_name(f".{place.name}.{secrets.token_hex(4)}{PART}")
    with disk_errors(place, 0):
        part.mkdir(parents=True)
    try:
        entries = [maker.entry(name, asked, part) for name, asked in names.items()]
        manifest = _joined(known, maker.manifest(), entries)
        _put_in_place(part, place, manifest)
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return Written(place, entries, maker.notices)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a bundle."""
    file = folder / MANIFEST
    if not file.is_file():
        raise FedtailorError(f"{folder}: no {MANIFEST} there; expected a bundle of fedtailor deploy")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptError(f"{file} cannot be read: {error}") from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
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
    if wanted.budget is not None:
        limits = [f"{name}-{limit}" for name, limit in wanted.budget.limits.items()]
        require(len(limits) > 0, "budget", wanted.budget, "at least one limit")
        return {"-".join(limits): (wanted.budget, None)}
    return {tier.name: (tier.budget, None) for tier in run.fleet.tiers}


def _file(name: str, form: Format, wanted: Wanted) -> str:
    stem = re.sub(r"[^A-Za-z0-9._+-]+", "_", name)
    return f"{stem}{'.int8' if wanted.quantize else ''}{form.suffix}"


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


class _Maker:
    """Makes the networks of one call and writes them into a folder that nobody sees yet."""

    def __init__(self, run: Run, wanted: Wanted, formats: Sequence[Format]) -> None:
        self.run, self.wanted, self.formats = run, wanted, formats
        self.notices: list[str] = []
        self.first: Network | None = None
        data, model = run.setup.data, run.model
        self.test: Examples | None = None
        if run.data_at_hand and len(data.test):
            own = None if wanted.client is None else data.client_test(wanted.client)
            self.test = examples_given(run, own or data.test, MOST_EXAMPLES)
        plain = len(tree_leaves(model.output)) == 1
        structure = None if plain and isinstance(model.output, torch.Tensor) else tree_structure(model.output)
        self.meaning = Meaning(model.learning_task, model.objective.metrics, data.label_names, structure)
        self.calibration = self._calibration() if wanted.quantize else None

    def _calibration(self) -> Inputs:
        if not self.run.data_at_hand:
            raise FedtailorError(
                "--quantize int8 needs training examples, which were not loaded: pass them, Run.load(folder, data=...)"
            )
        examples = examples_given(self.run, self.run.data.train, CALIBRATED_ON)
        return Inputs.of(examples.take(torch.arange(len(examples))))

    def entry(self, name: str, asked: tuple[Budget | None, int | None], part: Path) -> dict[str, Any]:
        """One network: its files, and what a manifest says of it."""
        budget, client = asked
        step(f"extracting {name}")
        network = network_for(self.run, name, budget, client)
        network = replace(network, about={**network.about, "model": model_words(self.run)})
        self._budget_kept(network)
        self.first = self.first or network
        plain = self._score(lambda inputs: answers_of(network.module, inputs), "evaluating", name)
        files = [self._write(network, form, part, plain) for form in self.formats]
        cost = network.cost
        return {
            "name": name,
            "tier": name if self.wanted.all_tiers else None,
            "client": client,
            "budget": {} if budget is None else {key: str(limit) for key, limit in budget.limits.items()},
            "width": network.patches[0].cut.tag,
            "members": len(network.patches),
            "params": cost.params,
            "macs": cost.macs,
            "bytes": cost.bytes,
            "peak_memory": peak_memory(network.module, network.example),
            "score": None if plain is None else plain.as_data(),
            "files": files,
        }

    def _budget_kept(self, network: Network) -> None:
        over = network.over_budget()
        if over and self.wanted.budget is not None:
            raise FedtailorError(
                f"{self.run.method.name} has no network for this budget: {'; '.join(over)}; nothing was written"
            )
        if over:
            self.notices.append(f"{network.name}: {self.run.method.name} gives it {'; '.join(over)}")

    def _write(self, network: Network, form: Format, part: Path, plain: Score | None) -> dict[str, Any]:
        """Make one file, run it, and describe it."""
        step(f"writing {network.name} as {form.name}")
        packed = form.pack(network, self.calibration)
        file = part / _file(network.name, form, self.wanted)
        with disk_errors(file, len(packed)):
            write_file(file, [packed])
        program = form.open(file, self.run.model.module)
        found: dict[str, Any] = {
            "file": file.name,
            "format": form.name,
            "sha256": hashlib.sha256(packed).hexdigest(),
            "size": len(packed),
            "inputs": input_specification(network.input_names, network.example, form.any_batch),
        }
        if self.calibration is None:
            answers = program(network.example)
            return {**found, "difference": refuse_other_answers(answers, network, f"the file {file.name}")}
        after = self._score(program, "evaluating", file.name)
        shown = None if after is None else after.as_data()
        return {**found, "int8": form.int8, "score": shown, "score_before": plain and plain.metrics}

    def _score(self, program: Callable[[Inputs], Any], doing: str, name: str) -> Score | None:
        if self.test is None or not self.meaning.metrics:
            return None
        step(f"{doing} {name}")
        return score(program, self.test, self.meaning)

    def manifest(self) -> Manifest:
        """What holds for all networks of the run."""
        run, first = self.run, self.first
        assert first is not None, "there is at least one network"
        return {
            "format": FORMAT,
            "made_by": {"fedtailor": fedtailor.__version__, "torch": torch.__version__.partition("+")[0]},
            "run": {
                "name": run.folder.name if run.folder is not None else run.method.name,
                "method": run.method.name,
                "rounds": run.state.round,
                "data": run.setup.data.name,
                "model": type(run.model.module).__name__,
            },
            "task": run.model.learning_task.name,
            "metrics": list(run.model.objective.metrics),
            "inputs": input_specification(first.input_names, first.example),
            "outputs": output_specification(first.expected),
            "preparation": {key: value for key, value in run.setup.data.inputs().items() if key != "labels"},
            "labels": list(run.setup.data.label_names),
            "licence": self.wanted.licence,
            "notes": self.wanted.notes,
        }


def model_words(run: Run) -> Mapping[str, Any] | None:
    """How the network at full size is built, in words, where words can say it."""
    config = run.origin.config
    if isinstance(config, RunConfig):
        from fedtailor.run.setup import OF_ANY_MODEL

        inputs = run.setup.data.example()
        first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]
        options = {key: value for key, value in config.model.items() if key not in OF_ANY_MODEL}
        return {
            "name": config.model["name"],
            "input_shape": list(first.shape[1:]),
            "num_classes": tree_leaves(run.model.output)[0].shape[-1],
            "symbols": run.setup.data.origin.symbols,
            "options": options,
        }
    called = (run.origin.call or {}).get("module")
    return {"name": called} if isinstance(called, str) else None
