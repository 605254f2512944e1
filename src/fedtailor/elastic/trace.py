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

import torch
from torch import fx, nn

import fedtailor.elastic.rulebook  # noqa: F401  (fills the tables of rules)
from fedtailor.elastic.copies import named_tensors as named_tensors
from fedtailor.elastic.copies import recordable, refuse_unfinished, shared_names
from fedtailor.elastic.exported import export
from fedtailor.elastic.groups import ChannelGroups, Extent, Indices
from fedtailor.elastic.labels import Labeller
from fedtailor.elastic.rewrite import training_switches, write_sizes
from fedtailor.elastic.rules import Notes, TraceError
from fedtailor.elastic.tracer import Answer, CannotFollowError, ExampleError, Tracer, copied, inputs_by_name
from fedtailor.elastic.units import Solution, Units, solve
from fedtailor.errors import FedtailorError, unknown


@dataclass(frozen=True)
class Annotations:
    """What a person says about a module that tracing cannot know."""

    keep: Sequence[str] = ()  # layers or tensors that stay whole; ``*`` stands for any part of a name
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
    units, notes, shared = Units(), Notes(), shared_names(module)
    found = _export(module, args, kwargs, doubt) if doubt else _record(module, args, kwargs)
    labellers = [Labeller(root, units, notes, shared) for root, _ in found.recorded]
    for labeller, (_, graph) in zip(labellers, found.recorded, strict=True):
        labeller.run(graph)
    obstacle = found.obstacle or _open_answer(labellers[0], found.answers)
    _annotate(units, annotations or Annotations(), module)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    _fix_the_rest(units, notes, shapes, on_unknown)
    solution = solve(units, shapes, shared)
    _refuse_unknown(notes, solution)
    elastic = set(solution.groups.elastic)
    literals = {
        f"{literal.place}: {literal.value}"
        for literal in notes.literals
        if elastic & set(solution.layout.groups_on([literal.labels]))
    }
    recordings = []
    for labeller, (root, graph) in zip(labellers, found.recorded, strict=True):
        sizes = write_sizes(
            graph, root, [literal for literal in notes.literals if literal.node.graph is graph]
        )
        recordings.append(Recording(fx.GraphModule(root, graph), labeller.known, sizes))
    evaluation, *training = recordings
    return Traced(
        solution,
        evaluation,
        training[0] if training else None,
        notes,
        units,
        shapes,
        obstacle,
        found.exported,
        tuple(sorted(literals)),
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
            return _Found(((root, graph),), tracer.answers)
        other_root = recordable(module, training=True)
        other = Tracer(copied(inputs)).record(other_root)
    except CannotFollowError as problem:
        return _export(module, args, kwargs, str(problem))
    except ExampleError as problem:
        if not _runs(module, args, kwargs):
            raise
        return _export(module, args, kwargs, str(problem))
    if training_switches(graph, other):
        return _Found(((root, graph),), tracer.answers)
    obstacle = "forward does something else in training than in evaluation"
    return _Found(((root, graph), (other_root, other)), tracer.answers, obstacle)


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
    layers = [name for name, _ in module.named_modules() if name]
    for pattern in annotations.keep:
        found = False
        for (tensor, _), labels in units.axes.items():
            names = [tensor, *(tensor[:end] for end, letter in enumerate(tensor) if letter == ".")]
            if any(fnmatchcase(name, pattern) for name in names):
                units.fix(labels, f"is kept whole, as {pattern!r} asks")
                found = True
        if not found:
            raise unknown("layer to keep", pattern, {*layers, *(tensor for tensor, _ in units.axes)})
    for pair in annotations.tie:
        first, second = (_output_axis(units, name) for name in pair)
        if len(first) != len(second):
            raise FedtailorError(
                f"tie {pair}: {len(first)} and {len(second)} channels cannot shrink together"
            )
        units.tie(first, second)


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


def _refuse_unknown(notes: Notes, solution: Solution) -> None:
    """An operation without a rule is no problem if nothing that reaches it can shrink."""
    elastic = set(solution.groups.elastic)
    for site, reaching in notes.unknown:
        groups = [group for group in solution.layout.groups_on(reaching) if group in elastic]
        if groups:
            producers = [
                p for p, made in solution.groups.producers.items() if set(made) & set(groups)
            ] or groups
            kind = "layer_rule" if site.node.op == "call_module" else "function_rule"
            raise TraceError(
                f"no rule says how channels pass through {site.place}. Register one with fedtailor.elastic.{kind}, "
                f"leave the channels that reach it uncut with keep={producers[:4]!r}, or leave all channels uncut that "
                'reach such operations with on_unknown="keep"'
            )
