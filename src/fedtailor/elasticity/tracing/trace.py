"""From an unmodified module and an example batch to its channel groups.

The module is recorded with ``torch.fx`` (``tracer.py``), or with ``torch.export`` where its code cannot be followed
(``exported.py``). Next to every value of the graph runs an array of unit numbers per axis, which the rules carry
from node to node (``labels.py``, ``rulebook/``). What was tied on the way becomes channel groups (``units.py``).
The user's module is never touched: all of this happens on a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch
from torch import fx, nn

import fedtailor.elasticity.tracing.rulebook  # noqa: F401  (fills the tables of rules)
from fedtailor.elasticity.groups import ChannelGroups, Extent, Indices
from fedtailor.elasticity.tracing.copies import named_tensors as named_tensors
from fedtailor.elasticity.tracing.copies import recordable, refuse_unfinished, shared_names
from fedtailor.elasticity.tracing.exported import export
from fedtailor.elasticity.tracing.labels import Labeller
from fedtailor.elasticity.tracing.recorder import (
    Answer,
    CannotFollowError,
    ExampleError,
    Tracer,
    copied,
    inputs_by_name,
)
from fedtailor.elasticity.tracing.rewrite import training_switches, write_sizes
from fedtailor.elasticity.tracing.rules import Notes, TraceError, describe
from fedtailor.elasticity.tracing.units import Solution, Units, solve
from fedtailor.errors import FedtailorError, unknown

GOOD_SHARE = 0.95  # of the parameters: above it, other readings of undecided reshapes are not tried
MOST_ATTEMPTS = 6


@dataclass(frozen=True)
class Annotations:
    """What a person says about a module that tracing cannot know."""

    keep: Sequence[
        str
    ] = ()  # layers whose channels stay, tensors that stay whole; ``*`` is any part of a name
    tie: Sequence[tuple[str, str]] = ()  # pairs of layers whose output channels shrink together


@dataclass(frozen=True)
class Recording:
    """A recorded ``forward``, and what is known about every node of it."""

    network: fx.GraphModule  # sizes that the code gives as numbers are attributes of it
    labels: Mapping[fx.Node, Any]  # node -> its value for the example, tensors as operands
    sizes: Mapping[str, Indices]  # attribute of ``network`` -> the axis whose kept positions it counts


@dataclass(frozen=True)
class Traced:
    """A traced module: its groups, and what the check needs to know."""

    solution: Solution
    evaluation: Recording
    training: Recording | None  # where training is more than evaluation with other numbers
    notes: Notes
    units: Units
    shapes: Mapping[str, tuple[int, ...]]
    obstacle: str  # why the graph cannot stand in for the user's class; empty if it can
    exported: bool  # whether torch.export had to help
    literals: tuple[str, ...]  # places where the code gives a size that must follow a cut

    @property
    def groups(self) -> ChannelGroups:
        """The channel groups of the user's own class."""
        return self.solution.groups

    def extents(self) -> dict[str, Extent]:
        """The sizes in the graph that follow a cut, by the name of their attribute."""
        elastic, layout = set(self.groups.elastic), self.solution.layout
        found = {name: layout.extent(axis, len(axis), name) for name, axis in self.evaluation.sizes.items()}
        return {name: e for name, e in found.items() if any(axis.group in elastic for axis in e.axes)}

    def without_literals(self) -> Traced:
        """The same module with every channel fixed that a literal size counts."""
        for literal in self.notes.literals:
            reason = f"has the literal size {literal.value} in {literal.place}; write -1 or x.size()"
            self.units.fix(literal.labels, reason)
        solution = solve(self.units, self.shapes, self.groups.ties)
        return replace(self, solution=solution, literals=())


def trace(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_unknown: str = "error",
    annotations: Annotations | None = None,
    doubt: str = "",
) -> Traced:
    """Trace ``module``; ``args`` and ``kwargs`` are an example of its inputs.

    ``on_unknown="keep"`` leaves channels that reach an operation without a rule uncut instead of refusing. ``doubt``
    says why ``torch.export`` should be used at once.
    """
    refuse_unfinished(module)
    found = _export(module, args, kwargs, doubt) if doubt else _record(module, args, kwargs)
    wishes = annotations or Annotations()
    best = _label(module, found, on_unknown, wishes, frozenset())
    share = best.share(module)
    for node in list(best.notes.undecided)[:MOST_ATTEMPTS] if share < GOOD_SHARE else ():
        other = _label(module, found, on_unknown, wishes, best.notes.front | {node})
        if other.share(module) > share:
            best, share = other, other.share(module)
    _refuse_unknown(best)
    return _finish(best, found)


@dataclass(frozen=True)
class _Labelled:
    """The recorded graphs with units on every axis, and the groups that follow."""

    units: Units
    notes: Notes
    labellers: tuple[Labeller, ...]
    shapes: Mapping[str, tuple[int, ...]]
    solution: Solution

    def share(self, module: nn.Module) -> float:
        """How much of the model can shrink."""
        return self.solution.groups.elastic_share(name for name, _ in module.named_parameters())


def _label(
    module: nn.Module, found: _Found, on_unknown: str, annotations: Annotations, front: frozenset[fx.Node]
) -> _Labelled:
    """Walk the graphs; ``front`` are reshapes whose first new axis carries the channels."""
    units, notes, shared = Units(), Notes(front=front), shared_names(module)
    labellers = tuple(Labeller(root, units, notes, shared) for root, _ in found.recorded)
    for labeller, (_, graph) in zip(labellers, found.recorded, strict=True):
        labeller.run(graph)
    _annotate(units, annotations, module)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    _fix_the_rest(units, notes, shapes, on_unknown)
    return _Labelled(units, notes, labellers, shapes, solve(units, shapes, shared))


def _finish(best: _Labelled, found: _Found) -> Traced:
    """Write the sizes that follow a cut into the graphs."""
    notes, solution = best.notes, best.solution
    elastic = set(solution.groups.elastic)
    literals = {
        f"{literal.place}: {literal.value}"
        for literal in notes.literals
        if elastic & set(solution.layout.groups_on([literal.labels]))
    }
    recordings = []
    for labeller, (root, graph) in zip(best.labellers, found.recorded, strict=True):
        sizes = write_sizes(
            graph, root, [literal for literal in notes.literals if literal.node.graph is graph]
        )
        recordings.append(Recording(fx.GraphModule(root, graph), labeller.known, sizes))
    evaluation, *training = recordings
    return Traced(
        solution=solution,
        evaluation=evaluation,
        training=training[0] if training else None,
        notes=notes,
        units=best.units,
        shapes=best.shapes,
        obstacle=found.obstacle or _open_answer(best.labellers[0], found.answers),
        exported=found.exported,
        literals=tuple(sorted(literals)),
    )


@dataclass(frozen=True)
class _Found:
    """What recording brought: graphs with the copies that they were made from, evaluation first."""

    recorded: tuple[tuple[nn.Module, fx.Graph], ...]
    answers: Sequence[Answer] = ()
    obstacle: str = ""
    exported: bool = False


def _record(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Found:
    inputs = inputs_by_name(module, tuple(args), kwargs)
    tracer, root = Tracer(copied(inputs)), recordable(module, training=False)
    try:
        graph = tracer.record(root)
        if not tracer.asked_mode:
            return _Found(((root, graph),), tracer.answers, _custom(graph))
        other_root = recordable(module, training=True)
        other = Tracer(copied(inputs)).record(other_root)
    except CannotFollowError as problem:
        return _export(module, args, kwargs, str(problem))
    except ExampleError as problem:
        if not _runs(module, args, kwargs):
            raise
        return _export(module, args, kwargs, str(problem))
    if training_switches(graph, other):
        return _Found(((root, graph),), tracer.answers, _custom(graph))
    obstacle = "forward does something else in training than in evaluation"
    return _Found(((root, graph), (other_root, other)), tracer.answers, obstacle)


def _custom(graph: fx.Graph) -> str:
    """Code of a graph cannot name the user's own autograd functions."""
    custom = [node for node in graph.nodes if isinstance(getattr(node.target, "__self__", None), type)]
    return f"forward uses {describe(custom[0])}" if custom else ""


def _export(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], problem: str) -> _Found:
    root = recordable(module, training=False).eval()
    exported = export(root, args, kwargs, problem)
    return _Found(((root, exported),), (), f"torch.fx cannot follow forward ({problem})", exported=True)


def _runs(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the module itself has no trouble with the example: then it was the tracing that failed."""
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            recordable(module, training=False).eval()(*copied(tuple(args)), **copied(dict(kwargs)))
    except (
        RuntimeError,
        TypeError,
        ValueError,
        LookupError,
        AssertionError,
        AttributeError,
        NotImplementedError,
    ):
        return False
    return True


def _open_answer(labeller: Labeller, answers: Sequence[Answer]) -> str:
    """Why the graph may only be good for batches of the example's sizes."""
    for answer in answers:
        if not answer.guard and labeller.is_open(answer.node):
            return f"what forward does depends on the sizes of the batch at {answer.place}"
    return ""


def _annotate(units: Units, annotations: Annotations, module: nn.Module) -> None:
    for pattern in annotations.keep:
        kept = [
            labels
            for (tensor, dim), labels in units.axes.items()
            if _stays(pattern, tensor, dim, units.producers)
        ]
        kept += [labels for layer, labels in units.producers.items() if _below(pattern, layer)]
        if not kept:
            layers = {name for name, _ in module.named_modules() if name}
            raise unknown("layer to keep", pattern, layers | {tensor for tensor, _ in units.axes})
        for labels in kept:
            units.fix(labels, f"is kept whole, as {pattern!r} asks")
    for pair in annotations.tie:
        first, second = (_output_axis(units, name) for name in pair)
        if len(first) != len(second):
            raise FedtailorError(
                f"tie {pair}: {len(first)} and {len(second)} channels cannot shrink together"
            )
        units.tie(first, second)


def _below(pattern: str, name: str) -> bool:
    """Whether a name, or a part that it lies in, is meant by a pattern."""
    return any(fnmatchcase(part, pattern) for part in (name, *_parents(name)))


def _parents(name: str) -> list[str]:
    return [name[:end] for end, letter in enumerate(name) if letter == "."]


def _stays(pattern: str, tensor: str, dim: int, producers: Mapping[str, Indices]) -> bool:
    """Whether an axis is kept: every axis of a tensor that is named, and of layers that only pass channels on.

    The columns of a layer that makes channels belong to the layer before it.
    """
    if fnmatchcase(tensor, pattern):
        return True
    owner = tensor.rpartition(".")[0]
    makes = any(part in producers for part in (owner, *_parents(owner)))
    return bool(owner) and _below(pattern, owner) and (not makes or dim == 0)


def _output_axis(units: Units, name: str) -> Indices:
    if name in units.producers:
        return units.producers[name]
    if (name, 0) in units.axes:
        return units.axes[name, 0]
    raise unknown(
        "layer to tie", name, {*units.producers, *(tensor for tensor, dim in units.axes if not dim)}
    )


def _fix_the_rest(units: Units, notes: Notes, shapes: Mapping[str, Any], on_unknown: str) -> None:
    """Channels on tensors that are not the module's, and those that a person leaves to be kept."""
    for (tensor, _), axis in units.axes.items():
        if tensor not in shapes:
            units.fix(axis, f"lies on {tensor}, which is neither a parameter nor a buffer")
    if on_unknown == "keep":
        for site, reaching in notes.unknown:
            for labels in reaching:
                units.fix(labels, f"reaches {site.place}, which has no rule")


def _refuse_unknown(found: _Labelled) -> None:
    """An operation without a rule is no problem if nothing that reaches it can shrink anyway."""
    layout, groups = found.solution.layout, found.solution.groups
    rigid = {int(root) for numbers, _ in found.units.fixed for root in layout.roots[numbers]}
    for site, reaching in found.notes.unknown:
        roots = {int(root) for labels in reaching for root in layout.roots[labels]}
        names = layout.groups_on([np.asarray(sorted(roots - rigid), dtype=np.int64)])
        if not names:
            continue
        producers = [
            producer for producer, made in groups.producers.items() if set(made) & set(names)
        ] or names
        kind = "layer_rule" if site.node.op == "call_module" else "function_rule"
        raise TraceError(
            f"no rule says how channels pass through {site.place}. Register one with fedtailor.{kind}, leave "
            f"the channels that reach it uncut with keep={list(producers)[:4]!r}, or leave all channels uncut that "
            'reach such operations with on_unknown="keep"'
        )
