"""Networks by name, also of installed packages, or by the import path of a function of the user's own."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from fedtailor.errors import FedtailorError, unknown
from fedtailor.importing import find, offered
from fedtailor.models.parts import whole

Builder = Callable[..., nn.Module]
B = TypeVar("B", bound=Builder)

ENTRY_POINTS = "fedtailor.models"  # where packages offer builders

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
    return sorted({*_builders, *offered(ENTRY_POINTS)})


def summary_of(name: str) -> str:
    """What a network is, in one line.

    >>> summary_of("mlp")
    'Multilayer perceptron with ReLU.'
    """
    return (builder_of(name).__doc__ or "").strip().partition("\n")[0]


def build_model(
    name: str | Builder,
    *,
    input_shape: tuple[int, ...],
    num_classes: int,
    symbols: int | None = None,
    **options: Any,
) -> nn.Module:
    """The network ``name`` with fresh weights, for examples of ``input_shape`` (without the batch).

    ``name`` is one of ``model_names()``, the import path ``my_package.my_module:build`` or ``my_file.py:build`` of
    a callable, or the callable itself; it is handed the options, and ``input_shape`` and ``num_classes`` if its
    signature has them. ``symbols``, how many different tokens a text may hold, is its ``vocabulary``, if it has such
    and no option says otherwise.
    """
    builder = builder_of(name)
    name = name if isinstance(name, str) else getattr(name, "__qualname__", type(name).__qualname__)
    if name in _builders:
        num_classes = whole("num_classes", num_classes)
    data: dict[str, Any] = {"input_shape": input_shape, "num_classes": num_classes}
    if symbols is not None and "vocabulary" not in options:
        data["vocabulary"] = symbols
    try:
        module = builder(**_arguments(name, builder, data, options))
    except (MemoryError, RuntimeError) as error:
        if (
            isinstance(error, MemoryError)
            or "alloc" in str(error).lower()
            or "overflow" in str(error).lower()
        ):
            raise FedtailorError(
                f"model {name!r} with {options}: its weights do not fit this machine's memory; expected smaller sizes"
            ) from error
        raise
    if not isinstance(module, nn.Module):
        raise FedtailorError(
            f"model {name!r} returned an object of type {type(module).__name__}: expected a torch.nn.Module"
        )
    return module


def builder_of(name: str | Builder) -> Builder:
    """The builder behind a registered name, an import path or a package's entry point; or the builder itself."""
    if not isinstance(name, str):
        return _checked(getattr(name, "__qualname__", type(name).__qualname__), name)
    if name in _builders:
        return _builders[name]
    return _checked(name, find("model", name, _builders, ENTRY_POINTS, "my_package.my_module:build"))


def _checked(name: str, target: Any) -> Builder:
    if isinstance(target, nn.Module):
        raise FedtailorError(
            f"model {name!r} is a network already built: expected a function or class that builds it"
        )
    if not callable(target):
        raise FedtailorError(
            f"model {name!r} is of type {type(target).__name__}: expected a function that builds the network"
        )
    builder: Builder = target
    return builder


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
