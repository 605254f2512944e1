"""What a format is: a network becomes bytes, a file becomes a function that can be called."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from torch import Tensor, nn

from fedtailor.deploying.inputs import Inputs, Specification
from fedtailor.deploying.network import Network
from fedtailor.errors import FedtailorError

Program = Callable[[Inputs], tuple[Tensor, ...]]


class Format(ABC):
    """One kind of file that devices run."""

    name: ClassVar[str]
    suffix: ClassVar[str]
    needs: ClassVar[tuple[str, ...]] = ()  # libraries, imported when a file is made or run
    extra: ClassVar[str] = ""  # that brings them
    any_batch: ClassVar[bool] = True  # whether a call takes any number of examples, or exactly one
    needs_class: ClassVar[bool] = (
        False  # whether a file holds weights alone, for a class that must be at hand
    )
    shares_widths: ClassVar[bool] = False  # whether a file of several widths keeps shared weights once
    int8: ClassVar[str]  # what ``--quantize int8`` does here, in words

    @abstractmethod
    def pack(self, network: Network, calibration: Inputs | None) -> bytes:
        """The file of a network; with examples to calibrate on, its weights (and activations) as int8."""

    @abstractmethod
    def open(self, file: Path, module: nn.Module | None = None) -> Program:
        """The function that a file holds; ``module`` is the user's network at full size, where that is needed."""

    def inputs(self, file: Path) -> Specification:
        """What a file itself says of its inputs, for where no manifest does."""
        raise FedtailorError(f"{file} does not say what its inputs are; expected its manifest beside it")

    def pack_widths(self, networks: Sequence[Network]) -> bytes:  # noqa: ARG002
        """One file of several widths of one network, the widest last, that is told which one to run."""
        raise self._one_width("--switchable")

    def open_width(self, file: Path, place: int) -> Program:  # noqa: ARG002
        """The function of one of the widths of such a file."""
        raise self._one_width(str(file))

    def _one_width(self, what: str) -> FedtailorError:
        return FedtailorError(
            f"{what}: a file of format {self.name} holds one width; expected --format onnx or pte, or "
            "run.switchable() in Python"
        )

    def require(self) -> None:
        """Refuse early where a library is missing."""
        for name in self.needs:
            self.library(name)

    def library(self, name: str) -> ModuleType:
        """A library of the extra, or a sentence that names the extra."""
        try:
            return importlib.import_module(name)
        except ImportError as error:
            raise FedtailorError(
                f"--format {self.name} needs the extra: pip install 'fedtailor[{self.extra}]' ({error})"
            ) from error


def one_at_a_time(call: Callable[[Inputs], tuple[Tensor, ...]]) -> Program:
    """A program for any number of examples, of one that takes exactly one."""

    def answer(inputs: Inputs) -> tuple[Tensor, ...]:
        import torch

        each = [call(single) for single in inputs.one_by_one()]
        return tuple(torch.cat(parts) for parts in zip(*each, strict=True))

    return answer
