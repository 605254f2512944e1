"""The experiments of a paper, how they are run, and the command line that all scripts have.

An experiment is a call of ``fedtailor compare``, or some of ``fedtailor run``. Its runs lie below ``runs/<paper>``,
where those commands would put them too: whichever made them, a finished run is not repeated, a begun one goes on.
"""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedtailor.config import load_config
from fedtailor.errors import FedtailorError, QuorumError
from fedtailor.run.interface import resume, run_config
from fedtailor.storage.run_folder import RunFolder
from fedtailor.sweep.plan import PlannedRun, is_same, make_plan
from reproduce.shared.figures import ending, versions
from reproduce.shared.results import Result, Results
from reproduce.shared.tables import accuracy_table, difference_table, rows_of

ROOT = Path(__file__).parents[2]

Figures = Callable[[RunFolder], Result]


@dataclass(frozen=True)
class Experiment:
    """Some methods under the same settings, with some seeds: one call of ``fedtailor compare``."""

    name: str
    config: str  # its path from the root
    methods: Collection[str]  # as ``fedtailor compare`` takes them
    seeds: int = 1
    settings: tuple[str, ...] = ()
    figures: tuple[Figures, ...] = (ending,)  # what is read from each finished run
    may_fail: bool = False  # a run whose clients all diverge is a result too: {"failed": why}

    def plan(self, runs: Path, workers: Sequence[str] = ()) -> Sequence[PlannedRun]:
        """Its runs, and where they lie. How many ``workers`` there are changes no result."""
        settings = [*self.settings, f"name={self.name}", *workers]
        return make_plan(ROOT / self.config, ",".join(self.methods), self.seeds, [], settings, runs).runs

    def commands(self, runs: Path) -> list[str]:
        """The calls that make the same runs."""
        asked = ["--methods", ",".join(self.methods), "--seeds", str(self.seeds), "--runs", str(runs)]
        return [_call("compare", self.config, asked, [*self.settings, f"name={self.name}"])]


@dataclass(frozen=True)
class Variants(Experiment):
    """The same for variants of the config's own method, which ``compare`` would replace: calls of ``fedtailor run``."""

    methods: Mapping[str, tuple[str, ...]]  # name -> what it sets

    def plan(self, runs: Path, workers: Sequence[str] = ()) -> Sequence[PlannedRun]:
        """Its runs, in the folder of the experiment."""
        planned = []
        for method, seed, settings in self.every():
            config = load_config(ROOT / self.config, [*settings, *workers])
            folder = RunFolder(runs / self.name / config.name)
            planned.append(PlannedRun(method, (), seed, "", config, folder))
        return planned

    def commands(self, runs: Path) -> list[str]:
        """One call for each run."""
        asked = ["--runs", str(runs / self.name)]
        return [_call("run", self.config, asked, settings) for _, _, settings in self.every()]

    def every(self) -> Iterator[tuple[str, int, list[str]]]:
        """Method, seed and settings of each run."""
        for method, own in self.methods.items():
            for seed in range(1, self.seeds + 1):
                named = (f"seed={seed}", f"name={method}-seed{seed}")
                yield method, seed, [*own, *self.settings, *named]


def _call(command: str, config: str, asked: list[str], settings: list[str]) -> str:
    changed = [part for setting in settings for part in ("--set", setting)]
    return shlex.join(["fedtailor", command, config, *asked, *changed])


@dataclass(frozen=True)
class Paper:
    """All experiments of a paper, and what can be drawn of them."""

    script: Path  # beside it lie configs and results
    about: str
    # What there is to run; of a script that looks at what came out, asked anew until nothing is left.
    experiments: Sequence[Experiment] | Callable[[Results], Sequence[Experiment]]
    draw: Callable[[Results, Path], None] | None = None  # into a folder
    runs: str = ""  # the folder below runs/; the paper's own name unless it shares those of another

    def main(self) -> None:
        """Run what is asked for, then draw."""
        options = self._options()
        elsewhere = options.folder.resolve() if options.folder else None
        results = Results((elsewhere or self.script.parent) / "results.json")
        runs = elsewhere / "runs" if elsewhere else Path("runs") / (self.runs or self.script.parent.name)

        wanted = options.experiments or self._names

        def planned() -> list[Experiment]:
            return [
                replace(
                    each,
                    settings=(*each.settings, *options.set),
                    seeds=min(each.seeds, options.seeds or each.seeds),
                    methods=_some(each.methods, options.methods),
                )
                for each in self._experiments(results)
                if each.name in wanted
            ]

        chosen = planned()
        if options.list:
            print("\n".join(command for each in chosen for command in each.commands(runs)))
            return
        if options.tables:
            print("\n".join(line for each in chosen for line in self._tables(each, results, options.against)))
            return
        try:
            if not options.draw:
                workers = [f"engine.workers={options.workers}"] if options.workers else []
                ends = time.monotonic() + options.seconds
                while self._run(planned(), results, runs, workers, ends) and callable(self.experiments):
                    pass
        except FedtailorError as error:
            sys.exit(f"error: {error}")
        except KeyboardInterrupt as stop:
            sys.exit(f"{stop or 'stopped'}; the same command goes on")
        if self.draw is not None:
            self.draw(results, elsewhere or ROOT / "docs" / "figures")

    @property
    def _names(self) -> list[str]:
        return [each.name for each in self._experiments(Results(self.script.parent / "results.json"))]

    def _experiments(self, results: Results) -> Sequence[Experiment]:
        return self.experiments(results) if callable(self.experiments) else self.experiments

    def _tables(self, experiment: Experiment, results: Results, against: str | None) -> Iterator[str]:
        """What is known of an experiment, as its page shows it."""
        rows = rows_of(results.runs(experiment.name), list(experiment.methods))
        if not rows:
            return
        yield from (f"## {experiment.name}", "", *accuracy_table(rows), "")
        first = against if against in rows else next(iter(rows))
        if len(rows) > 1:
            yield from (*difference_table(rows, first), "")

    def _run(
        self, chosen: Sequence[Experiment], results: Results, runs: Path, workers: list[str], ends: float
    ) -> int:
        """Run what is not there yet, but start nothing after ``ends``; how many runs that were."""
        made_now = 0
        for experiment in chosen:
            # Seed by seed: a script that is stopped leaves comparisons of all methods.
            for run in sorted(experiment.plan(ROOT / runs, workers), key=lambda each: each.seed):
                title, method = (
                    f"{experiment.name}, {run.title}",
                    run.variant.replace("=each", f"={run.tier}"),
                )
                if results.has(experiment.name, method, run.seed):
                    print(f"{title}: done before", flush=True)
                elif time.monotonic() < ends:
                    begun = time.monotonic()
                    figures = _outcome(run, experiment)
                    made = {"commands": experiment.commands(runs), "versions": [versions(run.folder)]}
                    results.add(experiment.name, method, run.seed, figures, made)
                    print(f"{title}: {time.monotonic() - begun:.0f} s", flush=True)
                    made_now += 1
        return made_now

    def _options(self) -> argparse.Namespace:
        parser = argparse.ArgumentParser(
            prog=f"python -m reproduce.{self.script.parent.name}.run",
            description=self.about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        add = parser.add_argument
        names = ", ".join(self._names)
        add(
            "experiments",
            nargs="*",
            choices=[*self._names, []],
            metavar="experiment",
            help=f"all, or of: {names}",
        )
        add("--list", action="store_true", help="show the commands and stop")
        add("--tables", action="store_true", help="show what came out as tables, with intervals, and stop")
        add(
            "--against",
            help="with --tables: the method that the others are compared with (default: the first)",
        )
        add("--workers", help="worker processes of a run (default: all cores)")
        add("--methods", help="some methods of each experiment, with commas between them (default: all)")
        add("--seeds", type=int, default=0, help="at most so many seeds of each experiment (default: all)")
        add(
            "--seconds",
            type=float,
            default=float("inf"),
            help="start no run later than after so many seconds",
        )
        add("--folder", type=Path, help="put runs, results and figures there, to try something out")
        add("--set", action="append", default=[], metavar="KEY=VALUE", help="with --folder: change every run")
        parser.set_defaults(draw=False)
        if self.draw is not None:
            add("--draw", action="store_true", help="run nothing, draw the figures of what is there")
        options = parser.parse_args()
        if options.set and not options.folder:
            parser.error("--set changes what is reproduced: give it a --folder of its own")
        return options


def _some(methods: Collection[str], chosen: str | None) -> Any:
    """The methods that are chosen, as they were given: by names, or with what each of them sets."""
    if chosen is None:
        return methods
    names = [name for name in methods if name in chosen.split(",")]
    return {name: methods[name] for name in names} if isinstance(methods, Mapping) else names


def _outcome(run: PlannedRun, experiment: Experiment) -> Result:
    """The figures of a run once it has ended, or why it could not."""
    try:
        _finish(run)
    except QuorumError as error:
        if not experiment.may_fail:
            raise
        return {"failed": str(error).partition(".")[0]}
    figures: Result = {}
    for read in experiment.figures:
        figures |= read(run.folder)
    return figures


def _finish(run: PlannedRun) -> None:
    """Run it, or go on with it, or leave it as it is."""
    path = run.folder.path
    if not path.exists():
        run_config(run.config, path)
    elif not is_same(run):
        raise FedtailorError(f"{path} holds a run of another configuration: remove it, or give a --folder")
    elif not run.folder.finished:
        resume(path)
