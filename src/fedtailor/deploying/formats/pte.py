"""``.pte``: for ExecuTorch on phones and boards; the XNNPACK library computes what it can."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from fedtailor.deploying.formats.base import Format, Program, one_at_a_time
from fedtailor.deploying.formats.exporting import exported, quiet, refusal
from fedtailor.deploying.inputs import Inputs, Specification, input_entry
from fedtailor.deploying.network import Network
from fedtailor.elasticity.costing.cost import plain_attention
from fedtailor.errors import CorruptError

WIDTH = "width"  # begins the names of methods of several widths
# Numbers that ExecuTorch has for types of tensors.
TYPES = dict(
    enumerate((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.half, torch.float, torch.double))
) | {11: torch.bool, 15: torch.bfloat16}  # fmt: skip
MAGIC = b"ET"  # at the fifth byte of a program, before its version


class Pte(Format):
    """One method ``forward`` for one example; memory is planned when the file is made."""

    name, suffix = "pte", ".pte"
    needs, extra = ("executorch.exir", "executorch.runtime"), "deploy-executorch"
    any_batch = False
    int8 = "weights and activations of what XNNPACK computes, calibrated"

    def pack(self, network: Network, calibration: Inputs | None) -> bytes:
        with _native_messages():
            self.require()
            program = exported(network.module, network.example, any_batch=False)
            if calibration is not None:
                program = self._as_int8(program, calibration)
            return self.lowered({"forward": program})

    def pack_widths(self, networks: Sequence[Network]) -> bytes:
        """Each width is a method of its own; XNNPACK packs the weights of each, so nothing is shared."""
        with _native_messages():
            self.require()
            programs = {
                f"{WIDTH}_{place}": exported(network.module, network.example, any_batch=False)
                for place, network in enumerate(networks)
            }
            return self.lowered(programs)

    def open_width(self, file: Path, place: int) -> Program:
        return one_at_a_time(self.method(file, f"{WIDTH}_{place}"))

    def require(self) -> None:
        """Importing it, native code says a lot that nobody asked for."""
        with _native_messages(), quiet():
            super().require()

    def lowered(self, programs: dict[str, ExportedProgram]) -> bytes:
        """The file of some programs, each under the name of a method."""
        exir = self.library("executorch.exir")
        partition = self.library("executorch.backends.xnnpack.partition.xnnpack_partitioner")
        try:
            with quiet(), torch.no_grad():
                edge = exir.to_edge_transform_and_lower(
                    programs, partitioner={name: [partition.XnnpackPartitioner()] for name in programs}
                )
                return bytes(edge.to_executorch().buffer)
        except Exception as error:  # its passes raise errors of any class
            raise refusal(self.name, next(iter(programs.values())), error) from error

    def _as_int8(self, program: ExportedProgram, calibration: Inputs) -> ExportedProgram:
        """The program with int8 where XNNPACK has kernels for it; ranges are those of the calibration examples."""
        quantizer = self.library("executorch.backends.xnnpack.quantizer.xnnpack_quantizer")
        steps = self.library("torchao.quantization.pt2e.quantize_pt2e")
        settings = quantizer.get_symmetric_quantization_config(is_per_channel=True)
        with quiet(), torch.no_grad(), plain_attention():
            prepared = steps.prepare_pt2e(program.module(), quantizer.XNNPACKQuantizer().set_global(settings))
            for single in calibration.one_by_one():
                prepared(*single.args, **single.kwargs)
            first = calibration.rows(0, 1)
            return torch.export.export(steps.convert_pt2e(prepared), first.args, dict(first.kwargs))

    def open(self, file: Path, module: nn.Module | None = None) -> Program:  # noqa: ARG002
        return one_at_a_time(self.method(file, "forward"))

    def inputs(self, file: Path) -> Specification:
        _owner, method = self._loaded(file, "forward")
        about = method.metadata
        found = [about.input_tensor_meta(place) for place in range(about.num_inputs())]
        return [
            input_entry(f"input_{place}", TYPES[each.dtype()], list(each.sizes()))
            for place, each in enumerate(found)
        ]

    def method(self, file: Path, name: str) -> Program:
        """One method of a file, for one example, on as many threads as PyTorch may use."""
        program, method = self._loaded(file, name)

        def answer(inputs: Inputs, _owner: Any = program) -> tuple[Tensor, ...]:
            found = method.execute([each.contiguous() for each in inputs.flat])
            return tuple(each.clone() for each in found)

        return answer

    def _loaded(self, file: Path, name: str) -> tuple[Any, Any]:
        """A program, which owns the memory of its methods, and one of them."""
        with _native_messages() as said:
            runtime = self.library("executorch.runtime")
            if file.read_bytes()[4:6] != MAGIC:
                raise CorruptError(f"{file} cannot be read: it is no program of ExecuTorch")
            _use_threads(torch.get_num_threads())
            try:
                program = runtime.Runtime.get().load_program(file)
                return program, program.load_method(name)
            except RuntimeError as error:
                raise CorruptError(f"{file} cannot be read: {said() or error}") from error


@cache
def _use_threads(count: int) -> None:
    """Give ExecuTorch as many threads as PyTorch, once: methods keep the threads that they were loaded with."""
    from executorch.extension.pybindings import portable_lib

    if _use_threads.cache_info().currsize == 0 and portable_lib._threadpool_get_thread_count() != count:
        portable_lib._unsafe_reset_threadpool(count)


@contextmanager
def _native_messages() -> Iterator[Any]:
    """Keeps what native code writes on the error stream off it; the value tells its last line."""
    sys.stderr.flush()
    before = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)

        def last() -> str:
            file.seek(0)
            lines = file.read().decode(errors="replace").splitlines()
            return lines[-1].strip() if lines else ""

        try:
            yield last
        finally:
            sys.stderr.flush()
            os.dup2(before, 2)
            os.close(before)
