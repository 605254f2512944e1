"""What a run starts from, as texts: for people and reports, which no computation reads, and for going on later."""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedtailor.audit.settings import AuditSettings
from fedtailor.config import RunConfig, to_toml
from fedtailor.data import picture
from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import absolute_limits
from fedtailor.elasticity.cutting.selections import as_width, prefix
from fedtailor.server.setup import Setup
from fedtailor.storage.fingerprint import Fingerprint, describe_environment, fingerprint
from fedtailor.storage.rows import as_text
from fedtailor.storage.run_folder import CALL, CONFIG, ENVIRONMENT, SETTINGS, SETUP, ReportSettings

MOST_CLIENTS = 200  # whose data and tier are described one by one
CHANGES_NOTHING = (
    "name",
    "checkpoint",
    "report",
    "audit",
)  # of a result: these may differ when a run goes on


@dataclass(frozen=True)
class Origin:
    """How a run came to be: from a config, or by a call of ``train``, as far as words can say it."""

    threads: int = 1
    config: RunConfig | None = None
    call: Mapping[str, Any] | None = None
    report: ReportSettings = field(default_factory=ReportSettings)
    audit: AuditSettings = field(default_factory=AuditSettings)


def texts_of(setup: Setup, origin: Origin) -> dict[str, str]:
    """The files of a new run folder."""
    environment = describe_environment(origin.threads, str(setup.device))
    report = origin.report if origin.config is None else origin.config.report
    described = describe(setup, report.client_details)
    return {
        **({CONFIG: to_toml(origin.config)} if origin.config is not None else {}),
        **({CALL: as_text(origin.call, 2) + "\n"} if origin.call is not None else {}),
        ENVIRONMENT: as_text(environment, 2) + "\n",
        SETUP: as_text({**described, **({} if origin.config else {SETTINGS: settings_of(setup)})}) + "\n",
    }


def fingerprint_of(setup: Setup, origin: Origin) -> Fingerprint:
    """All that must be the same when the run goes on; a run without a config is told by its objects."""
    if origin.config is not None:
        table = tomllib.loads(to_toml(origin.config))
        settings = {key: value for key, value in table.items() if key not in CHANGES_NOTHING}
    else:
        settings = {
            "rounds": dataclasses.asdict(setup.settings),
            "seed": setup.seeds.root,
            "method": {"name": type(setup.method).__qualname__, **dataclasses.asdict(setup.method)},
            "fleet": repr(setup.fleet),
        }
    mark = fingerprint(settings, setup.method, setup.model, setup.data, origin.threads)
    # How many processes work changes no bit: a run may go on with more or fewer.
    return {name: value for name, value in mark.items() if not name.endswith("engine.workers")}


def describe(setup: Setup, client_details: bool = False) -> dict[str, Any]:
    """Tiers and their members, the data, of each client if so asked, the axes of every weight."""
    model, data, fleet = setup.model, setup.data, setup.fleet
    members = [] if fleet.dynamic else setup.clients(0)[:MOST_CLIENTS]
    return {
        "tiers": _tiers(setup),
        "members": {str(client.id): client.tier for client in members},
        **({"too_small": left_out(setup)} if fleet.whole else {}),
        "data": {**picture.overview(data), **_counted(data, client_details), **_held(setup)},
        **({"chosen": dataclasses.asdict(setup.chosen)} if setup.chosen else {}),
        **({"aligned": setup.aligned.multiple} if setup.aligned else {}),
        "norm_statistics": bool(model.statistics),
        "groups": dict(model.groups.counts),
        "layers": _layers(setup),
    }


def _held(setup: Setup) -> dict[str, bool]:
    """Whether clients bring their examples along, which no configuration has split."""
    return {} if setup.roster is None or setup.roster.split is not None else {"own_examples": True}


def _counted(data: FederatedData, client_details: bool) -> dict[str, Any]:
    """Who holds which classes, client by client; or how many examples of each class all hold together."""
    if client_details:
        return {"rows": picture.rows(data, MOST_CLIENTS)}
    return {"label_counts": picture.label_counts(data)}


def left_out(setup: Setup) -> dict[str, Any]:
    """Tiers that no piece of the model fits, and how many clients take no part in the first round."""
    names = [tier.name for tier in setup.fleet.left_out]
    return {"tiers": names, "clients": setup.clients(0).left_out}


def settings_of(setup: Setup) -> dict[str, Any]:
    """What a config would say of a run that was started from Python, as far as its objects tell it."""
    method, objective = dataclasses.asdict(setup.method), setup.model.objective
    training, server, merge = (method.pop(name) for name in ("local", "server", "merging"))
    data = picture.overview(setup.data)
    del training["rounds"]  # those of the run
    fleet = {"tiers": [f"{tier.name}: {tier.budget}, {tier.share}" for tier in setup.fleet.tiers]}
    fleet |= {name: getattr(setup.fleet, name) for name in ("dynamic", "macs_range", "only_top")}
    sizes = ("dataset", "clients", "train_examples", "test_examples", "classes")
    settings = {
        "seed": setup.seeds.root,
        **dataclasses.asdict(setup.settings),
        "data": {name: data[name] for name in sizes},
        "model": {"name": type(setup.model.module).__qualname__},
        "fleet": fleet,
        "method": {"name": setup.method.name or type(setup.method).__qualname__, **method},
        "training": training,
        "server": server,
        "merge": merge,
        "objective": {"loss": _named(objective.loss), "metrics": list(objective.metrics)},
    }
    return dict(json.loads(json.dumps(settings, default=str)))


def _named(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _tiers(setup: Setup) -> list[dict[str, Any]]:
    tiers = []
    roster, fleet = setup.roster, setup.fleet
    counts = fleet.counts(setup.data.num_clients) if roster is None else roster.counts(fleet)
    for tier, clients in zip(fleet.tiers, counts, strict=True):
        cut = setup.method.cut_for(setup.start.state, tier.budget, setup.model)
        cost = setup.model.cost(cut)
        tiers.append(
            {
                "name": tier.name,
                "clients": int(clients),
                "width": None if tier.budget.width is None else float(tier.budget.width),
                **({} if cut.depth is None else {"depth": float(cut.depth)}),
                "budget": str(tier.budget),
                "params": cost.params,
                "macs": cost.macs,
                "allowed": _allowed(setup, tier.budget),
            }
        )
    return tiers


def _allowed(setup: Setup, budget: Budget) -> dict[str, int]:
    """What the budget lets any method spend: the piece of its width, and its limits; nothing of what it leaves open.

    Where clients have budgets of their own, that of a tier is nobody's.
    """
    if setup.fleet.macs_range is not None:
        return {}
    limits = {name: getattr(budget, name) for name in ("macs", "params", "bytes")}
    allowed = {
        name: int(limit) for name, limit in absolute_limits(setup.model.costs, Budget(**limits)).items()
    }
    if budget.width is None:
        return allowed
    cost = setup.model.cost(prefix(setup.model.groups, as_width(budget.width)))
    return {name: min(getattr(cost, name), allowed.get(name, getattr(cost, name))) for name in limits}


def _layers(setup: Setup) -> dict[str, Any]:
    extents = setup.model.groups.extents
    weights = [name for name, value in setup.model.weights().items() if value.dim() >= 2 and name in extents]
    return {
        name: [
            {"length": e.length, "axes": [[a.group, a.offset, a.repeat, a.blocks, a.stride] for a in e.axes]}
            for e in extents[name][:2]
        ]
        for name in weights
    }
