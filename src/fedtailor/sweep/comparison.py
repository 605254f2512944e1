"""What ``fedtailor.compare`` returns: tables that print, data, the runs themselves."""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.text import Text

from fedtailor.charts.terminal import Words
from fedtailor.errors import FedtailorError, counted
from fedtailor.record import headline
from fedtailor.report.amounts import size
from fedtailor.report.comparison import (
    Known,
    comparison_data,
    comparison_tables,
    gains_and_losses,
    unequal_in_words,
)
from fedtailor.report.export import check_place, format_of, write_report
from fedtailor.report.fairness import fairness_data
from fedtailor.report.rules import unequal_rules
from fedtailor.report.tables import join_by_tier, spread
from fedtailor.report.targets import Records, last_evaluation
from fedtailor.run.describing import describe
from fedtailor.run.html import table_html
from fedtailor.run.result import Run
from fedtailor.sweep.plan import plain_name, write_plan
from fedtailor.sweep.results import known_from

if TYPE_CHECKING:
    import pandas

NARROWEST = 80  # columns of a text that goes to no terminal


@dataclass(frozen=True, repr=False)
class Comparison:
    """The runs of a comparison; ``print`` shows its tables, ``to_pandas`` has one row per method, seed and tier."""

    each: Sequence[tuple[str, int, str, Run]]  # variant, seed, tier of a run for one tier alone, the run
    folder: Path | None = None
    target: float | None = None  # in per cent

    @property
    def runs(self) -> dict[str, list[Run]]:
        """The runs of every method: ``comparison.runs["heterofl"][0].submodel(0.25)``."""
        found: dict[str, list[Run]] = {}
        for variant, _, _, run in self.each:
            found.setdefault(variant, []).append(run)
        return found

    @cached_property
    def results(self) -> dict[str, list[Records]]:
        """The records of every method, one list per seed."""
        return {variant: list(by_seed.values()) for variant, by_seed in self._by_seed().items()}

    def _by_seed(self) -> dict[str, dict[int, Records]]:
        parts: dict[tuple[str, int], dict[str, Records]] = {}
        for variant, seed, tier, run in self.each:
            parts.setdefault((variant, seed), {})[tier] = _with_ending(run)
        found: dict[str, dict[int, Records]] = {}
        for (variant, seed), by_tier in parts.items():
            found.setdefault(variant, {})[seed] = join_by_tier(by_tier)
        return found

    def data(self) -> dict[str, Any]:
        """All of it as plain data, as ``fedtailor compare --json`` writes it."""
        known = self._known
        return {
            **comparison_data(self.results, self.target, known.guess),
            "fairness": fairness_data(self.results, known.allowed, known.narrower),
            "validation_examples": known.kept_back,
            "unequal_rules": self._unequal_rules(),
        }

    def to_pandas(self) -> pandas.DataFrame:
        """One row per method, seed and tier: the metrics at the end, and what the whole run cost."""
        try:
            import pandas
        except ImportError as error:
            raise FedtailorError("to_pandas needs pandas: pip install 'fedtailor[pandas]'") from error
        return pandas.DataFrame(self.rows())

    def rows(self) -> list[dict[str, Any]]:
        """The rows of ``to_pandas``."""
        return [
            {
                "method": variant,
                "seed": seed,
                "tier": tier,
                **metrics,
                "rounds": records[-1].round,
                "bytes": sum(record.spent.bytes for record in records),
                "flops": 2 * sum(record.spent.macs for record in records),
                "seconds": sum(record.seconds for record in records),
            }
            for variant, by_seed in self._by_seed().items()
            for seed, records in by_seed.items()
            for tier, metrics in last_evaluation(records).items()
        ]

    def report(self, path: Path | str = "report.html", *, overwrite: bool = False) -> Path:
        """Write the report: one page that opens offline; ``report.md`` writes text. Needs the extra ``report``."""
        place, form = Path(path), format_of(None, Path(path))
        check_place(place, form, overwrite)
        if self.folder is not None:
            write_report([self.folder], place, self.target, form)
            return place
        made = TemporaryDirectory()
        try:
            folder, entries = Path(made.name) / "comparison", []
            for variant, seed, tier, run in self.each:
                name = plain_name(f"{variant}{'-' if tier else ''}{tier}-seed{seed}")
                run.save(folder / name)
                entries.append({"folder": name, "variant": variant, "cell": {}, "seed": seed, "tier": tier})
            write_plan(folder, folder.name, entries)
            write_report([folder], place, self.target, form, saved=False)
        finally:
            shutil.rmtree(made.name, ignore_errors=True)
        return place

    def __str__(self) -> str:
        text = io.StringIO()
        width = max(NARROWEST, shutil.get_terminal_size((NARROWEST, 24)).columns)
        console = Console(file=text, width=width, highlight=False, force_jupyter=False, color_system=None)
        for part in self._parts():
            console.print(part)
        return text.getvalue().rstrip()

    __repr__ = __str__

    def _repr_html_(self) -> str:
        """For a notebook: the table of tiers, and what the command would say below it."""
        tiers = last_evaluation(next(iter(self.results.values()))[0])
        metric = headline(tiers)
        rows = []
        for variant, runs in self.results.items():
            ends = [last_evaluation(records) for records in runs]
            cells = [spread(metric, [end[tier][metric] for end in ends]) for tier in tiers]
            sent = mean(sum(record.spent.bytes for record in records) for records in runs)
            rows.append([variant, *cells, size(sent)])
        table = table_html(["method", *tiers, "sent"], rows)
        return f"<div><b>{escape(self._title)}: {escape(metric)} per tier at the end</b>{table}</div>"

    @property
    def _title(self) -> str:
        run = self.each[0][3]
        seeds = counted(len({seed for _, seed, _, _ in self.each}), "seed")
        return f"{run.setup.data.name}, {counted(run.setup.settings.rounds, 'round')}, {seeds}"

    def _parts(self) -> Iterator[RenderableType]:
        """What the command prints."""
        known = self._known
        yield from comparison_tables(self._title, self.results, self.target, known)
        yield from unequal_in_words(self.results, known)
        yield from map(Words, self._unequal_rules())
        if len(self.results) > 1:
            yield Text()
        yield from map(Words, gains_and_losses(self.results, known.allowed))

    @cached_property
    def _known(self) -> Known:
        first = {variant: run.setup for variant, _, _, run in reversed(self.each)}
        setups = {variant: describe(first[variant]) for variant in self.results}
        return known_from(setups, {variant: first[variant].method for variant in self.results})

    def _unequal_rules(self) -> list[str]:
        first = {variant: run.origin.call or {} for variant, _, _, run in reversed(self.each)}
        return unequal_rules({variant: first[variant] for variant in self.results}, self._known.statistics)


def _with_ending(run: Run) -> Records:
    """The records, the last of them with the figures of the round that the run ended with."""
    if not run.setup.settings.stopping.restore_best:
        return run.history
    best = next(record for record in run.history if record.round == run.best_round)
    return [*run.history[:-1], replace(run.history[-1], tiers=best.tiers, deployed=best.deployed)]
