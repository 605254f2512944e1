"""Local optimisers by name or import path: PyTorch's own classes, tried once before anything trains."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.importing import imported, is_import_path

NAMES: dict[str, type[Optimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
EXAMPLE = "torch.optim:RMSprop"
OF_TRAINING = (
    "lr",
    "momentum",
    "nesterov",
    "weight_decay",
)  # keys of [training] that optimisers call the same
TRIED_SHAPES = ((2, 3), (3,), (2, 2, 3, 3))  # of a matrix, a bias and a convolution


@dataclass(frozen=True)
class Optimiser:
    """A class of PyTorch's with its settings; the rate and the decay of a step are given later."""

    kind: type[Optimizer]
    settings: Mapping[str, Any]
    slots: int  # numbers that it keeps for each parameter
    follows_cuts: bool  # whether all that it keeps has the shape of the weights, or is one number

    def over(self, groups: list[dict[str, Any]]) -> Optimizer:
        """The optimiser of these groups of parameters, with its state empty."""
        return self.kind(groups, **self.settings)


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Refuse what [training.options] may not say."""
    for key in OF_TRAINING:
        require(key not in options, f"training.options.{key}", options.get(key), f"it as training.{key}")
    require(
        name != "sgd" or not options, "training.options", dict(options),
        'none with optimiser = "sgd"; "torch.optim:SGD" takes dampening and others',
    )  # fmt: skip


def optimiser_of(name: str, said: Mapping[str, Any], options: Mapping[str, Any]) -> Optimiser:
    """The optimiser that a name and its settings mean; ``said`` has what [training] says about ``OF_TRAINING``."""
    check_options(name, options)
    return _optimiser(name, _frozen(said), _frozen(options))


@lru_cache(maxsize=256)
def _optimiser(
    name: str, said: tuple[tuple[str, Any], ...], options: tuple[tuple[str, Any], ...]
) -> Optimiser:
    kind = _class_of(name)
    known = inspect.signature(kind.__init__).parameters
    anything = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
    takes = [key for key in known if key not in ("self", "params", *OF_TRAINING)]
    for key, _ in options:
        if key not in known and not anything:
            raise unknown(f"option of {kind.__name__} in [training.options]", key, takes)
    settings = dict(options)
    for key, value in said:
        if key in known or anything:
            # Where nobody speaks of momentum, a class has its own default for it.
            settings |= {key: value} if value or key == "weight_decay" else {}
        else:
            own = f"which has no such setting; training.options may have {', '.join(takes)}"
            require(
                not value, f"training.{key}", value, f"{'false' if value is True else 0} with {name}, {own}"
            )
    state = _tried(name, kind, settings)
    pairs = list(zip(TRIED_SHAPES, state, strict=True))
    slots = max(sum(value.shape == shape for value in kept) for shape, kept in pairs)
    follows = all(value.shape == shape or value.numel() == 1 for shape, kept in pairs for value in kept)
    return Optimiser(kind, settings, slots, follows)


def _class_of(name: str) -> type[Optimizer]:
    if not is_import_path(name):
        if name not in NAMES:
            raise unknown("training.optimiser", name, NAMES, hint=f"; or an import path such as {EXAMPLE!r}")
        return NAMES[name]
    kind = imported(name, "training.optimiser", EXAMPLE)
    fine = isinstance(kind, type) and issubclass(kind, Optimizer)
    require(fine, "training.optimiser", name, f"a class of torch.optim.Optimizer, such as {EXAMPLE!r}")
    return kind  # type: ignore[no-any-return]


def _tried(name: str, kind: type[Optimizer], settings: Mapping[str, Any]) -> list[list[Tensor]]:
    """One step on small tensors: what it keeps for each of them. What it raises here it would raise on every client."""
    weights = [torch.ones(shape, requires_grad=True) for shape in TRIED_SHAPES]
    for weight in weights:
        weight.grad = torch.ones_like(weight)
    try:
        optimiser = kind(weights, **settings)
        optimiser.step()
    except (TypeError, ValueError, RuntimeError, AttributeError) as error:
        said = ", ".join(f"{key} = {value!r}" for key, value in settings.items())
        raise FedtailorError(
            f"training.optimiser = {name!r} with {said}: expected settings with which it takes a step on the "
            f"gradients of any network; {type(error).__name__}: {error}"
        ) from error
    return [
        [value for value in optimiser.state[weight].values() if isinstance(value, Tensor)]
        for weight in weights
    ]


def _frozen(table: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A table as something that a cache knows again; TOML writes tuples as lists."""
    return tuple((key, tuple(value) if isinstance(value, list) else value) for key, value in table.items())
