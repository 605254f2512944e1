"""Under which rules the methods of a comparison were run, and where these differ.

Rules are what any method could have been given: local training, weighting, alignment, what happens to norm statistics;
and settings by which a method treats classes or clients otherwise than the others (``Method.rules``). What a method is
about, its own settings, is no rule.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.running.norm import FOR_ANY_METHOD
from fedtailor.merging.robust.settings import MergeSettings
from fedtailor.merging.settings import ServerSettings
from fedtailor.methods.registry import get_method, method_names

# A run of an earlier version, whose config does not know a setting yet, was run with its default.
UNSAID = {
    f"{table}.{key}": str(list(value) if isinstance(value, tuple) else value)
    for table, settings in (
        ("training", LocalTraining()),
        ("server", ServerSettings()),
        ("merge", MergeSettings()),
    )
    for key, value in asdict(settings).items()
    if value is not None
}
NEUTRAL = UNSAID | {
    "norm": "averaged",
    "weighting": "samples",
    "align": "1",
}  # switches that only some methods have are off
Settings = Mapping[str, Any]  # a run's config: tables [training] and [method], with every default filled in


def rules_of(config: Settings) -> dict[str, str]:
    """The rules of a run by name; a method that is not registered here has those of any method."""
    method = config.get("method", {})
    name = method.get("name", "")
    kept = get_method(name).rules if name in method_names() else ("norm", "weighting", "align")
    tables = {name: config.get(name, {}) for name in ("training", "server", "merge")}
    rules = UNSAID | {
        f"{name}.{key}": str(value) for name, table in tables.items() for key, value in table.items()
    }
    # A switch that a method does not have is one that is off.
    return rules | {key: str(method[key]) for key in kept if key in method and method[key] is not False}


def brought_along(key: str, told: Mapping[str, str]) -> bool:
    """Whether a setting of [server] is the default that the run's method has for it; ``told``: settings as text."""
    table, _, name = key.partition(".")
    method = told.get("method.name", "")
    if table != "server" or method not in method_names():
        return False
    usual = next(item.default for item in fields(get_method(method)) if item.name == "server")
    return told.get(key) == str(getattr(usual, name))


def has_statistics(setup: Settings) -> bool:
    """Whether norm layers of the model keep running statistics, by ``setup.json``; those that do not say may."""
    return setup.get("norm_statistics") is not False


def unequal_rules(configs: Mapping[str, Settings], statistics: bool = True) -> list[str]:
    """One sentence for each variant that was run under other rules than most; none where all are alike.

    Without running ``statistics`` those norm policies are one that differ in what becomes of them.
    """
    rules = {variant: rules_of(config) for variant, config in configs.items()}
    for each in rules.values() if not statistics else ():
        each |= {"norm": NEUTRAL["norm"]} if each.get("norm") in FOR_ANY_METHOD else {}
    keys = sorted({key for each in rules.values() for key in each})
    sentences = []
    for variant, own in rules.items():
        told = [_told(key, own, rules) for key in keys if _differs(key, variant, rules)]
        if told:
            sentences.append(f"{variant} differs from the others in: {', '.join(told)}.")
    return sentences


def _usual(key: str, rules: Mapping[str, Mapping[str, str]]) -> str | None:
    """What most variants have; of equally common values the neutral one, else the last variant's by name."""
    values: Mapping[str, str | None] = {variant: each.get(key) for variant, each in rules.items()}
    counts = Counter(values.values())
    most = [value for value, count in counts.items() if count == max(counts.values())]
    if len(most) > 1 and NEUTRAL.get(key) in most:
        return NEUTRAL.get(key)
    return most[0] if len(most) == 1 else values[max(v for v in values if values[v] in most)]


def _differs(key: str, variant: str, rules: Mapping[str, Mapping[str, str]]) -> bool:
    return rules[variant].get(key) != _usual(key, rules)


def _told(key: str, own: Mapping[str, str], rules: Mapping[str, Mapping[str, str]]) -> str:
    mine, usual, short = own.get(key), _usual(key, rules), key.removeprefix("training.")
    if mine == "True" and usual is None:
        return short
    return f"{short} = {mine or 'none'} (others: {usual or 'none'})"
