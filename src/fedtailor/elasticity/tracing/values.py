"""Values of a module that is being recorded: they stand where tensors, sizes, tuples would, and write down their use.

``recorder.py`` makes them, one for every node of its graph, and knows what each of them is for the example.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch import Tensor, fx

from fedtailor.elasticity.tracing.source_lines import is_unpacking


class Value(fx.Proxy):
    """A recorded value that answers questions about sizes."""

    @property
    def known(self) -> Any:
        """What the value is for the example."""
        return self.node.meta["value"]

    @property
    def kind(self) -> type:
        """The type of what it stands for."""
        return type(self.known)

    def __getattr__(self, k: str) -> Any:
        # numpy and PyTorch look for many ways in, such as ``__cuda_array_interface__``
        if k.startswith("__") or not hasattr(self.known, k):
            raise AttributeError(f"{type(self.known).__name__!r} object has no attribute {k!r}")
        if isinstance(getattr(self.known, k), str):  # ``x.device.type``, for ``torch.autocast``
            return getattr(self.known, k)
        return _Attribute(self, k)

    def _answer(self, kind: Callable[[Any], Any]) -> Any:
        return self.tracer.answer(self.node, kind)  # type: ignore[attr-defined]

    def __bool__(self) -> bool:
        return bool(self._answer(bool))

    def __int__(self) -> int:
        return int(self._answer(int))

    def __index__(self) -> int:
        return int(self._answer(int))

    def __float__(self) -> float:
        return float(self._answer(float))

    def __array__(self, *args: Any, **kwargs: Any) -> np.ndarray[Any, Any]:
        return np.asarray(self._answer(lambda value: value), *args, **kwargs)

    def __len__(self) -> int:
        return int(self.size(0)) if isinstance(self.known, Tensor) else len(self.known)

    def __iter__(self) -> Iterator[Any]:
        if is_unpacking() or not isinstance(self.known, Tensor):  # the code itself says how many there are
            return (self[index] for index in range(len(self.known)))  # type: ignore[index]
        return (self[index] for index in range(len(self)))  # type: ignore[index]

    def __contains__(self, key: object) -> bool:
        return key in self.known

    def keys(self) -> Any:
        """Of a dict that came in."""
        return self.known.keys()

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


class _Attribute(Value):
    """``x.shape``, or ``x.mean`` on the way to being called."""

    def __init__(self, root: Value, attr: str) -> None:
        self.root = root
        self.attr = attr
        self.tracer = root.tracer
        self._node: fx.Node | None = None

    @property
    def kind(self) -> type:
        """As of any value, without a node for the attribute."""
        return type(getattr(self.root.known, self.attr))

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        """The node of the attribute itself, made when it is first needed."""
        if self._node is None:
            self._node = self.tracer.create_proxy("call_function", getattr, (self.root, self.attr), {}).node
        return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.tracer.create_proxy("call_method", self.attr, (self.root, *args), kwargs)


_isinstance = builtins.isinstance


def stands_for(thing: Any, kinds: Any) -> bool:
    """``isinstance`` while code is recorded, which asks whether a value is a tensor, a number or a tuple.

    A ``__class__`` of values would say so to PyTorch's C++, too, which would take them for tensors.
    """
    found = _isinstance(thing, kinds)
    return found or (issubclass(type(thing), Value) and issubclass(thing.kind, kinds))


def of_known(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of types of numbers, such as ``torch.finfo``, that also takes ``x.dtype`` of a recorded ``x``."""
    return lambda *given: function(*(each.known if issubclass(type(each), Value) else each for each in given))
