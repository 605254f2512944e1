"""The formats by name."""

from __future__ import annotations

from pathlib import Path

from fedtailor.deploying.formats.base import Format as Format
from fedtailor.deploying.formats.base import Program as Program
from fedtailor.deploying.formats.onnx_file import Onnx
from fedtailor.deploying.formats.pt2 import Pt2
from fedtailor.deploying.formats.pte import Pte
from fedtailor.deploying.formats.safetensors_file import Safetensors
from fedtailor.deploying.formats.sparse import Sparse
from fedtailor.errors import FedtailorError, unknown

FORMATS: dict[str, Format] = {each.name: each for each in (Safetensors(), Pt2(), Onnx(), Pte(), Sparse())}


def format_named(name: str) -> Format:
    """The format of this name."""
    if name not in FORMATS:
        raise unknown("format", name, FORMATS)
    return FORMATS[name]


def format_of(file: Path) -> Format:
    """The format that the name of a file tells."""
    if not file.is_file():
        raise FedtailorError(f"{file}: no such file")
    for each in sorted(FORMATS.values(), key=lambda each: -len(each.suffix)):
        if file.name.endswith(each.suffix):
            return each
    endings = ", ".join(each.suffix for each in FORMATS.values())
    raise FedtailorError(f"{file}: its name ends with none of {endings}")
