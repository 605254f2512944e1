"""Makes networks of a run into files, and describes them: the entries of a manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_structure

import fedtailor
from fedtailor.config import RunConfig
from fedtailor.data.batches import Examples
from fedtailor.deploying.formats import Format, Program, format_named
from fedtailor.deploying.inputs import Inputs, answers_of, input_specification, output_specification
from fedtailor.deploying.memory import peak_memory
from fedtailor.deploying.network import Network, examples_given, network_for, refuse_other_answers
from fedtailor.deploying.scoring import MOST_EXAMPLES, Meaning, Score, score
from fedtailor.deploying.wanted import SWITCHABLE, Wanted
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.run.result import Run
from fedtailor.run.setup import wishes_and_options
from fedtailor.steps import step
from fedtailor.storage.files import disk_errors, write_file

CALIBRATED_ON = 64  # training examples that ranges of int8 activations are taken from


class Maker:
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
        self._budget_kept(network)
        self.first = self.first or network
        plain = self._score(_answers(network), "evaluating", name)
        files = [self._write(network, form, part, plain) for form in self.formats]
        asked_for = {} if budget is None else {key: str(limit) for key, limit in budget.limits.items()}
        named = {"name": name, "tier": name if self.wanted.all_tiers else None, "client": client}
        return {**named, "budget": asked_for, **self._described(network, plain), "files": files}

    def switchable(self, part: Path) -> dict[str, Any]:
        """All tiers as one network whose width is chosen when it runs."""
        self.run.switchable()  # refuses pieces that do not lie inside one another, or share no weights
        found = {tier.name: network_for(self.run, tier.name, tier.budget) for tier in self.run.fleet.tiers}
        by_cut = {network.patches[0].cut.tag: network for network in found.values()}
        networks = sorted(by_cut.values(), key=lambda network: network.cost.macs)
        self.first = networks[-1]
        scores = [self._score(_answers(network), "evaluating", network.name) for network in networks]
        widths = [
            {"place": place, **self._described(network, measured)}
            for place, (network, measured) in enumerate(zip(networks, scores, strict=True))
        ]
        return {
            "name": SWITCHABLE, "tier": None, "client": None, "budget": {},
            **self._described(networks[-1], scores[-1]), "widths": widths,
            "files": [self._write_widths(networks, form, part) for form in self.formats],
        }  # fmt: skip

    def _write_widths(self, networks: Sequence[Network], form: Format, part: Path) -> dict[str, Any]:
        step(f"writing {len(networks)} widths as {form.name}")
        packed = form.pack_widths(networks)
        file, entry = self._put(packed, SWITCHABLE, form, part)
        entry["inputs"] = input_specification(networks[-1].input_names, networks[-1].example, form.any_batch)
        worst = 0.0
        for place, network in enumerate(networks):
            answers = form.open_width(file, place)(network.example)
            worst = max(worst, refuse_other_answers(answers, network, f"the file {file.name}"))
        alone = len(form.pack(networks[-1], None))
        if not form.shares_widths:
            self.notices.append(
                f"{file.name}: {form.name} keeps the weights of every width, {len(packed) / alone:.2f} times the size "
                "of the widest alone"
            )
        return {**entry, "difference": worst, "widest_alone": alone}

    def _described(self, network: Network, measured: Score | None) -> dict[str, Any]:
        cost = network.cost
        return {
            "width": network.patches[0].cut.tag, "members": len(network.patches),
            "params": cost.params, "macs": cost.macs, "bytes": cost.bytes,
            "peak_memory": peak_memory(network.module, network.example),
            "score": None if measured is None else measured.as_data(),
        }  # fmt: skip

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
        file, found = self._put(packed, network.name, form, part)
        found["inputs"] = input_specification(network.input_names, network.example, form.any_batch)
        program = form.open(file, self.run.model.module)
        if self.calibration is None:
            answers = program(network.example)
            found["difference"] = refuse_other_answers(answers, network, f"the file {file.name}")
            if form.name == "sparse":
                found["dense_size"] = len(format_named("safetensors").pack(network, None))
                self.notices.append(
                    f"{file.name}: {len(packed):,} bytes where all weights take {found['dense_size']:,}; inference "
                    "gains nothing, the zeros are put back before it runs"
                )
            return found
        after = self._score(program, "evaluating", file.name)
        shown = None if after is None else after.as_data()
        return {**found, "int8": form.int8, "score": shown, "score_before": plain and plain.metrics}

    def _put(self, packed: bytes, name: str, form: Format, part: Path) -> tuple[Path, dict[str, Any]]:
        file = part / self.wanted.file(name, form)
        with disk_errors(file, len(packed)):
            write_file(file, [packed])
        digest = hashlib.sha256(packed).hexdigest()
        return file, {"file": file.name, "format": form.name, "sha256": digest, "size": len(packed)}

    def _score(self, program: Program, doing: str, name: str) -> Score | None:
        if self.test is None or not self.meaning.metrics:
            return None
        step(f"{doing} {name}")
        return score(program, self.test, self.meaning)

    def common(self) -> dict[str, Any]:
        """What holds for all networks of the run."""
        run, first = self.run, self.first
        assert first is not None, "there is at least one network"
        return {
            "made_by": {"fedtailor": fedtailor.__version__, "torch": torch.__version__.partition("+")[0]},
            "run": {
                "name": run.folder.name if run.folder is not None else run.method.name,
                "method": run.method.name,
                "rounds": run.state.round,
                "data": run.setup.data.name,
                "model": type(run.model.module).__name__,
                "weights": _digest(run),  # tells this run from others of the same name
            },
            "model": model_words(run),
            "task": run.model.learning_task.name,
            "metrics": list(run.model.objective.metrics),
            "inputs": input_specification(first.input_names, first.example),
            "outputs": output_specification(first.expected),
            "preparation": {key: value for key, value in run.setup.data.inputs().items() if key != "labels"},
            "labels": list(run.setup.data.label_names),
            "licence": self.wanted.licence,
            "notes": self.wanted.notes,
        }


def _digest(run: Run) -> str:
    found = hashlib.sha256()
    for name, value in sorted(run.state.weights.items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def _answers(network: Network) -> Program:
    return lambda inputs: answers_of(network.module, inputs)


def model_words(run: Run) -> Mapping[str, Any] | None:
    """How the network at full size is built, in words, where words can say it."""
    config = run.origin.config
    if isinstance(config, RunConfig):
        inputs = run.setup.data.example()
        first = next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]
        _, options = wishes_and_options(config.model)
        return {
            "name": config.model["name"],
            "input_shape": list(first.shape[1:]),
            "num_classes": tree_leaves(run.model.output)[0].shape[-1],
            "symbols": run.setup.data.origin.symbols,
            "options": options,
        }
    called = (run.origin.call or {}).get("module")
    return {"name": called} if isinstance(called, str) else None
