"""The same run without bad clients, with all clients honest, and attacked, under one rule after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedtailor.attacks.attack import POISONED, Attack
from fedtailor.attacks.bad_answers import BadAnswers
from fedtailor.attacks.poison import poisoned, success
from fedtailor.audit.settings import AuditSettings
from fedtailor.config import RunConfig
from fedtailor.engines.opening import open_engine
from fedtailor.errors import QuorumError, unknown
from fedtailor.merging.robust.settings import RULES
from fedtailor.method import refuse_measured
from fedtailor.record import RoundRecord, headline
from fedtailor.run.describing import Origin
from fedtailor.run.interface import start
from fedtailor.run.result import Run
from fedtailor.run.setup import prepare_config
from fedtailor.server.setup import Setup

OnRound = Callable[[RoundRecord], None]


@dataclass(frozen=True)
class Outcome:
    """How one run ended."""

    rule: str
    clients: str  # honest, absent (the bad ones never answered) or attacked
    tiers: Mapping[str, float]  # the headline metric of every tier; empty where the run could not go on
    refused: int = 0  # updates of bad clients
    wrongly: int = 0  # updates of honest clients
    restrained: int = 0  # how often a rule shortened a step of a bad client, or did not hear it somewhere
    backdoor: Mapping[str, float] | None = None  # tier -> how often the stamp works
    stopped: str = ""  # why the run could not go on

    @property
    def mean(self) -> float:
        """Over the tiers; of a run that stopped, 0."""
        return sum(self.tiers.values()) / len(self.tiers) if self.tiers else 0.0

    @property
    def worst(self) -> float:
        """Of all tiers."""
        return min(self.tiers.values(), default=0.0)

    def as_row(self) -> dict[str, Any]:
        """Plain values."""
        return {**vars(self), "mean": self.mean, "worst": self.worst}


def trial(
    config: RunConfig,
    attack: Attack,
    rules: Sequence[Mapping[str, Any]],
    on_round: OnRound | None = None,
) -> Iterator[Outcome]:
    """First the run without the bad clients, by the mean; then under every rule all honest, and attacked.

    Nothing is written: runs are kept in memory. ``rules`` are tables of [merge].
    """
    refuse_measured(config.built_method)
    yield outcome(replace(config, merge={"rule": "mean"}), absent(attack), on_round)
    for rule in rules:
        under = replace(config, merge=dict(rule))
        yield outcome(under, None, on_round)
        yield outcome(under, attack, on_round)


def absent(attack: Attack) -> Attack:
    """The same clients, who never answer."""
    return replace(attack, kind="absent", factor=None)


def outcome(config: RunConfig, attack: Attack | None, on_round: OnRound | None = None) -> Outcome:
    """One run; without an attack, everybody is honest. Nothing is written, so nothing is signed."""
    config = replace(config, audit=AuditSettings())
    setup = prepare_config(config)
    bad = attack.bad_clients(setup) if attack is not None else frozenset()
    data = poisoned(setup.data, attack, bad) if attack and attack.kind in POISONED else setup.data
    setup, rule = replace(setup, data=data), config.built_method.merging.rule
    clients = "honest" if attack is None else "absent" if attack.kind == "absent" else "attacked"
    try:
        run = _run(setup, config, attack, bad, on_round)
    except QuorumError as error:
        return Outcome(rule, clients, {}, stopped=str(error))
    metric = headline(run.tiers)
    by_client = [record.cohort.refused_by for record in run.history]
    counted = {int(each): 0 for found in by_client for each in found}
    for found in by_client:
        for each, reasons in found.items():
            counted[int(each)] += sum(reasons.values())
    stamps = attack is not None and attack.kind == "backdoor"
    return Outcome(
        rule,
        clients,
        {tier: metrics[metric] for tier, metrics in run.tiers.items()},
        refused=sum(count for each, count in counted.items() if each in bad),
        wrongly=sum(count for each, count in counted.items() if each not in bad),
        restrained=sum(
            len(bad & {*record.merge.get("clipped", ()), *record.merge.get("unheard", ())})
            for record in run.history
        ),
        backdoor=success(setup, run.state, attack) if attack is not None and stamps else None,
    )


def _run(
    setup: Setup, config: RunConfig, attack: Attack | None, bad: frozenset[int], on_round: OnRound | None
) -> Run:
    origin = Origin(config.threads, config)
    with open_engine(setup.method, setup.model, setup.data, setup.settings.engine) as engine:
        running = engine if attack is None else BadAnswers(engine, attack, bad, setup.model)
        return start(setup, origin, on_round, engine=running)


def rule_tables(names: Sequence[str], settings: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tables of [merge] for these rules; the settings of a config go to the rule that they were chosen for."""
    for name in names:
        if name not in RULES:
            raise unknown("merge.rule", name, RULES)
    own = dict(settings) if settings.get("rule", "mean") in names else {}
    return [own if own.get("rule", "mean") == name and own else {"rule": name} for name in names]
