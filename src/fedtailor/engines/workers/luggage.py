"""What a worker is given when it starts: the user's objects, and all their tensors in shared memory.

This is the one place where fedtailor pickles. The bytes are written by this process and read by its own child, through
memory that has no name and that no other process can open: they are no input. Tensors are not among them, only their
places.

    memory = length of the pickle (uint64) | pickle | tensors, each at the start of a cache line
"""

from __future__ import annotations

import ast
import io
import pickle
import runpy
import sys
from collections.abc import Mapping
from mmap import mmap
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.engines.workers.shared_memory import SharedMemory, aligned
from fedtailor.errors import FedtailorError

_HEAD = 8
_UNWRITABLE = (pickle.PicklingError, AttributeError, TypeError)  # what pickle raises for what it cannot write

Place = tuple[int, torch.dtype, tuple[int, ...], bool, bool]  # start, type, shape, is a parameter, is trained


class NotPortable(FedtailorError):  # noqa: N818  (a property of what was handed in)
    """Something that a worker process needs cannot get there; all clients can still run in this process."""


def check_portable(parts: Mapping[str, Any]) -> None:
    """Refuse, by its name, a part that could not travel."""
    _written(parts)


def pack(parts: Mapping[str, Any]) -> SharedMemory:
    """Parts by name, ready for any number of workers; one that cannot travel is refused by its name."""
    text, tensors = _written(parts)
    start = aligned(_HEAD + len(text))
    memory = SharedMemory(start + tensors.size + 1)
    memory.write(0, [len(text).to_bytes(_HEAD, "little"), text])
    for place, tensor in tensors.found:
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        memory.write(start + place, [raw.numpy().data])
    return memory


def unpack(memory: SharedMemory) -> dict[str, Any]:
    """The parts, in a worker; their tensors stay in the shared memory until someone writes to them."""
    content = memory.private()
    length = int.from_bytes(content[:_HEAD], "little")
    main, text = pickle.loads(content[_HEAD : _HEAD + length])
    if main is not None:
        _run_main(main)
    reader = _Reader(io.BytesIO(text), content, aligned(_HEAD + length))
    return dict(reader.load())


def _written(parts: Mapping[str, Any]) -> tuple[bytes, _Tensors]:
    file, tensors = io.BytesIO(), _Tensors()
    writer = _Writer(file, tensors)
    try:
        writer.dump(dict(parts))
    except _UNWRITABLE as error:
        raise NotPortable(f"{_culprit(parts)} cannot be sent to worker processes: {error}") from error
    main = _main_script(writer.of_main) if writer.of_main else None
    return pickle.dumps((main, file.getvalue())), tensors


def _culprit(parts: Mapping[str, Any]) -> str:
    """The first part that cannot be written by itself."""
    for name, part in parts.items():
        try:
            _Writer(io.BytesIO(), _Tensors()).dump(part)
        except _UNWRITABLE:
            return name
    return " and ".join(parts)


class _Tensors:
    """Dense tensors on the CPU, each once, and where they will lie."""

    def __init__(self) -> None:
        self.found: list[tuple[int, Tensor]] = []
        self.size = 0
        self._places: dict[int, int] = {}

    def place(self, tensor: Tensor) -> Place:
        if id(tensor) not in self._places:
            self._places[id(tensor)] = self.size
            self.found.append((self.size, tensor))
            self.size = aligned(self.size + max(1, tensor.numel() * tensor.element_size()))
        kind = isinstance(tensor, nn.Parameter)
        return self._places[id(tensor)], tensor.dtype, tuple(tensor.shape), kind, tensor.requires_grad


class _Writer(pickle.Pickler):
    """Replaces tensors by their places, and notes what is defined in the script that is being run."""

    def __init__(self, file: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.of_main: set[str] = set()
        self._tensors = tensors

    def persistent_id(self, obj: Any) -> Place | None:
        """A tensor with attributes of its own, or of another kind, is left to PyTorch's way."""
        plain = type(obj) in (Tensor, nn.Parameter) and obj.layout == torch.strided and not vars(obj)
        return self._tensors.place(obj) if plain and obj.device.type == "cpu" and obj.is_leaf else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            self.of_main.add(obj.__qualname__)
        return NotImplemented


class _Reader(pickle.Unpickler):
    """Puts tensors back in their places; one that was shared between owners is shared again."""

    def __init__(self, file: io.BytesIO, content: mmap, start: int) -> None:
        super().__init__(file)
        self._content, self._start = content, start
        self._made: dict[int, Tensor] = {}

    def persistent_load(self, pid: Place) -> Tensor:
        place, dtype, shape, is_parameter, trained = pid
        if place not in self._made:
            tensor = self._tensor(self._start + place, dtype, shape)
            made = nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor
            self._made[place] = made.requires_grad_(trained)
        return self._made[place]

    def _tensor(self, start: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self._content, dtype=dtype, count=count, offset=start).view(shape)


# The script that is being run


def _main_script(needed: set[str]) -> str:
    """The path of the script, if a worker can import it to find what is defined there."""
    names = ", ".join(sorted(needed))
    path = getattr(sys.modules["__main__"], "__file__", None)
    if path is None or not Path(path).is_file():
        raise NotPortable(
            f"{names}: defined in a notebook or at a prompt, where worker processes cannot find it; "
            "put it into a file of its own and import it"
        )
    if not _is_guarded(Path(path)):
        raise NotPortable(
            f"{names}: defined in {Path(path).name}, which worker processes would have to run from the top; "
            'put it into a file of its own, or what that file starts under `if __name__ == "__main__":`'
        )
    return str(Path(path).resolve())


def _is_guarded(path: Path) -> bool:
    """Whether a script says what must not run when it is imported."""
    tests = [node.test for node in ast.parse(path.read_bytes()).body if isinstance(node, ast.If)]
    return any("__name__" in ast.unparse(test) and "__main__" in ast.unparse(test) for test in tests)


def _run_main(path: str) -> None:
    """Import the script under another name than ``__main__``, as ``multiprocessing`` does, so that its guard holds."""
    module = ModuleType("__mp_main__")
    module.__dict__.update(runpy.run_path(path, run_name="__mp_main__"))
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module
