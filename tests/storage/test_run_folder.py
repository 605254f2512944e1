"""The run folder as users meet it: locked, interrupted, changed, full, stopped early."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fedtailor
from commands import call
from fedtailor.config import RunConfig, make_config
from fedtailor.errors import CorruptError, FedtailorError, LockedError
from fedtailor.record import RoundRecord
from fedtailor.run.interface import resume, run_config
from fedtailor.server.setup import RoundSettings
from fedtailor.server.stopping import Stopping
from fedtailor.storage import files as storage
from fedtailor.storage import fingerprint, new_folder
from fedtailor.storage.files import Lock, in_use
from fedtailor.storage.generations import place_of, saved_rounds
from fedtailor.storage.journal import CheckpointSettings, Journal
from fedtailor.storage.run_folder import RunFolder
from helpers import differing, final_weights, image_data, timeless, tiny_cnn

TABLE: dict[str, Any] = {
    "name": "small", "seed": 3, "rounds": 4, "clients_per_round": 3, "evaluate_every": 2,
    "data": {"clients": 5, "limit": 100}, "model": {"name": "cnn", "channels": [4, 8]}, "fleet": {"name": "uniform-2"},
    "method": {"name": "heterofl"}, "training": {"lr": 0.05}, "engine": {"workers": 0},
}  # fmt: skip


def config(*overrides: str) -> RunConfig:
    return make_config(TABLE, overrides)


class CutError(Exception):
    """Stands for whatever ended the process."""


def cut_after(round: int):
    def on_round(record: RoundRecord) -> None:
        if record.round == round:
            raise CutError

    return on_round


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody interrupted."""
    path = tmp_path_factory.mktemp("whole") / "run"
    run_config(config(), path)
    return path


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run, cut off after round 2 of 4."""
    path = tmp_path_factory.mktemp("half") / "run"
    with pytest.raises(CutError):
        run_config(config(), path, cut_after(2))
    return path


@pytest.fixture
def interrupted(half: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return shutil.copytree(half, tmp_path / "run")


def contents(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def comparable(path: Path) -> dict[str, bytes]:
    """Everything but the log of what happened when."""
    return {name: data for name, data in contents(path).items() if name not in ("events.jsonl", "run.lock")}


# What is in it


def test_metrics_hold_no_time_and_records_give_it_back(whole):
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    assert all("seconds" not in line for line in lines)
    records = RunFolder(whole).records()
    assert all(record.seconds > 0 for record in records)
    assert [record.as_row() for record in records] == lines


def test_records_of_a_run_that_is_writing_at_this_moment(interrupted):
    with (interrupted / "metrics.jsonl").open("a") as file:
        file.write('{"round": 3, "cli')
    with (interrupted / "events.jsonl").open("a") as file:
        file.write('{"event": "rou')
    assert [record.round for record in RunFolder(interrupted).records()] == [1, 2]


def test_records_of_a_folder_that_is_none(tmp_path):
    with pytest.raises(FedtailorError, match="expected the folder of a run"):
        RunFolder(tmp_path).records()


def test_no_other_file_is_left_behind(whole):
    names = {file.name for file in whole.rglob("*")}
    assert names == {
        "config.toml", "environment.json", "metrics.jsonl", "events.jsonl", "run.lock", "weights.safetensors",
        "setup.json", "coverage.jsonl", "confusion.json",
        "checkpoints", "00000003.checkpoint", "00000004.checkpoint",
        *((f"{best:08d}.checkpoint",) if (best := RunFolder(whole).records()[-1].best_round) == 2 else ()),
    }  # fmt: skip
    assert [file.name for file in whole.parent.iterdir()] == ["run"]


def test_events_tell_the_story(interrupted):
    resume(interrupted)
    events = [(event["event"], event.get("round")) for event in RunFolder(interrupted).events()]
    assert events == [
        ("started", None), ("round", 1), ("round", 2), ("resumed", 2), ("round", 3), ("round", 4), ("finished", 4),
    ]  # fmt: skip
    lines = (interrupted / "events.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == [event for event, _ in events]  # no line is blank


def test_an_event_that_was_cut_short_does_not_swallow_the_next_one(interrupted):
    with (interrupted / "events.jsonl").open("a") as file:
        file.write('{"event": "rou')
    resume(interrupted)
    assert ("resumed", 2) in [
        (event["event"], event.get("round")) for event in RunFolder(interrupted).events()
    ]


# Going on


def test_a_resumed_run_is_the_uninterrupted_run_file_by_file(whole, interrupted):
    assert comparable(interrupted) != comparable(whole)
    run = resume(interrupted)
    assert comparable(interrupted) == comparable(whole)
    assert [record.round for record in run.history] == [1, 2, 3, 4]
    assert list(run.tiers) == ["0.5", "1"]


def test_a_run_may_be_moved_and_renamed(whole, interrupted, tmp_path):
    moved = tmp_path / "elsewhere" / "other name"
    moved.parent.mkdir()
    interrupted.rename(moved)
    resume(moved)
    assert comparable(moved) == comparable(whole)


def test_a_finished_run_is_returned_as_it_is(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "copy")
    records: list[RoundRecord] = []
    run = resume(copy, on_round=records.append)
    assert records == []
    assert run.state.round == 4
    assert comparable(copy) == comparable(whole)


def test_weights_that_were_not_written_yet_are_written(whole, tmp_path):
    copy = shutil.copytree(whole, tmp_path / "copy")
    (copy / "weights.safetensors").rename(copy / "weights.safetensors.part")
    assert not RunFolder(copy).finished
    resume(copy)
    assert comparable(copy) == comparable(whole)


def test_what_is_no_run_is_said(tmp_path, interrupted):
    with pytest.raises(FedtailorError, match="no such run folder"):
        resume(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FedtailorError, match="expected the folder of a run"):
        resume(tmp_path / "empty")
    shutil.rmtree(interrupted / "checkpoints")
    with pytest.raises(CorruptError, match="there is none"):
        resume(interrupted)


def test_a_run_from_python_goes_on_with_the_same_call(tmp_path):
    def train(**settings: Any) -> fedtailor.Run:
        return fedtailor.train(
            tiny_cnn(), image_data((6, 5, 7, 4)), "uniform-2", "heterofl",
            rounds=4, clients_per_round=3, evaluate_every=2, seed=1, engine={"workers": 0}, **settings,
        )  # fmt: skip

    expected = train()
    with pytest.raises(CutError):
        train(folder=tmp_path / "run", on_round=cut_after(3))
    with pytest.raises(FedtailorError, match="exists already"):
        train(folder=tmp_path / "run")
    with pytest.raises(FedtailorError, match="started from Python"):
        fedtailor.resume(tmp_path / "run")
    run = train(folder=tmp_path / "run", resume=True)
    assert differing(run.state.weights, expected.state.weights) == set()
    assert timeless(run.history) == timeless(expected.history)
    assert differing(final_weights(tmp_path / "run"), expected.state.weights) == set()
    fresh = train(folder=str(tmp_path / "new"), resume=True)  # nothing there: starts
    assert differing(fresh.state.weights, expected.state.weights) == set()


# Drift


def changed_config(path: Path, key: str, value: str) -> None:
    file = path / "config.toml"
    text = re.sub(rf"(?m)^{key} = .*$", f"{key} = {value}", file.read_text(), count=1)
    assert text != file.read_text()
    file.write_text(text)


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("seed", "4", "seed: saved 3, now 4"),
        ("rounds", "5", "rounds: saved 4, now 5"),
        ("clients_per_round", "2", "clients_per_round: saved 3, now 2"),
        ("evaluate_every", "1", "evaluate_every: saved 2, now 1"),
        ("threads", "2", "machine.threads: saved 1, now 2"),
        ("lr", "0.1", "training.lr: saved 0.05, now 0.1"),
        ("clients", "6", "data.split: saved "),
        ("limit", "90", "data.examples: saved "),
        ("channels", "[4, 9]", r"model.channels: saved '\[4, 8\]', now '\[4, 9\]'"),
        ("scaler", "false", "method.scaler: saved True, now False"),
        ("patience", "3", "stopping.patience: saved 0, now 3"),
    ],
)
def test_a_changed_setting_is_refused_field_by_field(interrupted, key, value, words):
    changed_config(interrupted, key, value)
    before = contents(interrupted)
    with pytest.raises(FedtailorError, match=words) as caught:
        resume(interrupted)
    assert "--allow-drift" in str(caught.value)
    assert caught.value.exit_code == 2
    assert contents(interrupted) == before


@pytest.mark.parametrize("what", ["version", "processor", "code", "default dtype", "deterministic"])
def test_a_changed_machine_version_or_code_is_refused(interrupted, monkeypatch, what):
    if what == "version":
        monkeypatch.setattr(fingerprint.metadata, "version", lambda name: "99.0")
    elif what == "processor":
        monkeypatch.setattr(fingerprint.platform, "machine", lambda: "arm64")
    elif what == "code":
        real = fingerprint.inspect.getsource
        monkeypatch.setattr(
            fingerprint.inspect, "getsource", lambda item: real(item).replace("relu", "gelu") + "#"
        )
    elif what == "default dtype":
        monkeypatch.setattr(fingerprint.torch, "get_default_dtype", lambda: torch.float64)
    else:
        monkeypatch.setattr(fingerprint.torch, "are_deterministic_algorithms_enabled", lambda: True)
    words = {
        "version": "version.torch: saved", "processor": "machine.processor: saved", "code": "model.code: saved",
        "default dtype": "machine.default_dtype: saved",
        "deterministic": "machine.deterministic_algorithms: saved False, now True",
    }  # fmt: skip
    with pytest.raises(FedtailorError, match=words[what]):
        resume(interrupted)


def other_loss(output: Any, batch: Any) -> Any:
    return output.sum()


class Wrapped(torch.nn.Module):
    """Another class around the same layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = tiny_cnn()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.layers(images) * 2


def test_drift_of_a_run_from_python(tmp_path):
    usual: dict[str, Any] = {
        "module": tiny_cnn(), "data": image_data((6, 5, 7)), "fleet": "uniform-2", "method": "fedavg", "rounds": 2,
        "clients_per_round": 3, "folder": tmp_path / "run", "engine": {"workers": 0},
    }  # fmt: skip
    with pytest.raises(CutError):
        fedtailor.train(**usual, on_round=cut_after(1))
    changes: list[tuple[dict[str, Any], str]] = [
        ({"loss": other_loss}, "model.objective"),
        ({"module": Wrapped()}, "model.code"),
        ({"module": tiny_cnn(4, 7)}, "model.tensors"),
        ({"data": image_data((6, 7, 5))}, "data.split"),
        ({"fleet": "equal"}, "fleet"),
        ({"method": "heterofl"}, "method.name"),
        ({"training": {"lr": 0.5}}, "method.local.lr"),
        ({"seed": 9}, "seed: saved 0, now 9"),
        ({"rounds": 3}, "rounds.rounds: saved 2, now 3"),
        ({"threads": 2}, "machine.threads: saved 1, now 2"),
    ]
    for change, words in changes:
        with pytest.raises(FedtailorError, match=words):
            fedtailor.train(**{**usual, **change}, resume=True)
    assert fedtailor.train(**usual, resume=True).state.round == 2


def test_how_often_a_run_is_saved_may_change(whole, interrupted):
    changed_config(interrupted, "every", "3")
    resume(interrupted)
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert comparable(interrupted)[name] == comparable(whole)[name]


def test_drift_may_be_allowed_is_said_and_becomes_the_new_normal(interrupted):
    changed_config(interrupted, "rounds", "6")
    notices: list[str] = []
    run = resume(interrupted, allow_drift=True, on_notice=notices.append, on_round=cut_after(7))
    assert run.state.round == 6
    assert notices == ["changed since the run was saved: rounds: saved 4, now 6"]
    assert RunFolder(interrupted).events()[3]["changed"] == ["rounds: saved 4, now 6"]
    assert resume(interrupted).state.round == 6


# Two at once


def holding(path: Path, ready: Any) -> None:
    Lock(path)
    ready.set()
    time.sleep(60)


def processor_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_second_run_exits_at_once_and_changes_nothing(interrupted, tmp_path):
    file = tmp_path / "small.toml"
    file.write_text(
        (interrupted / "config.toml").read_text().replace('name = "small"', f'name = "{interrupted.name}"')
    )
    lock = Lock(interrupted)
    before = contents(interrupted)
    times = {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    commands = {
        "resume": ["resume", str(interrupted)],
        "run": ["run", str(file), "--runs", str(interrupted.parent)],
        "run --set name": [
            "run",
            str(file),
            "--set",
            f"name={interrupted.name}",
            "--runs",
            str(interrupted.parent),
        ],
    }
    for words in commands.values():
        seconds = []
        for _ in range(3):  # the machine may be busy with other tests
            used = processor_seconds()
            done = subprocess.run(
                [sys.executable, "-m", "fedtailor", *words], capture_output=True, text=True, check=False
            )
            seconds.append(processor_seconds() - used)
            assert done.returncode == 75, done.stderr
            assert "in use" in done.stderr
        used = min(seconds)
        assert used < 1  # of a processor: how long that takes depends on who else wants it
    assert contents(interrupted) == before
    assert times == {path: path.stat().st_mtime_ns for path in interrupted.rglob("*")}
    with pytest.raises(LockedError):
        resume(interrupted)
    with pytest.raises(LockedError):
        run_config(config(), interrupted)
    lock.release()
    assert resume(interrupted).state.round == 4


def test_the_message_says_who_holds_the_folder(interrupted):
    with Journal.open(interrupted) as held:
        held.lock.sign("process 1 on here")
        with pytest.raises(LockedError, match="in use by process 1 on here: nothing was changed"):
            Lock(interrupted)


def test_a_killed_owner_frees_the_lock_at_once(interrupted):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    owner = context.Process(target=holding, args=(interrupted, ready))
    owner.start()
    assert ready.wait(30)
    assert in_use(interrupted)
    os.kill(owner.pid or 0, signal.SIGKILL)
    owner.join()
    assert not in_use(interrupted)


def compete(path: Path, barrier: Any, wins: Any) -> None:
    barrier.wait()
    try:
        lock = Lock(path)
    except LockedError:
        return
    with wins.get_lock():
        wins.value += 1
    time.sleep(0.3)  # longer than the others need to try
    lock.release()


def start_new(path: Path, barrier: Any, wins: Any) -> None:
    from test_checkpoint import checkpoint_of

    barrier.wait()
    try:
        with Journal.create(path, {"config.toml": ""}) as made:
            made.begin({}, CheckpointSettings(), checkpoint_of(0), torch.device("cpu"))
            with wins.get_lock():
                wins.value += 1
            time.sleep(0.2)
    except FedtailorError as error:
        if not re.search("exists already|in use", str(error)):
            raise


def race(work: Any, path: Path, starters: int) -> int:
    """How many of them got the folder."""
    context = multiprocessing.get_context("fork")
    barrier, wins = context.Barrier(starters), context.Value("i", 0)
    children = [context.Process(target=work, args=(path, barrier, wins)) for _ in range(starters)]
    for child in children:
        child.start()
    for child in children:
        child.join(60)
    return int(wins.value)


@pytest.mark.slow
@pytest.mark.parametrize("times", [2, 20])
def test_of_ten_starters_exactly_one_wins(interrupted, tmp_path, times):
    for number in range(times):
        assert race(compete, interrupted, 10) == 1
        assert race(start_new, tmp_path / f"new{number}", 10) == 1
        assert [entry.name for entry in tmp_path.glob(".new*")] == []


def test_without_locks_a_run_goes_on_and_says_so(interrupted, monkeypatch):
    monkeypatch.setattr(storage, "fcntl", None)
    notices: list[str] = []
    run = resume(interrupted, on_notice=notices.append)
    assert run.state.round == 4
    assert "cannot be locked on this system" in notices[0]


def test_a_file_system_without_locks_is_the_same(interrupted, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError(storage.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(storage.fcntl, "flock", refuse)
    assert not Lock(interrupted).held
    assert not in_use(interrupted)


def test_leftovers_of_a_killed_start_are_removed_an_hour_later(tmp_path):
    old, young = tmp_path / ".run.1.part", tmp_path / ".run.2.part"
    for stray in (old, young):
        stray.mkdir()
    past = time.time() - new_folder.STRAY_SECONDS - 60
    os.utime(old, (past, past))
    run_config(config("rounds=1"), tmp_path / "run")
    assert not old.exists()
    assert young.exists()


# Ctrl-C


def start(path: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "fedtailor", *words]
    return subprocess.Popen(command, cwd=path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_round(folder: Path, round: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(event.get("round") == round for event in RunFolder(folder).events()):
            return
        time.sleep(0.01)
    raise AssertionError(f"round {round} did not come")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), pytest.param(signal.SIGTERM, 143, marks=pytest.mark.slow)]
)
def test_ctrl_c_finishes_the_round_saves_and_says_how_to_go_on(whole, tmp_path, number, code):
    text = (whole / "config.toml").read_text()
    (tmp_path / "small.toml").write_text(
        text.replace("rounds = 4", "rounds = 400").replace("every = 1\n", "every = 50\n")
    )
    process = start(tmp_path, "run", "small.toml")
    wait_for_round(tmp_path / "runs/small", 3)
    process.send_signal(number)
    _, shown = process.communicate(timeout=120)
    assert process.returncode == code, shown
    last = RunFolder(tmp_path / "runs/small").events()[-1]
    assert last["event"] == "stopped"
    assert "Finishing this round" in shown
    assert f"Stopped after round {last['round']}, which is saved in runs/small" in shown
    assert "Go on with:  fedtailor resume runs/small" in shown
    assert saved_rounds(tmp_path / "runs/small/checkpoints")[-1] == last["round"]
    assert not RunFolder(tmp_path / "runs/small").finished


def test_the_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    from fedtailor.storage.interrupt import stop_requests

    def twice() -> None:
        with stop_requests() as request:
            signal.raise_signal(signal.SIGINT)  # to this thread: another one might take it up after the block
            assert request.number == signal.SIGINT
            signal.raise_signal(signal.SIGINT)

    found = signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # a shell's background job ignores Ctrl-C
    try:
        with pytest.raises(KeyboardInterrupt):
            twice()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, found)


# The command


def test_resume_command(whole, interrupted, monkeypatch, capsys):
    assert call(monkeypatch, "resume", str(interrupted)) == 0
    shown = capsys.readouterr()
    assert "heterofl on digits" in shown.out
    assert "round 4/4" in shown.err
    assert comparable(interrupted) == comparable(whole)
    assert call(monkeypatch, "resume", str(interrupted), "--json") == 0
    assert json.loads(capsys.readouterr().out)["rounds"] == 4


def test_exit_codes_and_messages_of_resume(interrupted, monkeypatch, capsys):
    place = place_of(interrupted / "checkpoints", 2)
    good = place.read_bytes()
    place.write_bytes(good[:-5])
    assert call(monkeypatch, "resume", str(interrupted)) == 0
    assert "note: 00000002.checkpoint is damaged" in capsys.readouterr().err.replace("\n", " ")
    for file in (interrupted / "checkpoints").iterdir():
        file.write_bytes(b"")
    assert call(monkeypatch, "resume", str(interrupted)) == 65
    assert "no checkpoint that can be trusted" in capsys.readouterr().err
    assert call(monkeypatch, "resume", str(interrupted / "nowhere")) == 2
    assert call(monkeypatch, "resume") == 2


def test_drift_on_the_command_line(interrupted, monkeypatch, capsys):
    changed_config(interrupted, "rounds", "3")
    assert call(monkeypatch, "resume", str(interrupted)) == 2
    assert "rounds: saved 4, now 3" in capsys.readouterr().err
    assert call(monkeypatch, "resume", str(interrupted), "--allow-drift") == 0
    assert RunFolder(interrupted).records()[-1].round == 3


def test_run_says_how_to_go_on_with_a_folder_that_exists(interrupted, tmp_path, monkeypatch, capsys):
    (tmp_path / "c.toml").write_text((interrupted / "config.toml").read_text())
    assert (
        call(monkeypatch, "run", str(tmp_path / "c.toml"), "--set", "name=run", "--runs", str(tmp_path)) == 2
    )
    assert f"`fedtailor resume {interrupted}`" in capsys.readouterr().err.replace("\n", "")


@pytest.mark.slow
def test_compare_goes_on_with_an_interrupted_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(
        'name = "small"\nseed = 3\nrounds = 3\nclients_per_round = 3\n[data]\nclients = 5\nlimit = 100\n'
        '[model]\nname = "cnn"\nchannels = [4, 8]\n[engine]\nworkers = 0\n'
    )
    words = ("compare", "c.toml", "--methods", "fedavg,heterofl")
    assert call(monkeypatch, *words) == 0
    finished = tmp_path / "runs/small/heterofl-seed3"
    expected, events = comparable(finished), RunFolder(finished).events()
    (finished / "weights.safetensors").unlink()
    place_of(finished / "checkpoints", 3).unlink()
    capsys.readouterr()
    assert call(monkeypatch, *words) == 0
    shown = capsys.readouterr().err
    assert "fedavg, seed 3: finished before, skipped" in shown
    assert "heterofl, seed 3: interrupted before, going on" in shown
    assert comparable(finished)["metrics.jsonl"] == expected["metrics.jsonl"]
    assert comparable(finished)["weights.safetensors"] == expected["weights.safetensors"]
    assert [event["event"] for event in RunFolder(finished).events()[len(events) :]] == [
        "resumed",
        "round",
        "finished",
    ]
    assert call(monkeypatch, *words, "--set", "training.lr=0.5") == 2


# A disk that is really full


TMPFS = """
set -u
mount -t tmpfs -o size=4m tmpfs small || exit 99
fedtailor() { "$PYTHON" -m fedtailor "$@"; }
fedtailor run config.toml --runs small 2> full.txt; echo $? > full.code
mount -o remount,size=64m small
fedtailor resume small/big 2> resumed.txt; echo $? > resumed.code
cp -r small/big result
umount small
"""


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path):
    """A tmpfs of 4 MiB holds two generations of 1.5 MB and not a third."""
    table = {**TABLE, "model": {"name": "cnn", "channels": [64, 128, 256]}}
    expected = tmp_path / "expected"
    big = make_config(table, ["name=big"])
    run_config(big, expected)
    (tmp_path / "config.toml").write_text((expected / "config.toml").read_text())
    (tmp_path / "small").mkdir()
    (tmp_path / "script.sh").write_text(TMPFS)
    environment = {**os.environ, "PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["unshare", "-m", "sh", "script.sh"], cwd=tmp_path, env=environment, check=False)
    if done.returncode == 99 or not (tmp_path / "full.code").exists():
        pytest.skip("no tmpfs can be mounted here")
    message = (tmp_path / "full.txt").read_text()
    assert (tmp_path / "full.code").read_text().strip() == "74", message
    assert "No space left on device" in message
    assert "bytes to write" in message
    assert "fedtailor resume small/big" in message.replace("\n", " ")
    assert (tmp_path / "resumed.code").read_text().strip() == "0", (tmp_path / "resumed.txt").read_text()
    for name in ("metrics.jsonl", "weights.safetensors"):
        assert (tmp_path / "result" / name).read_bytes() == (expected / name).read_bytes()


# Early stopping


def tiers(*values: float) -> dict[str, dict[str, float]]:
    return {f"tier {i}": {"loss": 1 - value, "accuracy": value} for i, value in enumerate(values)}


def test_the_best_round_and_the_patience():
    stopping = Stopping(patience=2, min_delta=0.05)
    best = None
    for round, value in enumerate([0.5, 0.7, 0.74, 0.7], start=1):
        assert not stopping.reached(best)
        best = stopping.judge(best, round, tiers(value, value))
    assert (best.round, best.value, best.since) == (2, 0.7, 2)
    assert stopping.reached(best)
    assert not Stopping().reached(best)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 2),
        ({"metric": "loss"}, 2),
        ({"metric": "loss", "goal": "max"}, 1),
        ({"tier": "tier 0"}, 1),
        ({"tier": "tier 1", "metric": "accuracy"}, 2),
        ({"goal": "min"}, 1),
    ],
)
def test_what_is_compared(settings, expected):
    stopping, best = Stopping(**settings), None
    for round, values in enumerate([(0.5, 0.1), (0.4, 0.9)], start=1):
        best = stopping.judge(best, round, tiers(*values))
    assert best.round == expected


def test_not_a_number_is_never_better_and_always_worse():
    best = Stopping().judge(None, 1, tiers(float("nan")))
    best = Stopping().judge(best, 2, tiers(0.1))
    assert best.round == 2
    assert Stopping().judge(best, 3, tiers(float("nan"))).round == 2


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"patience": -1}, "stopping.patience = -1"),
        ({"min_delta": -0.1}, "stopping.min_delta"),
        ({"min_delta": float("nan")}, "stopping.min_delta"),
        ({"goal": "up"}, "stopping.goal"),
    ],
)
def test_bad_settings_of_stopping(settings, words):
    with pytest.raises(FedtailorError, match=words):
        Stopping(**settings)


def test_unknown_tier_and_metric():
    with pytest.raises(FedtailorError, match="did you mean '0.5'"):
        fedtailor.train(
            tiny_cnn(),
            image_data((6, 5)),
            "uniform-2",
            rounds=1,
            clients_per_round=2,
            stopping={"tier": "0.55"},
        )
    with pytest.raises(FedtailorError, match="did you mean 'accuracy'"):
        Stopping(metric="acuracy").judge(None, 1, tiers(0.1))


def trained(**settings: Any) -> fedtailor.Run:
    """Training with so high a rate that later rounds are worse than the first ones."""
    return fedtailor.train(
        tiny_cnn(), image_data((6, 5, 7, 4)), "uniform-2", "fedavg", rounds=12, clients_per_round=3, evaluate_every=1,
        training={"lr": 0.5, "batch_size": 4}, seed=1, engine={"workers": 0}, **settings,
    )  # fmt: skip


def test_a_run_stops_early_and_its_resumption_too(tmp_path):
    stopping = {"patience": 2, "metric": "loss"}
    whole = trained(stopping=stopping, folder=tmp_path / "whole")
    assert whole.state.round < 12
    assert whole.best_round == whole.state.round - 2
    assert whole.history[-1].tiers
    for round in (whole.best_round, whole.state.round - 1):
        path = tmp_path / f"cut{round}"
        with pytest.raises(CutError):
            trained(stopping=stopping, folder=path, on_round=cut_after(round))
        run = trained(stopping=stopping, folder=path, resume=True)
        assert run.state.round == whole.state.round
        assert comparable(path) == comparable(tmp_path / "whole")


def test_the_best_round_can_be_the_result(tmp_path):
    stopping = {"patience": 2, "metric": "loss", "restore_best": True}
    in_memory = trained(stopping=stopping)
    saved = trained(stopping=stopping, folder=tmp_path / "run")
    last = trained(stopping={"patience": 2, "metric": "loss"})
    assert in_memory.state.round == saved.state.round == last.best_round != last.state.round
    assert differing(in_memory.state.weights, saved.state.weights) == set()
    assert differing(in_memory.state.weights, last.state.weights) != set()
    assert in_memory.tiers == last.history[last.best_round - 1].tiers
    assert len(in_memory.history) == last.state.round
    assert saved.best_round in saved_rounds(tmp_path / "run/checkpoints")
    assert differing(final_weights(tmp_path / "run"), in_memory.state.weights) == set()


def test_bad_settings_of_checkpoints():
    with pytest.raises(FedtailorError, match=r"checkpoint.every = 0"):
        make_config({**TABLE, "checkpoint": {"every": 0}})
    with pytest.raises(FedtailorError, match=r"checkpoint.keep = 0"):
        make_config({**TABLE, "checkpoint": {"keep": 0}})
    with pytest.raises(FedtailorError, match="did you mean 'keep'"):
        make_config({**TABLE, "checkpoint": {"keeep": 1}})
    assert RoundSettings().stopping == Stopping()
