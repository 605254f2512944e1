"""``.onnx``: for ONNX Runtime and everything else that reads ONNX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedtailor.deploying.formats.base import Format, Program
from fedtailor.deploying.formats.exporting import exported, first_line, quiet, refusal
from fedtailor.deploying.formats.onnx_widths import WIDTH, joined
from fedtailor.deploying.inputs import Inputs, Specification, input_entry
from fedtailor.deploying.network import Network
from fedtailor.errors import CorruptError, FedtailorError


class Onnx(Format):
    """One graph with its weights, for any number of examples."""

    name, suffix = "onnx", ".onnx"
    needs, extra = ("onnx", "onnxscript", "onnxruntime"), "deploy-onnx"
    int8 = "weights and activations, calibrated"

    shares_widths = True

    def pack(self, network: Network, calibration: Inputs | None) -> bytes:
        packed: bytes = self._model(network).SerializeToString()
        return packed if calibration is None else self._as_int8(packed, network, calibration)

    def pack_widths(self, networks: Sequence[Network]) -> bytes:
        return joined([self._model(network, fold=False) for network in networks])

    def _model(self, network: Network, fold: bool = True) -> Any:
        """The graph; with ``fold``, norms become part of the weights in front of them, which are no prefixes then."""
        self.require()
        program = exported(network.module, network.example, any_batch=True)
        outputs = [f"output_{place}" if place else "output" for place in range(len(network.expected))]
        try:
            with quiet(), torch.no_grad():
                made = torch.onnx.export(
                    program,
                    (),
                    dynamo=True,
                    verbose=False,
                    optimize=fold,
                    input_names=network.input_names,
                    output_names=outputs,
                )
        except torch.onnx.errors.OnnxExporterError as error:
            raise refusal(self.name, program, error) from error
        assert made is not None
        return _without_remarks(made.model_proto)

    def _as_int8(self, packed: bytes, network: Network, calibration: Inputs) -> bytes:
        """The graph with int8 weights and activations, whose ranges are those of the calibration examples."""
        tools = self.library("onnxruntime.quantization")
        names = network.input_names

        class Reader(tools.CalibrationDataReader):  # type: ignore[misc,name-defined]
            """Hands over one example after the other."""

            def __init__(self) -> None:
                self.rest: Iterator[Inputs] = iter(calibration.one_by_one())

            def get_next(self) -> dict[str, Any] | None:
                single = next(self.rest, None)
                return None if single is None else _feed(names, single)

        with TemporaryDirectory() as made, quiet():
            plain, small = Path(made) / "plain.onnx", Path(made) / "small.onnx"
            plain.write_bytes(packed)
            tools.quantize_static(str(plain), str(small), Reader(), per_channel=True)
            return small.read_bytes()

    def open(self, file: Path, module: nn.Module | None = None) -> Program:  # noqa: ARG002
        return self._session(file, {})

    def open_width(self, file: Path, place: int) -> Program:
        return self._session(file, {WIDTH: np.array(place, dtype=np.int64)})

    def inputs(self, file: Path) -> Specification:
        found = self._opened(file).get_inputs()
        if any(each.name == WIDTH for each in found):
            raise FedtailorError(
                f"{file} holds several widths; expected its manifest beside it, which says which"
            )
        return [input_entry(each.name, _type(file, each.type), each.shape) for each in found]

    def _session(self, file: Path, fixed: dict[str, Any]) -> Program:
        session = self._opened(file)
        names = [each.name for each in session.get_inputs() if each.name not in fixed]

        def answer(inputs: Inputs) -> tuple[Tensor, ...]:
            return tuple(torch.from_numpy(each) for each in session.run(None, _feed(names, inputs) | fixed))

        return answer

    def _opened(self, file: Path) -> Any:
        runtime = self.library("onnxruntime")
        options = runtime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        try:
            return runtime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors share no other class
            raise CorruptError(f"{file} cannot be read: {first_line(error)}") from error


TYPES = {"float": torch.float32, "double": torch.float64, "float16": torch.float16, "bool": torch.bool}


def _type(file: Path, name: str) -> torch.dtype:
    """The type that ONNX Runtime calls ``tensor(...)``."""
    word = name.removeprefix("tensor(").removesuffix(")")
    found = TYPES.get(word, getattr(torch, word, None))
    if not isinstance(found, torch.dtype):
        raise FedtailorError(f"{file}: an input is a {name}; expected tensors of numbers")
    return found


def _without_remarks(model: Any) -> Any:
    """The model without what its converter noted of lines and folders on this machine: no device needs it."""
    for each in (
        model.graph,
        *model.graph.node,
        *model.graph.value_info,
        *model.graph.input,
        *model.graph.output,
    ):
        del each.metadata_props[:]
        each.doc_string = ""
    return model


def _feed(names: list[str], inputs: Inputs) -> dict[str, Any]:
    return {name: each.numpy() for name, each in zip(names, inputs.flat, strict=True)}
