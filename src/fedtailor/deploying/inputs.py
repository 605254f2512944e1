"""What a deployed network is given, and what it answers: values, and their description for a manifest."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from fedtailor.data.batches import Batch, Examples, inputs_of
from fedtailor.data.transforms import Deployable

BATCH = "batch"  # in place of a size: any number of examples

Specification = list[dict[str, Any]]  # of every tensor its name, type and shape


@dataclass(frozen=True)
class Inputs:
    """The inputs of some examples, as a module is called with them."""

    args: tuple[Tensor, ...]
    kwargs: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch) -> Inputs:
        """Everything of a batch but its target, on the processor."""
        args, kwargs = inputs_of(batch)
        return cls(tuple(each.cpu() for each in args), {name: each.cpu() for name, each in kwargs.items()})

    @property
    def flat(self) -> tuple[Tensor, ...]:
        """All tensors, in the order in which files take them."""
        return (*self.args, *self.kwargs.values())

    def __len__(self) -> int:
        return len(self.flat[0])

    def rows(self, first: int, count: int) -> Inputs:
        """Some of the examples."""
        chosen = slice(first, first + count)
        return Inputs(
            tuple(each[chosen] for each in self.args),
            {name: each[chosen] for name, each in self.kwargs.items()},
        )

    def one_by_one(self) -> list[Inputs]:
        """Every example as a batch of its own."""
        return [self.rows(place, 1) for place in range(len(self))]


def as_given(examples: Examples, preparation: Deployable | None) -> Examples:
    """The examples as a deployed network is given them: raw, if its first layer prepares them; else prepared."""
    return examples if preparation is None else examples.prepared_by(None)


@torch.no_grad()
def answers_of(module: nn.Module, inputs: Inputs) -> tuple[Tensor, ...]:
    """What a module answers, as a flat list of tensors."""
    return flat_answers(module(*inputs.args, **inputs.kwargs))


def flat_answers(output: Any) -> tuple[Tensor, ...]:
    """The tensors of an output, in the order in which files give them."""
    return tuple(leaf.detach().cpu() for leaf in tree_leaves(output) if isinstance(leaf, Tensor))


def names_of(module: nn.Module, inputs: Inputs) -> list[str]:
    """What a module calls its inputs; of a graph these are its placeholders."""
    taken = list(inspect.signature(module.forward).parameters)[: len(inputs.args)]
    return [*taken, *inputs.kwargs]


def input_specification(names: Sequence[str], inputs: Inputs, any_number: bool = True) -> Specification:
    """Name, type and shape of every input; ``batch`` stands for any number of examples."""
    first: Any = BATCH if any_number else 1
    return [
        input_entry(name, each.dtype, [first, *each.shape[1:]], keyword=name in inputs.kwargs)
        for name, each in zip(names, inputs.flat, strict=True)
    ]


def input_entry(
    name: str, dtype: torch.dtype, shape: Sequence[Any], *, keyword: bool = False
) -> dict[str, Any]:
    """The description of one input; a size that is no number stands for any number of examples.

    ``keyword``: modules are given it by its name.
    """
    sizes = [size if isinstance(size, int) else BATCH for size in shape]
    entry = {"name": name, "type": str(dtype).removeprefix("torch."), "shape": sizes}
    return {**entry, "keyword": True} if keyword else entry


def output_specification(answers: Sequence[Tensor]) -> Specification:
    """The same of what is answered, in the order in which it is answered."""
    return [
        {
            "name": f"output_{place}" if place else "output",
            "type": _type(each),
            "shape": [BATCH, *each.shape[1:]],
        }
        for place, each in enumerate(answers)
    ]


def made_up(specification: Specification, count: int = 1) -> Inputs:
    """Zeros of this shape: enough to run a file and to time it."""
    args, kwargs = [], {}
    for each in specification:
        shape = [count if size == BATCH else size for size in each["shape"]]
        zeros = torch.zeros(shape, dtype=getattr(torch, each["type"]))
        if each.get("keyword"):
            kwargs[each["name"]] = zeros
        else:
            args.append(zeros)
    return Inputs(tuple(args), kwargs)


def _type(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
