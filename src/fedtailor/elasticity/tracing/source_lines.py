"""Lines of the user's code: which one is running, for messages, and what a line that asks is for.

``recorder.py`` writes the line into every node, and asks whether a question about sizes only guards against errors.
"""

from __future__ import annotations

import ast
import dis
import linecache
import sys
import traceback
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import fx

_HOMES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_OURS, _MODELS = str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "models")
_TRACING = (str(Path(fx.__file__).parent), str(Path(__file__).parents[1]))


def user_line() -> str:
    """``model.py:12``: the innermost line that is neither PyTorch's nor ours."""
    frame = _user_frame()
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}" if frame is not None else ""


def _user_frame() -> Any:
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((*_HOMES, "<")):
        frame = frame.f_back
    return frame if frame is not None and not _is_ours(frame.f_code.co_filename) else None


def _is_ours(file: str) -> bool:
    """Whether a file is of fedtailor and no network: an ``nn.Sequential`` has no line of its own, and we called it."""
    return file.startswith(_OURS) and not file.startswith(_MODELS)


def failing_line(error: BaseException) -> str:
    """Where in the user's code an error came up."""
    lines = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_HOMES) and not _is_ours(frame.filename)
    ]
    return f" at {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""


def asking_line(node: fx.Node) -> str:
    """Where a value is asked for, if that is not where it was made."""
    line = user_line()
    return "" if line in ("", node.meta.get("source_line")) else f", asked for at {line}"


def is_unpacking() -> bool:
    """Whether the code asks in order to unpack: ``q, k, v = x``."""
    frame: Any = sys._getframe(2)
    return bool(dis.opname[frame.f_code.co_code[frame.f_lasti]] == "UNPACK_SEQUENCE")


def is_guard() -> bool:
    """Whether the line that asks is an ``assert``, or an ``if`` that only raises."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_TRACING):
        frame = frame.f_back
    if frame is None:
        return False
    return any(first <= frame.f_lineno <= last for first, last in _guards(frame.f_code.co_filename))


@lru_cache
def _guards(file: str) -> tuple[tuple[int, int], ...]:
    """The lines of all conditions in a file that lead to nothing but an error."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ()
    tests = [
        node.test
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert)
        or (isinstance(node, ast.If) and all(isinstance(line, ast.Raise) for line in node.body))
    ]
    return tuple((test.lineno, test.end_lineno or test.lineno) for test in tests)
