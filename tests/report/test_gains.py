"""The last lines of a comparison: what devices gain and lose, and which figures no device could have."""

from __future__ import annotations

from rich.console import Console

from fedtailor.record import RoundRecord
from fedtailor.report.comparison import comparison_tables, gains_and_losses
from fedtailor.report.differences import gained

ALLOWED = {"board": {"macs": 100, "params": 50}, "laptop": {"macs": 1000, "params": 500}}


def run(board: float, laptop: float, macs: int = 100, metric: str = "accuracy") -> list[RoundRecord]:
    tiers = {"board": {metric: board}, "laptop": {metric: laptop}}
    deployed = {"board": {"macs": macs, "params": 50}, "laptop": {"macs": max(macs, 900), "params": 50}}
    return [RoundRecord(1, tiers=tiers, deployed=deployed)]


RESULTS = {
    "fjord": [run(0.70, 0.80), run(0.71, 0.82)],
    "fedavg:width=1/5": [run(0.71, 0.71), run(0.70, 0.72)],
    "fedavg:only_able=true": [run(0.75, 0.75, 1000), run(0.74, 0.74, 1000)],
}
EVERY = dict.fromkeys(RESULTS, ALLOWED)


def test_words_say_what_each_device_gains_and_loses():
    assert list(gains_and_losses(RESULTS, EVERY)) == [
        "With fjord instead of fedavg:width=1/5:",
        "  board: gains or loses with the seed (-1.0 to +1.0 points of accuracy)",
        "  laptop: gains 9.5 points of accuracy (9.0 to 10.0 over 2 seeds)",
        "With fjord instead of fedavg:only_able=true:",
        "  board: a network that fits, where fedavg:only_able=true has none",
        "  laptop: gains 6.5 points of accuracy (5.0 to 8.0 over 2 seeds)",
    ]


def test_less_loss_is_a_gain_and_one_seed_has_no_range():
    results = {"a": [run(1.5, 2.0, metric="loss")], "b": [run(1.0, 2.5, metric="loss")]}
    assert list(gains_and_losses(results, {})) == [
        "With a instead of b (loss):",
        "  board: loses 0.500",
        "  laptop: gains 0.500",
    ]


def test_a_loss_is_told_as_positive_numbers():
    assert gained([-0.4, -1.2], " points") == "loses 0.8 points (0.4 to 1.2 over 2 seeds)"


def test_figures_of_networks_that_a_tier_cannot_run_stand_in_brackets():
    def table(*allowed: object) -> str:
        console = Console(width=80)
        with console.capture() as text:
            console.print(next(iter(comparison_tables("demo", RESULTS, None, *allowed))))
        return text.get()

    told = table(EVERY)
    assert "(74.5±0.7)" in told
    assert "74.5±0.7 " in told.replace("(74.5±0.7)", "")  # the laptop can run it
    assert "(in brackets): more than the tier can run" in " ".join(told.split())
    assert "(" not in table()
