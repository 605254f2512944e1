"""Generations on disk: whatever happens while one is written, the run has the old one or the new one."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import BROKEN, CHANGES, FULL, Disk, count_changes, failing_at, killed_at
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.errors import CorruptError, FedtailorError, StorageError
from fedtailor.messages import ServerState, Update
from fedtailor.methods.registry import get_method
from fedtailor.record import Best, Cohort, RoundRecord
from fedtailor.storage import generations
from fedtailor.storage.checkpoint import Checkpoint, decode_checkpoint, encode_checkpoint, settle
from fedtailor.storage.journal import CheckpointSettings, Journal
from helpers import bits, cnn_model, differing

MODEL = cnn_model()
CPU = torch.device("cpu")
MARK = {"seed": 1}
START = Checkpoint(settle(get_method("fedavg")().init(MODEL)))


def checkpoint_of(round: int) -> Checkpoint:
    """A state that differs from round to round, with every kind of memory in it."""
    weights = {name: value + round for name, value in START.state.weights.items()}
    memory = {"masks": [torch.tensor([True, False])], 3: (round, 0.5), "best": float("inf")}
    kept = {before: {"labels": torch.arange(before + 1)} for before in range(max(0, round - 2), round)}
    memories = {4: kept} if kept else {}
    return Checkpoint(ServerState(round, weights, memory), memories, Best(max(0, round - 1), 0.25, 1), {9: 2})


def record_of(round: int) -> RoundRecord:
    return RoundRecord(round, Cohort(asked=3), train_loss=1 / (round + 1), seconds=0.5)


def text(checkpoint: Checkpoint) -> bytes:
    return b"".join(encode_checkpoint(checkpoint))


# The state


def test_a_checkpoint_comes_back_bit_for_bit():
    before = checkpoint_of(3)
    after = decode_checkpoint(text(before))
    assert differing(after.state.weights, before.state.weights) == set()
    assert list(after.state.weights) == list(before.state.weights)
    assert after.state.round == 3
    assert after.state.memory[3] == (3, 0.5)
    assert after.state.memory["best"] == float("inf")
    assert bits(after.memories[4][2]["labels"]) == bits(before.memories[4][2]["labels"])
    assert (after.best, after.strikes) == (before.best, before.strikes)
    assert text(after) == text(before)


def test_a_checkpoint_of_another_version_is_refused():
    from fedtailor.storage.wire import encode

    with pytest.raises(CorruptError, match="another version"):
        decode_checkpoint(b"".join(encode({"round": 1})))


def test_client_memories_are_keyed_by_round_and_the_last_two_stay():
    """A server that was set back to round 2 must not hand out what a client kept in round 2 or later."""
    at = START
    for round in range(4):
        update = Update(
            7, round, round, Patch({}, Cut.everything()), 1.0, memory={"kept": torch.tensor(round)}
        )
        others = Update(8, round, round, Patch({}, Cut.everything()), 1.0)
        at = at.after(replace(at.state, round=round + 1), [update, others], None)
    assert {client: sorted(kept) for client, kept in at.memories.items()} == {7: [2, 3]}
    assert at.memory_of(7)[0] == 3
    assert int(at.memory_of(7)[1]["kept"]) == 3
    set_back = replace(at, state=replace(at.state, round=3))
    assert set_back.memory_of(7)[0] == 2
    assert replace(at, state=replace(at.state, round=1)).memory_of(7) == (-1, {})
    assert at.memory_of(8) == (-1, {})


def test_a_memory_that_cannot_be_saved_is_named_in_its_first_round():
    at = START
    with pytest.raises(FedtailorError, match=r"state.memory\['masks'\] is of type set"):
        at.after(replace(at.state, memory={"masks": {1}}), [], None)
    update = Update(1, 0, 0, Patch({}, Cut.everything()), 1.0, memory={"x": object()})  # type: ignore[dict-item]
    with pytest.raises(FedtailorError, match=r"update.memory\['x'\] is of type object"):
        at.after(at.state, [update], None)


def test_the_deepest_memory_that_is_accepted_can_be_saved():
    at = START

    def nested(depth: int) -> Any:
        return [nested(depth - 1)] if depth else 1

    accepted = 0
    for depth in range(40):
        update = Update(1, 0, 0, Patch({}, Cut.everything()), 1.0, memory={"x": nested(depth)})
        try:
            after = at.after(replace(at.state, memory={"x": nested(depth)}), [update], None)
        except FedtailorError:
            break
        accepted += 1
        assert text(decode_checkpoint(text(after))) == text(after)
    assert 20 < accepted < 40


# The folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run folder after three rounds, of which two generations are kept."""
    path = tmp_path / "run"
    with Journal.create(path, {"config.toml": "x = 1\n"}) as journal:
        journal.begin(MARK, CheckpointSettings(keep=2), checkpoint_of(0), CPU)
        for round in (1, 2, 3):
            journal.record(record_of(round), checkpoint_of(round))
    return path


def add_round(path: Path, round: int = 4) -> None:
    """What one round of a resumed run does to its folder."""
    with Journal.open(path) as journal:
        journal.begin(MARK, CheckpointSettings(keep=2), checkpoint_of(0), CPU, on_notice=lambda _: None)
        journal.record(record_of(round), checkpoint_of(round))


def newest(path: Path) -> int:
    """The round from which a run would go on; its state must be the state of that round."""
    with Journal.open(path) as journal:
        journal.begin(MARK, CheckpointSettings(keep=2), checkpoint_of(0), CPU, on_notice=lambda _: None)
        round = journal.at.state.round
        assert text(journal.at) == text(checkpoint_of(round))
        assert [record.round for record in journal.history] == list(range(1, round + 1))
    return round


def files(path: Path) -> dict[str, bytes]:
    """What a run has written and what does not depend on the clock."""
    skipped = ("events.jsonl", "run.lock", generations.SPARE)
    return {
        str(file.relative_to(path)): file.read_bytes()
        for file in path.rglob("*")
        if file.is_file() and file.name not in skipped
    }


def test_the_last_generations_and_the_best_one_are_kept(tmp_path):
    with Journal.create(tmp_path / "run", {}) as journal:
        journal.begin(MARK, CheckpointSettings(keep=3), checkpoint_of(0), CPU)
        for round in range(1, 9):
            best = Best(2 if round >= 2 else 1, 0.5)
            journal.record(record_of(round), replace(checkpoint_of(round), best=best))
        assert generations.saved_rounds(tmp_path / "run/checkpoints") == [2, 6, 7, 8]
        assert text(replace(checkpoint_of(2), best=Best(2, 0.5))) == text(
            replace(checkpoint_of(2), state=journal.state_of(2), best=Best(2, 0.5))
        )


def test_saving_every_few_rounds_also_saves_better_ones_and_the_end(tmp_path):
    with Journal.create(tmp_path / "run", {}) as journal:
        journal.begin(MARK, CheckpointSettings(every=4, keep=100), checkpoint_of(0), CPU)
        for round in range(1, 11):
            best = Best(3 if round >= 3 else 1, 0.5)
            journal.record(record_of(round), replace(checkpoint_of(round), best=best))
        journal.finish(checkpoint_of(10), lambda folder: None)
    assert generations.saved_rounds(tmp_path / "run/checkpoints") == [0, 1, 3, 4, 8, 10]


def test_rows_after_the_generation_are_cut_off(tmp_path):
    """Saved every third round: rounds 4 and 5 are done again, and stand in the metrics once."""
    settings = CheckpointSettings(every=3)
    with Journal.create(tmp_path / "run", {}) as journal:
        journal.begin(MARK, settings, replace(checkpoint_of(0), best=None), CPU)
        for round in range(1, 6):
            journal.record(record_of(round), replace(checkpoint_of(round), best=None))
    with Journal.open(tmp_path / "run") as journal:
        journal.begin(MARK, settings, checkpoint_of(0), CPU)
        assert journal.at.state.round == 3
        assert [record.round for record in journal.history] == [1, 2, 3]
        assert [record.seconds for record in journal.history] == [0.5] * 3
        for round in range(4, 7):
            journal.record(record_of(round), replace(checkpoint_of(round), best=None))
        assert [record.round for record in journal.folder.records()] == [1, 2, 3, 4, 5, 6]


# Crashes


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True], ids=["whole writes", "half writes"])
def test_every_crash_point_of_a_commit_leaves_the_old_or_the_new_round(folder, tmp_path, half):
    """SIGKILL right before each call that changes the disk, from opening the folder to removing what is not kept."""
    reference = tmp_path / "reference"
    shutil.copytree(folder, reference)
    points = count_changes(lambda: add_round(reference))
    seen = {3: 0, 4: 0}
    for point in range(1, points + 1):
        copy = tmp_path / f"copy{point}"
        shutil.copytree(folder, copy)
        assert killed_at(point, lambda copy=copy: add_round(copy), half=half)
        round = newest(copy)
        seen[round] += 1
        if round == 3:
            add_round(copy)
        assert files(copy) == files(reference)
    assert not killed_at(points + 1, lambda: add_round(folder))
    assert points >= 15
    assert seen[3] > 0
    assert seen[4] > 0


@pytest.mark.slow
def test_every_crash_point_of_a_new_run_leaves_no_folder_or_a_whole_one(tmp_path):
    def start(path: Path) -> None:
        with Journal.create(path, {"config.toml": "x = 1\n"}) as journal:
            journal.begin(MARK, CheckpointSettings(), checkpoint_of(0), CPU)

    points = count_changes(lambda: start(tmp_path / "reference"))
    seen = set()
    for point in range(1, points + 1):
        path = tmp_path / f"runs{point}" / "run"
        assert killed_at(point, lambda path=path: start(path))
        seen.add(path.exists())
        if path.exists():
            assert newest(path) == 0
        else:
            start(path)
        assert files(path) == files(tmp_path / "reference")
    assert seen == {True, False}


STRACED = """
    import sys
    from pathlib import Path
    from fedtailor.storage import generations
    folder = Path(sys.argv[1])
    found = generations.newest(folder).generation
    header = {"round": 4, "parent_round": found.round, "parent": found.digest}
    generations.save(folder, header, [bytes(10_000), b"end"])
    generations.prune(folder, 4, 2, None)
"""


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_every_crash_point_under_strace(tmp_path):
    """The same without any help of Python: the kernel kills the process at its k-th call on the folder's files."""
    start = tmp_path / "start"
    start.mkdir()
    parent: tuple[int | None, str] = (None, "")
    for round in (1, 2, 3):
        header = {"round": round, "parent_round": parent[0], "parent": parent[1]}
        parent = (round, generations.save(start, header, [bytes(9_000)]))
        generations.prune(start, round, 2, None)
    calls = "openat,write,fsync,ftruncate,rename,renameat,renameat2,unlink"

    def run(folder: Path, *options: str) -> int:
        watched = [
            part
            for name in ("", *sorted(os.listdir(start)), "00000004.checkpoint")
            for part in ("-P", str(folder / name))
        ]
        command = [
            "strace",
            "-f",
            "-qq",
            "-o",
            str(tmp_path / "log"),
            "-e",
            f"trace={calls}",
            *watched,
            *options,
        ]
        program = [sys.executable, "-S", "-c", textwrap.dedent(STRACED), str(folder)]
        source = str(Path(generations.__file__).parents[2])
        return subprocess.run(
            [*command, *program], env={**os.environ, "PYTHONPATH": source}, check=False
        ).returncode

    if run(shutil.copytree(start, tmp_path / "whole")) != 0:
        pytest.skip("strace may not trace here")
    log = [line.split(" ", 1)[1].lstrip() for line in (tmp_path / "log").read_text().splitlines()]
    outcomes: dict[str, list[int]] = {}
    for name in calls.split(","):
        for number in range(1, sum(line.startswith(f"{name}(") for line in log) + 1):
            folder = shutil.copytree(start, tmp_path / f"{name}{number}")
            status = run(folder, "-e", f"inject={name}:signal=SIGKILL:when={number}")
            assert status in (-signal.SIGKILL, 128 + signal.SIGKILL), (name, number, status)
            found = generations.newest(folder)
            assert found.refused == ()
            outcomes.setdefault(name, []).append(found.generation.round)
    rounds = [round for each in outcomes.values() for round in each]
    assert set(rounds) == {3, 4}
    assert len(rounds) >= 8


@pytest.mark.slow
def test_every_power_cut_leaves_the_old_or_the_new_round(folder, tmp_path):
    """Only what was synced is sure: names and contents that were not may be old, new or in between."""
    start = shutil.copytree(folder, tmp_path / "start")
    disk = Disk(folder)
    with disk.recording():
        add_round(folder)
    seen = {3: 0, 4: 0}
    for label, build in disk.states(start):
        copy = tmp_path / "cut"
        build(copy)
        try:
            round = newest(copy)
        except CorruptError as error:
            pytest.fail(f"{label}: {error}")
        seen[round] += 1
        if round == 3:
            add_round(copy)
        assert files(copy).keys() >= files(folder).keys(), label
        shutil.rmtree(copy)
    assert seen[3] > 20
    assert seen[4] > 5


# Damage


def damaged(path: Path, change: Callable[[bytearray], None]) -> None:
    data = bytearray(path.read_bytes())
    change(data)
    path.write_bytes(data)


def test_five_thousand_bit_flips_and_all_truncations_are_found(folder):
    checkpoints = folder / "checkpoints"
    place = generations.place_of(checkpoints, 3)
    good = place.read_bytes()
    draw = random.Random(6)
    changes: list[bytes] = [good[:length] for length in range(len(good))]
    for _ in range(5000):
        flipped = bytearray(good)
        flipped[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        changes.append(bytes(flipped))
    for data in changes:
        place.write_bytes(data)
        found = generations.newest(checkpoints)
        assert found.generation.round == 2
        assert len(found.refused) == 1
        assert place.name in found.refused[0]
    place.write_bytes(good)
    assert generations.newest(checkpoints).generation.round == 3


def test_a_damaged_generation_is_said_and_the_run_goes_on_from_the_one_before(folder):
    damaged(
        generations.place_of(folder / "checkpoints", 3), lambda data: data.__setitem__(900, data[900] ^ 1)
    )
    notices: list[str] = []
    with Journal.open(folder) as journal:
        journal.begin(MARK, CheckpointSettings(), checkpoint_of(0), CPU, on_notice=notices.append)
        assert journal.at.state.round == 2
        assert [record.round for record in journal.history] == [1, 2]
        event = journal.folder.events()[-1]
    assert notices == ["00000003.checkpoint is damaged: its checksum does not match; going on from round 2"]
    assert (event["event"], event["round"], len(event["refused"])) == ("resumed", 2, 1)


def test_if_nothing_can_be_trusted_the_run_refuses(folder):
    before = None
    for round in generations.saved_rounds(folder / "checkpoints"):
        damaged(generations.place_of(folder / "checkpoints", round), lambda data: data.__delitem__(-1))
    before = files(folder)
    with pytest.raises(CorruptError, match="no checkpoint that can be trusted") as caught:
        Journal.open(folder)
    assert caught.value.exit_code == 65
    assert files(folder) == before
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(CorruptError, match="there is none"):
        Journal.open(folder)


def swap(folder: Path) -> None:
    second, third = (generations.place_of(folder, round) for round in (2, 3))
    second.rename(folder / "x")
    third.rename(second)
    (folder / "x").rename(third)


def of_another_run(folder: Path) -> None:
    other = folder.parent.parent / "other"
    with Journal.create(other, {}) as journal:
        journal.begin({"seed": 2}, CheckpointSettings(), checkpoint_of(0), CPU)
        for round in (1, 2, 3):
            journal.record(record_of(round), checkpoint_of(round))
    shutil.copy(generations.place_of(other / "checkpoints", 3), folder)


@pytest.mark.parametrize(
    ("change", "words", "left"),
    [
        (lambda folder: generations.place_of(folder, 3).write_bytes(b""), "not a whole checkpoint", 2),
        (
            lambda folder: generations.place_of(folder, 3).write_bytes(bytes(5000)),
            "not a whole checkpoint",
            2,
        ),
        (
            lambda folder: shutil.copy(generations.place_of(folder, 3), generations.place_of(folder, 9)),
            "holds round 3",
            3,
        ),
        (
            lambda folder: generations.place_of(folder, 3).rename(generations.place_of(folder, 4)),
            "holds round 3",
            2,
        ),
        (lambda folder: generations.place_of(folder, 9).mkdir(), "cannot be read", 3),
        (lambda folder: (folder / "00000009.checkpoint.part").write_bytes(b"half"), "", 3),
        (lambda folder: (folder / "notes.txt").write_text("mine"), "", 3),
        (lambda folder: (folder / "x.checkpoint").write_text("mine"), "", 3),
        (of_another_run, "does not follow from", 2),
    ],
)
def test_exchanged_renamed_empty_and_stray_files(folder, change, words, left):
    change(folder / "checkpoints")
    found = generations.newest(folder / "checkpoints")
    assert found.generation.round == left
    assert words in "; ".join(found.refused)
    assert bool(found.refused) == bool(words)


def test_swapped_generations_leave_nothing_to_trust(folder):
    swap(folder / "checkpoints")
    with pytest.raises(CorruptError, match="holds round 2.*holds round 3"):
        generations.newest(folder / "checkpoints")


@pytest.mark.parametrize("line", [0, 1, 2])
def test_damaged_metrics_are_found_and_an_older_generation_is_taken_if_it_is_not_concerned(folder, line):
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    lines[line] = lines[line].replace(b"clients", b"cliemts")
    path.write_bytes(b"".join(lines))
    if line < 2:
        with pytest.raises(CorruptError, match="metrics.jsonl is damaged"):
            Journal.open(folder)
    else:
        assert newest(folder) == 2


# Disks


@pytest.mark.parametrize("code", [FULL, BROKEN], ids=["full", "broken"])
@pytest.mark.parametrize("call", ["write", "fsync", "replace", "open"])
def test_an_error_of_the_disk_at_any_moment_loses_nothing(folder, tmp_path, call, code):
    reference = shutil.copytree(folder, tmp_path / "reference")
    points = count_changes(lambda: add_round(reference), (call,))
    assert points >= 2
    for point in range(1, points + 1):
        copy = shutil.copytree(folder, tmp_path / f"copy{point}")
        with failing_at(point, (call,), code), pytest.raises(StorageError) as caught:
            add_round(copy)
        assert caught.value.exit_code == 74
        assert str(copy) in str(caught.value)
        if code == FULL:
            assert "No space left on device" in str(caught.value)
        round = newest(copy)
        assert round in (3, 4)
        if round == 3:
            add_round(copy)
        assert files(copy) == files(reference)


def test_a_sync_that_failed_is_not_tried_again_on_the_same_file(folder):
    with failing_at(2, ("fsync",), BROKEN), pytest.raises(StorageError):
        add_round(folder)
    assert not list((folder / "checkpoints").glob("*.part"))


def test_the_room_of_a_generation_that_is_given_up_is_used_again(folder):
    """A disk that is full after the first rounds is no reason to stop."""
    inode = (folder / "checkpoints" / generations.SPARE).stat().st_ino
    with Journal.open(folder) as journal:
        journal.begin(MARK, CheckpointSettings(keep=2), checkpoint_of(0), CPU)
        journal.record(record_of(4), checkpoint_of(4))
        inode = (folder / "checkpoints" / generations.SPARE).stat().st_ino
        journal.record(record_of(5), checkpoint_of(5))
    assert generations.place_of(folder / "checkpoints", 5).stat().st_ino == inode


def test_no_room_for_a_new_run_leaves_nothing_behind(tmp_path):
    def start(path: Path) -> None:
        with Journal.create(path, {"config.toml": "x = 1\n"}) as journal:
            journal.begin(MARK, CheckpointSettings(), checkpoint_of(0), CPU)

    points = count_changes(lambda: start(tmp_path / "reference"), ("write",))
    for point in range(1, points):  # the last one is the first event, when the folder is there
        parent = tmp_path / f"runs{point}"
        with failing_at(point, ("write",), FULL), pytest.raises(StorageError):
            start(parent / "run")
        assert list(parent.iterdir()) == []


def test_the_calls_that_are_watched_are_all_that_change_the_disk():
    """If storage used another call, crash points would be missed."""
    here = Path(generations.__file__)
    source = "".join(
        here.with_name(f"{name}.py").read_text() for name in ("files", "generations", "new_folder", "sheets")
    )
    used = {word.split("(")[0] for word in source.split("os.")[1:]}
    harmless = {"close", "read", "fstat", "name", "strerror", "lseek"}
    constants = {
        name for name in used if name[:2] == "O_" or not name.isidentifier() or name.startswith("SEEK")
    }
    assert {name for name in used if name in dir(os) and name not in harmless | constants} <= set(CHANGES)
