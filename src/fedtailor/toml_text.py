"""Values as TOML: Python reads the format and does not write it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any


def as_toml(value: Any) -> str:
    """A value as TOML."""
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{json.dumps(key)} = {as_toml(entry)}" for key, entry in value.items()) + " }"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(as_toml(entry) for entry in value) + "]"
    if isinstance(value, Fraction):
        return json.dumps(str(value))
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(
        value, str
    ):  # letters as they are: TOML has no escapes for those beyond 16 bits that JSON has
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)  # TOML writes numbers and booleans as JSON does
