"""Plain values out of a Python pickle, without unpickling it.

CIFAR's "python" archives are pickles, and unpickling runs whatever code a file names. This reader is safe
because it never does that: it is a small stack machine for the opcodes that plain containers, numbers,
strings and byte arrays need. The few globals that NumPy's arrays are written with are matched as names and
lead to functions of this module; no module is imported, no attribute looked up, and any other global or
opcode is an error.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Value = Any

_TYPES = {"u1": np.dtype(np.uint8)}


class NotPlainError(ValueError):
    """The file holds something other than plain values, or is no pickle, or ends early."""


@dataclass(eq=False)
class _PendingArray:
    """An array whose content a later BUILD opcode brings."""

    value: np.ndarray[Any, Any] | None = None


@dataclass(frozen=True)
class _ElementType:
    code: str


@dataclass(frozen=True)
class _Global:
    name: str


def _element_type(code: Value, *_: Value) -> _ElementType:
    return _ElementType(_text(code))


def _pending_array(*_: Value) -> _PendingArray:
    return _PendingArray()


def _encoded(text: Value, encoding: Value) -> bytes:
    if _text(encoding) not in {"latin1", "latin-1"}:
        raise NotPlainError(f"bytes in the encoding {encoding!r}")
    return _text(text).encode("latin-1")


def _no_bytes() -> bytes:
    """What protocol 2 calls for an empty string of bytes."""
    return b""


_FUNCTIONS: dict[str, Callable[..., Value]] = {
    "numpy.core.multiarray _reconstruct": _pending_array,
    "numpy._core.multiarray _reconstruct": _pending_array,
    "numpy dtype": _element_type,
    "_codecs encode": _encoded,
    "__builtin__ bytes": _no_bytes,
}
_MENTIONED = {"numpy ndarray"}  # only ever an argument of _reconstruct


def read_plain(content: bytes) -> Value:
    """The value in a pickle of protocol 2 to 4 that holds only plain values and arrays of bytes.

    Strings of Python 2 come back as ``bytes``.
    """
    try:
        return _Machine(content).run()
    except NotPlainError:
        raise
    except (IndexError, struct.error, ValueError, TypeError, KeyError, OverflowError) as error:
        raise NotPlainError(f"not a pickle of plain values ({type(error).__name__}: {error})") from error


def _text(value: Value) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


class _Machine:
    """One pass over the opcodes; a MARK is the height that the stack had."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.position = 0
        self.stack: list[Value] = []
        self.marks: list[int] = []
        self.memo: dict[int, Value] = {}

    def run(self) -> Value:
        """Read until STOP."""
        while True:
            opcode = self._bytes(1)
            if opcode == b".":
                return _finished(self.stack.pop())
            action = _OPCODES.get(opcode)
            if action is None:
                raise NotPlainError(f"opcode {opcode!r} at byte {self.position - 1} is not for plain values")
            action(self)

    def _bytes(self, count: int) -> bytes:
        piece = self.content[self.position : self.position + count]
        if count < 0 or len(piece) < count:
            raise NotPlainError("ends early")
        self.position += count
        return piece

    def number(self, code: str) -> int:
        """The next number, in a format of the struct module."""
        value: int = struct.unpack(code, self._bytes(struct.calcsize(code)))[0]
        return value

    def counted(self, code: str) -> bytes:
        """The next bytes, after their number."""
        return self._bytes(self.number(code))

    def line(self) -> str:
        """The next characters up to the end of the line."""
        end = self.content.index(b"\n", self.position)
        text = self.content[self.position : end].decode("ascii")
        self.position = end + 1
        return text

    def push(self, value: Value) -> None:
        """Put a value on the stack."""
        self.stack.append(value)

    def above_mark(self) -> list[Value]:
        """Take everything above the last MARK."""
        height = self.marks.pop()
        values = self.stack[height:]
        del self.stack[height:]
        return values

    def top(self, count: int) -> list[Value]:
        """Take the topmost values."""
        if len(self.stack) < count:
            raise NotPlainError("takes from an empty stack")
        values = self.stack[-count:]
        del self.stack[-count:]
        return values

    def add_global(self, name: str) -> None:
        """Note the name of a global; it is looked up in this module's own table only when it is called."""
        if name not in _FUNCTIONS and name not in _MENTIONED:
            raise NotPlainError(f"names {name!r}, which is no plain value")
        self.push(_Global(name))

    def reduce(self) -> None:
        """Call one of the few known functions."""
        function, arguments = self.top(2)
        if not isinstance(function, _Global) or function.name not in _FUNCTIONS:
            raise NotPlainError("calls something that is no function of plain values")
        self.push(_FUNCTIONS[function.name](*arguments))

    def build(self) -> None:
        """Give an array its content; the state of an element type adds nothing for bytes."""
        (state,) = self.top(1)
        target = self.stack[-1]
        if isinstance(target, _PendingArray):
            _version, shape, element, fortran_order, raw = state
            target.value = _array(shape, element, bool(fortran_order), raw)
        elif not isinstance(target, _ElementType):
            raise NotPlainError("sets the state of something that is no array")

    def add_items(self, values: list[Value]) -> None:
        """Put keys and values, in turn, into the dict on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, dict) or len(values) % 2:
            raise NotPlainError("sets items of something that is no dict")
        target.update(zip(values[::2], map(_finished, values[1::2]), strict=True))

    def add_elements(self, values: list[Value]) -> None:
        """Append to the list on top of the stack."""
        target = self.stack[-1]
        if not isinstance(target, list):
            raise NotPlainError("appends to something that is no list")
        target.extend(map(_finished, values))


def _array(shape: Value, element: Value, fortran_order: bool, raw: Value) -> np.ndarray[Any, Any]:
    if not isinstance(element, _ElementType) or element.code not in _TYPES:
        raise NotPlainError(f"holds an array of {getattr(element, 'code', element)!r}, expected bytes ('u1')")
    if not isinstance(raw, bytes) or math.prod(shape) != len(raw):
        raise NotPlainError(f"holds an array whose content does not fill its shape {shape}")
    flat = np.frombuffer(raw, _TYPES[element.code])
    return flat.reshape(shape, order="F" if fortran_order else "C")


def _finished(value: Value) -> Value:
    if isinstance(value, _PendingArray):
        if value.value is None:
            raise NotPlainError("holds an array without content")
        return value.value
    if isinstance(value, (_Global, _ElementType)):
        raise NotPlainError("holds something that is no plain value")
    return value


_OPCODES: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.number("<B"),  # PROTO
    b"\x95": lambda m: m.number("<Q"),  # FRAME
    b"(": lambda m: m.marks.append(len(m.stack)),
    b"}": lambda m: m.push({}),
    b"]": lambda m: m.push([]),
    b")": lambda m: m.push(()),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"J": lambda m: m.push(m.number("<i")),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"\x8a": lambda m: m.push(int.from_bytes(m.counted("<B"), "little", signed=True)),
    b"U": lambda m: m.push(m.counted("<B")),  # strings of Python 2 are bytes
    b"T": lambda m: m.push(m.counted("<i")),
    b"C": lambda m: m.push(m.counted("<B")),
    b"B": lambda m: m.push(m.counted("<I")),
    b"\x8e": lambda m: m.push(m.counted("<Q")),
    b"X": lambda m: m.push(m.counted("<I").decode("utf-8")),
    b"\x8c": lambda m: m.push(m.counted("<B").decode("utf-8")),
    b"q": lambda m: m.memo.__setitem__(m.number("<B"), m.stack[-1]),
    b"r": lambda m: m.memo.__setitem__(m.number("<I"), m.stack[-1]),
    b"\x94": lambda m: m.memo.__setitem__(len(m.memo), m.stack[-1]),
    b"h": lambda m: m.push(m.memo[m.number("<B")]),
    b"j": lambda m: m.push(m.memo[m.number("<I")]),
    b"\x85": lambda m: m.push(tuple(m.top(1))),
    b"\x86": lambda m: m.push(tuple(m.top(2))),
    b"\x87": lambda m: m.push(tuple(m.top(3))),
    b"t": lambda m: m.push(tuple(m.above_mark())),
    b"a": lambda m: m.add_elements(m.top(1)),
    b"e": lambda m: m.add_elements(m.above_mark()),
    b"s": lambda m: m.add_items(m.top(2)),
    b"u": lambda m: m.add_items(m.above_mark()),
    b"c": lambda m: m.add_global(f"{m.line()} {m.line()}"),
    b"\x93": lambda m: m.add_global(" ".join(map(_text, m.top(2)))),
    b"R": lambda m: m.reduce(),
    b"b": lambda m: m.build(),
}
