"""Train one global model over a fleet: the Python interface, and what the command line calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from torch import nn

from fedtailor.client.sgd import LocalTraining
from fedtailor.config import RunConfig, load_config, validated
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.front_door import elastic
from fedtailor.engines.opening import open_engine
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, fleet_by_name
from fedtailor.method import Method
from fedtailor.objective import Loss, Metric, Objective
from fedtailor.record import RoundRecord
from fedtailor.run.choosing import Share, checked_share, share_for
from fedtailor.run.describing import fingerprint_of, texts_of
from fedtailor.run.learning import report_what_is_known
from fedtailor.run.result import Run
from fedtailor.run.setup import (
    OnNotice,
    federated,
    method_with,
    pick_device,
    prepare,
    prepare_config,
    torch_threads,
)
from fedtailor.seeds import Seeds
from fedtailor.server.loop import run_rounds
from fedtailor.server.schedule import in_words
from fedtailor.server.setup import RoundSettings, Setup
from fedtailor.server.stopping import Stopping
from fedtailor.storage.checkpoint import Checkpoint
from fedtailor.storage.journal import CheckpointSettings, Journal, Unsaved
from fedtailor.storage.run_folder import CONFIG

OnRound = Callable[[RoundRecord], None]
S = TypeVar("S")


def train(
    module: nn.Module,
    data: FederatedData | str,
    fleet: Fleet | str = "uniform-5",
    method: Method | str = "heterofl",
    *,
    rounds: int = 20,
    clients_per_round: int = 10,
    evaluate_every: int | Literal["auto"] = "auto",
    training: LocalTraining | Mapping[str, Any] | None = None,
    task: str | None = None,
    loss: Loss | str | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    validation: Share = "auto",
    device: str = "auto",
    seed: int = 0,
    threads: int = 1,
    on_round: OnRound | None = None,
    stopping: Stopping | Mapping[str, Any] | None = None,
    checkpoint: CheckpointSettings | Mapping[str, Any] | None = None,
    engine: EngineSettings | Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
) -> Run:
    """Train ``module`` over a fleet of unequal devices; the module itself is left as it is.

    ``data`` is federated data or the name of a data set, ``fleet`` and ``method`` are objects or names. A pretrained
    module is a valid start. ``task`` says what outputs and targets mean ("regression", "multi-label" ...; without it
    whole numbers are classes where the shapes fit); ``loss(output, batch)`` and ``metrics`` replace what it minimises
    and reports.
    ``validation`` is the share of each client's training examples that is kept back to choose by; a tenth where early
    stopping, the best round or the method chooses.
    ``engine`` says how many processes work (``{"workers": 4}``) and what becomes of clients that fail.
    Tiers are evaluated after ``evaluate_every`` rounds and at the end; ``auto`` keeps that below a tenth of the work.
    With a ``folder`` every round is saved there; the same call with ``resume=True`` goes on after the last one.
    """
    settings = RoundSettings(
        rounds, clients_per_round, evaluate_every,
        _settings(Stopping, stopping, "stopping"), _settings(EngineSettings, engine, "engine"),
    )  # fmt: skip
    seeds, chosen_device, objective = Seeds(seed), pick_device(device), Objective.of(task, loss, metrics)
    held = federated(data, seeds).to(chosen_device)
    for notice in held.notices if isinstance(data, str) else held.findings:
        warnings.warn(notice, stacklevel=2)
    devices = fleet_by_name(fleet) if isinstance(fleet, str) else fleet
    chosen = method_with(method, training, rounds)
    held = held.with_validation(share_for(checked_share(validation), settings.stopping, chosen), seeds)
    model = elastic(module.to(chosen_device), held.example(), objective=objective)
    if metrics is None:
        report_what_is_known(model)
    setup = prepare(chosen, model, held, devices, settings, seeds)
    if folder is None:
        return _start(setup, threads, on_round)
    path, saving = Path(folder), _settings(CheckpointSettings, checkpoint, "checkpoint")
    again = resume and path.exists()
    with Journal.open(path) if again else Journal.create(path, texts_of(setup, threads)) as journal:
        journal.begin(fingerprint_of(setup, threads), saving, setup.start, setup.device)
        return _start(setup, threads, on_round, journal)


def run_config(
    config: RunConfig, path: Path, on_round: OnRound | None = None, on_notice: OnNotice = warnings.warn
) -> Run:
    """Run a configuration and write its folder; nothing is written unless the run can start.

    ``on_notice`` is told before the first round what a file of data was taken for and what is odd about it, and how
    often tiers are evaluated, where the configuration leaves it open.
    """
    setup = prepare_config(config, on_notice)
    every = setup.settings.evaluate_every
    if config.evaluate_every == "auto" and every != "auto":
        on_notice(in_words(setup.work(), config.rounds, every))
        config = replace(config, evaluate_every=every)  # what is written and resumed is settled
    with Journal.create(path, texts_of(setup, config.threads, config)) as journal:
        mark = fingerprint_of(setup, config.threads, config)
        journal.begin(mark, config.checkpoint, setup.start, setup.device)
        return _start(setup, config.threads, on_round, journal)


def resume(
    path: Path | str,
    *,
    allow_drift: bool = False,
    on_round: OnRound | None = None,
    on_notice: OnNotice = warnings.warn,
) -> Run:
    """Go on with a run that was interrupted, after its last saved round; the result is the same, bit for bit.

    A run whose config, model, data, versions or threads have changed is refused, unless ``allow_drift``.
    A run that has come to its end is returned as it is.
    """
    with Journal.open(Path(path)) as journal:
        file = journal.folder.path / CONFIG
        if not file.is_file():
            raise FedtailorError(
                f"{path} was started from Python: call train again with the same arguments and resume=True"
            )
        config = load_config(file)
        setup = prepare_config(config)
        journal.begin(
            fingerprint_of(setup, config.threads, config), config.checkpoint, setup.start, setup.device,
            allow_drift=allow_drift, on_notice=on_notice,
        )  # fmt: skip
        return _start(setup, config.threads, on_round, journal)


def _settings(kind: type[S], given: S | Mapping[str, Any] | None, name: str) -> S:
    return validated(kind, given or {}, name) if given is None or isinstance(given, Mapping) else given


def _start(
    setup: Setup, threads: int = 1, on_round: OnRound | None = None, journal: Journal | None = None
) -> Run:
    """Run the rounds that are left; what ``on_round`` is shown is in the journal already."""
    kept = journal or Unsaved(setup.start, setup.settings.stopping.restore_best)
    history = list(kept.history)

    def note(record: RoundRecord, at: Checkpoint) -> None:
        kept.record(record, at)
        history.append(record)
        if on_round is not None:
            on_round(record)
        kept.stop_if_asked(at)

    with (
        torch_threads(threads),
        open_engine(setup.method, setup.model, setup.data, setup.settings.engine) as engine,
        kept.until_asked_to_stop(),
    ):
        at = run_rounds(setup, engine, note, kept.at)
    best, state = at.best.round if at.best else None, at.state
    if best is not None and setup.settings.stopping.restore_best:
        state = kept.state_of(best)
    run = Run(setup, state, tuple(history), best, at.memories)
    if journal is not None:
        journal.finish(at, run.save)
    return run
