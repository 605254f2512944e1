"""Dynamic inference: one deployed network whose width is switched by one call while it runs.

The weights of the widest network are kept once; a narrower one is a prefix of them, copied together when it is switched
to, and has normalisation statistics of its own. The object is a plain ``nn.Module``: it needs no method, no fleet and
no data, and it is saved, loaded and moved between devices like any other.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.names import tagged
from fedtailor.elasticity.cutting.patch import Patch, gather, where_inside
from fedtailor.elasticity.cutting.selections import WidthLike, as_width
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.elasticity.running.shells import resize
from fedtailor.elasticity.tracing.copies import named_tensors
from fedtailor.errors import FedtailorError, require, unknown


class Switchable(nn.Module):
    """A network for inference that runs at any of its ``widths``; it starts at the largest.

    ``network.switch(0.4)`` takes as long as copying the weights of that width, and ``network(x)`` then costs what a
    network of that width costs.
    """

    _active: nn.Module
    preparation: nn.Module | None  # of raw inputs, in front of the network
    prepared_input: str | None  # which one; None: the first

    def __init__(
        self,
        full: nn.Module,
        groups: ChannelGroups,
        cuts: Mapping[str, Cut],
        statistics: Mapping[str, Mapping[str, Tensor]],
    ) -> None:
        super().__init__()
        self.preparation, self.prepared_input = None, None
        self.full = full.eval().requires_grad_(False)
        self.groups = groups
        self.cuts = {tag: cuts[tag] for tag in sorted(cuts, key=lambda tag: cuts[tag].share(groups))}
        self.statistics = {tag: tuple(values) for tag, values in statistics.items()}
        for tag, values in statistics.items():
            for name, value in values.items():
                self.register_buffer(_buffer(name, tag), value.detach().clone())
        self.width = next(reversed(self.cuts))
        outer = self.cuts[self.width]
        self.places = {
            tag: {
                name: where_inside(groups.extents[name], outer, cut, groups.counts)
                for name in named_tensors(full)
            }
            for tag, cut in self.cuts.items()
            if cut != outer
        }
        # Outside the registered modules: its tensors are parts of the others and must not be saved twice.
        object.__setattr__(self, "_active", copy.deepcopy(self.full))
        self.register_load_state_dict_post_hook(_after_loading)  # type: ignore[no-untyped-call]
        self.switch(self.width)

    @property
    def widths(self) -> tuple[str, ...]:
        """What ``switch`` can be given, ascending."""
        return tuple(self.cuts)

    @torch.no_grad()
    def switch(self, width: WidthLike) -> Switchable:
        """Run at this width from now on; returns the network itself."""
        tag = width if isinstance(width, str) and width in self.cuts else str(as_width(width))
        if tag not in self.cuts:
            raise unknown("width", tag, self.cuts)
        resize(self._active, self.groups, self.cuts[tag])
        places = self.places.get(tag)
        tensors, parameters = named_tensors(self.full), dict(self.full.named_parameters())
        own = {name: self.get_buffer(_buffer(name, tag)) for name in self.statistics[tag]}
        values = {n: gather(value, places[n]) if places else value for n, value in tensors.items()} | own
        for second, first in self.groups.ties.items():
            if first in values:
                values[second] = values[first]
        for name, value in values.items():
            owner, _, leaf = name.rpartition(".")
            is_parameter = self.groups.ties.get(name, name) in parameters
            new = nn.Parameter(value, requires_grad=False) if is_parameter else value
            setattr(self._active.get_submodule(owner), leaf, new)
        self._active.eval()
        self.width = tag
        return self

    def prepare(self, preparation: nn.Module, key: str | None) -> None:
        """From now on let the first input, or the one of this name, go through ``preparation`` first."""
        self.preparation, self.prepared_input = preparation.eval(), key

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the network at the current width."""
        if self.preparation is not None and self.prepared_input is not None:
            kwargs = {**kwargs, self.prepared_input: self.preparation(kwargs[self.prepared_input])}
        elif self.preparation is not None:
            args = (self.preparation(args[0]), *args[1:])
        return self._active(*args, **kwargs)

    def _apply(self, fn: Any, recurse: bool = True) -> Switchable:
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._active._apply(fn, recurse)
        return self.switch(self.width)


def switchable(model: Pieces, patches: Sequence[Patch]) -> Switchable:
    """One network for several deployed pieces, which must lie inside one another and share their weights."""
    require(len(patches) > 0, "patches", patches, "at least one")
    if any(patch.cut.sparse is not None for patch in patches):
        raise FedtailorError(
            "masks of single weights make no narrower network: deploy each density by itself"
        )
    if any(patch.cut.absent != patches[0].cut.absent for patch in patches):
        raise FedtailorError(
            "pieces that leave out different layers are different networks: deploy each by itself"
        )
    widest = next((one for one in patches if all(one.cut.holds(other.cut) for other in patches)), None)
    if widest is None:
        raise FedtailorError(
            "these pieces do not lie inside one another: no single network can be switched between them"
        )
    statistics = frozenset(model.statistics)
    own: dict[str, dict[str, Tensor]] = {}
    for patch in patches:
        weights = {name: value for name, value in patch.values.items() if name not in statistics}
        expected = model.narrow(widest, patch.cut).values
        for name, value in weights.items():
            if not torch.equal(value, expected[name]):
                raise FedtailorError(
                    f"width {patch.cut.tag} has a {name!r} of its own: its weights are not shared (fjord's are; "
                    "heterofl's with method.scaler = false). Deploy each width by itself"
                )
        own[patch.cut.tag] = {name: value for name, value in patch.values.items() if name in statistics}
    cuts = {patch.cut.tag: patch.cut for patch in patches}
    return Switchable(model.build(widest), model.groups, cuts, own)


def _buffer(name: str, tag: str) -> str:
    return tagged(name, tag).replace(".", ":")  # names of buffers cannot have dots


def _after_loading(network: Switchable, _keys: Any) -> None:
    network.switch(network.width)
