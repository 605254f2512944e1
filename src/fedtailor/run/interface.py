"""Train one global model over a fleet: the Python interface, and what the command line calls."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from fedtailor.client.sgd import LocalTraining
from fedtailor.config import RunConfig, load_config, to_toml, validated
from fedtailor.data.datasets import load_dataset
from fedtailor.data.federated import DataSettings, FederatedData, federate
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.ensemble import Ensemble
from fedtailor.elasticity.running.switchable import Switchable, switchable
from fedtailor.engines.automatic import check_workers, open_engine
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import FedtailorError, require
from fedtailor.fleet import Fleet, fleet_by_name
from fedtailor.fleet.names import build_fleet
from fedtailor.messages import Deployed, ServerState
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.models import build_model
from fedtailor.models.pretrained import load_pretrained
from fedtailor.objective import Loss, Metric, Objective
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import calibrate, personal_network
from fedtailor.server.loop import RoundSettings, Row, first_checkpoint, run_rounds
from fedtailor.server.notes import describe_setup
from fedtailor.server.stopping import Stopping
from fedtailor.storage.checkpoint import Checkpoint, Memories
from fedtailor.storage.fingerprint import Fingerprint, describe_environment, fingerprint
from fedtailor.storage.journal import CheckpointSettings, Journal, Unsaved
from fedtailor.storage.run_folder import CONFIG, ENVIRONMENT, SETUP, RunFolder
from fedtailor.storage.sparse_file import save_sparse

OF_ANY_MODEL = ("name", "weights", "keep")  # keys of [model] that are not options of its builder
OnRow = Callable[[Row], None]
OnNotice = Callable[[str], None]
S = TypeVar("S")


@dataclass(frozen=True)
class Run:
    """A finished run: the global model, and a sub-model for every budget."""

    method: Method
    model: ElasticModel
    data: FederatedData
    fleet: Fleet
    state: ServerState
    history: tuple[Row, ...]
    seeds: Seeds
    best_round: int | None = None  # among those that were evaluated
    memories: Memories = dataclasses.field(default_factory=dict)  # what clients keep for themselves

    @property
    def tiers(self) -> dict[str, dict[str, float]]:
        """Loss and metrics of every tier at the end."""
        evaluated = [row for row in self.history if "tiers" in row and row["round"] <= self.state.round]
        return dict(evaluated[-1]["tiers"])

    def deploy(self, budget: Budget) -> Deployed:
        """The pieces for a device of this budget, their norms calibrated where the method needs it."""
        engine = InProcess(self.method, self.model, self.data)
        clients = self.fleet.capacity(self.data.sizes, self.state.round, self.seeds)
        state = calibrate(self.method, self.state, [budget], clients, self.model, engine, self.seeds)
        return self.method.deploy(state, budget, self.model)

    def submodel(self, budget: Budget | float | str | None = None, *, client: int | None = None) -> nn.Module:
        """A plain small module for a device: ``run.submodel(0.25)`` or ``run.submodel(Budget(macs=1_000_000))``.

        ``run.submodel(client=7)`` is that client's own network, where clients have such (FedPA, APFL). Where the
        method deploys several networks (Split-Mix), they are one module that averages their outputs.
        """
        if (budget is None) == (client is None):
            raise FedtailorError("submodel: expected a budget, or the number of a client, and not both")
        if client is not None:
            return self.model.build(self.personal(client)).eval()
        assert budget is not None
        wanted = budget if isinstance(budget, Budget) else Budget(width=budget)
        members = [self.model.build(patch) for patch in self.deploy(wanted).patches]
        return (members[0] if len(members) == 1 else Ensemble(members)).eval()

    def personal(self, client: int) -> Patch:
        """What a client runs: its own part of the model on its own norm statistics."""
        if not self.method.policy.kept_by_clients:
            raise FedtailorError(
                f"client = {client}: with {self.method.name}, devices of one budget are given the same network; "
                "expected a budget"
            )
        clients = self.fleet.capacity(self.data.sizes, self.state.round, self.seeds)
        require(0 <= client < len(clients), "client", client, f"0 to {len(clients) - 1}")
        at, engine = Checkpoint(self.state, self.memories), InProcess(self.method, self.model, self.data)
        return personal_network(self.method, at, clients[client], self.model, engine, self.seeds)

    def save_sparse(self, path: Path | str, budget: Budget) -> None:
        """Write the network for a budget as a small file that holds its surviving weights alone."""
        patches = self.deploy(budget).patches
        if len(patches) > 1:
            raise FedtailorError(f"{self.method.name} deploys ensembles of networks: save each one by itself")
        save_sparse(path, patches[0], self.model.groups.ties)

    def switchable(self) -> Switchable:
        """One module for inference that can run at the width of every tier: ``network.switch(0.4)``."""
        deployed = [self.deploy(tier.budget) for tier in self.fleet.tiers]
        if any(len(each.patches) > 1 for each in deployed):
            raise FedtailorError(
                f"{self.method.name} deploys ensembles of networks, not nested widths of one"
            )
        return switchable(self.model, [each.patches[0] for each in deployed])

    def save(self, folder: RunFolder) -> None:
        """Write the final weights into a run folder, after what the method has to show about them."""
        if tables := self.method.diagnostics(self.state, self.model):
            folder.save_diagnostics(tables)
        folder.save_weights(self.state.weights, self.model.groups.ties)


def train(
    module: nn.Module,
    data: FederatedData | str,
    fleet: Fleet | str = "uniform-5",
    method: Method | str = "heterofl",
    *,
    rounds: int = 20,
    clients_per_round: int = 10,
    evaluate_every: int = 5,
    training: LocalTraining | Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    device: str = "auto",
    seed: int = 0,
    threads: int = 1,
    on_row: OnRow | None = None,
    stopping: Stopping | Mapping[str, Any] | None = None,
    checkpoint: CheckpointSettings | Mapping[str, Any] | None = None,
    engine: EngineSettings | Mapping[str, Any] | None = None,
    folder: Path | str | None = None,
    resume: bool = False,
) -> Run:
    """Train ``module`` over a fleet of unequal devices; the module itself is left as it is.

    ``data`` is federated data or the name of a data set, ``fleet`` and ``method`` are objects or names. A pretrained
    module is a valid start. ``loss(output, batch)`` and ``metrics`` replace cross-entropy and accuracy.
    ``engine`` says how many processes work (``{"workers": 4}``) and what becomes of clients that fail.
    With a ``folder`` every round is saved there; the same call with ``resume=True`` goes on after the last one.
    """
    prepared = prepare(
        module, data, fleet, method,
        RoundSettings(
            rounds, clients_per_round, evaluate_every,
            _settings(Stopping, stopping, "stopping"), _settings(EngineSettings, engine, "engine"),
        ),
        training=training, loss=loss, metrics=metrics, device=device, seed=seed,
    )  # fmt: skip
    if folder is None:
        return prepared.start(threads, on_row)
    path, saving = Path(folder), _settings(CheckpointSettings, checkpoint, "checkpoint")
    texts = prepared.texts(threads)
    with Journal.open(path) if resume and path.exists() else Journal.create(path, texts) as journal:
        journal.begin(prepared.fingerprint(threads), saving, prepared.first_checkpoint(), prepared.device)
        return prepared.start(threads, on_row, journal)


def _settings(kind: type[S], given: S | Mapping[str, Any] | None, name: str) -> S:
    return validated(kind, given or {}, name) if given is None or isinstance(given, Mapping) else given


@dataclass(frozen=True)
class Prepared:
    """A run that passed every check and has not started."""

    method: Method
    model: ElasticModel
    data: FederatedData
    fleet: Fleet
    settings: RoundSettings
    seeds: Seeds

    def start(self, threads: int = 1, on_row: OnRow | None = None, journal: Journal | None = None) -> Run:
        """Run the rounds that are left; what ``on_row`` is shown is in the journal already."""
        kept = journal or Unsaved(self.first_checkpoint(), self.settings.stopping.restore_best)
        history = list(kept.history)

        def note(row: Row, at: Checkpoint) -> None:
            kept.record(row, at)
            row = {key: value for key, value in row.items() if key != "notes"}
            history.append(row)
            if on_row is not None:
                on_row(row)
            kept.stop_if_asked(at)

        with (
            torch_threads(threads),
            open_engine(self.method, self.model, self.data, self.settings.engine) as engine,
            kept.until_asked_to_stop(),
        ):
            at = run_rounds(
                self.method, self.model, self.data, self.fleet, engine, self.settings, self.seeds, note, kept.at
            )  # fmt: skip
        best, state = at.best.round if at.best else None, at.state
        if best is not None and self.settings.stopping.restore_best:
            state = kept.state_of(best)
        run = Run(
            self.method, self.model, self.data, self.fleet, state, tuple(history), self.seeds, best, at.memories
        )  # fmt: skip
        if journal is not None:
            journal.finish(at, run.save)
        return run

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(iter(self.model.module.parameters())).device

    def texts(self, threads: int) -> dict[str, str]:
        """What is written beside the settings, for people and reports."""
        setup = describe_setup(
            self.method, self.model, self.data, self.fleet, self.seeds, self.method.init(self.model)
        )
        return {
            ENVIRONMENT: json.dumps(describe_environment(threads, str(self.device)), indent=2) + "\n",
            SETUP: json.dumps(setup) + "\n",
        }

    def first_checkpoint(self) -> Checkpoint:
        """Where the run starts."""
        return first_checkpoint(self.method, self.model)

    def fingerprint(self, threads: int, config: RunConfig | None = None) -> Fingerprint:
        """All that must be the same when the run goes on; a run without a config is told by its objects."""
        if config is not None:
            table = tomllib.loads(to_toml(config))
            settings = {key: value for key, value in table.items() if key not in ("name", "checkpoint")}
        else:
            settings = {
                "rounds": dataclasses.asdict(self.settings),
                "seed": self.seeds.root,
                "method": {"name": type(self.method).__qualname__, **dataclasses.asdict(self.method)},
                "fleet": repr(self.fleet),
            }
        mark = fingerprint(settings, self.method, self.model, self.data, threads)
        # How many processes work changes no bit: a run may go on with more or fewer.
        return {name: value for name, value in mark.items() if not name.endswith("engine.workers")}


def prepare(
    module: nn.Module,
    data: FederatedData | str,
    fleet: Fleet | str,
    method: Method | str,
    settings: RoundSettings,
    *,
    training: LocalTraining | Mapping[str, Any] | None = None,
    loss: Loss | None = None,
    metrics: Mapping[str, Metric] | None = None,
    device: str = "auto",
    seed: int = 0,
    keep: Sequence[str] = (),
) -> Prepared:
    """Resolve names, trace the module and refuse what cannot run, before anything is trained or written."""
    seeds = Seeds(seed)
    if isinstance(data, str):
        data = federate(load_dataset(data), DataSettings(dataset=data), seeds)
    if isinstance(fleet, str):
        fleet = fleet_by_name(fleet)
    chosen = get_method(method)() if isinstance(method, str) else method
    if training is not None:
        fields = dataclasses.asdict(training) if isinstance(training, LocalTraining) else dict(training)
        fields = {**dataclasses.asdict(chosen.local), **fields} if isinstance(training, Mapping) else fields
        chosen = dataclasses.replace(chosen, local=validated(LocalTraining, fields, "training"))
    chosen = dataclasses.replace(chosen, local=dataclasses.replace(chosen.local, rounds=settings.rounds))
    objective = Objective(loss or Objective().loss, metrics if metrics is not None else Objective().metrics)
    place = pick_device(device)
    data = dataclasses.replace(data, train=data.train.to(place), test=data.test.to(place))
    model = elastic(module.to(place), data.example(), objective=objective, keep=keep)
    check(chosen, model, data, fleet, settings)
    return Prepared(chosen, model, data, fleet, settings, seeds)


def check(
    method: Method, model: ElasticModel, data: FederatedData, fleet: Fleet, settings: RoundSettings
) -> None:
    """What would fail in the middle of a run fails here, in one sentence."""
    if settings.clients_per_round > data.num_clients:
        raise FedtailorError(
            f"clients_per_round = {settings.clients_per_round}: "
            f"expected at most {data.num_clients}, the number of clients"
        )
    fleet.counts(data.num_clients)
    settings.stopping.check_tier([tier.name for tier in fleet.tiers])
    if model.statistics and method.local.batch_size == 1:
        raise FedtailorError("training.batch_size = 1: batch norm needs at least 2 examples in a batch")
    if model.statistics and data.sizes.min() < 2:
        client = int(data.sizes.argmin())
        raise FedtailorError(
            f"client {client} has one example: batch norm needs at least 2; raise data.min_examples"
        )
    outputs = [model.groups.counts[group] for group in model.groups.outputs]
    if data.num_classes and outputs and max(outputs) < data.num_classes:
        raise FedtailorError(
            f"the model has {max(outputs)} outputs, but the labels of {data.name} go up to {data.num_classes - 1}"
        )
    start = method.init(model)
    for tier in fleet.tiers:
        method.cut_for(start, tier.budget, model)
    check_workers(method, model, data, settings.engine)


def pick_device(name: str) -> torch.device:
    """``auto`` takes CUDA, then Apple's MPS, then the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    available = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not available.get(name.partition(":")[0], False):
        usable = ", ".join(device for device, there in available.items() if there)
        raise FedtailorError(f"device = {name!r}: not available here; usable: auto, {usable}")
    return torch.device(name)


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Use ``count`` PyTorch threads inside the block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def prepare_config(config: RunConfig) -> Prepared:
    """Everything that a configuration asks for, checked and ready."""
    seeds = Seeds(config.seed)
    data = federate(load_dataset(config.data.dataset, **config.data.options), config.data, seeds)
    options = {key: value for key, value in config.model.items() if key not in OF_ANY_MODEL}
    inputs = data.example()
    shape = tuple((next(iter(inputs.values())) if isinstance(inputs, dict) else inputs[0]).shape[1:])
    with seeds.scope("model"):
        module = build_model(config.model["name"], input_shape=shape, num_classes=data.num_classes, **options)
    if "weights" in config.model:
        load_pretrained(module, Path(config.model["weights"]))
    return prepare(
        module, data, build_fleet(config.fleet), config.build_method(), config.round_settings,
        device=config.device, seed=config.seed, keep=config.model.get("keep", ()),
    )  # fmt: skip


def run_config(config: RunConfig, path: Path, on_row: OnRow | None = None) -> Run:
    """Run a configuration and write its folder; nothing is written unless the run can start."""
    prepared = prepare_config(config)
    texts = {CONFIG: to_toml(config), **prepared.texts(config.threads)}
    with Journal.create(path, texts) as journal:
        mark = prepared.fingerprint(config.threads, config)
        journal.begin(mark, config.checkpoint, prepared.first_checkpoint(), prepared.device)
        return prepared.start(config.threads, on_row, journal)


def resume(
    path: Path | str,
    *,
    allow_drift: bool = False,
    on_row: OnRow | None = None,
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
        prepared = prepare_config(config)
        journal.begin(
            prepared.fingerprint(config.threads, config), config.checkpoint, prepared.first_checkpoint(),
            prepared.device, allow_drift=allow_drift, on_notice=on_notice,
        )  # fmt: skip
        return prepared.start(config.threads, on_row, journal)
