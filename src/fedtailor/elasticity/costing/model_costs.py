"""What the cuts of one model cost: counted when first asked for, remembered, and read off curves by ``fit``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

import torch

from fedtailor.data.batches import inputs_of
from fedtailor.elasticity.costing.cost import Asked, Cost, Sizes, examples_in, products
from fedtailor.elasticity.costing.curves import Counts, Curve, of_tensors, recorded, total
from fedtailor.elasticity.costing.memory import Workload, imagined_parts, saved_parts
from fedtailor.elasticity.costing.timing import step_time
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import units_of
from fedtailor.elasticity.running.pieces import Pieces

CHECKED_BATCH = 2  # examples with which the memory of a curve is compared with a real run
REMEMBERED = 4096  # counts kept at once


class ModelCosts:
    """The costs of one model, or of what is left of it without some tensors: of its pieces that are less deep.

    A cost depends on how many units of each group are kept, not on which: *counts* lists them, one number for
    each elastic group. Nothing is counted before it is asked for.
    """

    def __init__(self, pieces: Pieces, absent: frozenset[str] = frozenset()) -> None:
        self.pieces = model = pieces
        self.absent = absent
        groups = model.groups
        self.full: Counts = tuple(groups.counts[group] for group in groups.elastic)
        sizes = {name: model.dtype(name).itemsize for name in groups.extents if name not in absent}
        stored = [name for name in sizes if name not in model.constants]
        parameters = [name for name in model.parameters if name not in absent]
        self._tensors = {
            "params": of_tensors(groups, ((name, 1) for name in parameters)),
            "bytes": of_tensors(groups, ((name, sizes[name]) for name in stored)),
            "held": of_tensors(groups, sizes.items()),
            "trained": of_tensors(groups, ((n, sizes[n]) for n in parameters if n in model.trainable)),
            "frozen": of_tensors(groups, ((n, sizes[n]) for n in parameters if n in model.frozen)),
        }
        self._shallower: dict[frozenset[str], ModelCosts] = {}
        self._members: dict[int, tuple[tuple[int, ...], ...]] = {}
        self._recorded: dict[str, Curve | None] = {}
        self._imaginable = False  # whether tensors without memory show what autograd saves
        self._remembered: dict[tuple[object, ...], int] = {}
        self._costs: dict[tuple[Counts, Workload | None], Cost] = {}
        self._of_cuts: dict[Cut, Cost] = {}  # without a workload: a server asks for every client of a round
        self._answers: list[object] = []  # to code that asks for values, where tensors have none

    def without(self, absent: frozenset[str]) -> ModelCosts:
        """The costs of pieces that do without these tensors."""
        if absent == self.absent:
            return self
        if absent not in self._shallower:
            self._shallower[absent] = ModelCosts(self.pieces, absent)
        return self._shallower[absent]

    def products(self, cut: Cut) -> list[Sizes]:
        """The matrix products and bias additions of one forward pass of the example, as sizes to be multiplied."""
        pieces = self.pieces
        held = {name: pieces.shape(name, cut) for name in pieces.table(cut) if name not in pieces.constants}
        # Made by their shapes: to take a part of a tensor on ``meta`` loads an algebra system.
        shapes = {
            name: torch.empty(shape, dtype=pieces.dtype(name), device="meta") for name, shape in held.items()
        }
        values = pieces.complete(shapes, cut, device="meta")
        inputs = inputs_of(pieces.example)
        try:
            return products(pieces.shell(cut), values, *inputs, self._answers)
        except RuntimeError as error:
            if self._answers or "meta tensor" not in str(error):
                raise
        self._answers = self._asked()
        return products(pieces.shell(cut), values, *inputs, self._answers)

    def _asked(self) -> list[object]:
        """What code that looks at values sees in the example, in the order in which it looks."""
        asked = Asked()
        with torch.no_grad(), asked:
            self.pieces.forward(self.pieces.weights(), Cut.everything(), self.pieces.example)
        return asked.answers

    def members(self, align: int = 1) -> tuple[tuple[int, ...], ...]:
        """For each elastic group the numbers of units that a cut may keep, ascending."""
        if align not in self._members:
            allowed = []
            for group, full in zip(self.pieces.groups.elastic, self.full, strict=True):
                widths = (Fraction(count, full) for count in range(1, full + 1))
                counts = {units_of(self.pieces.groups, group, width, align) for width in widths}
                allowed.append(tuple(sorted(counts)))
            self._members[align] = tuple(allowed)
        return self._members[align]

    def counts(self, cut: Cut) -> Counts:
        """How many units of each elastic group a cut keeps."""
        groups = self.pieces.groups
        return tuple(cut.count(group, groups.counts[group]) for group in groups.elastic)

    def cut(self, counts: Counts) -> Cut:
        """The prefix cut of these counts."""
        groups = self.pieces.groups
        kept = {group: range(count) for group, count in zip(groups.elastic, counts, strict=True)}
        return Cut.of(groups, kept, absent=self.absent)

    def of(self, cut: Cut, workload: Workload | None = None) -> Cost:
        """Parameters, multiply-accumulates and bytes; with a workload, also the memory that training takes.

        Weights that a mask leaves out are not stored or sent, but the kernels multiply by their zeros all the same.
        """
        if workload is None and (known := self._of_cuts.get(cut)) is not None:
            return known
        cost = self._of(cut, workload)
        # Cuts of listed units are ever new ones: they would be kept for nothing
        if workload is None and cut.mask is None and all(isinstance(u, range) for u in cut.channels.values()):
            if len(self._of_cuts) >= REMEMBERED:
                self._of_cuts.clear()
            self._of_cuts[cut] = cost
        return cost

    def _of(self, cut: Cut, workload: Workload | None) -> Cost:
        if cut.sparse is not None:
            whole = self.of(cut.unmasked, workload)
            pruned = {name: count for name, count in cut.sparse.pruned.items() if name not in cut.absent}
            saved = sum(count * self.pieces.dtype(name).itemsize for name, count in pruned.items())
            return replace(whole, params=whole.params - sum(pruned.values()), bytes=whole.bytes - saved)
        if cut.absent != self.absent:
            return self.without(cut.absent).of(cut, workload)
        counts, fixed = self.counts(cut), tuple(cut.channels.get(g) for g in self.pieces.groups.fixed)
        if any(units is not None for units in fixed):
            return self._counted(cut, workload)
        key = counts, workload
        if key not in self._costs:  # cuts of other units cost the same
            if len(self._costs) >= REMEMBERED:
                self._costs.clear()
            memory = None if workload is None else self.measure("memory", counts, workload)
            self._costs[key] = Cost(
                self.measure("params", counts),
                self.measure("macs", counts),
                self.measure("bytes", counts),
                memory,
            )
        return self._costs[key]

    def of_limit(self, limit: str, cut: Cut, workload: Workload | None = None) -> int:
        """What a cut costs, in the unit of a limit."""
        return self.without(cut.absent).measure(limit, self.counts(cut), workload)

    def measure(self, limit: str, counts: Counts, workload: Workload | None = None) -> int:
        """The cost that a limit speaks of, in the unit of the limit."""
        workload = workload or Workload()
        if limit in self._tensors:
            return self._tensors[limit].at(counts)
        if limit == "macs":
            curve = self._recorded.get("macs")
            batch = examples_in(*inputs_of(self.pieces.example))
            return (curve.at(counts) if curve else self._once(("macs", counts), self._products)) // batch
        if limit == "memory":
            copies = 1 + workload.optimiser_slots  # gradients, and what the optimiser keeps
            return (
                2 * self._tensors["held"].at(counts)  # as received, and as trained ...
                - self._tensors["frozen"].at(counts)  # ... but what is frozen is there once
                + copies * self._tensors["trained"].at(counts)
                + self._saved(counts, workload.at_once)
            )
        assert limit == "step_time", limit
        return self._once(
            ("step_time", counts, workload), lambda counts: step_time(self.pieces, self.cut(counts), workload)
        )

    def record(self, limit: str) -> None:
        """Write down the curve behind a limit, so that any number of cuts can be compared."""
        if limit in self._recorded or limit not in ("macs", "memory"):
            return
        # The curve must agree with a count where every group keeps another share of its units: 20 % to 80 %.
        allowed = self.members()
        checked = tuple(each[len(each) * (2 + group % 7) // 10] for group, each in enumerate(allowed))
        lower = tuple(each[-2:][0] for each in allowed)
        if limit == "macs":
            curve = recorded(lambda counts: self.products(self.cut(counts)), self.full, lower)
            exact = curve is not None and curve.at(checked) == self._products(checked)
            self._recorded["macs"] = curve if exact else None
            return
        real = total(saved_parts(self.pieces, self.cut(checked), CHECKED_BATCH))
        try:
            self._imaginable = total(self._imagined((*checked, CHECKED_BATCH))) == real
            sizes = (*self.full, CHECKED_BATCH + 1), (*lower, CHECKED_BATCH)
            curve = recorded(self._imagined, *sizes) if self._imaginable else None
        except (RuntimeError, TypeError, ValueError):  # code that looks at values cannot run without them
            self._imaginable, curve = False, None
        exact = curve is not None and curve.at((*checked, CHECKED_BATCH)) == real
        self._recorded["memory"] = curve if exact else None

    def curve(self, limit: str) -> Curve | None:
        """The curve behind ``macs`` or ``memory``; None where the cost follows no curve in the units."""
        self.record(limit)
        return self._recorded[limit]

    def _saved(self, counts: Counts, batch_size: int) -> int:
        """Bytes that autograd saves in one step.

        There is no curve for attention, whose kernel depends on its sizes, and recurrent layers have to run on real
        tensors, because nobody else knows how large the workspaces of their kernels are.
        """
        self.record("memory")
        curve = self._recorded["memory"]
        if curve is not None:
            return curve.at((*counts, batch_size))
        parts = imagined_parts if self._imaginable else saved_parts
        return self._once(
            ("saved", counts, batch_size),
            lambda counts: total(parts(self.pieces, self.cut(counts), batch_size)),
        )

    def _imagined(self, variables: Counts) -> list[tuple[int, ...]]:
        return imagined_parts(self.pieces, self.cut(variables[:-1]), variables[-1])

    def _products(self, counts: Counts) -> int:
        return total(self.products(self.cut(counts)))

    def _once(self, key: tuple[object, ...], count: Callable[[Counts], int]) -> int:
        if key not in self._remembered:
            while len(self._remembered) >= REMEMBERED:
                self._remembered.pop(next(iter(self._remembered)))
            self._remembered[key] = count(key[1])  # type: ignore[arg-type]
        return self._remembered[key]

    def _counted(self, cut: Cut, workload: Workload | None) -> Cost:
        """A cut into an output or vocabulary axis, which no curve describes."""
        model = self.pieces
        held = [name for name in model.groups.extents if name not in cut.absent]
        sizes = {name: total([model.shape(name, cut)]) for name in held}
        stored = {name: sizes[name] * model.dtype(name).itemsize for name in held}
        memory = None
        if workload is not None:
            trained = sum(stored[name] for name in model.trainable & stored.keys())
            saved = total(saved_parts(model, cut, workload.at_once))
            frozen = sum(stored[name] for name in model.frozen & stored.keys())
            memory = 2 * sum(stored.values()) - frozen + (1 + workload.optimiser_slots) * trained + saved
        return Cost(
            params=sum(sizes[name] for name in model.parameters if name in sizes),
            macs=total(self.products(cut)) // examples_in(*inputs_of(model.example)),
            bytes=sum(stored[name] for name in held if name not in model.constants),
            training_memory=memory,
        )
