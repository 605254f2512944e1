"""What the terminal shows of a run that goes on."""

from __future__ import annotations

from fedtailor.cli.output import RoundProgress
from fedtailor.record import Cohort, RoundRecord, Spent, Tiers


def record(number: int, sent: int, tiers: Tiers | None = None) -> RoundRecord:
    measuring = Spent(bytes_down=sent // 2)
    return RoundRecord(number, Cohort(2, 2), Spent(sent, sent // 2), measuring, tiers=tiers)


def test_bytes_of_earlier_rounds_count_and_rounds_that_are_done_again_count_once(capsys):
    tiers = {"all": {"accuracy": 0.5, "loss": 1.0}}
    progress = RoundProgress("run", 4, earlier=[record(1, 1000), record(2, 2000), record(3, 4000)])
    progress(record(3, 4000))
    progress(record(4, 500, tiers))
    shown = capsys.readouterr()
    assert "round 4/4" in shown.err
    assert "15 kB" in shown.err
