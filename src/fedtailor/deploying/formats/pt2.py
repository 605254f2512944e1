"""``.pt2``: the program of ``torch.export``, for devices with PyTorch; nothing of the user's code is needed."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fedtailor.deploying.formats.base import Format, Program
from fedtailor.deploying.formats.exporting import exported, first_line, quiet
from fedtailor.deploying.inputs import Inputs, Specification, flat_answers, input_entry
from fedtailor.deploying.int8 import with_int8_weights
from fedtailor.deploying.network import Network
from fedtailor.errors import CorruptError, FedtailorError


class Pt2(Format):
    """One program, for any number of examples where the network allows that."""

    name, suffix = "pt2", ".pt2"
    int8 = "weights alone, computed in floats: smaller, no faster"

    def pack(self, network: Network, calibration: Inputs | None) -> bytes:
        module = network.module if calibration is None else with_int8_weights(network.module)
        program = exported(module, network.example, any_batch=True)
        program.example_inputs = None  # they would be pickled
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # lines and folders of this machine, which no device needs
        buffer = io.BytesIO()
        with quiet():
            torch.export.save(program, buffer)
        return buffer.getvalue()

    def open(self, file: Path, module: nn.Module | None = None) -> Program:  # noqa: ARG002
        program = _loaded(file).module()

        @torch.no_grad()
        def answer(inputs: Inputs) -> tuple[Tensor, ...]:
            return flat_answers(program(*inputs.args, **inputs.kwargs))

        return answer

    def inputs(self, file: Path) -> Specification:
        program = _loaded(file)
        values = {node.name: node.meta["val"] for node in program.graph.nodes if node.op == "placeholder"}
        taken = [name for name in program.graph_signature.user_inputs if isinstance(name, str)]
        _, named = program.call_spec.in_spec.children()  # of what is given by place, and by name
        places = [*[None] * (len(taken) - named.num_leaves), *(named.context or [])]
        return [
            input_entry(
                known or name, values[name].dtype, list(values[name].shape), keyword=known is not None
            )
            for name, known in zip(taken, places, strict=True)
        ]


def _loaded(file: Path) -> ExportedProgram:
    refuse_pickles(file)
    try:
        with quiet():
            return torch.export.load(file)
    except (RuntimeError, ValueError, KeyError, AssertionError) as error:
        raise CorruptError(f"{file} cannot be read: {first_line(error)}") from error


def refuse_pickles(file: Path) -> None:
    """PyTorch unpickles parts of such a file if they are there; files of fedtailor have none."""
    try:
        with zipfile.ZipFile(file) as archive:
            if damaged := archive.testzip():
                raise CorruptError(
                    f"{file} is damaged: its part {damaged} has other bytes than it was written with"
                )
            for name in archive.namelist():
                inner = name.partition("/")[2]
                pickled = inner.endswith(".pt") and archive.getinfo(name).file_size > 0
                if inner.endswith("_config.json"):
                    config = json.loads(archive.read(name)).get("config", {})
                    pickled = any(entry.get("use_pickle") for entry in config.values())
                if pickled or inner.endswith((".so", ".pkl", ".cpp")):
                    raise FedtailorError(
                        f"{file}: its part {inner} could run code when it is loaded; expected one of fedtailor deploy"
                    )
    except (OSError, zipfile.BadZipFile, ValueError, AttributeError) as error:
        if isinstance(error, FedtailorError):
            raise
        raise CorruptError(
            f"{file} cannot be read: {first_line(error)}; expected a file of torch.export"
        ) from error
