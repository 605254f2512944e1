"""``widths = "fleet"`` on Flower: devices train the widths that the server gives out, whatever their fleet has lost."""

from __future__ import annotations

import tomllib
from fractions import Fraction

import pytest

from fedtailor.config import make_config
from fedtailor.errors import FedtailorError
from fedtailor.flower.server import serve
from flower.loopback import LoopbackGrid

CONFIG = """
rounds = 1
clients_per_round = {count}
evaluate_every = 1
[data]
dataset = "digits"
clients = 6
limit = 120
test_limit = 50
validation = 0
[model]
name = "cnn"
channels = [64, 128]
[fleet]
{fleet}
[method]
name = "{method}"
widths = "fleet"
[training]
batch_size = 8
[engine]
workers = 0
retries = 0
wait = 1
"""
TIERS = 'tiers = [{name = "mid", macs = 0.3}, {name = "big", width = 1}]'
SKIPPED = (
    'too_small = "skip"\n'
    'tiers = [{name = "tiny", macs = 500}, {name = "mid", macs = 0.3}, {name = "big", width = 1}]'
)
DEVICES = 'devices = "built-in"\ndeadline = "60ms"\ntoo_small = "skip"'


@pytest.mark.parametrize(
    ("method", "fleet"),
    [("fjord", SKIPPED), ("flanc", SKIPPED), ("tailor", SKIPPED), ("fjord", DEVICES)],
)
@pytest.mark.filterwarnings("ignore:tier")  # who takes no part is told
def test_devices_know_the_widths_of_the_fleet_that_is_left(tmp_path, method, fleet):
    text = CONFIG.format(count=2, fleet=fleet, method=method)
    nodes = {
        number: {"partition-id": number - 7, "num-partitions": 2, "state": str(tmp_path / "state")}
        for number in (7, 8)
    }
    run = serve(LoopbackGrid(text, nodes), make_config(tomllib.loads(text)), tmp_path / "run")
    assert run.history[0].cohort.merged == 2
    assert len(run.method.candidates) > 1


def test_a_device_below_the_smallest_of_them_is_not_taken_in(tmp_path):
    text = CONFIG.format(count=2, fleet=TIERS, method="fjord")
    own = {"dataset": "digits", "state": str(tmp_path / "state")}
    nodes = {
        7: {"name": "a", "tier": "big", **own},
        8: {"name": "b", "tier": "mid", **own},
        9: {"name": "c", "macs": "60k", **own},
    }
    run = serve(LoopbackGrid(text, nodes), make_config(tomllib.loads(text)), tmp_path / "run")
    assert run.history[0].cohort.merged == 2
    assert run.method.candidates[-1] == Fraction(1)
    alone = {9: nodes[9], 8: nodes[8]}
    with pytest.raises(FedtailorError, match="node 9: .*no width of method.widths fits it"):
        serve(LoopbackGrid(text, alone), make_config(tomllib.loads(text)), tmp_path / "other")
