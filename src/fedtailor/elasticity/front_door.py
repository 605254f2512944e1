"""The front door: from an unmodified module to an ``ElasticModel`` that is known to compute the right thing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, gcd

from torch import nn

from fedtailor.data.batches import Batch, batch_size, inputs_of, map_tensors
from fedtailor.elasticity import adapters
from fedtailor.elasticity.check import disagreement
from fedtailor.elasticity.groups import ChannelGroups, Constraint, Size
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.own_loss import own_objective
from fedtailor.elasticity.running.exits import Wished, with_exits
from fedtailor.elasticity.tracing.annotations import Annotations
from fedtailor.elasticity.tracing.copies import hooked, weightless
from fedtailor.elasticity.tracing.recorder import ExampleError
from fedtailor.elasticity.tracing.rewrite import stand_in
from fedtailor.elasticity.tracing.rules import TraceError
from fedtailor.elasticity.tracing.trace import Traced, trace
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.objective import Objective

HEADS = ("auto", "count", "dimension")
EXAMPLES = 2  # of the batch that are traced and checked


@dataclass(frozen=True)
class Wishes:
    """What a person asks of the result; see ``elastic``."""

    on_unknown: str = "error"
    keep: Sequence[str] = ()
    tie: Sequence[tuple[str, str]] = ()
    minimum: int | Mapping[str, int] = 1
    multiple: int | Mapping[str, int] = 1
    heads: str = "auto"
    exits: Wished | None = None
    chain: Sequence[str] = ()

    @property
    def annotations(self) -> Annotations:
        """What is said about single layers, and about heads."""
        return Annotations(self.keep, self.tie, self.heads)

    def __post_init__(self) -> None:
        require(self.heads in HEADS, "heads", self.heads, "'auto', 'count' or 'dimension'")
        require(self.on_unknown in ("error", "keep"), "on_unknown", self.on_unknown, "'error' or 'keep'")
        require(not isinstance(self.keep, str), "keep", self.keep, "a list of names")
        require(not isinstance(self.chain, str), "chain", self.chain, "a list of blocks, or of patterns")


def elastic(
    module: nn.Module,
    example: Batch,
    *,
    objective: Objective | None = None,
    on_unknown: str = "error",
    keep: Sequence[str] = (),
    tie: Sequence[tuple[str, str]] = (),
    minimum: int | Mapping[str, int] = 1,
    multiple: int | Mapping[str, int] = 1,
    heads: str = "auto",
    exits: Wished | None = None,
    chain: Sequence[str] = (),
) -> ElasticModel:
    """Trace an unmodified module so that it can be cut, and check the result numerically.

    ``example`` is a small batch as training will see it: a tuple with the target last, or a dict. The module itself is
    never touched.

    ``keep`` names layers whose output channels stay (``"head"``: all layers below it too; ``"block*"``: a pattern)
    and tensors that stay whole, ``tie`` pairs of layers whose output channels shrink together. ``minimum`` and
    ``multiple`` say how many channels a cut must keep at least, and in multiples of what: one number for all groups,
    or one for each layer named. ``on_unknown="keep"`` leaves channels that reach an operation without a rule uncut
    instead of refusing. ``heads`` says what shrinks where code splits channels into attention heads: their ``"count"``,
    or the ``"dimension"`` of each; ``"auto"`` takes the one that the code leaves open (-1, or computed from a size),
    and else the dimension.

    ``exits`` adds places where a network may end, each with a head that is trained with the model: ``"auto"`` (behind
    the stages of a network that has several, else four in all), a number of ends, a list of blocks, or a head of your
    own for each block. ``chain`` names the blocks where they are not found: paths, or patterns such as ``"layers.*"``.
    """
    wishes = Wishes(on_unknown, keep, tie, minimum, multiple, heads, exits, tuple(chain))
    model = choose(_with_ends(module, example, wishes), example, objective, wishes)
    model.chain = tuple(wishes.chain)
    if exits is not None and not model.own_class:
        raise FedtailorError(
            f"exits: pieces of {type(module).__name__} run the traced graph of its forward, which ends nowhere else "
            f"({'; '.join(model.remarks)})"
        )
    return model


def _with_ends(module: nn.Module, example: Batch, wishes: Wishes) -> nn.Module:
    """The module, or a copy of it that has the exits that were wished for."""
    if wishes.exits is None:
        return module
    require(not adapters.rank_places(module), "exits", wishes.exits, "none for a network with adapters")
    _refuse_no_numbers(example)
    return with_exits(module, example, wishes.exits, wishes.chain)


def choose(module: nn.Module, example: Batch, objective: Objective | None, wishes: Wishes) -> ElasticModel:
    """Trace, check, and choose what pieces are made of: the user's own class, or the traced graph of its forward.

    The own class is always tried first. It fails where ``forward`` has literal sizes; then the graph stands
    in, and where it cannot (its structure depends on the batch), the channels with literal sizes stay whole.
    """
    _refuse_no_numbers(example)
    if places := adapters.rank_places(module):
        return _of_ranks(module, example, objective, wishes, places)
    start = time.monotonic()
    batch, traced = _trace(module, example, wishes)
    traced_at = time.monotonic()
    model, problem = _first_good(module, example, objective, wishes, traced, batch)
    # The code may have taken another way because it was traced; torch.export sees none that it takes in training.
    if model is None and not traced.exported and traced.training is None:
        try:
            again = trace(module, *inputs_of(batch), wishes.on_unknown, wishes.annotations, doubt=problem)
        except TraceError:
            again = traced
        else:
            model, _ = _first_good(module, example, objective, wishes, again, batch)
    if model is None:
        raise TraceError(f"{type(module).__name__}: {problem}")
    seconds = traced_at - start, time.monotonic() - traced_at
    model.timing = f"traced in {seconds[0]:.1f} s, checked against the masked full form in {seconds[1]:.1f} s"
    model.objective = own_objective(model)
    return model


def _of_ranks(
    module: nn.Module,
    example: Batch,
    objective: Objective | None,
    wishes: Wishes,
    places: Sequence[adapters.Place],
) -> ElasticModel:
    """The ranks of adapters are all that shrinks: no forward is traced, and the check alone runs it."""
    require(not wishes.tie, "tie", wishes.tie, "nothing beside adapters, whose ranks are groups of their own")
    groups = _constrained(adapters.rank_groups(module, places, wishes.keep), wishes)
    if not groups.elastic:
        raise FedtailorError(f"nothing in {type(module).__name__} can shrink ({_reasons(groups)})")
    remark = "the ranks of adapters shrink and nothing else does: forward was checked, not traced"
    model = ElasticModel(module, groups, example, objective, remarks=[remark])
    problem = adapters.disagreement(model, _first(example, EXAMPLES))
    if problem:
        raise TraceError(f"{type(module).__name__}: the check of the adapters' ranks failed: {problem}")
    model.objective = own_objective(model)
    return model


def _first_good(
    module: nn.Module,
    example: Batch,
    objective: Objective | None,
    wishes: Wishes,
    traced: Traced,
    batch: Batch,
) -> tuple[ElasticModel | None, str]:
    """The first candidate that passes the check, or what is wrong with all of them."""
    problems: list[str] = []
    for candidate, shown in _candidates(module, example, objective, wishes, traced):
        if not shown.groups.elastic:
            raise FedtailorError(f"nothing in {type(module).__name__} can shrink ({_reasons(shown.groups)})")
        problem = disagreement(candidate, shown, batch, _another(example))
        if not problem:
            return candidate, ""
        problems.append(problem)
    return None, (
        f"the check of the trace failed: {problems[0]}. Leave these channels uncut with keep=[...], or register a rule "
        "for the layer that mixes them with fedtailor.layer_rule"
        + (f". The traced graph failed too: {problems[1]}" if len(problems) > 1 else "")
        + (f". The traced graph cannot stand in: {traced.obstacle}" if traced.obstacle else "")
        + (f". Hooks of {', '.join(hooked(module))} are not traced" if hooked(module) else "")
    )


def _refuse_no_numbers(example: Batch) -> None:
    """With NaN in the batch every comparison would fail, and channels would be blamed for it."""
    args, kwargs = inputs_of(example)
    for name, values in {**{f"input {place}": each for place, each in enumerate(args)}, **kwargs}.items():
        if values.is_floating_point() and not bool(values.isfinite().all()):
            what = "NaN" if bool(values.isnan().any()) else "infinite numbers"
            raise FedtailorError(
                f"the example batch has {what} in {name}: expected numbers, to trace the module with"
            )


def _another(example: Batch) -> Batch:
    """A batch that has another number of examples than the one that is traced."""
    return example if batch_size(example) > EXAMPLES else _first(example, 1)


def _first(example: Batch, count: int) -> Batch:
    """The first examples of a batch; tensors of another length (masks, time first) stay whole."""
    length = batch_size(example)
    return map_tensors(example, lambda x: x[:count] if x.dim() and len(x) == length else x)


def _trace(module: nn.Module, example: Batch, wishes: Wishes) -> tuple[Batch, Traced]:
    """Trace with the first examples of the batch, or with all of them if the module does not like few."""
    few = _first(example, EXAMPLES)
    try:
        return few, trace(module, *inputs_of(few), wishes.on_unknown, wishes.annotations)
    except ExampleError:
        if batch_size(example) <= EXAMPLES:
            raise
    return example, trace(module, *inputs_of(example), wishes.on_unknown, wishes.annotations)


def _candidates(
    module: nn.Module, example: Batch, objective: Objective | None, wishes: Wishes, traced: Traced
) -> Iterator[tuple[ElasticModel, Traced]]:
    def of_own_class(shown: Traced) -> tuple[ElasticModel, Traced]:
        groups = _constrained(shown.groups, wishes)
        groups = replace(groups, sizes=groups.sizes + shown.solution.attributes)
        return ElasticModel(module, groups, example, objective, remarks=_remarks(shown)), shown

    if not traced.solution.torn:
        yield of_own_class(traced)
    joined = traced.with_one_size_each() if traced.torn else None
    as_elastic = joined is not None and joined.share(module) >= traced.share(module)
    if joined is not None and as_elastic:
        yield of_own_class(joined)
    if not traced.obstacle:
        groups = _constrained(traced.groups, wishes)
        sizes = tuple(Size("", name, extent) for name, extent in traced.extents().items())
        network = weightless(stand_in(traced.evaluation.network, module))
        remarks = _remarks(traced, graph=True)
        groups = replace(groups, sizes=groups.sizes + sizes)
        yield ElasticModel(module, groups, example, objective, network=network, remarks=remarks), traced
    if joined is not None and not as_elastic:
        yield of_own_class(joined)
    if traced.literals:
        yield of_own_class((joined or traced).without_literals())


def _remarks(traced: Traced, graph: bool = False) -> list[str]:
    """What a person should know about how the module was traced."""
    remarks = []
    if traced.exported:
        remarks.append(f"traced with torch.export: {traced.obstacle}")
    if traced.unseen:
        remarks.append(f"only evaluation was checked: {traced.unseen}")
    if graph:
        places = f": {'; '.join(traced.literals)}" if traced.literals else ""
        remarks.append(
            "pieces run the traced graph of forward instead of the module's own class, because forward is written for "
            f"one size{places}"
        )
    return remarks


def _constrained(groups: ChannelGroups, wishes: Wishes) -> ChannelGroups:
    """The groups with the wished minimum and multiple, turned from channels into units."""
    constraints = dict(groups.constraints)
    for field in ("minimum", "multiple"):
        for group, channels in _by_group(groups, getattr(wishes, field), field).items():
            require(
                isinstance(channels, int) and channels >= 1, field, channels, "a whole number of at least 1"
            )
            per_unit = groups.channels_per_unit(group)
            known = constraints.get(group, Constraint())
            if field == "minimum":
                minimum = min(groups.counts[group], max(known.minimum, ceil(channels / per_unit)))
                constraints[group] = replace(known, minimum=minimum)
            else:
                constraints[group] = replace(known, multiple=channels // gcd(channels, per_unit))
    return replace(groups, constraints={group: c for group, c in constraints.items() if c != Constraint()})


def _by_group(groups: ChannelGroups, wished: int | Mapping[str, int], field: str) -> dict[str, int]:
    if not isinstance(wished, Mapping):
        return dict.fromkeys(groups.elastic, wished) if wished != 1 else {}
    found: dict[str, int] = {}
    for name, channels in wished.items():
        named = groups.producers.get(name) or ((name,) if name in groups.counts else ())
        if not named:
            raise unknown(f"layer or group in {field}", name, {*groups.counts, *groups.producers})
        found.update(dict.fromkeys((group for group in named if group in groups.elastic), channels))
    return found


def _reasons(groups: ChannelGroups) -> str:
    return "; ".join(f"{group}: {reason}" for group, reason in groups.fixed.items()) or "it has no channels"
