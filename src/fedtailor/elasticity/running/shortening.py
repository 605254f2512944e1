"""Which blocks a piece may leave out at any width: tried, not believed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import Chain, without_blocks
from fedtailor.elasticity.cutting.selections import as_width, units_of
from fedtailor.elasticity.running.chains import few_of, find_chains, walk
from fedtailor.elasticity.running.exits import PART
from fedtailor.elasticity.running.pieces import Pieces
from fedtailor.errors import FedtailorError

# Shares of units that groups keep in a trial, in turn: neighbours differ, so that what is no residual block fails.
TRIALS = (("1/5", "3/5", "2/5", "4/5"), ("4/5", "2/5", "1"))
# What a network raises whose parts do not fit each other.
FAILURES = (
    RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, FedtailorError,
)  # fmt: skip


def chains_of(model: Pieces) -> tuple[Chain, ...]:
    """The chains of a model; spare blocks are those without which it runs, whatever groups keep of their units."""
    return model.once("chains", lambda: tuple(_tried(model)))


def _tried(model: Pieces) -> Iterator[Chain]:
    for chain in find_chains(model.module, walk(model.module, model.example), model.chain):
        spare = tuple(block for block in chain.spare if _runs_without(model, chain, block))
        if not f"{chain.name}.".startswith(f"{PART}."):  # heads may have blocks, too
            yield replace(chain, spare=spare)


def _runs_without(model: Pieces, chain: Chain, block: str) -> bool:
    if not model.own_class:
        return False
    weights, groups = model.weights(), model.groups
    for shares in TRIALS:
        channels = {
            group: range(units_of(groups, group, as_width(shares[place % len(shares)])))
            for place, group in enumerate(groups.elastic)
        }
        cut = without_blocks(Cut.of(groups, channels), [chain], [block], groups.extents)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]):
                model.forward(model.cut(weights, cut).values, cut, few_of(model.example))
        except FAILURES:
            return False
    return True
