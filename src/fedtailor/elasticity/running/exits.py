"""Networks with exits: heads that answer from what a block hands on, so that a piece may end there.

The exits are parts of a copy of the user's module, called ``exits.0``, ``exits.1`` and so on; everything else keeps its
name. The class of the copy is a subclass of the user's, whose ``forward`` runs the user's own code as far as the
deepest exit that is there.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import wraps
from hashlib import blake2b
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedtailor.data.batches import Batch
from fedtailor.elasticity.cutting.depth import END, Chain, Exit
from fedtailor.elasticity.running.chains import (
    Shape,
    Walk,
    find_chains,
    first_tensor,
    tensors_beyond,
    walk,
    with_silent_parts,
)
from fedtailor.elasticity.running.skipping import Skipped
from fedtailor.elasticity.tracing.rules import rule_of_layer
from fedtailor.errors import FedtailorError, require
from fedtailor.objective.answers import ANSWER, answer_of
from fedtailor.seeds import Seeds

PART = "exits"  # the name of the heads in the module, and of all answers in its output
USUAL = 4  # exits of a network that nobody says a number for, its own end included

Wished = str | int | Sequence[str] | Mapping[str, nn.Module]


class WithExits(nn.Module):
    """What the classes of all modules with exits have in common."""

    exits: nn.ModuleList
    blocks_before: tuple[str, ...]  # behind which the exits leave, in their order
    own_layer: str  # one that nobody but the module's own end needs
    plan: tuple[Exit, ...]  # the exits and the module's own end


class _Reached(Exception):  # noqa: N818  (no error: the deepest exit that is there has what it needs)
    """Ends a forward pass behind a block."""


def exits_of(module: nn.Module) -> tuple[Exit, ...]:
    """Where a module may end, the deepest last: every module has an end of its own."""
    return module.plan if isinstance(module, WithExits) else (Exit(END, Fraction(1)),)


def answers_of(output: Any) -> list[Any]:
    """What each exit answers, the deepest last; of a network with one end, its answer."""
    if isinstance(output, Mapping) and isinstance(output.get(PART), Tensor):
        return list(output[PART].unbind(0))
    return [answer_of(output)]


def with_exits(module: nn.Module, example: Batch, wished: Wished, named: Sequence[str] = ()) -> WithExits:
    """A copy of the module with exits; ``wished`` and ``named`` are what ``elastic`` was told of exits and chain."""
    if hasattr(module, PART):
        raise FedtailorError(f"exits: {type(module).__name__} has a part of its own called {PART!r}")
    seen = walk(module, example)
    chains = find_chains(module, seen, named)
    places = _places(module, seen, chains, wished)
    heads = [
        copy.deepcopy(wished[place])
        if isinstance(wished, Mapping)
        else _made_head(module, seen, place, number)
        for number, place in enumerate(places)
    ]
    made = copy.deepcopy(module)
    made.__class__ = _class_with_exits(type(module))
    made = cast(WithExits, made)
    like = next(value for value in module.parameters() if value.is_floating_point())
    made.exits = nn.ModuleList(heads).to(like.device, like.dtype).train(module.training)
    if isinstance(wished, Mapping):
        _refuse_other_answers(made.exits, seen, places, like)
    made.blocks_before = tuple(places)
    made.plan = tuple(_plan(made, seen, chains, places))
    made.own_layer = _own_layer(module, seen, made.plan[-2])
    return made


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _class_with_exits(kind: type[nn.Module]) -> type[nn.Module]:
    """The subclass that stops at exits; one for each class, so that equal modules are of one type."""
    if kind not in _CLASSES:
        _CLASSES[kind] = _made_class(kind)
    return _CLASSES[kind]


def _made_class(kind: type[nn.Module]) -> type[nn.Module]:
    @wraps(kind.forward)
    def forward(self: WithExits, *args: Any, **kwargs: Any) -> Any:
        return _run(self, lambda: kind.forward(self, *args, **kwargs), (*args, *kwargs.values()))

    def reduce(self: WithExits) -> tuple[Any, ...]:
        return _bare, (kind,), self.__dict__

    def children(self: nn.Sequential) -> Iterator[nn.Module]:
        return (part for name, part in self._modules.items() if name != PART and part is not None)

    members: dict[str, Any] = {"forward": forward, "__reduce__": reduce, "__module__": kind.__module__}
    if issubclass(kind, nn.Sequential):  # its forward runs all its parts
        members |= {"__iter__": children, "__len__": lambda self: len(self._modules) - 1}
    return type(f"{kind.__name__}WithExits", (WithExits, kind), members)


def _bare(kind: type[nn.Module]) -> nn.Module:
    """An object of the class, to be filled by ``pickle`` and ``copy``: the class itself has no importable name."""
    made = _class_with_exits(kind)
    return made.__new__(made)


def _run(module: WithExits, forward: Callable[[], Any], inputs: Sequence[Any]) -> Any:
    """The answers of all ends that are there; of one, just that."""
    numbers = [place for place in range(len(module.blocks_before)) if _there(module, f"{PART}.{place}")]
    whole = _there(module, module.own_layer)
    if whole and not numbers:
        return forward()
    handed: dict[int, Any] = {}

    def tap(number: int) -> Callable[[nn.Module, Any, Any], None]:
        def note(_block: nn.Module, _args: Any, output: Any) -> None:
            handed[number] = first_tensor(output)
            if number == numbers[-1] and not whole:
                raise _Reached

        return note

    blocks = {number: _standing(module, module.blocks_before[number]) for number in numbers}
    handles = [block.register_forward_hook(tap(number)) for number, block in blocks.items()]
    own: list[Any] = []
    stack = _stack_of_calls(inputs)
    begun = dict(stack)
    try:
        own.append(answer_of(forward()))
    except _Reached:
        stack.clear()
        stack.update(begun)
    finally:
        for handle in handles:
            handle.remove()
    answers = [module.exits[number](handed[number]) for number in numbers] + own
    if len(answers) == 1:
        return answers[0]
    return {ANSWER: answers[-1], PART: torch.stack(answers)}


def _stack_of_calls(inputs: Sequence[Any]) -> dict[str, Any]:
    """The calls that are under way, as ``torch.fx`` or ``torch.export`` knows them while it records a pass."""
    tracers: list[Any] = [value.tracer for value in inputs if isinstance(value, fx.Proxy)]
    if recording := sys.modules.get("torch.fx.experimental.proxy_tensor"):  # importing it would take a second
        tracers.append(getattr(recording.get_proxy_mode(), "tracer", None))
    return next((each.module_stack for each in tracers if hasattr(each, "module_stack")), {})


def _standing(module: nn.Module, path: str) -> nn.Module:
    """The part of this path, or what stands there where it, or what it lies in, was left out."""
    for name in path.split("."):
        module = module._modules[name]  # type: ignore[assignment]
        if isinstance(module, Skipped):
            break
    return module


def _there(module: nn.Module, path: str) -> bool:
    return not isinstance(_standing(module, path), Skipped)


def _places(module: nn.Module, seen: Walk, chains: Sequence[Chain], wished: Wished) -> list[str]:
    """The blocks behind which there are exits, in the order in which they run."""
    if isinstance(wished, str | int):
        return _spread(module, chains, wished)
    require(
        len(wished) > 0, "exits", wished, "'auto', a number of exits, or the blocks behind which they leave"
    )
    for place in wished:
        single = place in seen.parts and rule_of_layer(type(module.get_submodule(place))) is not None
        if place not in seen.parts or single or not place:
            known = [block for chain in chains for block in chain.blocks]
            what = "is a single layer" if single else "is no part that runs once"
            raise FedtailorError(
                f"exits: {place!r} {what} of {type(module).__name__}: expected a block such as {known[:4]}"
            )
    ordered = sorted(dict.fromkeys(wished), key=lambda place: seen.parts[place].by_then)
    heads = wished.values() if isinstance(wished, Mapping) else ()
    for head in heads:
        require(isinstance(head, nn.Module), "exits", head, "a module for each block")
    return ordered


@torch.no_grad()
def _refuse_other_answers(heads: nn.ModuleList, seen: Walk, places: Sequence[str], like: Tensor) -> None:
    """All ends answer alike, or no loss and no metric could take one for another."""
    for head, place in zip(heads, places, strict=True):
        found = tuple(copy.deepcopy(head).eval()(like.new_zeros(seen.parts[place].handed or ())).shape)
        require(
            found == seen.answer,
            f"exits[{place!r}]",
            found,
            f"answers of the module's own shape, {seen.answer}",
        )


def _spread(module: nn.Module, chains: Sequence[Chain], wished: str | int) -> list[str]:
    """Behind the stages of a network that has several, or evenly over its blocks; the last exit is its own end."""
    auto = wished == "auto"
    counted = isinstance(wished, int) and not isinstance(wished, bool) and wished >= 2
    require(auto or counted, "exits", wished, "'auto', a number of at least 2, or a list of blocks")
    blocks = [block for chain in chains for block in chain.blocks]
    if len(blocks) < 2:
        raise FedtailorError(
            f"exits: no chain of like blocks was found in {type(module).__name__}: name the blocks with chain, as in "
            "chain = ['layers.*'], or the places of exits, as in exits = ['layers.0', 'layers.1']"
        )
    if auto and len(chains) > 1:
        return [chain.blocks[-1] for chain in chains[:-1]]
    count = min(int(wished) if counted else USUAL, len(blocks))
    ends = [-(-len(blocks) * number // count) for number in range(1, count)]
    return [blocks[end - 1] for end in ends]


def _plan(module: WithExits, seen: Walk, chains: Sequence[Chain], places: Sequence[str]) -> Iterator[Exit]:
    """What a network that ends at each exit does without."""
    blocks = [block for chain in chains for block in chain.blocks]
    heads = {f"{PART}.{n}": {path for path, _ in head.named_modules()} for n, head in enumerate(module.exits)}
    own = {f"{name}.{path}".removesuffix(".") for name, paths in heads.items() for path in paths}
    everything = {path for path, _ in module.named_modules()} - own
    for number, place in enumerate(places):
        end = seen.parts[place].by_then
        ran = [block for block in blocks if seen.parts[block].by_then <= end]
        share = Fraction(len(ran), len(blocks)) if ran else Fraction(number + 1, len(places) + 1)
        head = {path for path in own if f"{path}.".startswith(f"{PART}.{number}.")}
        held = with_silent_parts(module, seen, seen.held_by(end)) - own | head
        yield Exit(place, share, tensors_beyond(module, held))
    yield Exit(END, Fraction(1), tensors_beyond(module, everything))


def _own_layer(module: nn.Module, seen: Walk, last: Exit) -> str:
    """The last layer with weights that runs, which a network that ends at the last exit does without."""
    for path in sorted(seen.begun, key=lambda path: -seen.begun[path]):
        names = [f"{path}.{name}" for name, _ in module.get_submodule(path).named_parameters(recurse=False)]
        if names and last.absent.issuperset(names):
            return path
    raise FedtailorError(
        f"exits: nothing is learnt behind {last.name!r}: expected exits before the last block"
    )


def _made_head(module: nn.Module, seen: Walk, place: str, number: int) -> nn.Module:
    """Normalisation, pooling and a linear layer, for what a block hands on and for what the module answers."""
    handed, answer = seen.parts[place].handed, seen.answer
    pooled = answer is not None and len(answer) == 2
    each = answer is not None and handed is not None and handed[:-1] == answer[:-1]
    if handed is None or answer is None or not (pooled or each) or len(handed) not in (2, 3, 4, 5):
        raise FedtailorError(
            f"exits: no head can be made behind {place!r}, which hands on {handed} where the module answers {answer}: "
            "give a module of your own, exits = {block: head}"
        )
    with Seeds(_drawn_from(module)).scope(f"exit {number}"):
        return _head(module, handed, answer)


def _head(module: nn.Module, handed: Shape, answer: Shape) -> nn.Module:
    last = (
        len(handed) == 3 or handed[:-1] == answer[:-1]
    )  # where the channels lie: in images they come second
    channels = handed[-1] if last else handed[1]
    pools: dict[int, Callable[[], nn.Module]] = {
        4: lambda: nn.AdaptiveAvgPool2d(1),
        5: lambda: nn.AdaptiveAvgPool3d(1),
    }
    layers = [_normalisation(module, len(handed), channels, last)]
    if len(handed) > 3 and not last:
        layers += [nn.ReLU(), pools[len(handed)](), nn.Flatten()]
    elif len(handed) > len(answer):
        layers.append(MeanOverPositions())
    return nn.Sequential(*layers, nn.Linear(channels, answer[-1]))


class MeanOverPositions(nn.Module):
    """(batch, positions, features) to (batch, features)."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


def _normalisation(module: nn.Module, dimensions: int, channels: int, last: bool) -> nn.Module:
    """Of the kind that the module itself has; none where it has none."""
    own = [layer for layer in module.modules() if "Norm" in type(layer).__name__]
    if not own:
        return nn.Identity()
    if last and dimensions > 2:
        return nn.LayerNorm(channels)
    batch: dict[int, Callable[[int], nn.Module]] = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}
    if any(isinstance(layer, _BatchNorm) for layer in own):
        return batch[dimensions](channels)
    counts = [layer.num_groups for layer in own if isinstance(layer, nn.GroupNorm)]
    if counts and channels % counts[0] == 0:
        return nn.GroupNorm(counts[0], channels)
    return nn.LayerNorm(channels) if dimensions == 2 else nn.GroupNorm(1, channels)


def _drawn_from(module: nn.Module) -> int:
    """A seed that follows the module's own start: other weights, other heads."""
    first = next(module.parameters()).detach().cpu().double().contiguous()
    return int.from_bytes(blake2b(first.numpy().tobytes(), digest_size=6).digest(), "little")
