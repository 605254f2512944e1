"""How often every tier is evaluated where nobody says: so that it stays a small part of the work.

Work is counted in multiply-accumulates, not in seconds: the rounds of a run must not depend on how fast a machine is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.fleet import Fleet
from fedtailor.messages import ServerState
from fedtailor.method import Method

LARGEST_SHARE = 10  # evaluation is at most one part in so many
MOST_EVALUATIONS = 20  # in a run: more points make no curve clearer


@dataclass(frozen=True)
class Work:
    """Multiply-accumulates of one round of training, and of one evaluation of every tier."""

    training: float
    evaluating: float

    @classmethod
    def of(
        cls,
        method: Method,
        model: ElasticModel,
        data: FederatedData,
        fleet: Fleet,
        state: ServerState,
        clients_per_round: int,
        asked: int = 0,
    ) -> Work:
        """An estimate: clients with as many examples as they have on average, spread over the tiers by their number.

        ``asked``: how many clients measure for a width or a tier, at most; 0: all.
        """
        clients, examples = data.num_clients, int(data.sizes.sum())
        cuts = [method.cut_for(state, tier.budget, model) for tier in fleet.tiers]
        costs = [model.cost(cut).macs for cut in cuts]
        if data.remote:  # whoever has joined may be fewer than there are tiers
            total = sum(tier.share for tier in fleet.tiers)
            shares = [float(tier.share / total) for tier in fleet.tiers]
        else:
            shares = [count / clients for count in fleet.counts(clients)]
        mean = sum(share * cost for share, cost in zip(shares, costs, strict=True))
        seen = method.local.examples_for(examples // clients)
        training = clients_per_round * seen * 3 * mean  # a backward pass counts as two forward passes
        if method.policy.kept_by_clients:
            scored = sum(
                len(common) * clients if own is None else len(own.partition.order)
                for own, common in data.measured.values()
            )
            calibrated = examples if model.statistics else 0
            part = min(1.0, asked * len(costs) / clients) if asked else 1.0
            return cls(training, part * (calibrated + scored) * mean)
        scored = sum(len(common) for _, common in data.measured.values())
        evaluating = float(scored * sum(set(costs)))  # tiers with the same piece are evaluated once
        if method.policy.measured_after and model.statistics:
            able = {
                cost: sum(s for s, other in zip(shares, costs, strict=True) if other >= cost)
                for cost in costs
            }
            most = asked / clients if asked else 1.0
            evaluating += sum(examples * min(most, share) * cost for cost, share in able.items())
        return cls(training, evaluating)

    def share(self, rounds: int, every: int) -> float:
        """The part of a run's work that is evaluation."""
        evaluating = -(-rounds // every) * self.evaluating
        return evaluating / (rounds * self.training + evaluating)

    def rounds_between(self, rounds: int) -> int:
        """After how many rounds to evaluate; where one evaluation is too much, at the end alone.

        >>> Work(training=10, evaluating=1).rounds_between(20), Work(10, 5).rounds_between(200)
        (1, 10)
        >>> Work(training=1, evaluating=10).rounds_between(20)
        20
        """
        for every in _round_numbers(rounds):
            few = -(-rounds // every) <= MOST_EVALUATIONS
            if few and self.share(rounds, every) < 1 / LARGEST_SHARE:
                return every
        return rounds


def _round_numbers(rounds: int) -> Iterator[int]:
    """1, 2, 5, 10, 20, 50 ... below ``rounds``: numbers that a small difference of the work does not change."""
    power = 1
    while power < rounds:
        yield from (each for factor in (1, 2, 5) if (each := factor * power) < rounds)
        power *= 10


def in_words(work: Work, rounds: int, every: int) -> str:
    """How often is evaluated, and why, for people."""
    share = 100 * work.share(rounds, every)
    told = f"about {share:.0f} %" if share >= 1 else "less than 1 %"
    if every < rounds:
        times = "round" if every == 1 else f"{every} rounds"
        return f'every tier is evaluated after every {times}, {told} of the work (evaluate_every = "auto")'
    alike = f"{work.evaluating / work.training:.2g}"
    return (
        'every tier is evaluated once, at the end (evaluate_every = "auto"): '
        f"one evaluation is as much work as {alike} {'round' if alike == '1' else 'rounds'}"
    )
