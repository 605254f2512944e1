"""Modules of the zoo, traced once for all tests, and what tests do with their outputs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from elasticity.odd_constructions import ZOO
from fedtailor.data.batches import Batch, inputs_of, map_tensors
from fedtailor.elasticity.check import random_cut, shaken
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel


@dataclass(frozen=True)
class Case:
    module: nn.Module
    model: ElasticModel
    batch: Batch

    def cut(self, seed: int) -> Cut:
        return random_cut(self.model.groups, np.random.default_rng(seed))


@cache
def case(name: str, dtype: torch.dtype = torch.float64) -> Case:
    """A module of the zoo with weights that hide nothing (no zeros, no ones), and its elastic model."""
    torch.manual_seed(0)
    module = ZOO[name].build().to(dtype)
    batch = map_tensors(ZOO[name].batch(), lambda x: x.to(dtype) if x.is_floating_point() else x)
    model = elastic(module, batch)
    for parameter, value in shaken(model).items():
        target = dict([*module.named_parameters(), *module.named_buffers()])[parameter]
        target.data.copy_(value)
    return Case(module, model, batch)


def run(module: nn.Module, batch: Batch) -> list[Tensor]:
    """All tensors of the output."""
    args, kwargs = inputs_of(map_tensors(batch, torch.clone))
    return tensors(module(*args, **kwargs))


def tensors(output: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


def some_loss(outputs: list[Tensor]) -> Tensor:
    """A number that depends on every entry of every output."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.rand(out.shape, generator=generator, dtype=torch.float64).to(out) for out in outputs]
    return torch.stack([(out * part).sum() for out, part in zip(outputs, parts, strict=True)]).sum()


def close(mine: list[Tensor], theirs: list[Tensor], tolerance: float) -> None:
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert a.shape == b.shape
        scale = max(1.0, float(b.detach().abs().max())) if b.numel() else 1.0
        torch.testing.assert_close(a, b, rtol=0, atol=tolerance * scale)
