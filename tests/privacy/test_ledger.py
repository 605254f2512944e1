"""The ledger: paid before released, the same release once, another one again; and no crash that cheats it."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedtailor.config import RunConfig, make_config
from fedtailor.engines import in_process
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.messages import Refused
from fedtailor.privacy import guard, ledger
from fedtailor.privacy.guard import Guard
from fedtailor.privacy.ledger import KEY, LEDGER, Ledger
from fedtailor.privacy.settings import PrivacySettings
from fedtailor.privacy.terms import Terms
from fedtailor.run.interface import resume, run_config
from fedtailor.storage.journal import Journal
from fedtailor.storage.run_folder import RunFolder
from helpers import differing, final_weights

ROUNDS = 4


def terms(noise: float = 1.0) -> Terms:
    return Terms.of(
        PrivacySettings(clip=1.0, noise=noise, sampling="known"), ["one", "two"], (3, 3), 6, ROUNDS
    )


def test_the_same_release_is_paid_for_once_and_another_one_again(tmp_path):
    first = Ledger(terms(), 0, tmp_path)
    mark = first.pay(0, b"sums")
    again = Ledger(terms(), 0, tmp_path)
    assert again.pay(0, b"sums") == mark
    assert again.key_for(f"noise {mark}") == first.key_for(f"noise {mark}")
    assert len(again.spendings) == 1
    assert again.pay(0, b"other sums") != mark
    assert again.pay(1, b"sums") != mark
    assert len((tmp_path / LEDGER).read_text().splitlines()) == 3
    assert again.epsilons()["one"] == pytest.approx(terms().epsilons(3)["one"])


def test_the_key_is_private_random_and_gone_at_the_end(tmp_path):
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        Ledger(terms(), 0, folder)
        assert (folder / KEY).stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "a" / KEY).read_bytes() != (tmp_path / "b" / KEY).read_bytes()
    Ledger(terms(), 0, tmp_path / "a").close()
    assert not (tmp_path / "a" / KEY).exists()


def test_a_lost_key_makes_repeated_rounds_count_again(tmp_path):
    Ledger(terms(), 0, tmp_path).pay(0, b"sums")
    (tmp_path / KEY).unlink()
    after = Ledger(terms(), 0, tmp_path)
    after.pay(0, b"sums")
    assert len(after.spendings) == 2


def test_a_line_that_a_crash_cut_short_counts(tmp_path):
    before = Ledger(terms(), 0, tmp_path)
    before.pay(0, b"sums")
    whole = (tmp_path / LEDGER).read_bytes()
    (tmp_path / LEDGER).write_bytes(whole + whole[:20])
    after = Ledger(terms(), 0, tmp_path)
    assert len(after.spendings) == 2
    after.pay(1, b"more")
    assert [each["release"] for each in map(json.loads, (tmp_path / LEDGER).read_text().splitlines())] == [
        0,
        1,
        2,
    ]


def test_a_ledger_that_lacks_something_is_refused(tmp_path):
    book = Ledger(terms(), 0, tmp_path)
    for round in range(3):
        book.pay(round, b"sums")
    lines = (tmp_path / LEDGER).read_bytes().splitlines(keepends=True)
    (tmp_path / LEDGER).write_bytes(lines[0] + lines[2])
    with pytest.raises(CorruptError, match=r"line 2: expected release 1; what was spent is unknown"):
        Ledger(terms(), 0, tmp_path)
    (tmp_path / LEDGER).write_bytes(lines[0] + lines[1])
    with pytest.raises(CorruptError, match="round 3 was released and is not in it"):
        Ledger(terms(), 0, tmp_path).check_covers(3)


def test_nothing_is_paid_beyond_the_limit(tmp_path):
    limit = terms().epsilons(2)["one"]
    book = Ledger(terms(), limit, tmp_path)
    book.pay(0, b"sums")
    book.pay(0, b"other answers")
    with pytest.raises(
        FedtailorError, match=r"is used up: 2 releases are paid for.*The model is that of round 1"
    ):
        book.pay(1, b"sums")
    assert len((tmp_path / LEDGER).read_text().splitlines()) == 2
    book.pay(0, b"sums")  # was paid for


def config(**privacy: Any) -> RunConfig:
    return make_config(
        {
            "rounds": ROUNDS, "clients_per_round": 4, "evaluate_every": ROUNDS,
            "data": {"dataset": "digits", "clients": 6, "partition": "iid"},
            "model": {"name": "mlp", "hidden": [8]},
            "fleet": {"name": "uniform-2"},
            "method": {"name": "heterofl"},
            "engine": {"workers": 0},
            "checkpoint": {"every": 2},
            "privacy": {"clip": 1.0, "noise": 2.0, "sampling": "known", "seeded": True, **privacy},
        }
    )  # fmt: skip


def test_a_run_leaves_its_ledger_and_not_its_key(tmp_path):
    run = run_config(config(seeded=False), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / LEDGER).read_text().splitlines()]
    assert [row["round"] for row in rows] == list(range(ROUNDS))
    assert not (tmp_path / "run" / KEY).exists()
    spent = run.setup.terms.epsilons(ROUNDS)["1"]
    assert RunFolder(tmp_path / "run").records()[-1].privacy["epsilon"]["1"] == pytest.approx(spent, abs=1e-6)


# Kills: a child process counts the points below as it passes them, and ends itself without a warning at one of them.

POINTS: list[tuple[Any, str]] = [
    (ledger, "append_file"),
    (ledger, "sync_file"),
    (guard, "normal"),
    (guard, "released"),
    (Journal, "record"),
    (Journal, "save"),
]


def _killing(at: int) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    passed = 0

    def tick() -> None:
        nonlocal passed
        passed += 1
        if passed == at:
            os.kill(os.getpid(), signal.SIGKILL)

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **words: Any) -> Any:
            tick()
            result = function(*args, **words)
            tick()
            return result

        return watched

    return wrapped


def _logged(release: Callable[..., Any], log: Path) -> Callable[..., Any]:
    """Every release that anyone could see, in the order in which they came about."""

    def watched(self: Guard, state: Any, tasks: Any, updates: Any) -> Any:
        told = release(self, state, tasks, updates)
        digest = hashlib.sha256()
        for update in told:
            for name in sorted(update.patch.values):
                digest.update(update.patch.values[name].numpy().tobytes())
        with log.open("a") as file:
            file.write(f"{state.round} {digest.hexdigest()}\n")
            file.flush()
            os.fsync(file.fileno())
        return told

    return watched


def _child(folder: Path, at: int, silent: int | None) -> None:
    """Start the run or go on with it; die at point ``at``; client ``silent`` does not answer."""
    Guard.release = _logged(Guard.release, folder.with_suffix(".log"))  # type: ignore[method-assign]
    watch = _killing(at)
    for place, name in POINTS:
        setattr(place, name, watch(getattr(place, name)))
    answers = in_process.answers_to

    def without(tasks: Any, *others: Any) -> Any:
        (task,) = tasks
        lost = task.client.id == silent
        return [Refused(silent, task.round, "no-answer")] if lost else answers(tasks, *others)

    in_process.answers_to = without
    resume(folder) if folder.exists() else run_config(config(), folder)


def in_a_child(folder: Path, at: int = 0, silent: int | None = None) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=_child, args=(folder, at, silent))
    child.start()
    child.join()
    return child.exitcode


@pytest.mark.slow
def test_no_kill_makes_a_release_that_was_not_paid_for(tmp_path):
    """Twenty kills at twenty points; every second run goes on with other answers than before."""
    undisturbed = tmp_path / "undisturbed"
    assert in_a_child(undisturbed) == 0
    killed = 0
    for number in range(20):
        folder, other = tmp_path / f"run{number}", number % 2 == 1
        at = 2 + number * 4
        killed += in_a_child(folder, at) == -signal.SIGKILL
        assert in_a_child(folder, silent=0 if other else None) == 0
        rows = [json.loads(line) for line in (folder / LEDGER).read_text().splitlines()]
        seen = {tuple(line.split()) for line in folder.with_suffix(".log").read_text().splitlines()}
        for round in range(ROUNDS):
            paid = sum(row["round"] == round for row in rows)
            assert paid >= len({digest for at, digest in seen if int(at) == round}) >= 1, (number, round)
        total = replace(terms_of(folder), asked=4).epsilons(len(rows))["1"]
        assert RunFolder(folder).records()[-1].privacy["epsilon"]["1"] == pytest.approx(total, abs=1e-6)
        if not other:
            assert differing(final_weights(folder), final_weights(undisturbed)) == set()
            assert len(rows) == ROUNDS
    assert killed == 20


def terms_of(folder: Path) -> Terms:
    row = json.loads((folder / LEDGER).read_text().splitlines()[0])
    counts = (row["clients"], 0)
    settings = PrivacySettings(clip=1.0, noise=2.0, sampling="known")
    return Terms.of(settings, list(row["multipliers"]), counts, row["asked"], ROUNDS)
