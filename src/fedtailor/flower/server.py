"""The server's side of a run on Flower: the same setup, the same round loop, the same folder; clients are nodes.

The server holds test examples alone. How many examples a client has and what its device can do come from the client.
``clients.json`` in the run folder says which number belongs to which name, and under which name clients keep what they
keep: a run that is resumed finds both again.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from fedtailor.config import RunConfig, load_config
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, check_honoured, fit, meets
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import as_width
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.flower.engine import FlowerEngine
from fedtailor.engines.flower.masked import MaskedEngine
from fedtailor.engines.flower.post import Post
from fedtailor.errors import CorruptError, FedtailorError, require
from fedtailor.fleet import Fleet
from fedtailor.fleet.presets import build_fleet
from fedtailor.fleet.roster import Profile, Roster, TierFor, placed
from fedtailor.flower.remote import RemoteData
from fedtailor.method import Method
from fedtailor.record import RoundRecord
from fedtailor.run.auto.choosing import taken, written
from fedtailor.run.choosing import share_for
from fedtailor.run.describing import Origin, fingerprint_of, texts_of
from fedtailor.run.interface import OnRound, start
from fedtailor.run.result import Run
from fedtailor.run.setup import pick_device, prepare, read_data, torch_threads, trace_model
from fedtailor.seeds import Seeds
from fedtailor.server.evaluation import asks_for_statistics
from fedtailor.server.setup import Setup
from fedtailor.storage.files import CLIENTS, DEVICES, replace_file
from fedtailor.storage.journal import Journal
from fedtailor.storage.rows import table_in
from fedtailor.storage.run_folder import CONFIG, RunFolder

LOOKS = 2.0  # seconds between two looks of somebody who watches


def serve(
    grid: Any, config: RunConfig, folder: Path, on_round: OnRound | None = None, *, allow_drift: bool = False
) -> Run:
    """Run a configuration on the nodes of a grid; a folder that is there already is gone on with."""
    again = folder.exists()
    if again:
        config = load_config(folder / CONFIG)
    known: dict[str, Any] = (
        _known(folder) if again else {"run": secrets.token_hex(8), "clients": {}, "parts": None}
    )
    roster = Roster(known["clients"], known["parts"])
    with torch_threads(config.threads):
        setup, engine = _prepared(grid, config, roster, known["run"])
    # Not to be settled by who is there later.
    config = written(replace(config, evaluate_every=setup.settings.evaluate_every), setup)
    origin = Origin(config.threads, config)
    with Journal.open(folder) if again else Journal.create(folder, texts_of(setup, origin)) as journal:
        marks = fingerprint_of(setup, origin)
        journal.begin(marks, config.checkpoint, setup.start, setup.device, allow_drift=allow_drift)
        _remember(folder, known["run"], roster)

        show = Shown(folder / DEVICES, engine)

        def note(event: str, fields: Mapping[str, object]) -> None:
            journal.log(event, **fields)
            if event == "joined":
                _remember(folder, known["run"], roster)
            show()

        def follow(record: RoundRecord) -> None:
            show(now=True)
            if on_round is not None:
                on_round(record)

        # Those who came before there was a folder to say so in.
        for client, node in sorted(engine.homes.items()):
            profile = roster.profiles[client]
            note("joined", {"node": str(node), "client": profile.name, "examples": profile.examples})
        engine.note, engine.moved = note, show
        return start(
            setup, origin, follow, journal, engine=MaskedEngine(engine) if config.secure.active else engine
        )


class Shown:
    """Keeps the file that people watch up to date, but not more often than they look."""

    def __init__(self, file: Path, engine: FlowerEngine) -> None:
        self.file, self.engine, self.due = file, engine, 0.0
        engine.ledger.go_on(RunFolder(file.parent).devices())

    def __call__(self, now: bool = False) -> None:
        """Write it, if it is time."""
        if not now and time.monotonic() < self.due:
            return
        engine = self.engine
        value = engine.ledger.value(engine.roster, engine.homes, engine.refused)
        replace_file(self.file, [json.dumps(value, separators=(",", ":")).encode()])
        self.due = time.monotonic() + LOOKS


def _prepared(grid: Any, config: RunConfig, roster: Roster, run: str) -> tuple[Setup, FlowerEngine]:
    """A setup whose clients are those who have joined; it waits for them, and no longer than ``engine.wait``."""
    objective, rules = config.objective.build(), config.engine
    require(
        config.built_method.align != "auto", "method.align", "auto",
        "a number on Flower: this machine is none of the devices, and would measure itself",
    )  # fmt: skip
    share = share_for(config.data.validation, config.stopping, config.built_method)
    unsplit = replace(config.data, validation=0.0, clients=1, partition="iid", local_test=0.0)
    read = read_data(replace(config, data=unsplit), objective.task).to(pick_device(config.device))
    data = RemoteData.of(read, roster, validated=share > 0)
    model, fleet = trace_model(config, data, objective), build_fleet(config.fleet)
    common = {
        "run": run, "classes": data.num_classes, "keep": config.checkpoint.every + 2,
        "tiers": _limits(fleet),
    }  # fmt: skip
    settled = _settled(config.built_method, model, fleet)
    start_state = cache(lambda: settled.init(model))  # once, for all devices with limits of their own

    def able(client: int, patches: Sequence[Patch]) -> bool:
        """Nodes that hold parts of a split stand for any device; a device of its own runs what it can afford."""
        if roster.split is not None:
            return True
        _, budget = placed(roster.profiles[client], fleet)
        return all(_affords(model, budget, patch.cut) for patch in patches)

    def check(profile: Profile) -> None:
        """A device that says what cannot be, or that no piece fits, is not taken in: it would end the run for all."""
        if roster.split is None or profile.tier is not None or profile.budget is not None:
            placed(profile, fleet)
        if profile.budget is not None:
            if config.secure.active:
                raise own_limits(profile.name)
            check_honoured(profile.budget, settled.honours, settled.name)
            fit(model.costs, profile.budget, settled.grid, workload=settled.workload)
            settled.cut_for(start_state(), profile.budget, model)  # a method may know some widths alone

    engine = FlowerEngine(Post(grid, rules.deadline), roster, model, common, data.test, able, check)
    roster.look, roster.tier_for = engine.look, tier_finder(model, fleet, config.built_method)
    engine.wait_for(config.clients_per_round, rules.wait)
    settings, method = config.round_settings, config.built_method
    asks = method.policy.kept_by_clients or asks_for_statistics(method, model)
    if settings.evaluate_every == "auto" and not asks:
        settings = replace(settings, evaluate_every=1)  # on the server, while nobody pays for it in energy
    setup = prepare(method, model, data, fleet, settings, Seeds(config.seed))
    common["tiers"] = _limits(setup.fleet)  # devices settle the method by the same budgets
    return replace(setup, roster=roster, audited=config.audit.active), engine


def _limits(fleet: Fleet) -> list[dict[str, str]]:
    return [{name: str(limit) for name, limit in budget.limits.items()} for budget in fleet.budgets]


def _settled(method: Method, model: ElasticModel, fleet: Fleet) -> Method:
    """The method as the run will have it; what becomes of tiers that no piece fits is said later."""
    method, _ = taken(method, model, lambda: fleet)

    def fits(budget: Budget) -> bool:
        try:
            method.for_fleet([budget], model)
        except TooSmallError:
            return False
        return True

    return method.for_fleet([budget for budget in fleet.budgets if fits(budget)], model)


def own_limits(client: str) -> FedtailorError:
    """The error for a device whose piece does not follow from its tier, where masks cancel among those of a tier."""
    return FedtailorError(
        f"[secure]: client {client} has limits of its own, and who holds what must follow from tiers; expected a tier "
        "by its name"
    )


def tier_finder(model: ElasticModel, fleet: Fleet, method: Method) -> TierFor:
    """Which tier a device with limits of its own is counted with: the largest that it can keep up with.

    Tiers and devices are compared by the multiply-accumulates of what fits them; below all of them is the smallest.
    """

    def macs(budget: Budget) -> float:
        try:
            cut = fit(model.costs, replace(budget, density=None), method.grid, workload=method.workload)
        except TooSmallError:
            return 0.0
        return model.cost(cut).macs * float(1 if budget.density is None else as_width(budget.density))

    tiers = [macs(tier.budget) for tier in fleet.tiers]

    @cache
    def find(budget: Budget) -> int:
        most = max(macs(budget), min(tiers))
        return max((number for number, each in enumerate(tiers) if each <= most), key=tiers.__getitem__)

    return find


def _affords(model: ElasticModel, budget: Budget, cut: Cut) -> bool:
    """Whether a budget pays for running a cut."""
    wide = budget.width is None or cut.share(model.groups) <= as_width(budget.width)
    shallow = budget.depth is None or (cut.depth or 1) <= as_width(budget.depth)
    stored = model.cost(cut).params / model.cost(Cut.everything()).params
    dense = budget.density is None or stored <= as_width(budget.density)
    return wide and shallow and dense and meets(model.costs, cut, budget)


def _known(folder: Path) -> dict[str, Any]:
    file = folder / CLIENTS
    if not file.is_file():
        raise FedtailorError(
            f"{folder}: no {CLIENTS} there, so it is no run on Flower; `fedtailor resume` goes on with it"
        )
    known = table_in(file)
    run, numbers, parts = (known.get(key) for key in ("run", "clients", "parts"))
    named = isinstance(numbers, dict) and all(type(number) is int for number in numbers.values())
    if not (isinstance(run, str) and run.isalnum() and named and (parts is None or type(parts) is int)):
        raise CorruptError(
            f"{file} is damaged: expected the run's name for its clients, and whom numbers belong to"
        )
    return known


def _remember(folder: Path, run: str, roster: Roster) -> None:
    """Whom each number belongs to."""
    text = json.dumps(
        {"run": run, "clients": roster.numbers, "parts": roster.split}, indent=1, sort_keys=True
    )
    replace_file(folder / CLIENTS, [f"{text}\n".encode()])
