"""``fedtailor privacy``: what a private run costs every tier, and which noise a target needs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.charts.terminal import Titled, Words, plain_table
from fedtailor.cli.output import JsonOption, SetOption, console, load_torch, notice, print_json

if TYPE_CHECKING:
    from fedtailor.privacy.planning import Need, TierPlan
    from fedtailor.privacy.terms import Terms
    from fedtailor.server.setup import Setup


def privacy(
    config: Annotated[Path, typer.Argument(help="The TOML file of a run, with a section [privacy].")],
    epsilon: Annotated[
        list[float] | None,
        typer.Option(help="A target; the noise that it needs is shown. Repeatable. As a rule 1, 2, 4 and 8."),
    ] = None,
    overrides: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show what a private run would cost every tier; nothing is trained.

    Other noise, more rounds: --set privacy.noise=1.5 --set rounds=200
    """
    load_torch()
    from fedtailor.privacy.planning import needs, tier_plans

    for target in epsilon or []:
        if target <= 0:
            raise typer.BadParameter("expected numbers above 0", param_hint="--epsilon")
    setup, terms = _planned(config, overrides or [])
    rounds = setup.settings.rounds
    rows = tier_plans(terms, rounds, _ground(setup, terms))
    wanted = epsilon or _targets(setup)
    needed = needs(terms, rounds, wanted)
    if as_json:
        print_json(_as_data(terms, rounds, rows, needed))
        return
    console.print(_table(config.name, terms, rounds, rows))
    console.print(_needs(rounds, needed))
    for line in _remarks(setup):
        console.print(Words(line))


def _planned(config: Path, overrides: list[str]) -> tuple[Setup, Terms]:
    """The setup and its terms; a plan that costs more than it may is shown and not refused."""
    from fedtailor.config import load_config
    from fedtailor.errors import require
    from fedtailor.run.setup import check_privacy, prepare_config

    loaded = load_config(config, overrides, on_notice=notice)
    wanted = loaded.privacy
    require(
        bool(wanted.clip), "privacy.clip", wanted.clip, "a number above 0, such as 1.0: see docs/privacy.md"
    )
    without = dataclasses.replace(
        loaded, privacy=dataclasses.replace(wanted, clip=0.0, noise=0.0, epsilon=0.0)
    )
    setup = prepare_config(without, notice)
    open_ended = dataclasses.replace(wanted, epsilon=0.0)
    check_privacy(
        dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, privacy=open_ended))
    )
    setup = dataclasses.replace(setup, settings=dataclasses.replace(setup.settings, privacy=wanted))
    return setup, setup.terms


def _targets(setup: Setup) -> list[float]:
    from fedtailor.privacy.planning import USUAL_TARGETS

    own = setup.settings.privacy.epsilon
    return [own] if own else list(USUAL_TARGETS)


def _ground(setup: Setup, terms: Terms) -> Any:
    from fedtailor.privacy.guard import pieces_of
    from fedtailor.privacy.sums import grounds

    state = setup.method.begin(setup.start.state, setup.model)
    pieces = pieces_of(setup.method, setup.model, setup.fleet.tiers, state, setup.seeds)
    return grounds(state.weights, pieces, terms, setup.model)


def _table(name: str, terms: Terms, rounds: int, rows: list[TierPlan]) -> Titled:
    table = plain_table()
    table.add_column("tier", no_wrap=True)
    for column in ("clients", "a round", "noise", "per weight", "multiplier", "epsilon"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        ring = "-" if row.per_weight is None else f"{row.per_weight:.3g}"
        table.add_row(
            row.tier, f"{row.clients:,}", f"{row.expected:.3g}", f"{row.noise:.4g}", ring,
            f"{row.multiplier:.4g}", f"{row.epsilon:.3g}",
        )  # fmt: skip
    drawn = {"poisson": f"each with probability {terms.rate:.3g}", "fixed": "without replacement"}
    how = drawn.get(terms.sampling, "known to everyone")
    title = f"{name}: {rounds:,} rounds, {terms.asked} of {sum(terms.counts):,} clients, {how}"
    caption = f"Epsilon of the whole run, at delta = {terms.delta:g}. Noise in units of privacy.clip, in a tier's ring."
    return Titled(title, table, caption)


def _needs(rounds: int, needed: list[Need]) -> Titled:
    table = plain_table()
    noisy = any(need.rounds is not None for need in needed)
    for column in ("epsilon", "needs noise", *(("or rounds",) if noisy else ())):
        table.add_column(column, justify="right", no_wrap=True)
    for need in needed:
        cells = [f"{need.epsilon:g}", f"{need.noise:.4f}"]
        table.add_row(*cells, *([f"{need.rounds:,}"] if need.rounds is not None else []))
    beside = f"; rounds with the noise above, instead of {rounds:,}" if noisy else ""
    return Titled("What a target needs", table, f"The same noise in every ring, {rounds:,} rounds{beside}.")


def _remarks(setup: Setup) -> list[str]:
    settings = setup.settings.privacy
    lines = []
    if settings.epsilon and settings.noise:
        spent = max(setup.terms.epsilons(setup.settings.rounds).values())
        if spent > settings.epsilon:
            lines.append(
                f"The run would be refused: it costs {spent:.3g}, and privacy.epsilon = {settings.epsilon:g}."
            )
    if settings.seeded:
        lines.append("privacy.seeded: noise that anyone can work out from the seed hides nothing.")
    return lines


def _as_data(terms: Terms, rounds: int, rows: list[TierPlan], needed: list[Need]) -> dict[str, Any]:
    return {
        "rounds": rounds,
        "clients": sum(terms.counts),
        "asked": terms.asked,
        "sampling": terms.sampling,
        "delta": terms.delta,
        "tiers": [dataclasses.asdict(row) for row in rows],
        "needs": [dataclasses.asdict(need) for need in needed],
    }
