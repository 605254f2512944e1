"""Budgets as people write them, and fits that are the largest: measured again from scratch on the small networks."""

from __future__ import annotations

import math
import pickle
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from elasticity.plain_networks import NETWORKS, from_scratch, network
from fedtailor.elasticity.costing.budget import LIMITS, Budget, amount, as_limit, limit_text
from fedtailor.elasticity.costing.fitting import (
    CHANNEL_LIMITS,
    BudgetError,
    broken_limits,
    check_honoured,
    distinct_widths,
    fit,
    fit_with_reason,
    meets,
)
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.method import Method
from fedtailor.models import build_model, model_names
from helpers import cnn_model, mlp_model, slow_if

COSTS = ("macs", "params", "bytes", "memory")


@pytest.mark.parametrize(
    ("name", "written", "exact"),
    [
        ("macs", "5M", 5_000_000),
        ("macs", " 1.5 G ", 1_500_000_000),
        ("macs", "2k", 2000),
        ("macs", "1_000_000", 1_000_000),
        ("macs", "1e6", 1_000_000),
        ("macs", 2.0e6, 2_000_000),
        ("macs", np.int64(700), 700),
        ("params", "50%", Fraction(1, 2)),
        ("params", "12.5 %", Fraction(1, 8)),
        ("params", 0.2 + 0.4, Fraction(3, 5)),
        ("params", "1/3", Fraction(1, 3)),
        ("params", 1, Fraction(1)),
        ("params", "100%", Fraction(1)),
        ("bytes", "20MB", 20_000_000),
        ("memory", "20MiB", 20 * 2**20),
        ("memory", "1.5 KiB", 1536),
        ("memory", "512B", 512),
        ("memory", "0.5kB", 500),
        ("step_time", "3ms", 3_000_000),
        ("step_time", "250us", 250_000),
        ("step_time", "250µs", 250_000),
        ("step_time", "1.5s", 1_500_000_000),
        ("step_time", 0.5, Fraction(1, 2)),
        ("step_time", "50%", Fraction(1, 2)),
        ("width", "25%", Fraction(1, 4)),
        ("width", "1/4", Fraction(1, 4)),
        ("density", 0.1, Fraction(1, 10)),
    ],
)
def test_limits_as_people_write_them(name: str, written: Any, exact: int | Fraction) -> None:
    budget = Budget(**{name: written})
    assert budget.limits == {name: exact}
    assert type(budget.limits[name]) is type(exact)
    assert Budget(**budget.limits) == replace(budget) == pickle.loads(pickle.dumps(budget)) == budget


@pytest.mark.parametrize(
    ("name", "written", "message"),
    [
        ("macs", "5X", "macs = '5X': unknown unit 'X'; known: G, K, M, T, k"),
        ("memory", "20M", "memory = '20M': unknown unit 'M': did you mean 'MB'? Known: B, GB"),
        ("step_time", "3h", "step_time = '3h': unknown unit 'h'; known: ms, ns, s, us, µs"),
        ("macs", "5MB", "macs = '5MB': unknown unit 'MB'"),
        ("macs", 0, "macs = 0: expected a whole number above 1, or a share of the full model above 0"),
        ("macs", "0", "macs = '0': expected a whole number above 1"),
        ("macs", "0M", "macs = '0M': expected a whole number above 1"),
        ("macs", -5, "macs = -5: expected a whole number above 1"),
        ("memory", "-20MB", "memory = '-20MB': expected a whole number above 1, or a share"),
        ("params", "-50%", "params = '-50%': expected a whole number above 1"),
        ("params", "150%", "params = '150%': expected a whole number above 1, or a share of the full model"),
        ("params", "200%", "params = '200%': expected"),
        ("params", 2.5, "params = 2.5: expected a whole number above 1"),
        ("params", "3/2", "params = '3/2': expected"),
        ("params", "1/0", "params = '1/0': expected"),
        ("params", True, "params = True: expected"),
        ("params", float("nan"), "params = nan: expected"),
        ("params", float("inf"), "params = inf: expected"),
        ("params", "many", "params = 'many': expected a whole number above 1, or a share of the full model"),
        ("params", "", "params = '': expected"),
        ("params", [5], r"params = [5]: expected"),
        ("bytes", "1B", "bytes = '1B': expected a whole number above 1"),
        ("step_time", "3", "step_time = '3': expected a time with its unit, or a share of the full model"),
        ("step_time", 3.0, "step_time = 3.0: expected a time with its unit"),
        ("width", 8, "width = 8: expected a number above 0 and at most 1, such as 0.25"),
        ("width", "5M", "width = '5M': expected a number above 0 and at most 1"),
        ("width", 0, "width = 0: expected a number above 0 and at most 1"),
        ("density", "-10%", "density = '-10%': expected a number above 0 and at most 1"),
    ],
)
def test_limits_that_make_no_sense(name: str, written: Any, message: str) -> None:
    with pytest.raises(FedtailorError) as caught:
        Budget(**{name: written})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@given(st.integers(2, 10**15), st.sampled_from(["macs", "params", "bytes", "memory", "step_time"]))
def test_what_is_shown_is_close_to_the_limit(value: int, name: str) -> None:
    text = amount(name, value)
    assert as_limit(name, value) == value
    if "." not in text.partition(" ")[0] and " " not in text:
        assert int(text) == value
    else:
        assert abs(int(as_limit(name, text)) - value) <= value / 1000 + 1
    assert limit_text(name, value) == text


def test_budgets_from_the_command_line() -> None:
    budget = Budget.parse("macs=5M, memory=20MB,width=1/2")
    assert budget.limits == {"width": Fraction(1, 2), "macs": 5_000_000, "memory": 20_000_000}
    assert repr(Budget.parse("step_time=3ms,density=10%")) == "Budget(density=1/10, step_time=3ms)"
    assert LIMITS == ("width", "macs", "params", "bytes", "density", "memory", "step_time", "depth")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mac=5M", "unknown limit 'mac': did you mean 'macs'? Known: bytes, density, depth, macs"),
        ("macs", "budget 'macs': 'macs' is not of the form name=limit, as in macs=5M,memory=20MB"),
        ("macs=", "budget 'macs=': 'macs=' is not of the form name=limit"),
        ("", "budget '': '' is not of the form name=limit"),
        ("macs=5M,,", "budget 'macs=5M,,': '' is not of the form name=limit"),
        ("macs=5M,macs=6M", "budget 'macs=5M,macs=6M': macs is limited twice"),
        ("macs=5Q", "macs = '5Q': unknown unit 'Q'"),
    ],
)
def test_budgets_that_cannot_be_read(text: str, message: str) -> None:
    with pytest.raises(FedtailorError) as caught:
        Budget.parse(text)
    assert str(caught.value).startswith(message)


def test_a_width_alone_is_a_prefix() -> None:
    model = cnn_model()
    for width in ("1/3", "3/5", 1):
        cut = fit(model.costs, Budget(width=width))
        assert cut == prefix(model.groups, Fraction(width))
        assert cut.share(model.groups) == Fraction(width)


def test_the_width_itself_is_the_largest_member_below_a_width() -> None:
    """0.6 of 4 and 6 units are 3 and 4, which no share of 4 or 6 units below 0.6 gives."""
    model = cnn_model(4, 6)
    cut = fit(model.costs, Budget(width=0.6, macs=1))
    assert cut == prefix(model.groups, Fraction(3, 5))
    assert fit_with_reason(model.costs, Budget(width=0.6, macs=1)).binding == ("width",)
    assert fit_with_reason(model.costs, Budget(width=0.6)).binding == ("width",)
    assert fit_with_reason(model.costs, Budget(macs=1)).binding == ()
    assert fit_with_reason(model.costs, Budget()).cut == Cut.everything()


def test_the_limit_that_binds_is_named() -> None:
    model = network("femnist-cnn")
    result = fit_with_reason(model.costs, Budget(macs="200k", memory="1MB"), workload=Workload(32))
    assert result.binding == ("memory",)
    assert result.cost.macs <= 200_000
    assert result.cost.training_memory is not None
    assert result.cost.training_memory <= 1_000_000
    assert result.cut == prefix(model.groups, Fraction(2, 5))
    assert fit_with_reason(model.costs, Budget(macs="200k")).binding == ("macs",)


def test_the_memory_of_a_cut_depends_on_the_training_step() -> None:
    model = network("femnist-cnn")
    few, many = (fit(model.costs, Budget(memory="1MB"), workload=Workload(size)) for size in (8, 64))
    assert few.holds(many)
    assert few != many
    plain, momentum = (
        fit(model.costs, Budget(memory="200kB"), workload=Workload(2, slots), family="per_group")
        for slots in (0, 2)
    )
    assert model.cost(plain).params > model.cost(momentum).params


def test_nothing_fits() -> None:
    model = network("femnist-cnn")
    with pytest.raises(BudgetError) as caught:
        fit(model.costs, Budget(params=100, macs="10k"))
    error = caught.value
    assert (error.limit, error.allowed, error.needed) == ("params", 100, 1106)
    assert str(error) == (
        "no cut fits: params is limited to 100, but the smallest cut of this model needs 1.106 k, 11.1 times as much "
        "(the full model: 25.18 k); it breaks macs too"
    )
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    with pytest.raises(BudgetError, match=r"macs is limited to 1 % \(that is 4.909 k\).* 3.6 times as much"):
        fit(model.costs, Budget(macs="1%"), family="per_group")


def test_a_width_below_the_smallest_member_still_keeps_one_unit() -> None:
    model = mlp_model(8)
    assert fit(model.costs, Budget(width="1/1000")) == fit(model.costs, Budget(width="1/1000", macs=1))
    assert model.costs.counts(fit(model.costs, Budget(width="1/1000"))) == (1,)


def test_density_is_not_for_channels() -> None:
    with pytest.raises(FedtailorError, match="density = 1/2: a cut keeps every weight of its channels"):
        fit(mlp_model(8).costs, Budget(density=0.5))


def test_unknown_family_and_alignment() -> None:
    with pytest.raises(FedtailorError, match="unknown family 'per_layer': did you mean 'per_group'"):
        fit(mlp_model(8).costs, Budget(macs=0.5), family="per_layer")  # type: ignore[arg-type]
    with pytest.raises(FedtailorError, match="align = 0"):
        fit(mlp_model(8).costs, Budget(macs=0.5), align=0)


def test_per_group_fills_what_uniform_leaves() -> None:
    model = network("femnist-cnn")
    budget = Budget(macs="200k")
    uniform, filled = fit(model.costs, budget), fit(model.costs, budget, family="per_group")
    assert model.costs.counts(uniform) == (5, 10)
    assert model.costs.counts(filled) == (6, 10)
    assert filled.holds(uniform)


def test_a_step_time_limit_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    model = mlp_model(8)
    monkeypatch.setattr(
        "fedtailor.elasticity.costing.model_costs.step_time",
        lambda model, cut, workload: 1000 * model.costs.counts(cut)[0],
    )
    result = fit_with_reason(model.costs, Budget(step_time="5us"))
    assert (model.costs.counts(result.cut), result.binding, result.cost.step_time) == (
        (5,),
        ("step_time",),
        5000,
    )
    assert model.costs.counts(fit(model.costs, Budget(step_time="40%"), family="per_group")) == (3,)
    with pytest.raises(BudgetError, match="step_time is limited to 500 ns, .* needs 1 µs, 2 times as much"):
        fit(model.costs, Budget(step_time="500ns"))


def test_a_real_step_time_limit() -> None:
    module = nn.Sequential(nn.Linear(1024, 4096), nn.ReLU(), nn.Linear(4096, 4))
    model = elastic(module, (torch.zeros(2, 1024), torch.arange(2)))
    budget, workload = Budget(step_time="60%"), Workload(64)
    result = fit_with_reason(model.costs, budget, align=512, workload=workload)
    assert result.cost.step_time is not None
    full = model.costs.measure("step_time", model.costs.full, workload)
    assert result.cost.step_time <= 0.6 * full
    assert result.binding == ("step_time",)


def test_meets_and_broken_limits() -> None:
    model = network("femnist-cnn")
    half = prefix(model.groups, Fraction(1, 2))
    budget = Budget(macs="100k", params="50%", width="1/4")
    assert broken_limits(model.costs, half, budget) == ("macs",)
    assert not meets(model.costs, half, budget)
    assert meets(model.costs, half, Budget(width="1/4"))


def test_methods_declare_what_they_honour() -> None:
    assert Method.honours == CHANNEL_LIMITS == frozenset(LIMITS) - {"density", "depth"}
    check_honoured(Budget(macs="5M", memory="20MB"), CHANNEL_LIMITS, "heterofl")
    check_honoured(Budget(density=0.5), None, "fedavg")
    with pytest.raises(FedtailorError) as caught:
        check_honoured(Budget(macs="5M", memory="20MB"), frozenset({"macs", "width"}), "flado")
    assert str(caught.value) == (
        "flado does not keep to a limit on memory (Budget(macs=5000000, memory=20000000)); it honours width, macs; "
        "method.name = 'auto' takes one that keeps to the limits of a fleet"
    )


def test_methods_fit_their_own_training_step() -> None:
    model = network("femnist-cnn")
    method = Method()
    heavy = replace(method, local=replace(method.local, batch_size=64, momentum=0.9))
    assert (heavy.workload.batch_size, heavy.workload.optimiser_slots) == (64, 1)
    budget = Budget(memory="1MB")
    assert heavy.cut_for(heavy.init(model), budget, model) == fit(
        model.costs, budget, workload=Workload(64, 1)
    )
    assert method.cut_for(method.init(model), budget, model) == fit(
        model.costs, budget, workload=Workload(32, 0)
    )


def random_budget(draws: np.random.Generator, model: ElasticModel, workload: Workload) -> Budget:
    """One to three limits, absolute or as shares, from far too small to generous."""
    names = draws.choice([*COSTS, "width"], size=int(draws.integers(1, 4)), replace=False)
    limits: dict[str, Any] = {}
    for name in names:
        share = Fraction(f"{np.exp(draws.uniform(np.log(0.02), 0)):.6g}")
        absolute = name != "width" and draws.random() < 0.5
        full = model.costs.measure(name, model.costs.full, workload) if absolute else 0
        limits[name] = max(2, int(share * full)) if absolute else share
    return Budget(**limits)


def check_fit(
    model: ElasticModel, budget: Budget, family: str, align: int, workload: Workload, full: Any
) -> bool:
    """The answer meets every limit from scratch, and the next larger member breaks one; False: nothing fits."""
    allowed = {
        name: limit * full[name] if isinstance(limit, Fraction) else limit
        for name, limit in budget.limits.items()
        if name != "width"
    }

    def breaks(cut: Cut) -> set[str]:
        if not allowed:
            return set()
        costs = from_scratch(model, cut, workload, tuple(allowed))
        return {name for name, limit in allowed.items() if costs[name] > limit}

    ceiling = budget.limits.get("width", Fraction(1))
    smallest = prefix(model.groups, min(ceiling, distinct_widths(model.groups)[0]), align)
    missed = breaks(smallest)
    if missed:
        with pytest.raises(BudgetError) as caught:
            fit(model.costs, budget, align, family=family, workload=workload)  # type: ignore[arg-type]
        assert caught.value.limit in missed
        return False
    result = fit_with_reason(model.costs, budget, align, family=family, workload=workload)  # type: ignore[arg-type]
    assert not breaks(result.cut)
    most = prefix(model.groups, ceiling, align)
    assert most.holds(result.cut)
    counts, limits = model.costs.counts(result.cut), model.costs.counts(most)
    if counts == limits:
        assert result.binding == (() if counts == model.costs.full else ("width",))
        return True
    larger = larger_members(model, result.cut, most, family, align)
    assert larger
    assert all(broken_limits(model.costs, cut, budget, workload) for cut in larger)
    for cut in larger[len(larger) // 2 :][:1]:  # one of them from scratch
        assert breaks(cut)
        assert breaks(cut) <= set(result.binding) <= {*budget.limits}
    return True


def larger_members(model: ElasticModel, cut: Cut, most: Cut, family: str, align: int) -> list[Cut]:
    """The next larger uniform cut, or the cut with any single group grown by one step."""
    counts, ceilings = model.costs.counts(cut), model.costs.counts(most)
    if family == "per_group":
        steps = [
            next(n for n in [*each, ceiling] if n > count or n == ceiling)
            for each, count, ceiling in zip(model.costs.members(align), counts, ceilings, strict=True)
        ]
        grown = [
            (*counts[:group], steps[group], *counts[group + 1 :])
            for group, count in enumerate(counts)
            if count < ceilings[group]
        ]
        return [model.costs.cut(each) for each in grown]
    members = [prefix(model.groups, width, align) for width in distinct_widths(model.groups)]
    return [next(m for m in [*members, most] if m != cut and m.holds(cut) and most.holds(m))]


def check_network(name: str, small: bool, budgets: int) -> None:
    model = network(name, small)
    draws = np.random.default_rng([budgets, *name.encode()])
    fitted = 0
    for _ in range(budgets):
        batch_size = int(draws.choice([2, 5] if small else [2, 8, 32]))
        workload = Workload(batch_size, optimiser_slots=int(draws.integers(3)))
        budget = random_budget(draws, model, workload)
        family = "uniform" if draws.random() < 0.5 else "per_group"
        align = int(draws.choice([1, 1, 1, 4]))
        full = from_scratch(model, Cut.everything(), workload)
        fitted += check_fit(model, budget, family, align, workload, full)
    assert 0 < fitted <= budgets


def test_every_network_is_checked() -> None:
    assert sorted(NETWORKS) == [
        name for name in model_names() if name != "adapted"
    ]  # its backbone is another's


MANY_GROUPS = (
    "heterofl-resnet", "llama", "mobilenetv2", "preresnet18", "resnet18", "resnet50", "text-classifier", "transformer",
    "vit",
)  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [slow_if(name, *MANY_GROUPS) for name in NETWORKS],
)
def test_fits_are_the_largest_on_small_networks(name: str) -> None:
    check_network(name, small=True, budgets=4)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_fits_are_the_largest(name: str) -> None:
    check_network(name, small=False, budgets=math.ceil(1000 / len(NETWORKS)))  # a thousand in all


def test_a_model_string_that_does_not_import() -> None:
    with pytest.raises(FedtailorError, match="there is no module 'no_such_package'"):
        build_model("no_such_package.module:build", input_shape=(1, 8, 8), num_classes=2)
