"""Options that belong together as one value: a command takes a dataclass whose fields are options."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """The command as Typer reads it: instead of each dataclass that it takes, the options that are its fields."""
    hints = get_type_hints(command, include_extras=True)
    kinds: dict[str, Any] = {name: kind for name, kind in hints.items() if dataclasses.is_dataclass(kind)}
    flat: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name in kinds:
            flat += _options(kinds[name])
        else:
            flat.append(parameter.replace(annotation=hints[name], kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def called(**given: Any) -> None:
        values = {
            name: kind(**{item.name: given.pop(item.name) for item in dataclasses.fields(kind)})
            for name, kind in kinds.items()
        }
        command(**values, **given)

    called.__signature__ = inspect.Signature(flat)  # type: ignore[attr-defined]
    called.__annotations__ = {parameter.name: parameter.annotation for parameter in flat}
    return called


def _options(kind: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            item.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if item.default is dataclasses.MISSING else item.default,
            annotation=hints[item.name],
        )
        for item in dataclasses.fields(kind)
    ]
