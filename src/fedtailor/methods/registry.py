"""Methods by name, import path or entry point: how a class is registered, found, and described by its card."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import resources
from typing import Any, TypeVar

from fedtailor.errors import FedtailorError
from fedtailor.importing import find, import_path_of, offered
from fedtailor.method import Method

M = TypeVar("M", bound=type[Method])

ENTRY_POINTS = "fedtailor.methods"  # where packages offer classes

_METHODS: dict[str, type[Method]] = {}
_STAND_INS: dict[str, type[Method]] = {}  # names that a run puts a method in the place of: none themselves


def register(name: str) -> Callable[[M], M]:
    """Register a method class under a name; a name that is taken or badly spelt is refused.

    >>> @register("fedavg")
    ... class Mine(Method): ...
    Traceback (most recent call last):
    fedtailor.errors.FedtailorError: method 'fedavg' is registered already, by fedtailor.methods.fedavg.FedAvg
    """

    def add(method: M) -> M:
        if not name or name != name.lower() or not name.replace("-", "").isalnum():
            raise FedtailorError(f"method name {name!r}: expected lower-case letters, digits and hyphens")
        place = _place(_METHODS[name]) if name in _METHODS else _place(method)
        if place != _place(method):  # the same class again is a module that was loaded anew
            raise FedtailorError(f"method {name!r} is registered already, by {place}")
        method.name = name
        _METHODS[name] = method
        return method

    return add


def stand_in(name: str) -> Callable[[M], M]:
    """Let a name be said where a method's is, of what is replaced by one before a run starts."""

    def add(method: M) -> M:
        method.name = name
        _STAND_INS[name] = method
        return method

    return add


def stands_in(method: Method | type[Method]) -> bool:
    """Whether a run puts another method in the place of this one."""
    return method.name in _STAND_INS


def _place(method: type[Method]) -> str:
    return f"{method.__module__}.{method.__qualname__}"


def get_method(name: str) -> type[Method]:
    """The method class of a name: registered, offered by a package, or at an import path (``my_file.py:Timid``)."""
    known = {**_STAND_INS, **_METHODS}
    if name in known:
        return known[name]
    return _checked(name, find("method", name, known, ENTRY_POINTS, "my_package.my_module:Timid"))


def _checked(name: str, target: Any) -> type[Method]:
    if not (isinstance(target, type) and issubclass(target, Method)):
        what = (
            f"a class {target.__name__}" if isinstance(target, type) else f"of type {type(target).__name__}"
        )
        raise FedtailorError(f"method {name!r} is {what}: expected a class that extends fedtailor.Method")
    fields = {item.name for item in dataclasses.fields(target)}
    own = [
        key for key, kind in vars(target).get("__annotations__", {}).items() if "ClassVar" not in str(kind)
    ]
    if not fields.issuperset(own):
        raise FedtailorError(
            f"method {name!r} has settings: expected @dataclass(frozen=True) above its class"
        )
    return target


def name_of(method: type[Method]) -> str | None:
    """By what name ``get_method`` finds a class again; nothing where it cannot."""
    if _METHODS.get(method.name) is method:
        return method.name
    return import_path_of(method)


def method_names() -> list[str]:
    """All names: those that are registered, and those that installed packages offer."""
    return sorted({*_METHODS, *offered(ENTRY_POINTS)})


def method_classes() -> dict[str, type[Method]]:
    """All registered classes by their own names: ``HeteroFL``."""
    return {method.__name__: method for method in _METHODS.values()}


def method_card(name: str) -> str:
    """The method's card: what it does, its settings, its cost, where it deviates from the paper."""
    method = get_method(name)
    package, _, module = method.__module__.rpartition(".")
    if not package:  # a module of the user's own
        return (method.__doc__ or "").strip()
    file = resources.files(package) / f"{module}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else (method.__doc__ or "").strip()
