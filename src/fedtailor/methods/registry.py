"""Methods by name: how a class is registered, found, and described by its card."""

from __future__ import annotations

from collections.abc import Callable
from importlib import resources
from typing import TypeVar

from fedtailor.errors import FedtailorError, unknown
from fedtailor.method import Method

M = TypeVar("M", bound=type[Method])

_METHODS: dict[str, type[Method]] = {}


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


def _place(method: type[Method]) -> str:
    return f"{method.__module__}.{method.__qualname__}"


def get_method(name: str) -> type[Method]:
    """The method class of a name."""
    if name not in _METHODS:
        raise unknown("method", name, _METHODS)
    return _METHODS[name]


def method_names() -> list[str]:
    """All registered names."""
    return sorted(_METHODS)


def method_card(name: str) -> str:
    """The method's card: what it does, its settings, its cost, where it deviates from the paper."""
    method = get_method(name)
    package, _, module = method.__module__.rpartition(".")
    if not package:  # a module of the user's own
        return (method.__doc__ or "").strip()
    file = resources.files(package) / f"{module}.md"
    return file.read_text(encoding="utf-8") if file.is_file() else (method.__doc__ or "").strip()
