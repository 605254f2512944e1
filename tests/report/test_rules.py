"""What differs between the methods of a comparison beside the methods themselves."""

from __future__ import annotations

import tomllib

from fedtailor.config import make_config, to_toml
from fedtailor.report.rules import unequal_rules


def config(method: str, **settings):
    training = settings.pop("training", {})
    return tomllib.loads(to_toml(make_config({"method": {"name": method, **settings}, "training": training})))


def test_presets_that_differ_are_told():
    said = unequal_rules(
        {"heterofl": config("heterofl"), "fjord": config("fjord"), "fedavg": config("fedavg")}
    )
    (heterofl,) = [sentence for sentence in said if sentence.startswith("heterofl")]
    for part in (
        "clip_norm = 1.0 (others: inf)",
        "label_rows",
        "masked_loss",
        "weighting = count (others: samples)",
    ):
        assert part in heterofl
    (fjord,) = [sentence for sentence in said if sentence.startswith("fjord")]
    assert "norm = per_width" in fjord
    assert "clip_norm" not in fjord


def test_methods_with_equal_settings_differ_in_nothing_but_their_own():
    same = {"clip_norm": 1.0, "lr": 0.05}
    heterofl = config(
        "heterofl", norm="averaged", weighting="samples", masked_loss=False, label_rows=False, training=same
    )
    configs = {
        "heterofl": heterofl,
        "fjord": config("fjord", norm="averaged", training=same),
        "fedavg": config("fedavg", width=0.2, training=same),
    }
    assert unequal_rules(configs) == []


def test_what_the_server_does_is_a_rule_and_what_a_config_does_not_know_is_its_default():
    plain, other = config("fedavg"), config("fedavg")
    other["server"] |= {"optimiser": "adam", "average": 0.9}
    told = "b differs from the others in: server.average = 0.9 (others: 0.0), server.optimiser = adam (others: sgd)."
    assert unequal_rules({"a": plain, "b": other}) == [told]
    del plain["server"], plain["training"]["optimiser"]
    assert unequal_rules({"a": plain, "b": other}) == [told]
    assert unequal_rules({"a": plain, "b": config("fedavg")}) == []


def test_of_two_the_neutral_one_is_the_rule_in_any_order():
    pairs = [("heterofl", config("heterofl")), ("fedavg", config("fedavg"))]
    said = unequal_rules(dict(pairs))
    assert len(said) == 1
    assert said[0].startswith("heterofl differs from the others in: ")
    assert unequal_rules(dict(reversed(pairs))) == said
    # Where none is neutral, the order does not decide either.
    odd = [("a", config("fedavg", training={"lr": 0.3})), ("b", config("fedavg", training={"lr": 0.7}))]
    assert unequal_rules(dict(odd)) == unequal_rules(dict(reversed(odd)))


def test_a_norm_policy_is_no_rule_where_there_are_no_statistics():
    configs = {name: config(name) for name in ("heterofl", "fjord", "fedavg")}
    assert any("norm = static" in sentence for sentence in unequal_rules(configs))
    without = unequal_rules(configs, statistics=False)
    assert [sentence for sentence in without if " norm = " in sentence] == []
    assert any("clip_norm" in sentence for sentence in without)
    plain, local = ({"method": {"name": "mine", "norm": norm}} for norm in ("averaged", "local"))
    # There clients evaluate their networks themselves.
    assert unequal_rules({"plain": plain, "local": local}, statistics=False) == [
        "local differs from the others in: norm = local (others: averaged)."
    ]


def test_a_method_of_the_users_own_has_the_rules_of_any_method():
    own = {"method": {"name": "mine", "norm": "static", "colour": "red"}, "training": {"lr": 0.1}}
    other = {"method": {"name": "mine too", "norm": "averaged", "colour": "blue"}, "training": {"lr": 0.1}}
    assert unequal_rules({"mine": own, "too": other}) == [
        "mine differs from the others in: norm = static (others: averaged)."
    ]
