"""What the terminal shows of a run that goes on."""

from __future__ import annotations

from fedtailor.cli.output import RoundProgress


def row(number: int, sent: int, **more: object) -> dict[str, object]:
    return {
        "round": number,
        "clients": 2,
        "merged": 2,
        "refused": {},
        "bytes_down": sent,
        "bytes_up": sent,
        **more,
    }


def test_bytes_of_earlier_rounds_count_and_rounds_that_are_done_again_count_once(capsys):
    tiers = {"all": {"accuracy": 0.5, "loss": 1.0}}
    progress = RoundProgress("run", 4, earlier=[row(1, 1000), row(2, 2000), row(3, 4000)])
    progress(row(3, 4000))
    progress(row(4, 500, tiers=tiers))
    shown = capsys.readouterr()
    assert "round 4/4" in shown.err
    assert "15 kB" in shown.err
