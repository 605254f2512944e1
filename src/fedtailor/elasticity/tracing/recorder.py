"""Records ``forward`` as a graph: ``torch.fx``, with every value also computed for the example.

Plain ``torch.fx`` stops at the first ``assert``, ``if`` or ``range`` that asks for a size. Here each recorded node is
computed at once on the example (a few examples and a copy of the weights: cheaper than the ``meta`` device, whose first
use imports PyTorch's compiler), so that such questions have an answer. Answers that were given are remembered
(``Answer``): a graph that relies on the batch's own sizes is good for finding out which channels belong together, but
not for running other batches. Questions about the values of tensors are refused.

``numbering.py`` walks the graph afterwards and needs the shapes of values only. Code that cannot be recorded goes to
``exported.py``; ``source_lines.py`` says which line of it is running.
"""

from __future__ import annotations

import builtins
import inspect
import operator
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.fx._symbolic_trace import _assert_is_none, _wrapped_fns_to_patch
from torch.nn.modules import transformer
from torch.nn.utils import parametrizations, parametrize

from fedtailor.elasticity.tracing.attributes import label_sizes
from fedtailor.elasticity.tracing.example import on_meta
from fedtailor.elasticity.tracing.rules import TraceError, describe, rule_of_function, rule_of_layer
from fedtailor.elasticity.tracing.source_lines import (
    asking_line,
    failing_line,
    is_guard,
    user_line,
)
from fedtailor.elasticity.tracing.values import Value, of_known, stands_for

FACTORIES = (
    torch.arange, torch.empty, torch.eye, torch.full, torch.linspace, torch.ones, torch.rand, torch.randint,
    torch.randn, torch.scalar_tensor, torch.tensor, torch.tril_indices, torch.triu_indices, torch.zeros,
)  # fmt: skip
PACKING = (nn.utils.rnn.pack_padded_sequence, nn.utils.rnn.pad_packed_sequence)
# Layers of PyTorch that are made of other layers: their own code says how channels flow.
COMPOSITE = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Transformer, nn.TransformerEncoder, nn.TransformerDecoder,
    nn.TransformerEncoderLayer, nn.TransformerDecoderLayer,
)  # fmt: skip
_DATA = ("item", "tolist", "equal", "allclose", "is_nonzero", torch.equal, torch.allclose, torch.is_nonzero)


class CannotFollowError(Exception):
    """The code does something that symbolic tracing cannot record."""


class ExampleError(TraceError):
    """A step fails on the example batch."""


@dataclass(frozen=True)
class Answer:
    """A question about sizes that the code asked while it was traced, and that the example answered."""

    node: fx.Node
    guard: bool  # an ``assert``, or an ``if`` that only raises
    source_line: str


class Recorder(fx.Tracer):
    """Stops at every layer that has a rule, looks into the others, and computes shapes on the way."""

    proxy_buffer_attributes = True

    def __init__(self, inputs: Mapping[str, Any]) -> None:
        super().__init__(autowrap_functions=(*FACTORIES, *PACKING))
        self.inputs = inputs  # by the names of ``forward``
        self.answers: list[Answer] = []
        self.asked_mode = False  # whether the code looked at ``self.training``
        self._computing = False

    def record(self, module: nn.Module) -> fx.Graph:
        """The graph of ``module.forward``; ``node.meta["value"]`` holds the example's value, tensors without memory."""
        self._watch_mode(module)
        label_sizes(module)
        with _patched(self), _looking_inside(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            try:
                graph = self.trace(module)
            except (TraceError, CannotFollowError):
                raise
            except (fx.proxy.TraceError, TypeError, RuntimeError, NotImplementedError, AttributeError, NameError,
                    AssertionError, ValueError, LookupError) as error:  # fmt: skip
                said = (str(error).strip().splitlines() or [""])[0]
                raise CannotFollowError(f"{type(error).__name__}: {said}{failing_line(error)}") from error
        for node in graph.nodes:
            if node.op != "output":
                node.meta["value"] = on_meta(self._known(node))
        return graph

    def _watch_mode(self, module: nn.Module) -> None:
        """Notice when the user's code asks whether it is in training."""

        def ask(part: nn.Module) -> bool:
            self.asked_mode = self.asked_mode or not self._computing
            return bool(part.__dict__["training"])

        def tell(part: nn.Module, mode: bool) -> None:
            part.__dict__["training"] = mode

        watched: dict[type, type] = {}
        for part in module.modules():
            kind = type(part)
            if rule_of_layer(kind) is None and "training" in part.__dict__:
                if kind not in watched:
                    watched[kind] = type(
                        kind.__name__,
                        (kind,),
                        {"training": property(ask, tell), "__module__": kind.__module__},
                    )
                part.__class__ = watched[kind]

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> Any:
        """As ``torch.fx``, but a ``forward`` that is decorated, or could take more inputs than the example has, is
        called as the user would: with the inputs of the example, by name.
        """
        signature, given = inspect.signature(root_fn), dict[str, Any]()
        more = [
            name for name, parameter in signature.parameters.items() if parameter.kind.name == "VAR_KEYWORD"
        ]
        spare = any(f"**{name}" not in self.inputs for name in more)
        if inspect.unwrap(root_fn) is root_fn and not spare:
            return super().create_args_for_root(root_fn, is_module, concrete_args)
        for name, parameter in list(signature.parameters.items())[1:]:
            star = "**" if parameter.kind is inspect.Parameter.VAR_KEYWORD else ""
            if star + name in self.inputs:
                value = self._proxy_placeholder(star + name, None, signature, root_fn)
                given.update({key: value[key] for key in value.known} if star else {name: value})
        return lambda root: root_fn(root, **given), [self.root]

    def is_leaf_module(self, m: nn.Module, _path: str) -> bool:
        if rule_of_layer(type(m)) is not None:
            return True
        if _is_weight_norm(m):
            return False
        if type(m).__module__.startswith("torch.nn") and not isinstance(m, COMPOSITE):
            return any(True for _ in m.parameters())  # without weights, its code says how channels flow
        return type(m).__module__.startswith("torch.ao")

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        # A layer that forward makes for itself has no path; without weights, its code says how channels flow.
        passing = m not in (self.submodule_paths or {}) and not any(True for _ in m.parameters())
        if self._computing or passing:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        return attr_val if self._computing else super().getattr(attr, attr_val, parameter_proxy_cache)

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, np.generic):  # generated code knows plain numbers only
            return a.item()
        return a.node if isinstance(a, fx.Proxy) else super().create_arg(a)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        node.meta["source_line"] = user_line()
        return node

    def proxy(self, node: fx.Node) -> Value:
        """Compute the node for the example as soon as it is recorded."""
        node.meta["value"] = self._compute(node)
        return Value(node, self)

    def answer(self, node: fx.Node, kind: Callable[[Any], Any]) -> Any:
        """A number or truth value that the code wants to see."""
        value = node.meta["value"]
        if isinstance(value, Tensor) or node.meta.get("data"):
            raise TraceError(
                f"{describe(node)}{asking_line(node)}: the code asks for the value of a tensor, so that what it does "
                "next depends on the data and cannot be traced; move it into a layer of its own and register a rule "
                "for that layer with fedtailor.layer_rule"
            )
        self.answers.append(Answer(node, is_guard(), user_line()))
        return kind(value)

    def _compute(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self.inputs[str(node.target)]
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), self._known)
        asks = node.target in _DATA
        self._computing = True
        try:
            value = self._run(node, args, dict(kwargs))
            number = not isinstance(value, Tensor)
            node.meta["data"] = number and (
                asks or any(part.meta.get("data") for part in node.all_input_nodes)
            )
            return value
        except (RuntimeError, TypeError, ValueError, IndexError, AssertionError, AttributeError) as error:
            layer = self.root.get_submodule(str(node.target)) if node.op == "call_module" else None
            if layer is not None and rule_of_layer(type(layer)) is None:
                hint = ": there is no rule for this layer; register one with fedtailor.layer_rule"
            else:
                hint = " (is the example batch what forward expects?)"
            raise ExampleError(
                f"{describe(node, layer)} fails on the example batch: {error}{hint}"
            ) from error
        finally:
            self._computing = False

    def _run(self, node: fx.Node, args: Any, kwargs: dict[str, Any]) -> Any:
        if node.op == "get_attr":
            return operator.attrgetter(str(node.target))(self.root)
        if node.op == "call_module":
            return self.root.get_submodule(str(node.target)).forward(*args, **kwargs)
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return node.target(*args, **kwargs)  # type: ignore[operator]

    def _known(self, node: fx.Node) -> Any:
        if "value" not in node.meta:  # made on the way: a constant that was stored, a named tuple
            node.meta["value"] = self._compute(node)
        return node.meta["value"]

    def _proxy_placeholder(self, name: str, _concrete: Any, sig: inspect.Signature, _function: Any) -> Any:
        """Inputs that the example leaves out keep their defaults, and the graph insists on it."""
        given = self.inputs.get(name)
        if name.startswith("*"):
            return self.create_proxy("placeholder", name, (), {}) if given else ({} if name[1] == "*" else ())
        default = sig.parameters[name].default
        args = () if default is inspect.Parameter.empty else (default,)
        if name not in self.inputs and not args:
            raise TraceError(
                f"{type(self.root).__name__}.forward: input {name!r} is missing in the example batch"
            )
        if name in self.inputs and isinstance(given, Tensor | tuple | list | dict):
            return self.create_proxy("placeholder", name, args, {})
        chosen = given if name in self.inputs else default
        node = self.create_node("placeholder", name, args, {})
        node.meta["value"] = chosen
        message = f"{name} was {chosen!r} when the network was traced and must stay so"
        if chosen is None:
            self.create_node("call_function", _assert_is_none, (node, message), {}).meta["value"] = None
        return chosen


def _is_weight_norm(layer: nn.Module) -> bool:
    """Whether a layer, or a part of it, makes its weight of a direction and a length: its code says how."""
    if isinstance(layer, parametrize.ParametrizationList | parametrizations._WeightNorm):
        return all(isinstance(part, parametrizations._WeightNorm) for part in layer.children())
    made = getattr(layer, "parametrizations", {}) if parametrize.is_parametrized(layer) else {}
    return bool(made) and all(_is_weight_norm(entry) for entry in made.values())


@contextmanager
def _patched(recorder: Recorder) -> Iterator[None]:
    """Record what plain ``torch.fx`` would compute or miss: constant tensors, autograd functions, checks of masks."""

    def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
        def record(*args: Any, **kwargs: Any) -> Any:
            if recorder._computing:
                return function(*args, **kwargs)
            return recorder.create_proxy("call_function", function, args, kwargs)

        return record

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        bound = original.__get__(None, cls)
        if recorder._computing:
            return bound(*args, **kwargs)
        return recorder.create_proxy("call_function", bound, args, kwargs)

    def length(sized: Any) -> Any:
        if isinstance(sized, Value) and isinstance(sized.known, Tensor) and not recorder._computing:
            return sized.size(0)
        return count(sized)

    count = builtins.len
    original = torch.autograd.Function.__dict__["apply"]
    changes: list[tuple[Any, str, Any]] = [
        *((torch, function.__name__, recorded(function)) for function in FACTORIES),
        *((nn.utils.rnn, function.__name__, recorded(function)) for function in PACKING),
        (torch.autograd.Function, "apply", classmethod(apply)),
        *((torch, name, of_known(getattr(torch, name))) for name in ("finfo", "iinfo")),
        (builtins, "len", length),
        (builtins, "isinstance", stands_for),
        # It compares the values of masks to find out whether they are causal: a hint, not a result.
        (transformer, "_detect_is_causal_mask", lambda _mask, is_causal, _size: bool(is_causal)),
    ]
    before = [owner.__dict__[name] for owner, name, _ in changes]
    fused = torch.backends.mha.get_fastpath_enabled()
    # Fused Transformer layers look at the values of masks, and into the weights of the layers inside them.
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        for owner, name, replacement in changes:
            setattr(owner, name, replacement)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for (owner, name, _), value in zip(changes, before, strict=True):
            setattr(owner, name, value)


@contextmanager
def _looking_inside() -> Iterator[None]:
    """Follow functions that ``torch.fx.wrap`` would hide, unless there is a rule for them."""
    hidden = dict(_wrapped_fns_to_patch)
    for place, namespace in hidden.items():
        function = namespace.get(place[1])
        if inspect.isfunction(function) and rule_of_function(function) is None:
            del _wrapped_fns_to_patch[place]
    try:
        yield
    finally:
        _wrapped_fns_to_patch.update(hidden)
