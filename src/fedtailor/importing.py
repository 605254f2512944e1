"""What users bring along: by import path (``my_package.my_module:Name``, ``my_file.py:Name``), or offered by a package.

A package offers something under a name by an entry point: of the group ``fedtailor.methods`` or ``fedtailor.models``.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from fedtailor.errors import FedtailorError, unknown


def is_import_path(name: object) -> bool:
    """Whether a name means something of the user's own."""
    return isinstance(name, str) and ":" in name


def imported(path: str, what: str, example: str) -> Any:
    """The object at ``module:attribute`` or ``file.py:attribute``; ``what`` names the setting in errors.

    The current folder is searched last, also when a console script runs.
    """
    place, _, attribute = path.rpartition(":")
    parts, is_file = attribute.split("."), place.endswith(".py")
    names = parts if is_file else [*place.split("."), *parts]
    if not all(part.isidentifier() for part in names):
        raise FedtailorError(
            f"{what} {path!r}: expected an import path such as {example!r} or {_in_file(example)!r}"
        )
    module = _import_file(f"{what} {path!r}", Path(place)) if is_file else _import(f"{what} {path!r}", place)
    target: Any = module
    for part in parts:
        if not hasattr(target, part):
            where = getattr(module, "__file__", None) or "built in"
            raise FedtailorError(
                f"{what} {path!r}: module {module.__name__!r} ({where}) has no {attribute!r}"
            )
        target = getattr(target, part)
    return target


def import_path_of(target: Any) -> str | None:
    """The import path of a class or function, if another process could find it there."""
    module, name = getattr(target, "__module__", None), getattr(target, "__qualname__", "")
    if module in (None, "__main__", "builtins") or not all(part.isidentifier() for part in name.split(".")):
        return None
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    return f"{module}:{name}" if found is target else None


def offered(group: str) -> dict[str, EntryPoint]:
    """What installed packages offer under names of their own; nothing of it is imported yet."""
    return {entry.name: entry for entry in entry_points(group=group)}


def find(what: str, name: str, known: Iterable[str], group: str, example: str) -> Any:
    """What a name that is not among the ``known`` ones means: an import path, or what a package offers."""
    if is_import_path(name):
        return imported(name, what, example)
    entries = offered(group)
    if name in entries:
        return _load(what, entries[name])
    hint = f"; or an import path such as {example!r} or {_in_file(example)!r}"
    raise unknown(what, name, [*known, *entries], hint=hint)


def _in_file(example: str) -> str:
    return f"my_file.py:{example.rpartition(':')[2]}"


def _load(what: str, entry: EntryPoint) -> Any:
    """What a package offers; a package that cannot be imported is named."""
    try:
        return entry.load()
    except Exception as error:
        owner = entry.dist.name if entry.dist is not None else entry.value
        raise FedtailorError(
            f"{what} {entry.name!r} of package {owner}: loading {entry.value!r} failed with "
            f"{type(error).__name__}: {error}"
        ) from error


def _import_file(asked: str, file: Path) -> ModuleType:
    """The module of a file; its folder is searched from now on, so that worker processes find it too."""
    if not file.expanduser().is_file():
        raise FedtailorError(f"{asked}: there is no file {file} in {os.getcwd()}")
    file = file.expanduser().resolve()
    if not file.stem.isidentifier():
        raise FedtailorError(
            f"{asked}: {file.name} cannot be imported; expected a name of letters, digits and '_'"
        )
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))
    importlib.invalidate_caches()
    known = sys.modules.get(file.stem)
    spec = known.__spec__ if known is not None else importlib.util.find_spec(file.stem)
    origin = getattr(known, "__file__", None) or (spec.origin if spec is not None else None)
    if origin is None or Path(origin).resolve() != file:
        raise FedtailorError(
            f"{asked}: Python has another module {file.stem!r} ({origin or 'built in'}); rename the file"
        )
    return _import(asked, file.stem)


def _import(asked: str, module: str) -> ModuleType:
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module}.".startswith(f"{missing}."):
            raise FedtailorError(
                f"{asked}: there is no module {missing!r}; it must be installed or lie in {folder}"
            ) from None
        raise FedtailorError(
            f"{asked}: importing {module!r} failed with {type(error).__name__}: {error}"
        ) from error
