"""Local steps at equal compute: ``FEDTAILOR_DATA=... python -m reproduce.common.compute`` writes ``compute.json``.

What a client may compute in a round is what the steps of the config cost at its budget of multiply-accumulates, or, of
a budget of width, on a network of that width. A method whose steps cost more takes fewer: so many that no tier computes
more than that, to within half a step. Methods that cost more than twice as much (those that leave out single weights
run dense networks) take all steps, and tables mark them. A method that asks some clients alone asks them more often;
how much more is counted too. Nothing is trained: the server counts beforehand.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from fedtailor.config import load_config
from fedtailor.elasticity.costing.expected import allowed_macs
from fedtailor.elasticity.costing.fitting import fit_among
from fedtailor.elasticity.cutting.selections import as_candidates, prefix
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Tier
from fedtailor.fleet.presets import build_fleet
from fedtailor.messages import Client
from fedtailor.run.setup import prepare, read_data, trace_model
from fedtailor.seeds import Seeds
from fedtailor.server.setup import Setup
from fedtailor.storage.files import replace_file
from fedtailor.sweep.plan import under_rules
from reproduce.common.plan import COMPUTE, FLEETS, HERE, METHODS, MOST, TASKS
from reproduce.shared.results import laid_out

COUNTED = 400  # steps whose mean is taken, where steps draw their networks
ABOUT = (
    "By reproduce.common.compute. allowed: multiply-accumulates of a prediction that a tier can pay; steps: of a "
    "client in a round; times: the largest ratio over tiers of a step's "
    "multiply-accumulates to those that the tier's budget pays; often: how much more often the clients that take part "
    "are asked, because others are not."
)


def main() -> None:
    """Count every method in every cell."""
    cells = {f"{task}-{fleet}": counted for task in TASKS for fleet, counted in _task(task)}
    replace_file(COMPUTE, [f"{laid_out({'about': ABOUT, 'cells': cells})}\n".encode()])


def _task(task: str) -> list[tuple[str, dict[str, Any]]]:
    config = load_config(HERE / f"{task}.toml", [f"training.steps={COUNTED}"])
    objective = config.objective.build()
    data = read_data(config, objective.task)
    model = trace_model(config, data, objective)
    found = []
    for name, devices in FLEETS.items():
        fleet = build_fleet(load_config(HERE / f"{task}.toml", [f"fleet.name={devices.name}"]).fleet)
        smallest = smallest_width(model, fleet.tiers)
        counted = {}
        for method, spec in METHODS.items():
            own = spec.format(smallest=smallest, widths=devices.widths, base=devices.base, able=devices.able)
            wanted = load_config(
                HERE / f"{task}.toml", [*under_rules(own, config.training), f"training.steps={COUNTED}"]
            )
            try:
                setup = prepare(
                    wanted.built_method, model, data, fleet, wanted.round_settings, Seeds(config.seed)
                )
                counted[method] = steps_at(setup, load_config(HERE / f"{task}.toml").training["steps"])
            except FedtailorError as error:
                counted[method] = {"refused": str(error)}
            print(task, name, method, counted[method], file=sys.stderr, flush=True)
        allowed = {tier.name: int(allowed_macs(model.costs, tier.budget)) for tier in fleet.tiers}
        found.append((name, {"smallest": str(smallest), "allowed": allowed, "methods": counted}))
    return found


def smallest_width(model: ElasticModel, tiers: Sequence[Tier]) -> Fraction:
    """The largest width, in hundredths or as its budget says, that the smallest device can run."""
    budget = tiers[0].budget
    if budget.width is not None:
        return Fraction(budget.width)
    cut = fit_among(
        model.costs, budget, as_candidates("uniform-100"), lambda width: prefix(model.groups, width)
    )
    assert cut.width is not None
    return cut.width


def steps_at(setup: Setup, steps: int) -> dict[str, Any]:
    """How many steps a method takes where the largest piece of every tier takes so many."""
    asked = _taking_part(setup)
    times = max(_times(setup, tier) for tier in asked)
    fewer = 1 < times <= MOST
    found = {"steps": max(1, round(steps / times)) if fewer else steps, "times": round(times, 3)}
    often = sum(tier.share for tier in setup.fleet.tiers) / sum(tier.share for tier in asked)
    return {**found, "often": round(float(often), 3)} if often > 1 else found


def _taking_part(setup: Setup) -> list[Tier]:
    clients = [Client(n, tier.name, tier.budget, 100) for n, tier in enumerate(setup.fleet.tiers)]
    able = {client.id for client in setup.method.participants(setup.start.state, clients, setup.model)}
    return [tier for number, tier in enumerate(setup.fleet.tiers) if number in able]


def _times(setup: Setup, tier: Tier) -> float:
    """A step of a client of this tier, in what its budget pays."""
    method, model = setup.method, setup.model
    client = Client(0, tier.name, tier.budget, COUNTED * method.local.batch_size)
    task = method.assign(method.begin(setup.start.state, model), client, model, setup.seeds)
    return method.work(task, model).macs / (3 * allowed_macs(model.costs, tier.budget))


if __name__ == "__main__":
    main()
