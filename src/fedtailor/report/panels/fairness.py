"""Whether methods were given the same: what each really spent per client and tier, and under which rules it was run."""

from __future__ import annotations

from collections.abc import Sequence

from fedtailor.charts.grouping import Runs, by_setting, of_common_seeds, round_to, setting_filter
from fedtailor.charts.panel import Chart, Panel, ReportedRun, Row, axis, lines
from fedtailor.report.amounts import short, size
from fedtailor.report.fairness import (
    FIGURES,
    TOLERANCE,
    Spending,
    allowed_by,
    everything_unequal,
    marks,
    narrower,
    not_recorded,
    spending,
    times,
    unequal_budgets,
    widths_of,
)
from fedtailor.report.rules import has_statistics, unequal_rules

MEANING = (
    "Figures are means over clients, rounds and seeds: what one client spent on training in a round that it took part "
    "in, in the tier that it had in that round, without measuring. MACs are multiply-accumulates, bytes those of both "
    "ways, parameters the weights and biases that a client was sent, whether or not every step runs them."
)
TICKS = [0.001, 0.01, 0.03, 0.1, 0.3, 0.5, 1, 2, 3, 10, 30, 100, 1000]
EQUAL = "No method spends over 5 % more or less than the others on a client of the same tier."


def fairness(runs: Runs) -> Panel:
    """Who was given more than others, in words, in figures and as a picture."""
    tables: list[tuple[str, Sequence[Row]]] = []
    ratios: list[Row] = []
    words: list[str] = []
    for setting, methods in by_setting(runs).items():
        same_seeds = of_common_seeds(methods) or methods
        results = {variant: [run.records for run in each] for variant, each in same_seeds.items()}
        found = spending(results, {variant: allowed_by(each[0].setup) for variant, each in methods.items()})
        at = f"With {setting}: " if setting else ""
        words += [f"{at}{sentence}" for sentence in _budgets(found, len(methods))]
        words += filter(None, (_narrower(variant, each[0]) for variant, each in methods.items()))
        statistics = any(has_statistics(each[0].setup) for each in methods.values())
        words += unequal_rules({variant: each[0].config for variant, each in methods.items()}, statistics)
        words += [
            f"{variant}: made before it was recorded what each tier spends."
            for variant in not_recorded(results)
        ]
        if found:
            tables.append((f"What a client spends in a round {setting}".strip(), _rows(found)))
        ratios += _ratios(found, {"setting": setting} if setting else {})
    words += [MEANING] if tables else []
    beyond = any(abs(row[figure] - 1) > TOLERANCE for row in ratios for figure in FIGURES if figure in row)
    charts = [_chart(ratios, setting_filter(runs))] if beyond else []
    return Panel("fairness", "Fairness", "\n".join(dict.fromkeys(words)), charts, tables)


def _narrower(variant: str, run: ReportedRun) -> str:
    method = run.config.get("method", {})
    setting = f"{method.get('name', variant)}:widths"
    return narrower(variant, setting, method.get("widths"), widths_of(run.setup))


def _budgets(found: Spending, methods: int) -> list[str]:
    """What is unequal; that nothing is, where all methods could be compared."""
    equal = len(found) == methods > 1 and not unequal_budgets(found)
    return [*([EQUAL] if equal else []), *everything_unequal(found)]


def _rows(found: Spending) -> list[Row]:
    """Tier by tier, so that methods that should be equal stand below each other."""
    tiers = dict.fromkeys(tier for each in sorted(found.values(), key=len, reverse=True) for tier in each)
    limited = any(each.of_budget for tiers in found.values() for each in tiers.values())
    rows: list[Row] = []
    for tier in tiers:
        for method in (method for method in found if tier in found[method]):
            each = found[method][tier]
            row: Row = {"method": method, "tier": tier, "unequal": marks(found, method, tier)}
            row |= {
                "clients per round": f"{each.clients:.3g}",
                "MACs": short(each.macs),
                "bytes": size(each.bytes),
                "parameters": short(each.parameters),
            }
            if limited:
                of = each.of_budget
                row |= {f"{FIGURES[f]} of budget": times(of[f]) if f in of else "no limit" for f in FIGURES}
            rows.append(row)
    return rows


def _ratios(found: Spending, at: Row) -> list[Row]:
    return [
        {
            "method": method,
            **at,
            "tier": tier,
            **{f: round_to(ratio, 4) for f, ratio in each.of_others.items()},
        }
        for method, tiers in found.items()
        for tier, each in tiers.items()
        if each.of_others
    ]


def _chart(rows: Sequence[Row], filters: Sequence[str]) -> Chart:
    tier = axis("tier", "device class", "ordinal", sort=None)
    logarithmic: Row = {"scale": {"type": "log"}, "axis": {"values": TICKS}}
    views = {
        name: lines(tier, axis(figure, f"{name}, times those of the others", **logarithmic))
        for figure, name in FIGURES.items()
    }
    text = (
        "1 is the middle method of the tier (of an even number, the lower of the two in the middle). Lines that lie on "
        "each other were given the same."
    )
    return Chart("spending", "What a client spends, against the others", text, rows, views, filters)
