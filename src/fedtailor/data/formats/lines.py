"""JSON lines: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtailor.data.files import read_file
from fedtailor.errors import FedtailorError


def read_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Place (file and line, for errors) and object of every line that is not blank."""
    return ((f"line {number} of {path}", record) for number, record in numbered_records(path))


def numbered_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of every line that is not blank."""
    for number, line in enumerate(read_file(path).splitlines(), start=1):
        if not line.strip():
            continue
        where = f"line {number} of {path}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:  # a wrong encoding is a ValueError too
            raise FedtailorError(f"{where} is not JSON ({error}): expected one object per line") from error
        if not isinstance(record, dict):
            raise FedtailorError(
                f"{where} is a {type(record).__name__}: expected an object with named fields"
            )
        yield number, record


def read_texts(path: Path) -> dict[str, str]:
    """The text of each user, from lines with ``user`` and ``text``; several lines of one user are joined."""
    pieces: dict[str, list[str]] = {}
    for where, record in read_records(path):
        user, text = record.get("user"), record.get("text")
        if not isinstance(user, (str, int)) or not isinstance(text, str):
            raise FedtailorError(f"{where} has {', '.join(record) or 'nothing'}: expected user and text")
        pieces.setdefault(str(user), []).append(text)
    if not pieces:
        raise FedtailorError(f"{path} holds no lines: expected objects with user and text")
    return {user: "\n".join(texts) for user, texts in pieces.items()}
