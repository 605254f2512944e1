"""Fleets, methods and settings in Python: names, tables and objects as in a config, wrong ones refused alike."""

from __future__ import annotations

import subprocess
import sys

import pytest
from torch import nn

import fedtailor
from fedtailor.config import make_config
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.fleet import fleet_by_name
from fedtailor.methods.registry import get_method, method_names
from fedtailor.run.arguments import fleet_of, method_with
from helpers import tiny_mlp, vector_data

QUICK = {"rounds": 1, "evaluate_every": 1, "engine": {"workers": 0}}


def test_a_fleet_is_a_list_of_tiers_as_in_a_config():
    tiers = [{"name": "board", "macs": 2e6, "share": 3}, {"width": 0.5}]
    config = make_config({"fleet": {"tiers": tiers}})
    assert fleet_of(tiers) == fleet_of({"tiers": config.fleet.tiers}) == fleet_of(tuple(tiers))
    assert [(tier.name, tier.budget, tier.share) for tier in fleet_of(tiers).tiers] == [
        ("board", Budget(macs=2_000_000), 3),
        ("tier 1", Budget(width="1/2"), 1),
    ]
    assert fleet_of([Budget(width=0.5), Budget(width=1)]).tiers[0].budget == Budget(width=0.5)
    assert fleet_of({"name": "high", "capacity": "dynamic"}).dynamic
    assert fleet_of("high") == fleet_by_name("high")


def test_a_method_is_a_name_a_table_a_class_or_an_object():
    wanted = fedtailor.FedAvg(width=0.5)
    for given in (wanted, {"name": "fedavg", "width": 0.5}, {"name": fedtailor.FedAvg, "width": "1/2"},
                  "fedavg:width=1/2"):  # fmt: skip
        made = method_with(given, {"lr": 0.5}, 7)
        assert (type(made), made.width) == (fedtailor.FedAvg, wanted.width)
        assert (made.local.lr, made.local.rounds) == (0.5, 7)
    assert type(method_with(fedtailor.HeteroFL, None, 1)) is fedtailor.HeteroFL


def test_every_method_is_at_the_top_level_and_importing_fedtailor_imports_none_of_them():
    for name in method_names():
        method = get_method(name)
        assert getattr(fedtailor, method.__name__) is method
    with pytest.raises(AttributeError, match="no attribute 'HeteroFl'; methods: .*HeteroFL"):
        _ = fedtailor.HeteroFl
    code = "import sys, fedtailor; print(sorted({'torch', 'numpy', 'rich', 'pydantic'} & sys.modules.keys()))"
    seen = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert seen.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"fleet": [0.25, 1]},
            r'fleet.tiers\[0\] = 0.25: expected a table such as {"width": 0.5, "share": 3}',
        ),
        ({"fleet": 5}, "fleet = 5: expected a name such as 'uniform-5', a list of tiers"),
        ({"fleet": []}, "expected at least one tier"),
        ({"fleet": {"phone": {}}}, r"unknown key in \[fleet\] 'phone'"),
        ({"method": {"name": "fedavg", "widht": 1}}, "did you mean 'width'"),
        ({"method": {"width": 1}}, "method = {'width': 1}: expected a name"),
        ({"method": 5}, "method = 5: expected a name such as 'heterofl', a table"),
        (
            {"method": {"name": "fedavg", "align": "x"}},
            "method.align = 'x': input should be a valid integer or 'auto'",
        ),
        ({"method": {"name": "fedavg", "width": [1]}}, r"method.width = \[1\]: input should be"),
        ({"server": {"optimiser": "adam", "betas": [0.9]}}, r"server.betas = \[0.9\]: field required"),
        ({"rounds": "many"}, "rounds = 'many': input should be a valid integer"),
        ({"seed": 1.5}, "seed = 1.5: input should be a valid integer"),
        ({"threads": 0}, "threads = 0: expected at least 1"),
        ({"training": "fast"}, "training = 'fast': expected a table such as"),
        ({"stopping": 5}, "stopping = 5: input should be a dictionary"),
        ({"device": 5}, "device = 5: expected auto, cpu, cuda or mps"),
        ({"folder": 5}, "folder = 5: expected a path"),
        ({"module": None}, "module = None: expected an nn.Module, a function or class that builds one"),
        ({"module": "mpl"}, "unknown model 'mpl': did you mean 'mlp'"),
    ],
)
def test_wrong_arguments_get_the_sentences_of_a_config(change, words):
    arguments = {"module": tiny_mlp(), "data": vector_data(), "fleet": "uniform-2", **QUICK, **change}
    with pytest.raises(FedtailorError, match=words):
        fedtailor.train(**arguments)


@pytest.mark.parametrize(("clients", "count"), [(3, 3), (12, 10)])
def test_all_clients_take_part_at_most_ten(clients, count):
    run = fedtailor.train(tiny_mlp(), vector_data((4,) * clients), "equal", "fedavg", **QUICK)
    assert run.history[0].cohort.asked == count
    config = make_config({"data": {"clients": clients}, "fleet": {"name": "equal"}})
    assert config.clients_per_round == count


def test_a_module_may_be_a_function_that_builds_it_from_the_seed():
    def build(input_shape: tuple[int, ...], num_classes: int) -> nn.Module:
        return nn.Sequential(nn.Linear(*input_shape, 6), nn.ReLU(), nn.Linear(6, num_classes))

    weights = [
        fedtailor.train(build, vector_data(), "equal", "fedavg", seed=seed, **QUICK).setup.start.state.weights
        for seed in (0, 0, 1)
    ]
    first, again, other = (each["0.weight"] for each in weights)
    assert first.equal(again)
    assert not first.equal(other)
