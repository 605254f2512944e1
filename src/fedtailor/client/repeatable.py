"""Whether every step of a network is the same operations, so that one that was recorded stands for the next.

PyTorch's own layers are. A class of the user's is if its ``forward`` does nothing but compute: it keeps nothing, draws
from no generator but PyTorch's, reads no clock and calls only what is known to do as little. Its bytecode tells; what
is not understood counts as a reason to run it as it is.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.elasticity.tracing.rewrite import SizedGraph
from fedtailor.objective.losses import OnTargets

TRUSTED = (
    "torch.nn.modules",
    "torch.nn.functional",
    "torch.functional",
    "fedtailor.objective",
    "fedtailor.elasticity",
)
MODULES = (torch, nn, nn.functional, math)
BUILTINS = frozenset(
    {"len", "range", "zip", "enumerate", "int", "float", "bool", "tuple", "list", "isinstance", "max", "min", "sum",
     "abs", "reversed", "sorted", "all", "any", "slice"}
)  # fmt: skip
NUMBERS = (int, float, bool)
PLAIN = (*NUMBERS, str, type(None), torch.dtype, torch.device, torch.Size, torch.memory_format)
# What changes something beside local names, or runs at another time
CHANGES = frozenset(
    {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE",
     "IMPORT_NAME", "IMPORT_FROM", "YIELD_VALUE", "LOAD_SUPER_ATTR", "LOAD_BUILD_CLASS", "LOAD_NAME", "STORE_NAME",
     "BEFORE_WITH", "LOAD_SPECIAL"}
)  # fmt: skip
# Methods of tensors that hand their numbers to Python behind PyTorch's back, or code of Python's to PyTorch
ESCAPES = frozenset(
    {"numpy", "tolist", "data_ptr", "storage", "untyped_storage", "register_hook", "apply_", "map_"}
)
OF_LISTS = frozenset({"append", "extend", "items", "values", "keys"})
OF_LAYERS = frozenset({"forward", "training"})  # of what every layer has
# Of a class: what no step calls, or what is read anyway
UNREAD = frozenset({"__init__", "extra_repr", "__repr__", "forward"})
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_MISSING = object()


def is_repeatable(module: nn.Module, loss: Callable[..., Any]) -> bool:
    """Whether a network's forward pass and its loss compute and do nothing else."""
    layers = tuple(module.modules())
    hooked = any(getattr(nn.modules.module, f"_global{hooks}") for hooks in HOOKS)
    return not hooked and all(_layer_computes(layer, layers) for layer in layers) and _loss_computes(loss)


def _layer_computes(layer: nn.Module, layers: Sequence[nn.Module]) -> bool:
    kind, reading = type(layer), _Reading(layers)
    if any(getattr(layer, hooks) for hooks in HOOKS) or "forward" in vars(layer):
        return False
    if isinstance(layer, SizedGraph):  # a traced graph, whose code is PyTorch's calls and no more
        return True
    given = [value for value in vars(layer).values() if callable(value) and not isinstance(value, type)]
    if not all(map(reading.is_fine, given)):  # an activation, say
        return False
    own = [each for each in kind.__mro__ if each is not object and not _is_trusted(each.__module__)]
    changed = {name for each in own for name, value in vars(each).items() if _is_code(value)} - UNREAD
    if "__getattribute__" in changed or "__getattr__" in changed or "__call__" in changed:
        return False
    # What PyTorch's own forward calls on itself may be another class's
    inherited = _is_trusted(kind.forward.__globals__["__name__"])
    return not (inherited and changed) and reading.is_fine(kind.forward)


def _is_code(value: object) -> bool:
    return callable(value) or isinstance(value, property | classmethod | staticmethod)


def _is_trusted(module: str) -> bool:
    return module.startswith(TRUSTED)


def _loss_computes(loss: object) -> bool:
    if isinstance(loss, OnTargets):
        loss = loss.loss
    if isinstance(loss, nn.Module):
        return _layer_computes(loss, (loss,))
    return isinstance(loss, FunctionType | BuiltinFunctionType) and _Reading(()).is_fine(loss)


class _Reading:
    """Reads functions, and what they call, of a network with these layers."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        self.layers = layers
        self.read: set[CodeType] = set()

    def is_fine(self, value: object) -> bool:
        """Whether what code refers to is a constant, a tensor, a layer, or a function that only computes."""
        if isinstance(value, ModuleType):
            return any(value is each for each in MODULES)
        if isinstance(value, PLAIN):
            return True
        if isinstance(value, Tensor):  # one that nobody registered may be changed by anyone
            return any(value is each for layer in self.layers for each in _tensors(layer))
        if isinstance(value, nn.Module):
            return any(value is layer for layer in self.layers)
        if isinstance(value, tuple):  # a list may be changed behind the code's back
            return all(map(self.is_fine, value))
        if isinstance(value, type):
            return value is Tensor or getattr(builtins, value.__name__, None) is value
        if isinstance(value, BuiltinFunctionType):
            return _is_of_torch(value) or getattr(math, value.__name__, None) is value
        function = value.__func__ if isinstance(value, staticmethod) else value
        if not isinstance(function, FunctionType):
            return False
        return _is_trusted(function.__globals__["__name__"]) or self._computes(function)

    def _computes(self, function: FunctionType) -> bool:
        if inspect.isgeneratorfunction(function) or inspect.iscoroutinefunction(function):
            return False
        if function.__code__ in self.read:  # or is being read: it calls itself
            return True
        self.read.add(function.__code__)
        given = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
        outer = _closure(function)
        return (
            outer is not None
            and all(map(self.is_fine, given))
            and self._codes_compute(function.__code__, function.__globals__, outer)
        )

    def _codes_compute(self, whole: CodeType, names: dict[str, Any], outer: dict[str, Any]) -> bool:
        return all(self._only_computes(code, names, outer) for code in _codes(whole))

    def _only_computes(self, code: CodeType, names: dict[str, Any], outer: dict[str, Any]) -> bool:
        """Whether every instruction does, where names mean this."""
        space: object = None  # the module that the instruction before has loaded
        for each in dis.get_instructions(code):
            name, loaded = each.argval, list[object]()
            if each.opname in CHANGES or (each.opname == "STORE_DEREF" and name in outer):
                return False
            if each.opname == "LOAD_GLOBAL":
                if name not in names and name not in BUILTINS:
                    return False
                loaded = [names[name]] if name in names else []
                if any(isinstance(value, (*NUMBERS, Tensor)) for value in loaded):  # anyone may change it
                    return False
            elif each.opname == "LOAD_DEREF":
                loaded = [outer[name]] if name in outer else []  # else it is local to the function around
            elif each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                loaded = [getattr(space, name, _MISSING)] if space is not None else self._called(name)
            if not all(map(self.is_fine, loaded)):
                return False
            space = loaded[0] if loaded and isinstance(loaded[0], ModuleType) else None
        return True

    def _called(self, name: str) -> list[object]:
        """What an attribute may mean: that of any layer that has one of this name, or else a tensor's."""
        if name.startswith("_") or name.endswith("_") or name in ESCAPES:
            return [_MISSING]
        of_all, of_tensors = hasattr(nn.Module, name), hasattr(Tensor, name)
        if of_all and not (of_tensors or name in OF_LAYERS):
            return [_MISSING]
        usual = inspect.getattr_static(nn.Module, name, _MISSING)
        found = [value for layer in self.layers if (value := _held(layer, name)) not in (_MISSING, usual)]
        if name in OF_LAYERS:  # each layer's own is read where that layer is
            return []
        known = found or of_tensors or name in OF_LISTS
        return list(found) if known else [_MISSING]


def _held(layer: nn.Module, name: str) -> object:
    """An attribute of a layer; numbers of its class are anyone's to change."""
    for held in (layer._modules, layer._parameters, layer._buffers, vars(layer)):
        if name in held:
            return held[name]
    value = inspect.getattr_static(type(layer), name, _MISSING)
    own = not _is_trusted(type(layer).__module__)
    return [value] if own and isinstance(value, NUMBERS) else value  # a list, which is not fine


def _tensors(layer: nn.Module) -> Iterator[Tensor | None]:
    yield from layer._parameters.values()
    yield from layer._buffers.values()


def _closure(function: FunctionType) -> dict[str, Any] | None:
    """What the names of functions around it mean; None where one means nothing yet."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    try:
        return {name: cell.cell_contents for name, cell in cells}
    except ValueError:
        return None


def _codes(code: CodeType) -> Iterator[CodeType]:
    """A function's code and that of what is defined inside it: comprehensions, lambdas."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _is_of_torch(value: BuiltinFunctionType) -> bool:
    """Whether it is a function on tensors; what is random among them is told by its operation."""
    spaces = (torch._C._VariableFunctions, torch._C._nn)
    return any(getattr(space, value.__name__, None) is value for space in spaces)
