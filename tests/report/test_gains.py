"""The last lines of a comparison: what devices gain and lose, and which figures no device could have."""

from __future__ import annotations

from rich.console import Console, RenderableType

from fedtailor.record import RoundRecord
from fedtailor.report.comparison import Known, comparison_tables, gains_and_losses
from fedtailor.report.differences import gained, paired

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


def printed(*parts: RenderableType, width: int = 80) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as text:
        for part in parts:
            console.print(part)
    return text.get()


def test_words_say_what_each_device_gains_and_loses():
    assert list(gains_and_losses(RESULTS, EVERY)) == [
        "With fjord instead of fedavg:width=1/5:",
        "  board: higher or lower with the seed (-1.0 to +1.0 points); 2 are too few to tell",
        "  laptop: 9.5 points higher in each of these 2 seeds (9.0 to 10.0), too few to tell",
        "With fjord instead of fedavg:only_able=true:",
        "  board: a network that fits, where fedavg:only_able=true has none",
        "  laptop: 6.5 points higher in each of these 2 seeds (5.0 to 8.0), too few to tell",
    ]


def test_less_loss_is_a_gain_and_one_seed_has_no_range():
    results = {"a": [run(1.5, 2.0, metric="loss")], "b": [run(1.0, 2.5, metric="loss")]}
    assert list(gains_and_losses(results, {})) == [
        "With a instead of b (loss):",
        "  board: 0.500 worse in one seed, too few to tell",
        "  laptop: 0.500 better in one seed, too few to tell",
    ]


def words(*values: float) -> str:
    return gained(values, paired([0.0] * len(values), values), " points")


def test_only_what_is_larger_than_noise_is_called_a_gain_or_a_loss():
    assert words(5.1, 5.0, 5.2) == "gains 5.1 points (5.0 to 5.2 over 3 seeds)"
    assert words(-5.1, -5.0, -5.2) == "loses 5.1 points (5.0 to 5.2 over 3 seeds)"
    assert words(-0.4, -1.2) == "0.8 points lower in each of these 2 seeds (0.4 to 1.2), too few to tell"
    assert words(-3, 5, -1, 4, 2) == "higher or lower with the seed (-3.0 to +5.0 points); within noise"
    assert words(2, 2, 2, 2, 2) == "2.0 points higher in each of these 5 seeds (2.0 to 2.0), cannot be told"


def test_what_is_never_higher_is_not_called_so():
    assert words(-4.0, -0.01) == "2.0 points lower in these 2 seeds (0.0 to 4.0), too few to tell"
    assert words(0.0, 0.0) == "the same in these 2 seeds, too few to tell"
    assert words(float("nan"), 1.0) == "no number with some seeds, cannot be told"


def test_the_last_lines_and_the_table_have_one_voice():
    """Five seeds: the laptop's gain is starred in the table and called a gain below it, the board's is neither."""
    boards, laptops = (0.70, 0.72, 0.71, 0.69, 0.71), (0.80, 0.82, 0.81, 0.79, 0.80)
    results = {
        "fjord": [run(board, laptop) for board, laptop in zip(boards, laptops, strict=True)],
        "fedavg": [run(0.70 + n / 300, 0.71 + n / 500) for n in range(5)],
    }
    text = printed(*comparison_tables("demo", results))
    (row,) = [line for line in text.splitlines() if line.startswith("fedavg ") and line.endswith("*")]
    assert row.split()[1:] == ["+0.1", "-9.0*"]
    _, board, laptop = gains_and_losses(results, {})
    assert board.endswith("within noise")
    assert laptop.startswith("  laptop: gains 9.0 points")


def test_the_star_is_explained_only_where_there_is_one():
    text = printed(*comparison_tables("demo", RESULTS))
    assert "*" not in text
    assert "None of these differences can be told from noise." in text


def test_figures_of_networks_that_a_tier_cannot_run_stand_in_brackets():
    def table(known: Known | None = None) -> str:
        return printed(next(iter(comparison_tables("demo", RESULTS, None, known))))

    told = table(Known(EVERY))
    assert "(74.5±0.7)" in told
    assert "74.5±0.7 " in told.replace("(74.5±0.7)", "")  # the laptop can run it
    assert "(in brackets): more than the tier can run" in " ".join(told.split())
    assert "(" not in table().replace("(%)", "")


def test_examples_that_were_kept_back_are_told():
    assert "validation" not in printed(*comparison_tables("demo", RESULTS, None, Known(EVERY)))
    told = printed(*comparison_tables("demo", RESULTS, None, Known(EVERY, kept_back=1200)))
    assert "kept 1,200 training examples of its clients back as validation examples" in told.replace(
        "\n", " "
    )
