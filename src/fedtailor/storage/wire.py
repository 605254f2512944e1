"""How plain values and tensors travel and rest: a canonical JSON header, then raw little-endian tensors.

    frame  = magic (8 bytes) | length of header (uint32) | header | body
    header = {"tensors": [[type, shape], ...], "value": ...}     canonical JSON, ASCII
    body   = the bytes of these tensors in this order, nothing before, between or behind them

A value is made of None, booleans, numbers, strings, lists, tuples, dicts and tensors, nothing else. One value has one
frame: what the reader accepts, the writer would have written byte for byte. Reading runs no code, and the size of all
tensors must equal the bytes that are there before any of them is allocated.

Messages from other machines are patches (``patch_frames``); ``decode`` reads what this one wrote.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedtailor.errors import CorruptError, FedtailorError

Buffer = bytes | bytearray | memoryview

MAGIC = b"fedtail\x01"  # the last byte is the version
MAX_DEPTH = 32  # lists in lists
MAX_AXES = 16
MAX_LENGTH = 2**48  # of an axis, and of all axes multiplied: far from where sizes overflow
MAX_INTEGER = 2**63
TYPES = {
    "bool": torch.bool, "uint8": torch.uint8, "int8": torch.int8, "int16": torch.int16, "int32": torch.int32,
    "int64": torch.int64, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
    "float64": torch.float64, "complex64": torch.complex64, "complex128": torch.complex128,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in TYPES.items()}
_START = len(MAGIC) + 4
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_AS_THEY_ARE = frozenset(
    {bool, float, str, type(None)}
)  # of what JSON has; numbers may be too long, and lists too deep

if sys.byteorder != "little":
    raise ImportError("fedtailor.wire writes tensors as they lie in memory, which must be little-endian")


class DecodeError(CorruptError):
    """Bytes that are no frame, or not the frame that was asked for. Nothing else is raised for bad bytes."""


@dataclass(frozen=True)
class Slot:
    """A tensor that is known by its type and shape only."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """How long its values are."""
        return math.prod(self.shape) * self.dtype.itemsize


# Values


def encode(value: Any) -> list[Buffer]:
    """The frame of a value, in pieces: tensors on the CPU are not copied."""
    tensors: list[Tensor] = []
    structure = structure_of(value, "value", tensors, 0)
    slots = [Slot(tensor.dtype, tuple(tensor.shape)) for tensor in tensors]
    return [head_of(slots, structure), *map(raw, tensors)]


def decode(data: Buffer, device: torch.device | str = "cpu") -> Any:
    """The value of a frame; tensors that lay on a device other than the CPU go to ``device``."""
    view = memoryview(data).cast("B")
    header, start = header_of(view, len(view))
    slots = _slots(header["tensors"])
    check_length(view, start, slots)
    tensors = enumerate(tensors_of(view, start, slots))
    value = value_of(header["value"], tensors, torch.device(device), 0)
    if next(tensors, None) is not None:
        raise DecodeError("the frame holds a tensor that its value does not name")
    return value


def settled(value: Any, place: str = "value", depth: int = 0) -> Any:
    """The value as it would be read back: contiguous tensors without history. Other types are refused by name.

    What rests is what runs: a run that was interrupted must not go on with tensors of another layout,
    on which the same arithmetic may round differently.
    """
    kind = type(value)
    if kind in (list, tuple) and depth <= MAX_DEPTH:
        return kind(settled(entry, f"{place}[{i}]", depth + 1) for i, entry in enumerate(value))
    if kind is dict and depth <= MAX_DEPTH:
        return {
            _key(key, place): settled(entry, f"{place}[{key!r}]", depth + 1) for key, entry in value.items()
        }
    structure_of(value, place, [], depth)
    return _plain(value) if isinstance(value, Tensor) else value


def can_travel(tensor: Tensor) -> bool:
    """Whether a tensor can be written down as it is."""
    return tensor.dtype in _NAMES and tensor.layout == torch.strided and not tensor.is_meta


def structure_of(value: Any, place: str, tensors: list[Tensor], depth: int) -> Any:
    """The value as JSON; its tensors are added to ``tensors`` and named by their number."""
    if depth > MAX_DEPTH:
        raise FedtailorError(f"{place}: nested more than {MAX_DEPTH} deep")
    kind = type(value)
    if value is None or kind in (bool, str) or _is_integer(value):
        return value
    if kind is float:
        return value if math.isfinite(value) else {"float": str(value)}
    if isinstance(value, Tensor):
        if not can_travel(value):
            raise FedtailorError(
                f"{place} is a tensor of {value.dtype}, {value.layout}, on {value.device}: "
                f"expected a dense one of {', '.join(TYPES)}"
            )
        tensors.append(value)
        return {"tensor" if value.device.type == "cpu" else "device_tensor": len(tensors) - 1}
    if kind in (list, tuple):
        entries = [structure_of(entry, f"{place}[{i}]", tensors, depth + 1) for i, entry in enumerate(value)]
        return entries if kind is list else {"tuple": entries}
    if kind is dict:  # as pairs: JSON has neither numbers as keys nor an order of them
        pairs = [
            [_key(key, place), structure_of(entry, f"{place}[{key!r}]", tensors, depth + 1)]
            for key, entry in value.items()
        ]
        return {"dict": pairs}
    raise FedtailorError(
        f"{place} is {'a number of more than 64 bits' if kind is int else f'of type {kind.__name__}'}: expected None, "
        "bool, int, float, str, list, tuple, dict or Tensor, which can be saved"
    )


def _is_integer(value: Any) -> bool:
    return type(value) is int and -MAX_INTEGER <= value < MAX_INTEGER


def _key(key: Any, place: str) -> str | int:
    if not (type(key) is str or _is_integer(key)):
        raise FedtailorError(f"{place} has the key {key!r}: expected a string or a whole number")
    return key  # type: ignore[no-any-return]


def value_of(structure: Any, tensors: Iterator[tuple[int, Tensor]], device: torch.device, depth: int) -> Any:
    """The inverse of ``_structure``: tensors must be named in their order, each once."""
    if depth > MAX_DEPTH:
        raise DecodeError(f"nested more than {MAX_DEPTH} deep")
    if isinstance(structure, list):
        plain = _AS_THEY_ARE if depth < MAX_DEPTH else frozenset()
        return [
            entry if type(entry) in plain else value_of(entry, tensors, device, depth + 1)
            for entry in structure
        ]
    if not isinstance(structure, dict):
        if type(structure) is int and not _is_integer(structure):
            raise DecodeError("a whole number of more than 64 bits")
        return structure
    kind, content = next(iter(structure.items())) if len(structure) == 1 else ("", None)
    if kind in ("tensor", "device_tensor"):
        number, tensor = next(tensors, (None, None))
        if tensor is not None and type(content) is int and content == number:
            return tensor if kind == "tensor" else tensor.to(device)
    if kind == "float" and isinstance(content, str) and content in _NOT_FINITE:
        return _NOT_FINITE[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(value_of(entry, tensors, device, depth + 1) for entry in content)
    if kind == "dict" and isinstance(content, list) and all(_is_pair(pair) for pair in content):
        result = {key: value_of(entry, tensors, device, depth + 1) for key, entry in content}
        if len(result) == len(content):
            return result
    raise DecodeError("no value that was ever written")


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and (type(pair[0]) is str or _is_integer(pair[0]))


# Bytes


def _canonical(value: Any) -> bytes:
    return json.dumps(value, allow_nan=False, sort_keys=True, separators=(",", ":")).encode("ascii")


def head_of(slots: list[Slot], structure: Any) -> bytes:
    """Magic, length and header of a frame."""
    header = _canonical(
        {"tensors": [[_NAMES[slot.dtype], list(slot.shape)] for slot in slots], "value": structure}
    )
    return MAGIC + len(header).to_bytes(4, "little") + header


def header_of(view: memoryview, limit: int) -> tuple[dict[str, Any], int]:
    """The parsed header and where the body starts."""
    if len(view) < _START or view[: len(MAGIC)] != MAGIC:
        raise DecodeError("these bytes are no frame of this version")
    start = _START + int.from_bytes(view[len(MAGIC) : _START], "little")
    if start > min(limit, len(view)):
        raise DecodeError(
            f"a header of {start - _START} bytes instead of at most {min(limit, len(view)) - _START}"
        )
    text = bytes(view[_START:start])
    try:
        header = json.loads(text)
        canonical = _canonical(header)
    except (ValueError, RecursionError):
        raise DecodeError("the header is not JSON") from None
    if canonical != text or not isinstance(header, dict) or header.keys() != {"tensors", "value"}:
        raise DecodeError("the header is not written in the canonical way")
    return header, start


def _slots(table: Any) -> list[Slot]:
    if not isinstance(table, list):
        raise DecodeError("the header lists no tensors")
    return [_slot(entry) for entry in table]


def _slot(entry: Any) -> Slot:
    kind, shape = entry if isinstance(entry, list) and len(entry) == 2 else (None, None)
    if not (isinstance(kind, str) and kind in TYPES and isinstance(shape, list) and len(shape) <= MAX_AXES):
        raise DecodeError("the header lists a tensor of unknown type or shape")
    size = 1
    for length in shape:
        if type(length) is not int or not 0 <= length <= MAX_LENGTH:
            raise DecodeError("the header lists a tensor with an axis of no possible length")
        size *= max(1, length)
    if size > MAX_LENGTH:
        raise DecodeError("the header lists a tensor of no possible size")
    return Slot(TYPES[kind], tuple(shape))


def check_length(view: memoryview, start: int, slots: list[Slot]) -> None:
    """Refuse a frame whose body is not as long as its tensors."""
    expected = start + sum(slot.nbytes for slot in slots)
    if len(view) != expected:
        raise DecodeError(f"{len(view)} bytes instead of {expected}")


def tensors_of(view: memoryview, start: int, slots: list[Slot]) -> Iterator[Tensor]:
    """The tensors of a body whose length was checked; each owns its memory."""
    for slot in slots:
        raw = np.frombuffer(view, dtype=np.uint8, count=slot.nbytes, offset=start)
        if slot.dtype == torch.bool and bool((raw > 1).any()):
            raise DecodeError("a boolean that is neither 0 nor 1")
        tensor = torch.empty(slot.shape, dtype=slot.dtype)
        tensor.view(-1).view(torch.uint8).numpy()[:] = raw
        start += slot.nbytes
        yield tensor


def raw(tensor: Tensor) -> memoryview:
    """The bytes of a tensor."""
    return _plain(tensor.cpu()).view(-1).view(torch.uint8).numpy().data


def _plain(tensor: Tensor) -> Tensor:
    """Without history, in the usual layout; complex numbers may wait to be conjugated or negated until here."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous()
