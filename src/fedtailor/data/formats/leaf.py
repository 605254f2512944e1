"""LEAF's JSON: files with ``user_data``, lists of ``x`` and ``y`` for each user (Caldas et al., 2018)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedtailor.data.files import broken, read_file


def read_leaf(folder: Path) -> Iterator[tuple[Path, str, list[Any], list[Any]]]:
    """File, user, x and y of every user in the JSON files of a folder, one file in memory at a time."""
    files = sorted(folder.glob("*.json"))
    if not files:
        raise broken(folder, "holds no .json files")
    for file in files:
        try:
            content = json.loads(read_file(file))
        except (ValueError, RecursionError) as error:
            raise broken(file, f"is not JSON ({error})") from error
        users = content.get("user_data") if isinstance(content, dict) else None
        if not isinstance(users, dict):
            raise broken(file, "has no user_data")
        for user, examples in users.items():
            x, y = examples.get("x"), examples.get("y")
            if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y):
                raise broken(file, f"has no x and y of equal length for user {user}")
            yield file, user, x, y
