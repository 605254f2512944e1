"""Objects of the user's own by their import path: ``my_package.my_module:name``."""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from fedtailor.errors import FedtailorError


def imported(path: str, what: str, example: str) -> Any:
    """The object at ``module:attribute``; ``what`` names the setting in errors, such as ``model``."""
    module_name, _, attribute = path.partition(":")
    parts = attribute.split(".")
    if not all(part.isidentifier() for part in [*module_name.split("."), *parts]):
        raise FedtailorError(f"{what} {path!r}: expected an import path such as {example!r}")
    module = _import(f"{what} {path!r}", module_name)
    target: Any = module
    for part in parts:
        if not hasattr(target, part):
            where = getattr(module, "__file__", None) or "built in"
            raise FedtailorError(f"{what} {path!r}: module {module_name!r} ({where}) has no {attribute!r}")
        target = getattr(target, part)
    return target


def _import(asked: str, module_name: str) -> ModuleType:
    """Import a module; the current folder is searched last, also when a console script runs."""
    folder = os.getcwd()
    if folder not in sys.path and "" not in sys.path:
        sys.path.append(folder)
    importlib.invalidate_caches()
    try:
        return importlib.import_module(module_name)
    except Exception as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{module_name}.".startswith(f"{missing}."):
            raise FedtailorError(
                f"{asked}: there is no module {missing!r}; it must be installed or lie in {folder}"
            ) from None
        raise FedtailorError(
            f"{asked}: importing {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error
