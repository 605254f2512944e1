"""From an unmodified module and an example batch to its channel groups.

The module is recorded with ``torch.fx`` (``tracer.py``), or with ``torch.export`` where its code cannot be followed
(``exported.py``). Next to every value of the graph runs an array of unit numbers per axis, which the rules carry
from node to node (``labels.py``, ``rulebook.py``). What was tied on the way becomes channel groups (``units.py``).
The user's module is never touched: all of this happens on a copy.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import is_lazy

import fedtailor.elastic.rulebook  # noqa: F401  (fills the tables of rules)
from fedtailor.elastic.exported import export
from fedtailor.elastic.groups import ChannelGroups, Extent, Indices
from fedtailor.elastic.labels import Labeller
from fedtailor.elastic.rewrite import training_switches, write_sizes
from fedtailor.elastic.rules import LAYER_RULES, Notes, TraceError
from fedtailor.elastic.tracer import Answer, CannotFollowError, Tracer, copied, inputs_by_name
from fedtailor.elastic.units import Solution, Units, solve
from fedtailor.errors import FedtailorError, unknown


@dataclass(frozen=True)
class Annotations:
    """What a person says about a module that tracing cannot know."""

    keep: Sequence[str] = ()  # layers or tensors that stay whole; ``*`` stands for any part of a name
    tie: Sequence[tuple[str, str]] = ()  # pairs of layers whose output channels shrink together


@dataclass
class Traced:
    """A traced module: its groups, and what the check needs to know about every node."""

    solution: Solution
    network: fx.GraphModule  # without weights; sizes that the code gives as numbers are attributes of it
    labels: dict[fx.Node, Any]  # node -> its value for the example, tensors as operands
    notes: Notes
    units: Units
    shapes: Mapping[str, tuple[int, ...]]
    sizes: dict[str, Indices]  # attribute of ``network`` -> the axis whose kept positions it counts
    obstacle: str  # why the graph cannot stand in for the user's class; empty if it can
    exported: bool = False  # whether torch.export had to help
    literals: list[str] = field(
        default_factory=list
    )  # places where the code gives a size that must follow a cut

    @property
    def groups(self) -> ChannelGroups:
        """The channel groups of the user's own class."""
        return self.solution.groups

    def extents(self) -> dict[str, Extent]:
        """The sizes in the graph that follow a cut, by the name of their attribute."""
        elastic = set(self.groups.elastic)
        found = {
            name: self.solution.layout.extent(axis, len(axis), name) for name, axis in self.sizes.items()
        }
        return {name: e for name, e in found.items() if any(axis.group in elastic for axis in e.axes)}

    def without_literals(self) -> Traced:
        """The same module with every channel fixed that a literal size counts."""
        for literal in self.notes.literals:
            self.units.fix(
                literal.labels,
                f"has the literal size {literal.value} in {literal.place}; write -1 or x.size()",
            )
        solution = solve(self.units, self.shapes, self.groups.ties)
        return replace(self, solution=solution, literals=[])


def trace(
    module: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    on_unknown: str = "error",
    annotations: Annotations | None = None,
) -> Traced:
    """Trace ``module``; ``args`` and ``kwargs`` are an example of its inputs.

    ``on_unknown="keep"`` leaves channels that reach an operation without a rule uncut instead of refusing.
    """
    _refuse_unfinished(module)
    inputs = inputs_by_name(module, *copied((tuple(args), dict(kwargs))))
    shared = shared_names(module)
    notes, units, exported = Notes(), Units(), False
    try:
        tracer, root = Tracer(inputs), _in_mode(duplicate(module), training=False)
        graph, answers = tracer.record(root), tracer.answers
        obstacle, others = _in_training(module, inputs, graph) if tracer.asked_mode else ("", [])
    except CannotFollowError as problem:
        root = duplicate(module).eval()
        graph = export(root, args, kwargs, str(problem))
        answers, others, exported = [], [], True
        obstacle = f"torch.fx cannot follow forward ({problem})"
    labeller = Labeller(root, units, notes, shared)
    labeller.run(graph)
    obstacle = obstacle or _open_answer(labeller, answers)
    for other_root, other in others:
        Labeller(other_root, units, notes, shared).run(other)
    _annotate(units, annotations or Annotations(), module)
    if on_unknown == "keep":
        for site, reaching in notes.unknown:
            for labels in reaching:
                units.fix(labels, f"reaches {site.place}, which has no rule")
    sizes = write_sizes(graph, root, [literal for literal in notes.literals if literal.node.graph is graph])
    shapes_of = {name: tuple(tensor.shape) for name, tensor in named_tensors(module).items()}
    for (tensor, _), axis in units.axes.items():
        if tensor not in shapes_of:
            units.fix(axis, f"lies on {tensor}, which is neither a parameter nor a buffer")
    solution = solve(units, shapes_of, shared)
    _refuse_unknown(notes, solution)
    traced = Traced(
        solution,
        fx.GraphModule(root, graph),
        labeller.known,
        notes,
        units,
        shapes_of,
        sizes,
        obstacle,
        exported,
    )
    elastic = set(solution.groups.elastic)
    traced.literals += sorted(
        {
            f"{found.place}: {found.value}"
            for found in notes.literals
            if elastic & set(solution.layout.groups_on([found.labels]))
        }
    )
    return traced


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, shared tensors once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def shared_names(module: nn.Module) -> dict[str, str]:
    """Second and later names of shared tensors, each with the first name."""
    first: dict[int, str] = {}
    tied: dict[str, str] = {}
    both = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, tensor in both:
        known = first.setdefault(id(tensor), name)
        if known != name:
            tied[name] = known
    return tied


def weightless(module: nn.Module) -> nn.Module:
    """A copy of the module with all parameters and buffers on ``meta``: its structure without its memory."""
    return duplicate(module, lambda value: torch.empty_like(value, device="meta", requires_grad=False))


def duplicate(
    module: nn.Module, tensor: Callable[[Tensor], Tensor] = lambda value: value.detach().clone()
) -> nn.Module:
    """A copy of the module without gradients, its tensors made by ``tensor``."""
    memo: dict[int, Any] = {}
    for value in [*module.parameters(), *module.buffers()]:
        made = tensor(value)
        memo[id(value)] = nn.Parameter(made, value.requires_grad) if isinstance(value, nn.Parameter) else made
    try:
        return copy.deepcopy(module, memo)
    except (RuntimeError, TypeError) as error:
        raise TraceError(f"{type(module).__name__} cannot be copied with copy.deepcopy: {error}") from error


def _refuse_unfinished(module: nn.Module) -> None:
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if is_lazy(value):
            raise TraceError(
                f"{name} is built lazily and has no size yet: call the module once on the example batch, then trace it"
            )


def _in_mode(module: nn.Module, training: bool) -> nn.Module:
    """Set the mode of the user's own modules; PyTorch's layers stay in evaluation (norms refuse a batch of one)."""
    module.eval()
    for part in module.modules():
        part.training = training and type(part) not in LAYER_RULES
    return module


def _in_training(
    module: nn.Module, inputs: Mapping[str, Any], graph: fx.Graph
) -> tuple[str, list[tuple[nn.Module, fx.Graph]]]:
    """How training differs: numbers become switches in the graph; another structure is a second graph."""
    root = _in_mode(duplicate(module), training=True)
    other = Tracer(copied(inputs)).record(root)
    if training_switches(graph, other):
        return "", []
    return "forward does something else in training than in evaluation", [(root, other)]


def _open_answer(labeller: Labeller, answers: Sequence[Answer]) -> str:
    """Why the graph may only be good for batches of the example's sizes."""
    for answer in answers:
        if not answer.guard and labeller.is_open(answer.node):
            return f"what forward does depends on the sizes of the batch at {answer.place}"
    return ""


def _annotate(units: Units, annotations: Annotations, module: nn.Module) -> None:
    named = [name for name, _ in module.named_modules() if name]
    for pattern in annotations.keep:
        found = False
        for (tensor, _), labels in units.axes.items():
            names = [tensor, *(tensor[:end] for end, letter in enumerate(tensor) if letter == ".")]
            if any(fnmatchcase(name, pattern) for name in names):
                units.fix(labels, f"is kept whole, as {pattern!r} asks")
                found = True
        if not found:
            raise unknown("layer to keep", pattern, {*named, *(tensor for tensor, _ in units.axes)})
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
