"""``fedtailor resume`` on a folder that was damaged: the same bits, or the documented code and one sentence."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import call, small_config
from fedtailor.config import load_config
from fedtailor.run.interface import run_config
from fedtailor.storage.run_folder import CHECKPOINTS, COVERAGE, EVENTS, METRICS, WEIGHTS

ROUNDS = 4
FLIPS = 24


class Cut(BaseException):
    """The end of a run in its middle."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> tuple[Path, Path]:
    """A run of four rounds whose clients keep something, and the same run cut off after three."""
    place = tmp_path_factory.mktemp("runs")
    config = load_config(small_config(place, rounds=ROUNDS), ["checkpoint.keep=3", "method.name=flado"])

    def stop(record):
        if record.round == ROUNDS - 1:
            raise Cut

    run_config(config, place / "whole", on_notice=lambda _: None)
    with pytest.raises(Cut):
        run_config(config, place / "cut", stop, on_notice=lambda _: None)
    return place / "whole", place / "cut"


def same_result(one: Path, other: Path) -> bool:
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in (METRICS, WEIGHTS))


TAILS = {
    "torn": b'{"round": 4, "cli',
    "NUL": b"\0" * 40 + b"\n",
    "NUL without an end": b"\0" * 4096,
    "no text": b"\xff\xfe\x80\n",
    "no row": b"[1, 2]\n",
    "a row without a round": b'{"clients": 3}\n',
    "deep": b"[" * 100_000 + b"\n",
    "number": b'{"round": 1e999}\n',
}
FAST = ((METRICS, "torn"), (METRICS, "NUL"), (COVERAGE, "a row without a round"))


@pytest.mark.parametrize(
    ("name", "tail"),
    [
        pytest.param(name, tail, marks=() if (name, tail) in FAST else pytest.mark.slow)
        for name in (METRICS, COVERAGE, EVENTS)
        for tail in TAILS
    ],
)
def test_what_stands_after_the_last_checkpoint_is_cut_off(name, tail, folders, tmp_path, monkeypatch):
    whole, cut = folders
    folder = tmp_path / "run"
    shutil.copytree(cut, folder)
    with (folder / name).open("ab") as file:
        file.write(TAILS[tail])
    assert call(monkeypatch, "resume", str(folder)) == 0
    assert same_result(whole, folder)


def test_rows_that_are_damaged_before_every_checkpoint_are_refused_with_65(
    folders, tmp_path, monkeypatch, capfd
):
    folder = tmp_path / "run"
    shutil.copytree(folders[1], folder)
    data = bytearray((folder / METRICS).read_bytes())
    data[3] ^= 1
    (folder / METRICS).write_bytes(data)
    for older in sorted((folder / CHECKPOINTS).glob("00000000*")):
        older.unlink()
    assert call(monkeypatch, "resume", str(folder)) == 65
    told = capfd.readouterr().err
    assert "has no checkpoint that can be trusted" in told
    assert "Traceback" not in told


def test_a_report_of_damaged_rows_is_one_sentence_with_65(folders, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "run"
    shutil.copytree(folders[1], folder)
    (folder / METRICS).write_bytes(b'{"round": 1}\n\0\0\0\n')
    assert call(monkeypatch, "report", str(folder), "-o", str(tmp_path / "r.md")) == 65
    told = capfd.readouterr().err
    assert f"{METRICS} is damaged: line 2" in told.replace("\n", "")
    assert "Traceback" not in told


def flipped(place: Path, file: Path, number: int) -> None:
    """One bit of a file is another, each time elsewhere."""
    data = bytearray(file.read_bytes())
    generator = np.random.default_rng([number, len(data), sum(file.name.encode())])
    data[int(generator.integers(len(data)))] ^= 1 << int(generator.integers(8))
    file.write_bytes(data)


@pytest.mark.slow
def test_single_bit_flips_in_every_file_are_recovered_or_refused(folders, tmp_path, monkeypatch, capfd):
    whole, cut = folders
    files = [
        path.relative_to(cut) for path in sorted(cut.rglob("*")) if path.is_file() and path.stat().st_size
    ]
    counted: dict[str, dict[str, int]] = {}
    for name in files:
        counts = counted.setdefault(str(name), {"recovered": 0, "refused": 0})
        for number in range(FLIPS):
            folder = tmp_path / "run"
            shutil.copytree(cut, folder)
            flipped(cut, folder / name, number)
            code = call(monkeypatch, "resume", str(folder))
            told = capfd.readouterr()
            assert "Traceback" not in told.err, (name, number, told.err)
            if code == 0:
                assert same_result(whole, folder), (name, number)
            else:
                assert code in (2, 65), (name, number, code)
                assert told.err.count("error:") == 1
            counts["recovered" if code == 0 else "refused"] += 1
            shutil.rmtree(folder)
    print(json.dumps(counted, indent=2))
    assert all(sum(each.values()) == FLIPS for each in counted.values())
