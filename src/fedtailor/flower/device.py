"""A client's side of a run on Flower: one message, one answer.

Flower starts a process for every message. It reads the run's configuration, which came with the app, and what the node
says of itself (``flower-supernode --node-config``); builds the model; and does what it is asked on the data that lies
here. What a client keeps from round to round lies beside it on this disk.

A node is a device of its own, or holds parts of a split for trying things out:

    name="phone-17" dataset="photos/" tier="phone"          a device; or macs="5M" memory="200MB" instead of a tier
    device="phone.toml"                                     the same in a file, which is read in every round
    partition-id=0 num-partitions=2                         clients 0, 2, 4 ... of the split that the config describes
"""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, get_args

from torch import Tensor

from fedtailor.client.evaluate import evaluate_deployed
from fedtailor.config import RunConfig
from fedtailor.data.batches import Examples
from fedtailor.data.federated import FederatedData, Parts
from fedtailor.data.splits import hold_back_for_all
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.flower.frames import answer_head, masked_head, patch_from, state_key, task_from
from fedtailor.engines.flower.memory import Cupboard, get_maps, put_maps
from fedtailor.engines.flower.post import Head, Parcel
from fedtailor.engines.protocol import Answer, answer_to
from fedtailor.errors import FedtailorError, require, unknown
from fedtailor.fleet.presets import build_fleet
from fedtailor.fleet.roster import LIMITS, Profile
from fedtailor.flower.app_folder import config_of
from fedtailor.flower.device_file import node_table
from fedtailor.flower.masking import Masking, in_clear
from fedtailor.messages import Measure, Refused, Task, Update
from fedtailor.method import Method
from fedtailor.run.auto.choosing import taken
from fedtailor.run.choosing import share_for
from fedtailor.run.setup import pick_device, read_data, torch_threads, trace_model
from fedtailor.seeds import Seeds
from fedtailor.server.checking import check_update

STATE = Path("~/.fedtailor/clients")  # what clients keep, if the node does not say otherwise

Table = Mapping[str, Any]


def respond(parcel: Parcel, run: Table, node: Table) -> Parcel:
    """The answer to a message; what goes wrong in a way that people can mend is an answer too."""
    try:
        device = Device(config_of(run), node_table(node), parcel.head)
        with torch_threads(device.config.threads):
            ways = {
                "join": device.introduce, "tasks": device.work, "measure": device.score,
                "secure": device.masking.answer,
            }  # fmt: skip
            ask = str(parcel.head.get("ask"))
            if ask not in ways:
                raise unknown("question of a server", ask, ways)
            return ways[ask](parcel)
    except FedtailorError as error:
        return Parcel({"error": str(error)})


@dataclass(frozen=True)
class Device:
    """This machine in one run."""

    config: RunConfig
    node: Table
    head: Head

    @property
    def parts(self) -> tuple[int, int] | None:
        """Which parts of the config's split lie here, of how many nodes; nothing on a device of its own."""
        if "partition-id" not in self.node:
            return None
        number, count = self.node["partition-id"], self.node.get("num-partitions")
        if not (isinstance(number, int) and isinstance(count, int) and 0 <= number < count):
            raise FedtailorError(
                f"partition-id = {number!r}: expected a number below num-partitions ({count!r})"
            )
        return number, count

    @cached_property
    def data(self) -> FederatedData:
        """The examples on this machine: of one client, or all of the split that the config describes."""
        config = self.config
        if self.parts is None:
            dataset = str(self.node.get("dataset", config.data.dataset))
            own = dataclasses.replace(
                config.data, dataset=dataset, clients=1, partition="iid", validation=0.0
            )
            config = dataclasses.replace(config, data=own, clients_per_round=1)
        data = read_data(config, config.objective.build().task).to(pick_device(config.device))
        data = data if self.parts is not None else self._with_kept(data)
        classes = self.head.get("classes")
        return data if not isinstance(classes, int) else dataclasses.replace(data, num_classes=classes)

    def _with_kept(self, data: FederatedData) -> FederatedData:
        """A device's own data, of which it keeps a share back to choose by, if it has enough for that."""
        config = self.config
        share = share_for(config.data.validation, config.stopping, config.built_method)
        seeds, least = Seeds(config.seed), config.data.min_examples
        _, held = hold_back_for_all(data.partition, share, least, seeds)
        return data.with_validation(share, seeds, least) if len(held.order) else data

    @cached_property
    def model(self) -> ElasticModel:
        """The network, as the server has it."""
        return trace_model(self.config, self.data, self.config.objective.build())

    @cached_property
    def method(self) -> Method:
        """The method, knowing the fleet as the server knows it."""
        budgets = [Budget(**limits) for limits in self.head["tiers"]]
        method, _ = taken(self.config.built_method, self.model, lambda: build_fleet(self.config.fleet))
        return method.for_fleet(budgets, self.model)

    @cached_property
    def clients(self) -> dict[str, int]:
        """Who lives here: the name of each client, and which part of the data is its own."""
        if self.parts is None:
            return {str(self.node.get("name", platform.node())): 0}
        number, count = self.parts
        return {str(part): part for part in range(self.data.num_clients) if part % count == number}

    def introduce(self, _parcel: Parcel) -> Parcel:
        """Who answers here, with how many examples, on what kind of device."""
        self.masking.forget(self._folder().glob("client-*"))
        return Parcel({**self._said(), "model": state_key(self.model)})

    def _said(self) -> Head:
        return {"clients": self._profiles(), "parts": None if self.parts is None else self.data.num_clients}

    def _profiles(self) -> list[dict[str, Any]]:
        limits = {name: self.node[name] for name in LIMITS if name in self.node}
        budget, tier = Budget(**limits) if limits else None, self.node.get("tier")
        sizes, tests, kept = self.data.sizes, self.data.tests, self.data.validation

        def count(parts: Parts | None, part: int) -> int:
            return 0 if parts is None else int(parts.partition.sizes[part])

        return [
            Profile(name, int(sizes[part]), count(tests, part), tier, budget, count(kept, part)).value()
            for name, part in self.clients.items()
        ]

    def work(self, parcel: Parcel) -> Parcel:
        """Do the tasks one after the other; if a map of masks is missing here, ask for it instead."""
        heads = parcel.head.get("tasks") or []
        maps = self._maps(parcel, heads)
        if isinstance(maps, Parcel):
            return maps
        answers: list[Head] = []
        pieces: dict[str, bytes] = {}
        for head in heads:
            answer, frames = self._one(head, parcel.pieces, maps.get(head["levels"]))
            answers.append(answer)
            pieces |= frames
        return Parcel({"answers": answers, **self._said()}, pieces)

    def score(self, parcel: Parcel) -> Parcel:
        """How good networks are on the examples that clients here keep back to choose by."""
        if self.config.secure.active:
            raise in_clear("scores")
        networks: dict[str, list[Head]] = parcel.head["networks"]
        maps = self._maps(parcel, [head for heads in networks.values() for head in heads])
        if isinstance(maps, Parcel):
            return maps
        patches = {
            int(number): [patch_from(head, parcel.pieces, maps.get(head["levels"])) for head in heads]
            for number, heads in networks.items()
        }
        kept, scores = self.data.validation, {}
        for client, numbers in parcel.head["scores"].items():
            if kept is not None and kept.partition.sizes[self._part(int(client))]:
                own = [patches[number] for number in numbers]
                scores[client] = evaluate_deployed(self.model, own, kept.part(self._part(int(client))))
        return Parcel({"scores": scores, **self._said()})

    def _maps(self, parcel: Parcel, heads: Sequence[Head]) -> dict[str, Levels] | Parcel:
        """The maps of masks that patches need; if one is missing here, the request for it."""
        folder, names = self._folder(), {head["levels"] for head in heads if head["levels"]}
        for name in names & parcel.pieces.keys():
            put_maps(folder, name, parcel.pieces[name])
        found = {name: get_maps(folder, name) for name in names}
        missing = sorted(name for name, levels in found.items() if levels is None)
        if missing:
            return Parcel({"missing": missing})
        return {name: levels for name, levels in found.items() if levels is not None}

    def _one(
        self, head: Head, pieces: Mapping[str, bytes], levels: Levels | None
    ) -> tuple[Head, dict[str, bytes]]:
        cupboard = Cupboard(self._own_folder(int(head["client"][0])))
        asked = tuple(head["memory"]) or None
        found: dict[str, Tensor] | None = {} if asked is None else cupboard.get(asked)
        task = task_from(head, pieces, levels, found or {})
        if task.action == "validate" and self.data.validation is None:
            return answer_head(_unable(task, "keeps no examples back to choose by"), kept=False, lost=False)

        def work() -> tuple[Answer, bool]:
            answer = answer_to(task, self.method, self._examples(head), self.model)
            if isinstance(answer, Refused) or not answer.memory or task.action in get_args(Measure):
                return answer, False
            stage = "calibrate" if task.action == "calibrate" else "train"
            cupboard.put((task.round, stage), answer.memory, int(self.head["keep"]), asked)
            return answer, True

        if self.config.secure.active:
            return self._masked(head, task, work)
        answer, kept = work()
        return answer_head(answer, kept, lost=found is None)

    def _masked(
        self, head: Head, task: Task, work: Callable[[], tuple[Answer, bool]]
    ) -> tuple[Head, dict[str, bytes]]:
        """The same under masks: what the server would refuse is refused here, where it can be seen."""
        try:
            held = self.masking.begin_update(head)
            answer, kept = work()
            if isinstance(answer, Update):
                answer = check_update(task, answer, self.model) or answer
            if isinstance(answer, Update):
                return masked_head(answer, held.rows(task, answer, self.method, self.model), kept)
        except FedtailorError as error:
            answer = _unable(task, str(error))
        return answer_head(answer, kept=False, lost=False)

    def _examples(self, head: Head) -> Examples:
        return self.data.examples_for(self._part(int(head["client"][0])), str(head["action"]))

    def _part(self, client: int) -> int:
        """Which part of the data here belongs to a client."""
        return 0 if self.parts is None else client

    @property
    def masking(self) -> Masking:
        """The part of clients here in rounds under masks."""
        return Masking(self.config.secure, self.config.engine.deadline, self._own_folder)

    def _own_folder(self, client: int) -> Path:
        return self._folder() / f"client-{client:08d}"

    def _folder(self) -> Path:
        run = str(self.head.get("run", ""))
        require(run.isalnum(), "run", run, "letters and digits")
        return Path(str(self.node.get("state", STATE))).expanduser() / run


def _unable(task: Task, why: str) -> Refused:
    return Refused(task.client.id, task.round, "no-answer", why)
