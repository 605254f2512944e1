"""Networks by name, or by the import path of a function of the user's own."""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, TypeVar

from torch import nn

from fedtailor.errors import FedtailorError, unknown
from fedtailor.models.parts import whole

Builder = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)

_builders: dict[str, Builder] = {}


def register(name: str, options: type | None = None) -> Callable[[B], B]:
    """Make the decorated builder known as ``name``.

    A builder takes its options one by one, or, where they are many, as its first argument: a dataclass ``options``,
    whose fields are then the options of the model.
    """
    if name in _builders:
        raise FedtailorError(f"model {name!r} is registered twice")

    def add(builder: B) -> B:
        _builders[name] = builder if options is None else _one_by_one(builder, options)
        return builder

    return add


def _one_by_one(builder: Builder, options: type) -> Builder:
    """The builder with the fields of ``options`` as arguments of its own."""
    fields = inspect.signature(options).parameters
    _, *data = inspect.signature(builder).parameters.values()

    @functools.wraps(builder)
    def build(**given: Any) -> nn.Module:
        chosen = {field: given.pop(field) for field in fields if field in given}
        return builder(options(**chosen), **given)

    by_keyword = [field.replace(kind=field.KEYWORD_ONLY) for field in fields.values()]
    vars(build)["__signature__"] = inspect.Signature([*data, *by_keyword])
    return build


def model_names() -> list[str]:
    """The names that ``build_model`` knows."""
    return sorted(_builders)


def summary_of(name: str) -> str:
    """What a network is, in one line.

    >>> summary_of("mlp")
    'Multilayer perceptron with ReLU.'
    """
    return (_find(name).__doc__ or "").strip().partition("\n")[0]


def build_model(
    name: str, *, input_shape: tuple[int, ...], num_classes: int, symbols: int | None = None, **options: Any
) -> nn.Module:
    """The network ``name`` with fresh weights, for examples of ``input_shape`` (without the batch).

    ``name`` is one of ``model_names()``, or the import path ``my_package.my_module:build`` of a callable,
    which is handed the options, and ``input_shape`` and ``num_classes`` if its signature has them. ``symbols``, how
    many different tokens a text may hold, is its ``vocabulary``, if it has such and no option says otherwise.
    """
    builder = _find(name)
    if name in _builders:
        num_classes = whole("num_classes", num_classes)
    data: dict[str, Any] = {"input_shape": input_shape, "num_classes": num_classes}
    if symbols is not None and "vocabulary" not in options:
        data["vocabulary"] = symbols
    module = builder(**_arguments(name, builder, data, options))
    if not isinstance(module, nn.Module):
        raise FedtailorError(
            f"model {name!r} returned an object of type {type(module).__name__}: expected a torch.nn.Module"
        )
    return module


def _find(name: str) -> Builder:
    """The builder behind a registered name or an import path."""
    if name in _builders:
        return _builders[name]
    if isinstance(name, str) and ":" in name:
        return _load(name)
    raise unknown("model", name, _builders, hint="; or an import path such as 'my_package.my_module:build'")


def _load(path: str) -> Builder:
    """The callable at ``module:attribute``."""
    module_name, _, attribute = path.partition(":")
    parts = attribute.split(".")
    if not all(part.isidentifier() for part in [*module_name.split("."), *parts]):
        raise FedtailorError(f"model {path!r}: expected an import path such as 'my_package.my_module:build'")
    module = _import(path, module_name)
    target: Any = module
    for part in parts:
        if not hasattr(target, part):
            where = getattr(module, "__file__", None) or "built in"
            raise FedtailorError(f"model {path!r}: module {module_name!r} ({where}) has no {attribute!r}")
        target = getattr(target, part)
    if isinstance(target, nn.Module):
        raise FedtailorError(
            f"model {path!r} is a network already built: expected a function or class that builds it"
        )
    if not callable(target):
        raise FedtailorError(
            f"model {path!r} is of type {type(target).__name__}: expected a function that builds the network"
        )
    builder: Builder = target
    return builder


def _import(path: str, module_name: str) -> ModuleType:
    """Import the module of ``path``; the current folder is searched last, also when a console script runs."""
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
                f"model {path!r}: there is no module {missing!r}; it must be installed or lie in {folder}"
            ) from None
        raise FedtailorError(
            f"model {path!r}: importing {module_name!r} failed with {type(error).__name__}: {error}"
        ) from error


def _arguments(name: str, builder: Builder, data: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """What to call ``builder`` with: the data's sizes as far as it takes them, and all options."""
    try:
        signature = inspect.signature(builder)
    except ValueError:  # a callable written in C need not have one
        return data | options
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        accepted = {parameter.name for parameter in parameters if parameter.kind in by_keyword}
        for option in options:
            if option not in accepted:
                raise unknown("option", option, accepted - set(data), hint=f" (options of model {name!r})")
        data = {key: value for key, value in data.items() if key in accepted}
    try:
        signature.bind(**data, **options)
    except TypeError as error:
        raise FedtailorError(f"model {name!r}: {error}; give it as an option of the model") from None
    return data | options
