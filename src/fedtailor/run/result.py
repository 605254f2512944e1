"""The result of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from torch import nn

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.cost import Cost
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.ensemble import Ensemble
from fedtailor.elasticity.running.prepared import with_preparation as prepared
from fedtailor.elasticity.running.switchable import Switchable, switchable
from fedtailor.engines.in_process import InProcess
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet
from fedtailor.merging.optimising import to_deploy
from fedtailor.messages import Deployed, ServerState, version_of
from fedtailor.method import Method
from fedtailor.record import RoundRecord, headline
from fedtailor.report.export import check_place, format_of, write_report
from fedtailor.run.arguments import MethodLike, ModuleLike
from fedtailor.run.describing import Origin, fingerprint_of, texts_of
from fedtailor.run.html import run_html
from fedtailor.run.loading import AtHand, load
from fedtailor.server.confusion import confusion
from fedtailor.server.evaluation import calibrate, personal_network
from fedtailor.server.inquiry import Inquiry
from fedtailor.server.setup import Setup
from fedtailor.storage.checkpoint import Checkpoint, Memories
from fedtailor.storage.files import CLIENTS
from fedtailor.storage.journal import CheckpointSettings, Journal
from fedtailor.storage.run_folder import RunFolder
from fedtailor.storage.sparse_file import save_sparse


@dataclass(frozen=True, repr=False)
class Run:
    """A finished run: the global model, and a sub-model for every budget."""

    setup: Setup
    state: ServerState
    history: tuple[RoundRecord, ...]
    best_round: int | None = None  # among those that were evaluated
    memories: Memories = field(default_factory=dict)  # what clients keep for themselves
    origin: Origin = field(default_factory=Origin)
    last: Checkpoint | None = None  # of the last round, which need not be the one that the run ends with
    data_at_hand: bool = True  # or made-up examples stand in for it (``Run.load`` without data)
    folder: Path | None = None  # where it was saved or loaded from

    @classmethod
    def load(
        cls,
        folder: Path | str,
        module: ModuleLike | None = None,
        data: Any = None,
        *,
        method: MethodLike | None = None,
        device: str = "auto",
    ) -> Run:
        """The run in a folder, finished or not; nothing is trained.

        A run that Python started is built from what the folder says of the call. What words cannot say (a module with
        arguments or from a notebook, data in memory) is passed as it was passed to ``train``. Without its data a run
        can be looked at and deployed, unless the method asks clients for norm statistics.
        """
        found = load(Path(folder), AtHand(module, data, method, device))
        history, best = RunFolder(Path(folder)).records(), found.last.best
        return cls(
            found.setup, to_deploy(found.end.state), tuple(history), best.round if best else None, found.end.memories,
            found.origin, found.last, found.data_at_hand, Path(folder),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<Run: {self._title}{self._ending}>"

    def _repr_html_(self) -> str:
        """For a notebook: a table of the tiers, and how they got there."""
        return run_html(self._title, self._costs(), self.history)

    @property
    def _title(self) -> str:
        rounds = "1 round" if self.state.round == 1 else f"{self.state.round} rounds"
        return f"{self.method.name} on {self.setup.data.name}, {rounds}"

    @property
    def _ending(self) -> str:
        ends = {tier: metrics[headline(self.tiers)] for tier, metrics in self.tiers.items()}
        return "".join(f"; {tier}: {headline(self.tiers)} {value:.3f}" for tier, value in ends.items())

    def _costs(self) -> dict[str, Cost]:
        """What each tier's network costs."""
        tiers = [tier for tier in self.fleet.tiers if tier.name in self.tiers]
        return {
            tier.name: self.model.cost(self.method.cut_for(self.state, tier.budget, self.model))
            for tier in tiers
        }

    @property
    def method(self) -> Method:
        """How it was trained."""
        return self.setup.method

    @property
    def model(self) -> ElasticModel:
        """What was trained, cut and costed."""
        return self.setup.model

    @property
    def data(self) -> FederatedData:
        """What it was trained on."""
        self._require_data("this is")
        return self.setup.data

    @property
    def fleet(self) -> Fleet:
        """The devices that it was trained by and for."""
        return self.setup.fleet

    @property
    def tiers(self) -> dict[str, dict[str, float]]:
        """Loss and metrics of every tier at the end."""
        seen = [record.tiers for record in self.history if record.round <= self.state.round and record.tiers]
        return {tier: dict(metrics) for tier, metrics in seen[-1].items()} if seen else {}

    def deploy(self, budget: Budget) -> Deployed:
        """The pieces for a device of this budget, their norms calibrated where the method needs it."""
        state = self.state
        if self.method.policy.measured_after and self.model.statistics:
            self._require_data(f"{self.method.name} measures norm statistics on")
            state = calibrate(self._inquiry(), state, [budget], self.setup.clients(state.round))
        return self.method.deploy(state, budget, self.model)

    def submodel(
        self,
        budget: Budget | float | str | None = None,
        *,
        client: int | None = None,
        with_preparation: bool = True,
    ) -> nn.Module:
        """A plain small module for a device: ``run.submodel(0.25)`` or ``run.submodel(Budget(macs=1_000_000))``.

        It answers raw inputs: where fedtailor normalised the data, that is its first layer, and the network the second
        (``small.network``). ``with_preparation=False`` is the network alone, for inputs that are prepared already.

        ``run.submodel(client=7)`` is that client's own network, where clients have such (FedPA, APFL). Where the
        method deploys several networks (Split-Mix), they are one module that averages their outputs.
        """
        if (budget is None) == (client is None):
            raise FedtailorError("submodel: expected a budget, or the number of a client, and not both")
        if client is not None:
            return self.build([self.personal(client)], with_preparation=with_preparation)
        assert budget is not None
        wanted = budget if isinstance(budget, Budget) else Budget(width=budget)
        return self.build(self.deploy(wanted).patches, with_preparation=with_preparation)

    def build(self, patches: Sequence[Patch], *, with_preparation: bool = True) -> nn.Module:
        """The plain module of what ``deploy`` or ``personal`` gave; several patches answer with their mean."""
        members = [self.model.build(patch) for patch in patches]
        network = members[0] if len(members) == 1 else Ensemble(members)
        return (self._prepared(network) if with_preparation else network).eval()

    def _prepared(self, network: nn.Module) -> nn.Module:
        """The network behind what fedtailor does to raw inputs; the network itself where that is nothing."""
        preparation = self.setup.data.preparation
        if preparation is None:
            return network
        layer = preparation.layer().to(self.setup.device)
        return prepared(network, layer, preparation.key, self.model.example)

    def personal(self, client: int) -> Patch:
        """What a client runs: its own part of the model on its own norm statistics."""
        if not self.method.policy.kept_by_clients:
            raise FedtailorError(
                f"client = {client}: with {self.method.name}, devices of one budget are given the same network; "
                "expected a budget"
            )
        if self.setup.data.remote or (self.folder is not None and (self.folder / CLIENTS).is_file()):
            raise FedtailorError(
                f"client = {client}: of a run on Flower, a client's examples and what it keeps for itself lie on its "
                "own device, and nobody else can build its network; expected a budget"
            )
        self._require_data(f"{self.method.name} needs, for networks of clients,")
        found = self.setup.clients(self.state.round).find(client)
        return personal_network(self._inquiry(), Checkpoint(self.state, self.memories), found)

    def _require_data(self, need: str) -> None:
        if not self.data_at_hand:
            raise FedtailorError(
                f"{need} the clients' data, which was not loaded: pass it, Run.load(folder, data=...)"
            )

    def _inquiry(self) -> Inquiry:
        return Inquiry(self.setup, InProcess(self.method, self.model, self.setup.data))

    def save_sparse(self, path: Path | str, budget: Budget) -> None:
        """Write the network for a budget as a small file: its surviving weights, and how raw inputs are prepared."""
        patches = self.deploy(budget).patches
        if len(patches) > 1:
            raise FedtailorError(f"{self.method.name} deploys ensembles of networks: save each one by itself")
        save_sparse(path, patches[0], self.model.groups.ties, self.setup.data.inputs())

    def switchable(self, *, with_preparation: bool = True) -> Switchable:
        """One module for inference that can run at the width of every tier: ``network.switch(0.4)``.

        It answers raw inputs, as ``submodel`` does.
        """
        deployed = [self.deploy(tier.budget) for tier in self.fleet.tiers]
        if any(len(each.patches) > 1 for each in deployed):
            raise FedtailorError(
                f"{self.method.name} deploys ensembles of networks, not nested widths of one"
            )
        network = switchable(self.model, [each.patches[0] for each in deployed])
        if with_preparation and (preparation := self.setup.data.preparation) is not None:
            network.prepare(preparation.layer().to(self.setup.device), preparation.key)
        return network

    def save(self, path: Path | str) -> None:
        """Write the run as a folder of its own, which ``Run.load`` and reports read; it must not exist."""
        self._require_data("a run folder describes")
        end = self.last or Checkpoint(self.state, self.memories)
        kept = {at.state.round: at for at in (Checkpoint(self.state, best=end.best), end)}
        with Journal.create(Path(path), texts_of(self.setup, self.origin)) as journal:
            mark = fingerprint_of(self.setup, self.origin)
            journal.begin(mark, CheckpointSettings(), self.setup.start, self.setup.device)
            for record in self.history:
                journal.add(record)
                if record.round in kept:
                    journal.save(kept[record.round])
            journal.finish(end, self.write)

    def report(
        self, path: Path | str = "report.html", *, target: float | None = None, overwrite: bool = False
    ) -> Path:
        """Write the report: one page that opens offline; ``report.md`` writes text. Needs the extra ``report``."""
        place, form = Path(path), format_of(None, Path(path))
        check_place(place, form, overwrite)
        if self.folder is not None:
            write_report([self.folder], place, target, form)
            return place
        with TemporaryDirectory() as made:
            folder = Path(made) / self.method.name
            self.save(folder)
            write_report([folder], place, target, form, saved=False)
        return place

    def write(self, folder: RunFolder) -> None:
        """Write the final weights into a run folder, after what the method has to show about them."""
        at = Checkpoint(self.state, self.memories)
        memories = {client: at.memory_of(client)[1] for client in sorted(self.memories)}
        kept = {
            client: memory for client, memory in memories.items() if memory and version_of(memory) is None
        }
        if tables := self.method.diagnostics(self.state, self.model, kept):
            folder.save_diagnostics(tables)
        if found := confusion(self.setup, self.state):
            folder.save_confusion(found)
        folder.save_weights(self.state.weights, self.model.groups.ties, self.setup.data.inputs())
