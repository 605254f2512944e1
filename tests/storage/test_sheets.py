"""Clients' memories on disk: written once per change, given up when superseded, found again or refused."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from faults import count_changes, killed_at, watched
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.errors import CorruptError
from fedtailor.messages import ServerState, Update
from fedtailor.record import Best, Cohort, RoundRecord
from fedtailor.storage import generations, saved, sheets
from fedtailor.storage.checkpoint import Checkpoint, encode_checkpoint
from fedtailor.storage.journal import CheckpointSettings, Journal
from fedtailor.storage.sheets import LOOKED_AT, Span

CPU = torch.device("cpu")
START = Checkpoint(ServerState(0, {"w": torch.zeros(3)}, {}))
VALUES = 25  # of one memory


def after(at: Checkpoint, clients: Any, best: int | None = None) -> Checkpoint:
    """The end of a round in which these clients kept something."""
    round = at.state.round
    kept = [torch.full((VALUES,), float(1000 * client + round)) for client in clients]
    updates = [
        Update(client, round, 1, Patch({}, Cut.everything()), 1.0, memory={"kept": value})
        for client, value in zip(clients, kept, strict=True)
    ]
    return at.after(replace(at.state, round=round + 1), updates, best and Best(best, 0.5))


def record(journal: Journal, at: Checkpoint) -> None:
    journal.record(RoundRecord(at.state.round, Cohort(asked=3), train_loss=1.0, seconds=0.5), at)


def begun(journal: Journal, **settings: int) -> Journal:
    journal.begin({}, CheckpointSettings(**settings), START, CPU, on_notice=lambda _: None)
    return journal


def text(at: Checkpoint) -> bytes:
    return b"".join(encode_checkpoint(at))


def sheet_rounds(folder: Path) -> list[int]:
    return generations.saved_rounds(folder / "memories", sheets.SUFFIX)


def sheet(folder: Path, round: int) -> Path:
    return generations.place_of(folder / "memories", round, sheets.SUFFIX)


def flip(path: Path, place: int = -40) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def cohorts(rounds: int, population: int = 9, size: int = 3) -> list[list[int]]:
    """Who takes part in each round; one client does so in the first alone."""
    draw = random.Random(3)
    found = [sorted(draw.sample(range(population), size)) for _ in range(rounds)]
    return [[*found[0], population], *found[1:]]


def written_by(folder: Path, population: int) -> int:
    """Bytes that a round of three clients writes after so many were seen."""
    sizes: list[int] = []
    with begun(Journal.create(folder, {})) as journal:
        at = after(START, range(population))
        record(journal, at)

        def note(_count: int, _name: str, arguments: tuple[Any, ...]) -> None:
            sizes.append(memoryview(arguments[1]).nbytes)

        with watched(note, ("write",)):
            record(journal, after(at, [1, 5, 9]))
    return sum(sizes)


def test_what_a_round_writes_depends_on_its_clients_and_not_on_all_that_were_ever_seen(tmp_path):
    few, many = (written_by(tmp_path / str(count), count) for count in (10, 1000))
    assert many < few + 100  # digits of sizes
    assert many < 12_000


def test_memories_come_back_bit_for_bit_and_superseded_ones_are_given_up(tmp_path):
    folder, at = tmp_path / "run", START
    begun(Journal.create(folder, {})).close()
    for round, clients in enumerate(cohorts(18), 1):
        at = after(at, clients)
        with begun(Journal.open(folder)) as journal:
            record(journal, at)
        end, kept = saved.restored(folder, saved.newest(folder).generation, CPU)
        assert text(end) == text(at)
        written = sum(len(page) for _, page in kept.pages) - kept.skipped
        assert written <= 2 * sum(map(len, at.memories.values())) + 3
        assert len(kept.pages[-1][1]) <= (1 + LOOKED_AT) * 3
        assert len(sheet_rounds(folder)) <= len(kept.pages) + 2, round
    assert kept.pages[0][0] > 3
    assert list(at.memories[9]) == [0]  # it has moved


def test_a_run_that_is_never_closed_leaves_the_same_files(tmp_path):
    """Which memories move on depends on what is saved, not on who saved it."""
    folder, at = tmp_path / "run", START
    begun(Journal.create(folder, {})).close()
    with begun(Journal.create(tmp_path / "whole", {})) as whole:
        for clients in cohorts(12):
            at = after(at, clients)
            record(whole, at)
            with begun(Journal.open(folder)) as journal:
                record(journal, at)
    names = sheet_rounds(folder)
    assert names == sheet_rounds(tmp_path / "whole")
    assert all(sheet(folder, n).read_bytes() == sheet(tmp_path / "whole", n).read_bytes() for n in names)


def test_rounds_that_are_not_saved_and_rounds_in_which_nobody_keeps_anything(tmp_path):
    at, folder = START, tmp_path / "run"
    with begun(Journal.create(folder, {}), every=3) as journal:
        for clients in ([1, 2], [1], [1], [], [], [], [2]):
            at = after(at, clients)
            record(journal, at)
        journal.save(at)
    assert sheet_rounds(folder) == [3, 7]
    assert text(saved.read_end(folder, CPU)[0]) == text(at)


def test_the_best_round_keeps_the_memories_that_it_needs(tmp_path):
    """It is what a run goes on from if all that came later is damaged."""
    folder, at, states = tmp_path / "run", START, {}
    with begun(Journal.create(folder, {}), keep=2) as journal:
        for clients in cohorts(16):
            at = after(at, clients, best=4 if at.state.round >= 3 else None)
            states[at.state.round] = at
            record(journal, at)
    for round in (15, 16):
        flip(generations.place_of(folder / "checkpoints", round))
    with begun(Journal.open(folder)) as journal:
        assert text(journal.at) == text(states[4])
        assert max(sheet_rounds(folder)) == 4
        for round in range(5, 17):
            record(journal, states[round])
    assert text(saved.read_end(folder, CPU)[0]) == text(at)


# Damage


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of eight rounds whose last sheet took over an old memory."""
    path, at = tmp_path / "run", START
    with begun(Journal.create(path, {})) as journal:
        for round in range(8):
            at = after(at, [4, 5] if round == 0 else [4])
            record(journal, at)
    return path


def test_a_damaged_sheet_leads_to_the_older_checkpoint(folder):
    expected = text(saved.restored(folder, generations.load(folder / "checkpoints", 7), CPU)[0])
    flip(sheet(folder, 8))
    found = saved.newest(folder)
    assert found.generation.round == 7
    assert found.refused == ("00000008.sheet is damaged: its checksum does not match",)
    assert text(saved.read_end(folder, CPU)[0]) == expected


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (flip, "00000007.sheet is damaged"),
        (Path.unlink, "00000007.sheet cannot be read: No such file"),
        (lambda path: path.write_bytes(b""), "00000007.sheet is not a whole sheet"),
        (lambda path: shutil.copy(path.with_name("00000008.sheet"), path), "00000007.sheet holds round 8"),
    ],
)
def test_a_sheet_that_every_checkpoint_needs_is_a_reason_to_refuse(folder, change, words):
    change(sheet(folder, 7))
    before = sorted(folder.rglob("*"))
    with pytest.raises(CorruptError, match=f"no checkpoint that can be trusted.*{words}") as caught:
        Journal.open(folder)
    assert caught.value.exit_code == 65
    assert sorted(folder.rglob("*")) == before


def test_a_sheet_of_another_run_is_refused(folder, tmp_path):
    other, at = tmp_path / "other", START
    with begun(Journal.create(other, {})) as journal:
        for _ in range(8):
            at = after(at, [6])
            record(journal, at)
    shutil.copy(sheet(other, 8), sheet(folder, 8))
    found = saved.newest(folder)
    assert found.generation.round == 7
    assert found.refused == ("00000008.sheet is not the one that the checkpoint was saved with",)


@pytest.mark.parametrize(
    "memories",
    [
        [],
        {"first": 1},
        {"first": -1, "skipped": 0, "last": 1, "digest": ""},
        {"first": 0, "skipped": True, "last": 1, "digest": ""},
        {"first": 0, "skipped": 0, "last": 1, "digest": 5},
    ],
)
def test_a_header_that_names_no_memories_is_refused(memories):
    with pytest.raises(CorruptError, match="names no memories of clients"):
        Span.named_in({"round": 3, "memories": memories})


def test_spans_that_lead_nowhere_are_refused(folder):
    span = Span.named_in(generations.load(folder / "checkpoints", 8).header)
    assert span is not None
    for wrong in (replace(span, first=0), replace(span, skipped=99)):
        with pytest.raises(CorruptError, match="cannot be read|fewer memories"):
            sheets.read(folder / "memories", wrong, CPU)


# Older folders


def test_a_folder_of_the_first_version_goes_on_and_its_memories_are_written_once(folder, tmp_path):
    """There checkpoints hold what clients keep."""
    generation = generations.load(folder / "checkpoints", 8)
    at = saved.restored(folder, generation, CPU)[0]
    shutil.rmtree(folder / "memories")
    header = {key: value for key, value in generation.header.items() if key not in ("size", "memories")}
    place = generations.place_of(folder / "checkpoints", 8)
    generations.save(folder / "checkpoints", header, encode_checkpoint(at))
    data = place.read_bytes()[: -generations.DIGEST].replace(generations.MAGIC, b"fedtgen\x01", 1)
    place.write_bytes(data + generations._digest([data]))
    with begun(Journal.open(folder)) as journal:
        assert text(journal.at) == text(at)
        record(journal, after(at, [4]))
    kept = saved.restored(folder, saved.newest(folder).generation, CPU)[1]
    assert kept.pages == ((9, ((4, 7), (4, 8), (5, 0))),)
    assert text(saved.read_end(folder, CPU)[0]) == text(after(at, [4]))


# Crashes


@pytest.mark.slow
@pytest.mark.parametrize("half", [False, True])
def test_every_crash_point_of_a_round_that_moves_memories(tmp_path, half):
    """SIGKILL right before each change of the disk; the round is done again and leaves the same files."""

    def go_on(path: Path) -> None:
        with begun(Journal.open(path)) as journal:
            if journal.at.state.round < 11:
                record(journal, after(journal.at, [4]))

    def files(path: Path) -> dict[str, bytes]:
        skipped = ("events.jsonl", "run.lock", generations.SPARE)
        found = (file for file in path.rglob("*") if file.is_file() and file.name not in skipped)
        return {str(file.relative_to(path)): file.read_bytes() for file in found}

    path, at = tmp_path / "run", START
    with begun(Journal.create(path, {})) as journal:
        for round in range(10):
            at = after(at, [4, 5] if round == 0 else [4])
            record(journal, at)
    reference = shutil.copytree(path, tmp_path / "reference")
    points = count_changes(lambda: go_on(reference))
    assert min(sheet_rounds(reference)) > min(sheet_rounds(path))
    for point in range(1, points + 1):
        copy = shutil.copytree(path, tmp_path / f"copy{point}")
        assert killed_at(point, lambda copy=copy: go_on(copy), half=half)
        go_on(copy)
        assert files(copy) == files(reference), point
    assert points > 15
