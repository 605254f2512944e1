"""Small private runs that the tests share."""

from __future__ import annotations

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.in_process import InProcess
from fedtailor.fleet import Fleet
from fedtailor.method import Method
from fedtailor.methods.registry import get_method
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.run.setup import check_privacy
from fedtailor.server.loop import run_rounds
from fedtailor.server.setup import RoundSettings, Setup
from helpers import Result, image_data, setup_of

OPEN = {"label_rows": False, "norm": "averaged"}  # of HeteroFL: everyone sends whole pieces
METHODS = {
    "fedavg": {"weighting": "count"},
    "heterofl": OPEN,
    "fedrolex": OPEN,
    "fjord": {"weighting": "count", "norm": "averaged"},
    "federated-dropout": {"weighting": "count", "norm": "averaged", "mask": "round"},
}


def method_of(name: str, **settings: object) -> Method:
    return get_method(name)(**{**METHODS.get(name, {}), **settings})


def private_setup(
    method: Method,
    model: ElasticModel,
    privacy: PrivacySettings,
    data: FederatedData | None = None,
    fleet: Fleet | str = "uniform-3",
    cohort: int = 6,
) -> Setup:
    """A checked setup with its guard, in memory."""
    settings = RoundSettings(3, cohort, 100, privacy=privacy)
    setup = setup_of(method, model, data or image_data(), fleet, settings)
    if privacy.active:
        check_privacy(setup)
    return setup.guarded(None, 0)


def run_private(setup: Setup) -> Result:
    records = []
    engine = InProcess(setup.method, setup.model, setup.data)
    end = run_rounds(setup, engine, lambda record, _at: records.append(record))
    return Result(end.state, records)
