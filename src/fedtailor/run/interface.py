"""Train one global model over a fleet: the Python interface, and what the command line calls."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fedtailor.audit.log import AuditLog
from fedtailor.audit.settings import AuditSettings
from fedtailor.config import RunConfig, load_config
from fedtailor.engines.opening import open_engine
from fedtailor.engines.protocol import Engine
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError
from fedtailor.merging.optimising import to_deploy
from fedtailor.objective import Loss, Metric
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.progress import showing
from fedtailor.record import RoundRecord
from fedtailor.run.advice import afterthought
from fedtailor.run.arguments import (
    FleetLike,
    MergeLike,
    MethodLike,
    ModuleLike,
    ServerLike,
    TrainingLike,
    fleet_of,
    folder_of,
    method_with,
    run_settings,
)
from fedtailor.run.auto.choosing import written
from fedtailor.run.call import called
from fedtailor.run.choosing import Share
from fedtailor.run.describing import Origin, fingerprint_of, texts_of
from fedtailor.run.making import Learnt, make_setup
from fedtailor.run.result import Run
from fedtailor.run.setup import prepare_config, torch_threads
from fedtailor.secure.aggregation import Parties
from fedtailor.secure.settings import SecureSettings
from fedtailor.server.loop import run_rounds
from fedtailor.server.schedule import in_words
from fedtailor.server.setup import AsynchronousSettings, NormSettings, Setup
from fedtailor.server.stopping import Stopping
from fedtailor.steps import OnNotice, phase
from fedtailor.storage.checkpoint import Checkpoint
from fedtailor.storage.files import refuse_existing
from fedtailor.storage.interrupt import Interrupted
from fedtailor.storage.journal import CheckpointSettings, Journal, Unsaved
from fedtailor.storage.run_folder import CONFIG, ReportSettings, RunFolder

OnRound = Callable[[RoundRecord], None]


def train(
    module: ModuleLike,
    data: Any,
    fleet: FleetLike = "uniform-5",
    method: MethodLike = "heterofl",
    *,
    rounds: int = 20,
    clients_per_round: int | None = None,
    evaluate_every: int | Literal["auto"] = "auto",
    training: TrainingLike = None,
    server: ServerLike = None,
    merge: MergeLike = None,
    task: str | None = None,
    loss: Loss | str | None = None,
    metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    validation: Share = "auto",
    model: Mapping[str, Any] | None = None,
    device: str = "auto",
    seed: int = 0,
    threads: int = 1,
    on_round: OnRound | None = None,
    stopping: Stopping | Mapping[str, Any] | None = None,
    checkpoint: CheckpointSettings | Mapping[str, Any] | None = None,
    engine: EngineSettings | Mapping[str, Any] | None = None,
    norm: NormSettings | Mapping[str, Any] | None = None,
    asynchronous: AsynchronousSettings | Mapping[str, Any] | None = None,
    privacy: PrivacySettings | Mapping[str, Any] | None = None,
    secure: SecureSettings | Mapping[str, Any] | None = None,
    report: ReportSettings | Mapping[str, Any] | None = None,
    audit: AuditSettings | Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
    progress: bool | None = None,
) -> Run:
    """Train ``module`` over a fleet of unequal devices; the module itself is left as it is.

    ``data`` is ``(x, y)``, a data set, one of these for each client (a list, or a dict by name), federated data, or the
    name of a data set; ``run/given_data.py`` lists all spellings. ``fleet`` is a name or a list of tiers,
    ``[{"macs": 2e6, "share": 3}, ...]``; ``method`` a name, a table or an object. A pretrained module is a valid start,
    and a model's name or a function that builds a module will do. ``clients_per_round`` is all that the data has, at
    most 10. ``task`` says what outputs and targets mean ("regression", "multi-label" ...; without it whole numbers are
    classes where the shapes fit); ``loss(output, batch)`` and ``metrics`` replace what it minimises and reports.
    ``validation`` is the share of each client's training examples that is kept back to choose by; a tenth where early
    stopping, the best round or the method chooses.
    ``training`` says how clients train, ``server`` what becomes of their mean (``{"optimiser": "adam"}``), ``merge`` by
    which rule they are merged where some may be bad (``{"rule": "trimmed-mean"}``).
    ``model`` is what ``elastic`` should know of the module: ``{"heads": "dimension", "keep": ["stem"]}``.
    ``engine`` says how many processes work (``{"workers": 4}``) and what becomes of clients that fail,
    ``norm`` how many clients measure norm statistics, ``report`` whether the folder names single clients;
    ``asynchronous`` merges answers as they come, in simulated time (``{"buffer": 10}``); ``privacy`` clips differences
    and adds noise to their sums (``{"clip": 1.0, "epsilon": 4}``), ``secure`` sums
    updates under masks (``{"threshold": 3}``).
    Tiers are evaluated after ``evaluate_every`` rounds and at the end; ``auto`` keeps that below a tenth of the work.
    With a ``folder`` every round is saved there, and with ``audit={"key": ...}`` signed in a log; the same call with
    ``resume=True`` goes on after the last one.
    Progress is shown in a terminal and in a notebook; ``progress=True`` shows it elsewhere too, ``False`` nowhere.
    """
    path = folder_of(folder)
    if path is not None and not resume:
        refuse_existing(path)
    settings = run_settings(
        rounds=rounds, clients_per_round=clients_per_round, evaluate_every=evaluate_every, seed=seed, threads=threads,
        stopping=stopping, engine=engine, norm=norm, report=report, asynchronous=asynchronous,
        privacy=privacy, secure=secure, checkpoint=checkpoint, audit=audit,
    )  # fmt: skip
    devices, chosen = fleet_of(fleet), method_with(method, training, settings.rounds, server, merge)
    if resume and path is not None and path.exists() and chosen.align == "auto":  # measured when it began
        chosen = replace(chosen, align=RunFolder(path).setup().get("aligned", "auto"))
    learnt = Learnt(task, loss, metrics, validation, model)
    with showing(chosen.name, settings.rounds, progress) as show:
        settings.audit.check()
        setup = make_setup(module, data, devices, chosen, settings, clients_per_round, learnt, device)
        setup = replace(setup, audited=settings.audit.active)
        share = learnt.share(data, settings.stopping, chosen)
        words = called(setup, module, data, learnt.recognised(setup.model).words(share))
        origin = Origin(settings.threads, call=words, report=settings.report, audit=settings.audit)
        if path is None:
            return start(setup, origin, both(show, on_round))
        again = resume and path.exists()
        with Journal.open(path) if again else Journal.create(path, texts_of(setup, origin)) as journal:
            journal.begin(fingerprint_of(setup, origin), settings.checkpoint, setup.start, setup.device)
            if show is not None:
                show.count(journal.history)
            try:
                return start(setup, origin, both(show, on_round), journal)
            except Interrupted as stop:
                stop.add_note("The same call with resume=True goes on from there.")
                raise


def both(first: OnRound | None, second: OnRound | None) -> OnRound | None:
    """Tell two of a round."""
    if first is None or second is None:
        return first or second

    def tell(record: RoundRecord) -> None:
        first(record)
        second(record)

    return tell


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
    if setup.aligned is not None:
        config = replace(config, method={**config.method, "align": setup.aligned.multiple})
    config = written(config, setup)
    origin = Origin(config.threads, config)
    with Journal.create(path, texts_of(setup, origin)) as journal:
        journal.begin(fingerprint_of(setup, origin), config.checkpoint, setup.start, setup.device)
        return start(setup, origin, on_round, journal, on_notice)


def resume(
    path: Path | str,
    *,
    allow_drift: bool = False,
    on_round: OnRound | None = None,
    on_notice: OnNotice = warnings.warn,
    on_begin: Callable[[Sequence[RoundRecord]], None] | None = None,
) -> Run:
    """Go on with a run that was interrupted, after its last saved round; the result is the same, bit for bit.

    A run whose config, model, data, versions or threads have changed is refused, unless ``allow_drift``.
    A run that has come to its end is returned as it is. ``on_begin`` is told the rounds that were done before, once
    they have been found to be whole.
    """
    with Journal.open(Path(path)) as journal:
        file = journal.folder.path / CONFIG
        if not file.is_file():
            raise FedtailorError(
                f"{path} was started from Python: call train again with the same arguments and resume=True"
            )
        config = load_config(file)
        setup, origin = prepare_config(config), Origin(config.threads, config)
        journal.begin(
            fingerprint_of(setup, origin), config.checkpoint, setup.start, setup.device,
            allow_drift=allow_drift, on_notice=on_notice,
        )  # fmt: skip
        if on_begin is not None:
            on_begin(journal.history)
        return start(setup, origin, on_round, journal, on_notice)


def start(
    setup: Setup,
    origin: Origin,
    on_round: OnRound | None = None,
    journal: Journal | None = None,
    on_notice: OnNotice = warnings.warn,
    engine: Engine | None = None,
) -> Run:
    """Run the rounds that are left; what ``on_round`` is shown is in the journal already.

    Clients run where the settings say, or on the ``engine`` that is given.
    """
    kept = journal or Unsaved(setup.start, setup.settings.stopping.restore_best)
    history, log = list(kept.history), _log(origin, journal)
    parties = engine if isinstance(engine, Parties) else None  # clients that hold their own secrets
    setup = setup.guarded(None if journal is None else journal.folder.path, kept.at.state.round, parties)

    def note(record: RoundRecord, at: Checkpoint) -> None:
        with phase("save"):
            if log is not None:  # first: what is saved has been signed
                log.add(record)
            kept.record(record, at)
        history.append(record)
        if on_round is not None:
            on_round(record)

    # An engine that is given runs in a process of its makers, who end it by signals: without a SuperLink no round ends.
    patient = kept.until_asked_to_stop() if engine is None else nullcontext()
    with torch_threads(origin.threads), _engine(setup, engine) as running, patient:
        at = run_rounds(setup, running, note, kept.at, kept)
    best, state = at.best.round if at.best else None, at.state
    if best is not None and setup.settings.stopping.restore_best:
        state = kept.state_of(best)
    state = to_deploy(state)
    folder = journal.folder.path if journal is not None else None
    run = Run(setup, state, tuple(history), best, at.memories, origin, at, folder=folder)
    if journal is not None:
        journal.finish(at, run.write)
        if log is not None:
            log.finish(journal.folder.path, at.state.round)
    if setup.guard is not None:
        setup.guard.ledger.close()
    if doubt := afterthought(setup, run.tiers):
        on_notice(doubt)
    return run


def _log(origin: Origin, journal: Journal | None) -> AuditLog | None:
    """The signed log of a run that asks for one; it lies in the run's folder."""
    settings = origin.audit if origin.config is None else origin.config.audit
    if not settings.active:
        return None
    if journal is None:
        raise FedtailorError(
            f"audit.key = {settings.key!r}: a log lies in the run's folder; expected folder=..."
        )
    return AuditLog(journal.folder.path, settings.file, journal.at.state.round)


def _engine(setup: Setup, given: Engine | None) -> AbstractContextManager[Engine]:
    if given is not None:
        return nullcontext(given)
    return open_engine(setup.method, setup.model, setup.data, setup.settings.engine)
