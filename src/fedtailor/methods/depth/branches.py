"""Where the residual branches of blocks end: layers whose outputs are added to what the block was given."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.data.batches import inputs_of
from fedtailor.elasticity.check import shaken
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.tracing.copies import recordable

MOST_BRANCHES = 2  # of one block: a Transformer's has attention and a feed-forward part

Given = tuple[tuple[Any, ...], dict[str, Any]]


def branch_ends(model: ElasticModel) -> tuple[str, ...]:
    """The layers that end a residual branch of a block which may be left out; none where it is no x + f(x).

    With their outputs at zero the block hands on what it was given: this is tried on the example, block by block.
    """
    return model.once("branch ends", lambda: tuple(_found(model)))


@torch.no_grad()
def _found(model: ElasticModel) -> Iterator[str]:
    module = recordable(model.module, training=False).eval()
    module.load_state_dict(
        shaken(model), strict=False
    )  # branches that start at zero would hide where they end
    blocks = {block: module.get_submodule(block) for chain in model.chains for block in chain.spare}
    given: dict[str, Given] = {}

    def noting(block: str) -> Callable[..., None]:
        def note(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            given[block] = (args, kwargs)

        return note

    with ExitStack() as stack, torch.random.fork_rng(devices=[]):
        for path, block in blocks.items():
            stack.callback(block.register_forward_pre_hook(noting(path), with_kwargs=True).remove)
        args, kwargs = inputs_of(model.example)
        module(*args, **kwargs)
    for path, block in blocks.items():
        for layer in _silencing(block, *given[path]):
            yield f"{path}.{layer}"


def _silencing(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[str]:
    """The fewest layers without whose outputs a block hands on what it is given; of equals those that run last."""
    layers = [
        path
        for path, layer in block.named_modules()
        if path and any(name == "weight" for name, _ in layer.named_parameters(recurse=False))
    ]
    for count in range(1, MOST_BRANCHES + 1):
        for chosen in combinations(reversed(layers), count):
            with ExitStack() as stack:
                for path in chosen:
                    handle = block.get_submodule(path).register_forward_hook(lambda _l, _a, out: out * 0)
                    stack.callback(handle.remove)
                handed = block(*args, **kwargs)
            if isinstance(handed, Tensor) and torch.allclose(handed, args[0], rtol=1e-6, atol=1e-7):
                return sorted(chosen, key=layers.index)
    return ()
