"""FedOpt (Reddi et al., Adaptive Federated Optimization, 2021), coordinate by coordinate, and averages over the rounds.

The merged difference, negated, is the gradient: g = w - mean over holders. Sub-models make one thing new: of some
coordinates there is no mean, because nobody sent them. These keep their value, their moments and, with Adam, their
count of steps: each coordinate is optimised as if the rounds without it had not been. Which these are the merge itself
says; a difference of zero would not tell them from coordinates that clients sent back as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.adagrad import adagrad
from torch.optim.adam import adam
from torch.optim.sgd import sgd

from fedtailor.elasticity.cutting.names import plain
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.merging.holders import each_mean
from fedtailor.merging.robust.merging import each_merged, heard
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.merging.settings import ServerSettings
from fedtailor.messages import ServerState, Update

Moments = dict[str, Tensor]  # by kind; each has the shape of the weights
COUNT = "steps"  # of Adam: how often each coordinate was sent
AVERAGE, AVERAGED, ROUND = "average", "averaged", "round"
VERDICT = "verdict"  # of a robust rule: who was shortened or not heard in this round


def merge(
    settings: ServerSettings,
    state: ServerState,
    updates: Sequence[Update],
    model: ElasticModel,
    weight: Callable[[Update], float],
    rule: MergeSettings = MergeSettings(),
) -> ServerState:
    """The state after a round: the mean over holders, or what a robust rule puts in its place, and what the server
    makes of it."""
    weights, kept = dict(state.weights), {kind: dict(each) for kind, each in _kinds(state.moments)}
    hearing = heard(rule, state.weights, updates, model, weight) if rule.active else None
    means = each_mean(state.weights, updates, model, weight) if hearing is None else each_merged(hearing)
    for name, mean, sent in means:
        old = state.weights.get(name)
        if settings.optimises and old is not None and _is_optimised(name, old, model):
            known = {kind: each[name] for kind, each in kept.items() if name in each}
            weights[name], found = optimised(settings, old, mean, sent, known)
            for kind, value in found.items():
                kept.setdefault(kind, {})[name] = value
        else:
            weights[name] = mean
    moments = {**state.moments, **kept}
    if settings.average:
        moments |= _averaged(settings.average, state, weights, updates)
    if hearing is not None:
        moments[VERDICT] = hearing.verdict
    if settings.active or rule.active:
        moments[ROUND] = state.round + 1
    return replace(state, round=state.round + 1, weights=weights, moments=moments)


def _is_optimised(name: str, old: Tensor, model: ElasticModel) -> bool:
    """Trained weights alone. Running statistics are no directions to go on in, and a step beyond the mean may make a
    variance negative; whole numbers (``num_batches_tracked``) have no gradient at all: both stay the merged mean."""
    return old.is_floating_point() and plain(name) in model.trainable


def _kinds(moments: dict[str, Any]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    return ((kind, each) for kind, each in moments.items() if kind not in (AVERAGE, AVERAGED, ROUND, VERDICT))


def optimised(
    settings: ServerSettings, old: Tensor, mean: Tensor, sent: Tensor, known: Moments
) -> tuple[Tensor, Moments]:
    """One tensor: the next weights and moments; ``sent`` says which coordinates there is a mean of."""
    step, initial = _RULES[settings.optimiser]
    wide = torch.promote_types(old.dtype, torch.float32)  # moments of half numbers would be lost in rounding
    moments = {
        kind: known[kind].clone() if kind in known else torch.full_like(old, value, dtype=_type(kind, wide))
        for kind, value in initial(settings).items()
    }
    result = mean.clone()
    for chosen in _alike(sent, moments.get(COUNT)):
        weights = old[chosen].to(wide)
        parts = {kind: value[chosen] for kind, value in moments.items()}
        step(settings, weights, weights - mean[chosen].to(wide), parts)
        result[chosen] = weights.to(old.dtype)
        for kind, part in parts.items():
            moments[kind][chosen] = part
    return result, moments


def _type(kind: str, wide: torch.dtype) -> torch.dtype:
    return torch.int32 if kind == COUNT else wide


def _alike(sent: Tensor, counts: Tensor | None) -> list[Tensor]:
    """Masks of coordinates that one call can step: all that were sent; with Adam, those of equal count.

    All of them before the first step, which changes counts.
    """
    if counts is None:
        return [sent] if bool(sent.any()) else []
    return [sent & (counts == count) for count in counts[sent].unique().tolist()]


# One step of coordinates in a row, in place: weights, their gradient, their moments. PyTorch's own functions.


def _sgd(settings: ServerSettings, weights: Tensor, gradient: Tensor, moments: Moments) -> None:
    momentum = moments.get("momentum")
    sgd(
        [weights], [gradient], [momentum], weight_decay=0.0, momentum=settings.momentum, lr=settings.rate,
        dampening=0.0, nesterov=False, maximize=False, foreach=False,
    )  # fmt: skip


def _adagrad(settings: ServerSettings, weights: Tensor, gradient: Tensor, moments: Moments) -> None:
    adagrad(
        [weights], [gradient], [moments["sum"]], [torch.tensor(0.0)], foreach=False, lr=settings.rate,
        weight_decay=0.0, lr_decay=0.0, eps=settings.eps, maximize=False,
    )  # fmt: skip


def _adam(settings: ServerSettings, weights: Tensor, gradient: Tensor, moments: Moments) -> None:
    count = moments[COUNT][0].float().cpu()  # the same for all
    adam(
        [weights], [gradient], [moments["first"]], [moments["second"]], [], [count], foreach=False, amsgrad=False,
        beta1=settings.betas[0], beta2=settings.betas[1], lr=settings.rate, weight_decay=0.0, eps=settings.eps,
        maximize=False,
    )  # fmt: skip
    moments[COUNT] += 1


def _yogi(settings: ServerSettings, weights: Tensor, gradient: Tensor, moments: Moments) -> None:
    """v <- v - (1 - b2) g^2 sign(v - g^2);  w <- w - lr m / (sqrt(v) + tau).   PyTorch has no Yogi."""
    first, second, square = moments["first"], moments["second"], gradient.square()
    first.lerp_(gradient, 1 - settings.betas[0])
    second.sub_((1 - settings.betas[1]) * square * torch.sign(second - square))
    weights.sub_(settings.rate * first / (second.sqrt() + settings.eps))


_Step = Callable[[ServerSettings, Tensor, Tensor, Moments], None]
_Initial = Callable[[ServerSettings], dict[str, float]]
_RULES: dict[str, tuple[_Step, _Initial]] = {
    "sgd": (_sgd, lambda settings: {"momentum": 0.0} if settings.momentum else {}),
    "adagrad": (_adagrad, lambda _: {"sum": 0.0}),
    "adam": (_adam, lambda _: {"first": 0.0, "second": 0.0, COUNT: 0}),
    "yogi": (_yogi, lambda settings: {"first": 0.0, "second": settings.eps**2}),  # algorithm 2: v_0 = tau^2
}


def _averaged(
    decay: float, state: ServerState, weights: dict[str, Tensor], updates: Sequence[Update]
) -> dict[str, Any]:
    """The average over rounds, of all that clients ever sent: with weights also their running statistics.

    After n rounds min(decay, (1 + n) / (10 + n)) of it stays, as with TensorFlow's: the start is soon forgotten.
    A coordinate that nobody ever sent is its own average, bit for bit.
    """
    before, rounds = state.moments.get(AVERAGE, {}), state.moments.get(AVERAGED, 0)
    sent = {name for update in updates for name in update.patch.values}
    stays = min(decay, (1 + rounds) / (10 + rounds))
    average = {}
    for name in sorted({*before, *sent} & weights.keys()):
        now, old = weights[name], before.get(name, state.weights.get(name))
        if now.is_floating_point() and old is not None and old.shape == now.shape:
            average[name] = torch.lerp(old, now, 1 - stays)
    return {AVERAGE: average, AVERAGED: rounds + 1}


def to_deploy(state: ServerState) -> ServerState:
    """The state as it is evaluated and deployed: where an average is kept, its weights are the average."""
    average = {name: value for name, value in state.moments.get(AVERAGE, {}).items() if name in state.weights}
    return replace(state, weights={**state.weights, **average}) if average else state


def to_train(measured: ServerState, state: ServerState) -> ServerState:
    """The state to go on with, after norms were measured on ``to_deploy(state)``: their statistics, its own weights."""
    average = state.moments.get(AVERAGE, {})
    own = {name: state.weights[name] for name in average if name in measured.weights}
    return replace(measured, weights={**measured.weights, **own}) if own else measured


def check_applied(
    settings: ServerSettings, method: str, state: ServerState, rule: MergeSettings = MergeSettings()
) -> None:
    """Refuse a method whose ``merge`` forgot the shared one: its state was not stepped in this round."""
    for section, each in (("server", settings), ("merge", rule)):
        if each.active and state.moments.get(ROUND) != state.round:
            raise FedtailorError(
                f"{each}: {method}.merge did not call the shared merge, on which [{section}] acts; expected "
                "super().merge(state, updates, model) in it, or shared_merge = False in its class and nothing in "
                f"[{section}]"
            )
