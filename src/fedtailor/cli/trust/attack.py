"""``fedtailor attack``: what bad clients would do to a run, under one rule of merging after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedtailor.cli.output import JsonOption, SetOption, console, load_torch, messages, notice, print_json

if TYPE_CHECKING:
    from fedtailor.attacks.trial import Outcome

KindOption = Annotated[
    str, typer.Option(help="nan, scale, sign-flip, noise, label-flip or backdoor.", metavar="KIND")
]
FactorOption = Annotated[
    float | None,
    typer.Option(help="How many times their own step bad clients go; by default what is usual for the kind."),
]
RuleOption = Annotated[
    list[str] | None,
    typer.Option("--rule", metavar="RULE", help="Rules of [merge] to try; all if none is named. Repeatable."),
]


def attack(
    config: Annotated[Path, typer.Argument(help="A TOML file of a run of your own.")],
    kind: KindOption = "sign-flip",
    share: Annotated[float, typer.Option(help="Share of the clients that are bad, at least one.")] = 0.1,
    factor: FactorOption = None,
    tier: Annotated[str, typer.Option(help="Only clients of this tier are bad.")] = "",
    rule: RuleOption = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Try bad clients on a run of your own: without them, all honest, and attacked, under each rule. Writes nothing."""
    load_torch()
    from fedtailor.attacks.attack import KINDS, Attack
    from fedtailor.attacks.trial import rule_tables, trial
    from fedtailor.config import load_config
    from fedtailor.errors import unknown
    from fedtailor.merging.robust.settings import RULES

    if kind not in KINDS:
        raise unknown("attack", kind, KINDS)
    settings = load_config(config, overrides or [], notice)
    meant = Attack(kind=kind, share=share, factor=factor, tier=tier)  # type: ignore[arg-type]
    found: list[Outcome] = []
    for each in trial(settings, meant, rule_tables(rule or RULES, settings.merge)):
        found.append(each)
        if not as_json:
            messages.print(f"{each.rule}, {each.clients}: {100 * each.mean:.1f}", markup=False)
    if as_json:
        rows = [each.as_row() for each in found]
        print_json({"kind": kind, "share": share, "factor": meant.times, "tier": tier, "outcomes": rows})
        return
    where = f" of tier {tier}" if tier else ""
    console.print(_table(f"{kind} x{meant.times:g} by {share:.0%} of the clients{where}", found))
    console.print("Mean and worst tier at the end, in per cent of the headline metric. Lost: against the run")
    console.print("without the bad clients, merged by the mean.")
    for each in found:
        if each.stopped:
            console.print(f"{each.rule}, {each.clients}, stopped: {each.stopped}", markup=False)


def _table(title: str, found: Sequence[Outcome]) -> Table:
    """One row per rule; 80 columns hold it."""
    without, *rest = found
    stamped = any(each.backdoor is not None for each in found)
    table = Table(title=title)
    table.add_column("rule")
    for column in ("honest", "attacked", "worst", "lost", "refused", *(["backdoor"] if stamped else [])):
        table.add_column(column, justify="right")
    table.add_row("without them", "", _percent(without.mean), _percent(without.worst), "", "")
    for honest, attacked in zip(rest[::2], rest[1::2], strict=True):
        backdoor = attacked.backdoor or {}
        works = sum(backdoor.values()) / len(backdoor) if backdoor else 0.0
        table.add_row(
            honest.rule,
            _percent(honest.mean),
            _percent(attacked.mean),
            _percent(attacked.worst),
            f"{100 * (without.mean - attacked.mean):.1f}",
            str(attacked.refused),
            *([_percent(works)] if stamped else []),
        )
    return table


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"
