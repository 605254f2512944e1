"""From an unmodified module and an example batch to its channel groups: the one function that calls all neighbours.

The module is recorded with ``torch.fx`` (``recorder.py``), or with ``torch.export`` where its code cannot be followed
(``exported.py``). Next to every value of the graph runs an array of unit numbers per axis, which the rules carry from
node to node (``numbering.py``, ``rulebook/``). What was tied on the way becomes channel groups (``units.py``). The
user's module is never touched: all of this happens on a copy (``copies.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import fx, nn

import fedtailor.elasticity.tracing.rulebook  # noqa: F401  (fills the tables of rules)
from fedtailor.elasticity.groups import ChannelGroups, Extent, Indices
from fedtailor.elasticity.tracing.annotations import Annotations, annotate
from fedtailor.elasticity.tracing.copies import named_tensors, recordable, refuse_unfinished, shared_names
from fedtailor.elasticity.tracing.example import copied, inputs_by_name
from fedtailor.elasticity.tracing.exported import export
from fedtailor.elasticity.tracing.numbering import Numberer
from fedtailor.elasticity.tracing.recorder import Answer, CannotFollowError, ExampleError, Recorder
from fedtailor.elasticity.tracing.rewrite import training_switches, write_sizes
from fedtailor.elasticity.tracing.rules import Counted, Findings, TraceError, describe
from fedtailor.elasticity.tracing.units import Solution, Units, join_counted, solve

GOOD_SHARE = 0.95  # of the parameters: above it, other readings of undecided reshapes are not tried
MOST_ATTEMPTS = 6


@dataclass(frozen=True)
class Recording:
    """A recorded ``forward``, and what is known about every node of it."""

    network: fx.GraphModule  # sizes that the code gives as numbers are attributes of it
    known: Mapping[fx.Node, Any]  # node -> its value for the example, tensors as operands
    sizes: Mapping[str, Indices]  # attribute of ``network`` -> the axis whose kept positions it counts


@dataclass(frozen=True)
class Traced:
    """A traced module: its groups, and what the check needs to know."""

    solution: Solution
    evaluation: Recording
    training: Recording | None  # where training is more than evaluation with other numbers
    findings: Findings
    units: Units
    shapes: Mapping[str, tuple[int, ...]]
    obstacle: str  # why the graph cannot stand in for the user's class; empty if it can
    exported: bool  # whether torch.export had to help
    literals: tuple[str, ...]  # where the code gives a size that must follow a cut, and which
    unseen: str  # what was not recorded, and so is not checked

    @property
    def groups(self) -> ChannelGroups:
        """The channel groups of the user's own class."""
        return self.solution.groups

    @property
    def torn(self) -> bool:
        """Whether an attribute of the user's code counts axes that need not have one size."""
        moving = {(size.layer, size.attribute, size.index) for size in self.solution.attributes}
        uses = [axis for place in moving for axis in self.units.counted[place]]
        return self.solution.torn or any(axis is None for axis in uses)

    def share(self, module: nn.Module) -> float:
        """How much of the model can shrink."""
        return self.groups.elastic_share(name for name, _ in module.named_parameters())

    def extents(self) -> dict[str, Extent]:
        """The sizes in the graph that follow a cut, by the name of their attribute."""
        elastic, arrangement = set(self.groups.elastic), self.solution.arrangement
        found = {
            name: arrangement.extent(axis, len(axis), name) for name, axis in self.evaluation.sizes.items()
        }
        return {name: e for name, e in found.items() if any(axis.group in elastic for axis in e.axes)}

    def with_one_size_each(self) -> Traced:
        """The same module with axes tied that one attribute of the user's code counts."""
        join_counted(self.units)
        return replace(self, solution=solve(self.units, self.shapes, self.groups.ties))

    def without_literals(self) -> Traced:
        """The same module with every channel fixed that a literal size counts; attributes follow."""
        for literal in self.findings.literals:
            if isinstance(literal.value, Counted):
                continue
            reason = f"has the literal size {literal.value} in {literal.description}; write -1 or x.size()"
            self.units.fix(literal.numbers, reason)
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
    best = _number(module, found, on_unknown, wishes, frozenset())
    share = best.share(module)
    for node in list(best.findings.undecided)[:MOST_ATTEMPTS] if share < GOOD_SHARE else ():
        other = _number(module, found, on_unknown, wishes, best.findings.front | {node})
        if other.share(module) > share:
            best, share = other, other.share(module)
    _refuse_unknown(best)
    return _finish(best, found)


@dataclass(frozen=True)
class _Numbered:
    """The recorded graphs with unit numbers on every axis, and the groups that follow."""

    units: Units
    findings: Findings
    numberers: tuple[Numberer, ...]
    shapes: Mapping[str, tuple[int, ...]]
    solution: Solution

    def share(self, module: nn.Module) -> float:
        """How much of the model can shrink."""
        return self.solution.groups.elastic_share(name for name, _ in module.named_parameters())


def _number(
    module: nn.Module, found: _Found, on_unknown: str, annotations: Annotations, front: frozenset[fx.Node]
) -> _Numbered:
    """Number the graphs; ``front`` are reshapes whose first new axis carries the channels."""
    units, shared = Units(), shared_names(module)
    findings = Findings(heads=annotations.heads, front=front)
    numberers = tuple(Numberer(root, units, findings, shared) for root, _ in found.recorded)
    for numberer, (_, graph) in zip(numberers, found.recorded, strict=True):
        numberer.run(graph)
    annotate(units, annotations, module)
    shapes = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    _fix_the_rest(units, findings, shapes, on_unknown)
    return _Numbered(units, findings, numberers, shapes, solve(units, shapes, shared))


def _finish(best: _Numbered, found: _Found) -> Traced:
    """Write the sizes that follow a cut into the graphs."""
    findings, solution = best.findings, best.solution
    elastic = set(solution.groups.elastic)
    literals = {
        f"{literal.description}: {literal.value}"
        for literal in findings.literals
        if elastic & set(solution.arrangement.groups_on([literal.numbers]))
    }
    recordings = []
    for numberer, (root, graph) in zip(best.numberers, found.recorded, strict=True):
        sizes = write_sizes(
            graph, root, [literal for literal in findings.literals if literal.node.graph is graph]
        )
        recordings.append(Recording(fx.GraphModule(root, graph), numberer.known, sizes))
    evaluation, *training = recordings
    return Traced(
        solution=solution,
        evaluation=evaluation,
        training=training[0] if training else None,
        findings=findings,
        units=best.units,
        shapes=best.shapes,
        obstacle=found.obstacle or _open_answer(best.numberers[0], found.answers),
        exported=found.exported,
        literals=tuple(sorted(literals)),
        unseen=found.unseen,
    )


@dataclass(frozen=True)
class _Found:
    """What recording brought: graphs with the copies that they were made from, evaluation first."""

    recorded: tuple[tuple[nn.Module, fx.Graph], ...]
    answers: Sequence[Answer] = ()
    obstacle: str = ""
    exported: bool = False
    unseen: str = ""  # what was not recorded, and so is not checked


def _record(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Found:
    inputs = inputs_by_name(module, tuple(args), kwargs)
    recorder, root = Recorder(copied(inputs)), recordable(module, training=False)
    try:
        graph = recorder.record(root)
        if not recorder.asked_mode:
            return _Found(((root, graph),), recorder.answers, _custom(graph))
    except CannotFollowError as problem:
        return _export(module, args, kwargs, str(problem))
    except ExampleError as problem:
        if not _runs(module, args, kwargs):
            raise
        return _export(module, args, kwargs, str(problem))
    try:
        other_root = recordable(module, training=True)
        other = Recorder(copied(inputs)).record(other_root)
    except (CannotFollowError, ExampleError) as problem:  # masks that are drawn with numpy, for instance
        obstacle = f"what forward does in training cannot be followed ({problem})"
        return _Found(((root, graph),), recorder.answers, obstacle, unseen=obstacle)
    if training_switches(graph, other):
        return _Found(((root, graph),), recorder.answers, _custom(graph))
    obstacle = "forward does something else in training than in evaluation"
    return _Found(((root, graph), (other_root, other)), recorder.answers, obstacle)


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


def _open_answer(numberer: Numberer, answers: Sequence[Answer]) -> str:
    """Why the graph may only be good for batches of the example's sizes."""
    for answer in answers:
        if not answer.guard and numberer.is_open(answer.node):
            return f"what forward does depends on the sizes of the batch at {answer.source_line}"
    return ""


def _fix_the_rest(units: Units, findings: Findings, shapes: Mapping[str, Any], on_unknown: str) -> None:
    """Channels on tensors that are not the module's, and those that a person leaves to be kept."""
    for (tensor, _), axis in units.axes.items():
        if tensor not in shapes:
            units.fix(axis, f"lies on {tensor}, which is neither a parameter nor a buffer")
    if on_unknown == "keep":
        for site, reaching in findings.unknown:
            for numbers in reaching:
                units.fix(numbers, f"reaches {site.description}, which has no rule")


def _refuse_unknown(found: _Numbered) -> None:
    """An operation without a rule is no problem if nothing that reaches it can shrink anyway."""
    arrangement, groups = found.solution.arrangement, found.solution.groups
    rigid = {int(root) for axis, _ in found.units.fixed for root in arrangement.roots[axis]}
    for site, reaching in found.findings.unknown:
        roots = {int(root) for numbers in reaching for root in arrangement.roots[numbers]}
        names = arrangement.groups_on([np.asarray(sorted(roots - rigid), dtype=np.int64)])
        if not names:
            continue
        producers = [
            producer for producer, made in groups.producers.items() if set(made) & set(names)
        ] or names
        kind = "layer_rule" if site.node.op == "call_module" else "function_rule"
        raise TraceError(
            f"no rule says how channels pass through {site.description}. Register one with fedtailor.{kind}, leave "
            f"the channels that reach it uncut with keep={list(producers)[:4]!r}, or leave all channels uncut that "
            'reach such operations with on_unknown="keep"'
        )
