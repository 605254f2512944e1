"""Chains of like blocks: found by running a module once and watching in which order its parts work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedtailor.data.batches import Batch, batch_size, inputs_of, map_tensors
from fedtailor.elasticity.cutting.depth import Chain
from fedtailor.elasticity.tracing.copies import recordable, shared_names
from fedtailor.elasticity.tracing.rules import rule_of_layer
from fedtailor.errors import FedtailorError
from fedtailor.objective.answers import answer_of

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
EXAMPLES = 2  # of the batch that are run

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """One call of a part of the module."""

    begun: int  # parts that began before it
    by_then: int  # parts that had begun when it ended
    given: Shape | None  # of the tensor that it is given first
    handed: Shape | None  # of the tensor that it hands on first
    alone: bool  # it hands on this one tensor and nothing else


@dataclass(frozen=True)
class Walk:
    """What happened while a module ran: parts that were called once, in their order, and what came out."""

    parts: Mapping[str, Part]
    begun: Mapping[str, int]  # of every part that ran at all: when it did so first
    answer: Shape | None

    def held_by(self, end: int) -> set[str]:
        """The parts that must be there for the first ``end`` calls: a part that is never called goes with its owner."""
        return {path for path, first in self.begun.items() if first < end}


def walk(module: nn.Module, example: Batch) -> Walk:
    """Run a copy of the module on a few examples, or on all of them if it does not like few."""
    copy = recordable(module, training=False).eval()
    for batch in (few_of(example), example):
        calls: list[tuple[str, Part]] = []
        began: list[str] = []
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), _watched(copy, calls, began):
                args, kwargs = inputs_of(batch)
                answer = answer_of(copy(*args, **kwargs))
        except (RuntimeError, ValueError, TypeError, AssertionError, LookupError):
            if batch is example:
                raise
            continue
        break
    times = Counter(began)
    parts = {path: part for path, part in sorted(calls, key=lambda call: call[1].begun) if times[path] == 1}
    firsts = {path: place for place, path in reversed(list(enumerate(began)))}
    return Walk(parts, firsts, _shape(answer))


def few_of(example: Batch) -> Batch:
    """The first examples of a batch; tensors of another length (masks, time first) stay whole."""
    length = batch_size(example)
    return map_tensors(example, lambda x: x[:EXAMPLES] if x.dim() and len(x) == length else x)


@contextmanager
def _watched(module: nn.Module, calls: list[tuple[str, Part]], began: list[str]) -> Iterator[None]:
    """Write down when parts begin and end."""
    open_calls: list[int] = []

    def hooks(path: str, part: nn.Module) -> list[Any]:
        def begin(_part: nn.Module, _args: Any, _kwargs: Any) -> None:
            open_calls.append(len(began))
            began.append(path)

        def end(_part: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = next(iter(tree_leaves((args, kwargs))), None)
            start = open_calls.pop()
            alone = isinstance(output, Tensor)
            calls.append((path, Part(start, len(began), _shape(given), _shape(first_tensor(output)), alone)))

        return [
            part.register_forward_pre_hook(begin, with_kwargs=True),
            part.register_forward_hook(end, with_kwargs=True),
        ]

    handles = [handle for path, part in module.named_modules() for handle in hooks(path, part)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def first_tensor(output: Any) -> Any:
    """What a block hands on: its output, or the first tensor of it (others are states, or weights of attention)."""
    return next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)), output)


def _shape(value: Any) -> Shape | None:
    return tuple(value.shape) if isinstance(value, Tensor) else None


def find_chains(module: nn.Module, seen: Walk, named: Sequence[str] = ()) -> tuple[Chain, ...]:
    """The blocks of each container, in their order; ``named`` are paths or patterns of blocks, if a person says them.

    A block is a part with weights in a ``Sequential``, ``ModuleList`` or ``ModuleDict`` that is no single layer and of
    whose class there are several; of blocks inside blocks the outer ones count.
    """
    blocks = _named_blocks(seen, named) if named else _like_blocks(module, seen)
    containers: dict[str, list[str]] = {}
    for path in blocks:
        containers.setdefault(path.rpartition(".")[0], []).append(path)

    def spare(path: str) -> bool:
        part = seen.parts[path]
        return part.alone and part.given is not None and part.given == part.handed

    return tuple(
        Chain(name, tuple(paths), tuple(path for path in paths if spare(path)))
        for name, paths in containers.items()
    )


def _like_blocks(module: nn.Module, seen: Walk) -> list[str]:
    owners = dict(module.named_modules())
    found = [
        path
        for path in seen.parts
        if path
        and isinstance(owners[path.rpartition(".")[0]], CONTAINERS)
        and not isinstance(owners[path], CONTAINERS)
        and rule_of_layer(type(owners[path])) is None
        and any(True for _ in owners[path].parameters())
    ]
    kinds = Counter(type(owners[path]) for path in found)
    return _outermost([path for path in found if kinds[type(owners[path])] > 1])


def _named_blocks(seen: Walk, named: Sequence[str]) -> list[str]:
    found = {path for name in named for path in seen.parts if path and fnmatchcase(path, name)}
    for name in named:
        if not any(fnmatchcase(path, name) for path in found):
            raise FedtailorError(
                f"model.chain = {name!r}: expected the path of a part that runs once, or a pattern of such paths"
                f"; {_some(seen)}"
            )
    return _outermost([path for path in seen.parts if path in found])


def _outermost(paths: Sequence[str]) -> list[str]:
    chosen: list[str] = []
    for path in paths:  # an outer part begins before what is inside it
        if not any(path.startswith(f"{outer}.") for outer in chosen):
            chosen.append(path)
    return chosen


def _some(seen: Walk) -> str:
    return f"this module has {', '.join(path for path in list(seen.parts)[:6] if path)} and others"


def tensors_beyond(module: nn.Module, held: Collection[str]) -> frozenset[str]:
    """The names of all tensors that only parts own which are not ``held``; of a layer all tensors, or none."""
    ties = shared_names(module)
    own: dict[str, list[str]] = {}
    for path, layer in module.named_modules():
        tensors = (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False))
        own[path] = [f"{path}.{name}".removeprefix(".") for name, _ in tensors]
    needed = {ties.get(name, name) for path in held for name in own[path]}
    return frozenset(
        name
        for path, names in own.items()
        if path not in held and not any(first in needed for first in names)
        for name in names
    )


def with_silent_parts(module: nn.Module, seen: Walk, held: set[str]) -> set[str]:
    """The held parts, and inside them those that no code ever calls: their weights are read by their owner."""
    found = set(held)
    for path, _ in module.named_modules():  # owners come before what they own
        if path and path not in seen.begun and path.rpartition(".")[0] in found:
            found.add(path)
    return found
