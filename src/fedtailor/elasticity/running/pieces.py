"""Pieces of a module: taken out of full weights, run as small networks, built as plain modules, put back."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from fedtailor.data.batches import Batch, inputs_of
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import is_tagged
from fedtailor.elasticity.cutting.patch import (
    Patch,
    Where,
    gather,
    is_whole,
    kept_positions,
    prefix_shape,
    scatter,
    where_inside,
    where_of,
)
from fedtailor.elasticity.cutting.unit_vectors import UnitMap
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.running.exits import answers_of
from fedtailor.elasticity.running.shells import Mode, Replacement, Scale, Shell, resize, tracks_statistics
from fedtailor.elasticity.running.skipping import Skipped, refuse_skipping, skipped_layers
from fedtailor.elasticity.tracing.copies import named_tensors, weightless
from fedtailor.elasticity.tracing.rewrite import SizedGraph, plain_graph
from fedtailor.errors import FedtailorError
from fedtailor.objective import Objective
from fedtailor.objective.answers import answer_of

Weights = dict[str, Tensor]
T = TypeVar("T")

CACHED_INDICES = 512  # index tables kept at once; a prefix takes a few kilobytes


class Pieces:
    """A module, its channel groups, and all that can be done with a cut of it.

    The module is the template: its class, sizes and initial values. The weights of a run live outside, as plain
    dictionaries from names to tensors, and every method here takes them as an argument.
    """

    def __init__(
        self,
        module: nn.Module,
        groups: ChannelGroups,
        example: Batch,
        objective: Objective | None = None,
        *,
        network: SizedGraph | None = None,
        remarks: Sequence[str] = (),
    ) -> None:
        """``network`` is the traced graph that stands in for the module's class where ``forward`` has literal sizes."""
        self.module = module
        self.groups = groups
        self.timing = ""  # for ``explain``: how long tracing and checking took
        self.remarks = tuple(remarks)  # for ``explain``: what tracing met on the way
        self.chain: tuple[str, ...] = ()  # patterns of blocks, where a person named them
        self.network = network  # None: the module's own class serves every width
        self.example = example
        self.objective = objective or Objective()
        persistent = set(module.state_dict(keep_vars=True))
        tensors = named_tensors(module)
        # What no training moves stays with the module: it is never sent, merged or saved
        self.frozen = frozenset(name for name, value in module.named_parameters() if not value.requires_grad)
        self.constants = {
            name: value for name, value in tensors.items() if name not in persistent or name in self.frozen
        }
        self.parameters = tuple(name for name, _ in module.named_parameters())
        self.trainable = frozenset(name for name, value in module.named_parameters() if value.requires_grad)
        self.statistics = tuple(
            f"{path}.{name}"
            for path, layer in module.named_modules()
            if tracks_statistics(layer)
            for name in ("running_mean", "running_var", "num_batches_tracked")
        )
        self._dtypes = {name: value.dtype for name, value in tensors.items()}
        self._all_travels = not self.constants and not groups.ties  # weights are all that a network needs
        self._shell = Shell(weightless(module) if network is None else copy.deepcopy(network), groups)
        self.strided = self._shell.strided  # 1 x 1 convolutions that leave out pixels first
        # The cut that was run last with weights that are all it needs, and their names
        self._whole: tuple[Cut | None, frozenset[str]] = (None, frozenset())
        self._slices: OrderedDict[Cut, list[tuple[str, Where, tuple[int, ...]]]] = OrderedDict()
        self._derived: dict[Hashable, Any] = {}
        self._tables: OrderedDict[tuple[Cut, Cut | None], dict[str, Where]] = OrderedDict()

    @cached_property
    def embedded(self) -> frozenset[str]:
        """The groups to which the columns of embeddings belong; some methods never cut them."""
        tables = [
            path
            for path, layer in self.module.named_modules()
            if isinstance(layer, nn.Embedding | nn.EmbeddingBag)
        ]
        extents = [self.groups.extents.get(f"{path}.weight", ()) for path in tables]
        return frozenset(axis.group for dims in extents for extent in dims[1:] for axis in extent.axes)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What is derived from the model alone, made when it is first asked for and remembered with the model."""
        if key not in self._derived:
            self._derived[key] = make()
        return cast(T, self._derived[key])

    @cached_property
    def units(self) -> UnitMap:
        """All elastic units in one vector, and where tensors and layers hold them."""
        return UnitMap(self.groups, self.module)

    def weights(self) -> Weights:
        """The module's own values, as a copy: where training starts (random or pretrained)."""
        tensors = named_tensors(self.module)
        return {name: value.detach().clone() for name, value in tensors.items() if name not in self.constants}

    def cut(self, weights: Mapping[str, Tensor], cut: Cut, names: Collection[str] | None = None) -> Patch:
        """Take the values at ``cut`` out of the full weights; only those tensors that are in ``names``, if given."""
        values = {}
        for name, where, shape in self._slices_of(cut):
            if name not in weights or (names is not None and name not in names):
                continue
            full = weights[name]
            if not where:  # the whole tensor
                values[name] = full.clone()
            elif shape and not full.requires_grad:  # a prefix: one view instead of one for each axis
                values[name] = full.as_strided(shape, full.stride()).clone()
            else:
                values[name] = gather(full, where)
        return Patch(values, cut)

    def place(self, weights: Mapping[str, Tensor], patch: Patch) -> Weights:
        """The full weights with the patch written back; tensors that the patch does not hold are shared."""
        table = self.table(patch.cut)
        placed = dict(weights)
        for name, values in patch.values.items():
            if name in table:
                placed[name] = weights[name].clone()
                scatter(placed[name], table[name], values)
            else:
                placed[name] = values  # an extra tensor, addressed by its name alone
        return placed

    def narrow(self, patch: Patch, inner: Cut) -> Patch:
        """A cut inside a cut: the values of ``inner`` out of a patch that holds it. Differentiable."""
        if inner == patch.cut:
            return patch
        table = self.inside(patch.cut, inner)
        return Patch(
            {name: gather(value, table[name]) for name, value in patch.values.items() if name in table}, inner
        )

    def part(self, patch: Patch, inner: Cut) -> Patch:
        """As ``narrow``, with the tensors that stand beside the model's as they are."""
        if inner is patch.cut:
            return patch
        if inner == patch.cut:
            return Patch(patch.values, inner)
        beside = {name: value for name, value in patch.values.items() if is_tagged(name)}
        return Patch({**beside, **self.narrow(patch, inner).values}, inner)

    def spread(self, patch: Patch) -> Patch:
        """The patch with all weights of its channels, those that its mask leaves out as zeros."""
        if patch.cut.sparse is None:
            return patch
        places = patch.cut.sparse.survivors()
        values = {n: places[n].spread(v) if n in places else v for n, v in patch.values.items()}
        return Patch(values, patch.cut.unmasked)

    def inside(self, outer: Cut, inner: Cut) -> dict[str, Where]:
        """Where the tensors of ``inner`` lie inside the tensors of ``outer``."""
        if not outer.holds(inner):
            raise FedtailorError("a cut can only be narrowed to a part of itself")
        return self.table(inner, outer)

    def forward(
        self,
        weights: Mapping[str, Tensor],
        cut: Cut,
        batch: Batch,
        *,
        mode: Mode = "eval",
        scale: Scale | None = None,
        replace: Replacement | None = None,
        all_exits: bool = False,
    ) -> Any:
        """What the module answers for weights that have the sizes of ``cut``: its output, or the logits in it.

        With ``all_exits`` that is a list of what each exit of the cut answers, the deepest last. ``scale`` multiplies
        the outputs of layers in training; ``replace`` substitutes the computation of layers. In ``train`` and
        ``calibrate`` mode running statistics among ``weights`` are updated in place.
        """
        if not self._shell.is_set(weights, cut, mode):
            self._shell.fit(cut, mode, weights)
        scale = scale if mode == "train" else None
        if self._shell.multiplies(scale or None, weights, cut):
            scale = None
        if scale or replace:
            with self._shell.altered(scale, replace):
                output = self.call(weights, cut, batch)
        else:
            output = self.call(weights, cut, batch)
        return answers_of(output) if all_exits else answer_of(output)

    def call(self, weights: Mapping[str, Tensor], cut: Cut, batch: Batch) -> Any:
        """All that the module returns, run as ``shell`` or ``forward`` have set it."""
        args, kwargs = inputs_of(batch)
        if self._shell.seats(weights, cut):
            return self._shell.run(args, kwargs)
        whole, names = self._whole
        if cut is not whole or weights.keys() != names:  # as in nearly no step
            weights = self.complete(weights, cut)
        return self._shell.call(weights, args, kwargs)

    def seated(self, weights: Weights, cut: Cut) -> AbstractContextManager[None]:
        """Inside the block ``forward`` on this very dictionary in ``train`` mode finds all of it in its place."""
        if not self._all_travels or cut.sparse is not None or not weights.keys() <= self.table(cut).keys():
            return nullcontext()
        return self._shell.seated(weights, cut)

    def shell(self, cut: Cut) -> nn.Module:
        """The module without weights at the sizes of a cut; the next call of ``forward`` resizes it."""
        return self._shell.lent(cut, self.groups.extents)

    @property
    def own_class(self) -> bool:
        """Whether pieces are of the user's own class; if not, they run the traced graph of its ``forward``."""
        return self.network is None

    def extract(self, weights: Mapping[str, Tensor], cut: Cut) -> nn.Module:
        """A plain small module: no fedtailor code is needed to run, train or load it.

        It is of the user's own class, or, where ``forward`` has literal sizes, the traced graph with small sizes.
        """
        return self.build(self.cut(weights, cut))

    def build(self, patch: Patch) -> nn.Module:
        """The module of a patch, with copies of its values."""
        missing = [
            name for name in self.table(patch.cut) if name not in patch.values and name not in self.constants
        ]
        if missing:
            raise FedtailorError(
                f"the patch has no values for {', '.join(missing[:3])}: it cannot run by itself"
            )
        small: nn.Module = weightless(self.module) if self.network is None else copy.deepcopy(self.network)
        resize(small, self.groups, patch.cut)
        if isinstance(small, SizedGraph):
            refuse_skipping(patch.cut)
            small = plain_graph(small, [n for n in self.constants if n not in self.frozen]).train(
                self.module.training
            )
        for path in skipped_layers(self.module, patch.cut):
            owner, _, leaf = path.rpartition(".")
            setattr(small.get_submodule(owner), leaf, Skipped())
        parameters = dict(self.module.named_parameters())
        made: dict[str, Tensor] = {}
        for name, value in self.complete(patch.values, patch.cut).items():
            first = self.groups.ties.get(name, name)
            if first not in made:
                new = value.detach().clone()
                trained = first in parameters
                made[first] = nn.Parameter(new, requires_grad=first in self.trainable) if trained else new
            owner, _, leaf = name.rpartition(".")
            setattr(small.get_submodule(owner), leaf, made[first])
        return small

    def shape(self, name: str, cut: Cut) -> tuple[int, ...]:
        """The shape of a tensor that a cut holds; where a mask leaves out single weights, the others lie in one row."""
        if cut.sparse is not None and name in cut.sparse.levels.maps:
            return (cut.sparse.count(name),)
        kept = (kept_positions(extent, cut, self.groups.counts) for extent in self.groups.extents[name])
        return tuple(positions if isinstance(positions, int) else len(positions) for positions in kept)

    def dtype(self, name: str) -> torch.dtype:
        """The element type of a tensor."""
        return self._dtypes[name]

    def complete(self, weights: Mapping[str, Tensor], cut: Cut, device: str | None = None) -> Weights:
        """Held weights, the constants at the same cut, and the second names of shared tensors; nothing is packed."""
        if cut.sparse is not None:
            weights, cut = self.spread(Patch(dict(weights), cut)).values, cut.unmasked
        table = self.table(cut)
        if self._all_travels and weights.keys() <= table.keys():
            self._whole = (cut, frozenset(weights))
            return dict(weights)
        values = {name: value for name, value in weights.items() if name in table}
        for name, value in self.constants.items():
            if name in cut.absent:
                continue
            source = value if device is None else value.to(device)
            values[name] = source if is_whole(table[name]) else gather(source, table[name])
        return {
            **values,
            **{
                second: values[first]
                for second, first in self.groups.ties.items()
                if first in values and second not in cut.absent
            },
        }

    def _slices_of(self, cut: Cut) -> list[tuple[str, Where, tuple[int, ...]]]:
        """How each tensor is taken out of the full weights: its place, and its shape where that is a prefix."""
        if cut.sparse is not None:
            return [(name, where, ()) for name, where in self.table(cut).items()]
        cut = cut.unmasked
        if cut not in self._slices:
            lengths = {name: [e.length for e in extents] for name, extents in self.groups.extents.items()}
            self._slices[cut] = [
                (name, () if is_whole(where) else where, prefix_shape(where, lengths[name]))
                for name, where in self.table(cut).items()
            ]
            if len(self._slices) > CACHED_INDICES:
                self._slices.popitem(last=False)
        return self._slices[cut]

    def table(self, cut: Cut, outer: Cut | None = None) -> dict[str, Where]:
        """Where each tensor of the model lies at a cut (inside ``outer``, if given).

        Cached: making a table costs more than using it. Only what a mask adds to it is made anew, so that no map of
        levels is kept alive here.
        """
        if cut.sparse is not None:
            whole = self.table(cut.unmasked, None if outer is None else outer.unmasked)
            survivors = cut.sparse.survivors(None if outer is None else outer.sparse).items()
            return {**whole, **{name: where for name, where in survivors if name not in cut.absent}}
        key = (cut.unmasked, None if outer is None else outer.unmasked)
        if key not in self._tables:
            counts = self.groups.counts
            self._tables[key] = {
                name: where_of(extents, cut, counts)
                if outer is None
                else where_inside(extents, outer, cut, counts)
                for name, extents in self.groups.extents.items()
                if name not in cut.absent
            }
            if len(self._tables) > CACHED_INDICES:
                self._tables.popitem(last=False)
        self._tables.move_to_end(key)
        return self._tables[key]
