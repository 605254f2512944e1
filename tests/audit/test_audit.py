"""A signed log: every change is found, a killed run goes on with it, and it speaks of the files that lie there."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fedtailor
from fedtailor.audit.keys import new_key, read_key, read_public
from fedtailor.audit.log import FILE, AuditLog
from fedtailor.audit.verifying import verify
from fedtailor.cli.main import app
from fedtailor.errors import CorruptError, FedtailorError
from fedtailor.record import RoundRecord
from fedtailor.server.audited import digest_of
from helpers import cnn_model, differing, image_data

ROUNDS = 3


class CutError(Exception):
    """The run is cut off here."""


@pytest.fixture(scope="module")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "audit.pem"
    new_key(path)
    return path


def trained(folder: Path, key: Path | None, **settings: Any) -> fedtailor.Run:
    return fedtailor.train(
        cnn_model().module, image_data((6,) * 4), "equal", "fedavg", rounds=ROUNDS, folder=folder,
        training={"batch_size": 4}, engine={"workers": 0}, audit=None if key is None else {"key": str(key)}, **settings,
    )  # fmt: skip


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, key: Path) -> tuple[Path, fedtailor.Run]:
    folder = tmp_path_factory.mktemp("run") / "run"
    return folder, trained(folder, key)


def copied(folder: Path, to: Path) -> Path:
    to.mkdir()
    for file in folder.iterdir():
        if file.is_file():
            (to / file.name).write_bytes(file.read_bytes())
    return to


def entries(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line)["entry"] for line in (folder / FILE).read_text().splitlines()]


def test_a_log_says_who_was_leased_what_and_what_came_of_it(finished, key):
    folder, run = finished
    begun, *rounds, end = entries(folder)
    assert (begun["event"], end["event"]) == ("begun", "finished")
    assert [each["round"] for each in rounds] == [1, 2, 3]
    last = rounds[-1]
    assert {each["client"] for each in last["leases"]} == {0, 1, 2, 3}
    assert [each["verdict"] for each in last["verdicts"]] == ["merged"] * 4
    assert last["updates"].keys() == {"0", "1", "2", "3"}
    assert last["model"] == digest_of(run.state.weights)
    assert last["privacy"] is None
    found = verify(folder, read_public(f"{key}.pub"))
    assert (found.rounds, found.finished, found.redone) == (ROUNDS, True, [])


def test_a_log_changes_no_result_and_no_record(finished, tmp_path):
    folder, run = finished
    plain = trained(tmp_path / "plain", None)
    assert not (tmp_path / "plain" / FILE).exists()
    assert differing(plain.state.weights, run.state.weights) == set()
    for name in ("metrics.jsonl", "coverage.jsonl", "weights.safetensors"):
        assert (tmp_path / "plain" / name).read_bytes() == (folder / name).read_bytes()


def test_every_changed_byte_of_a_short_log_is_found(tmp_path, key):
    log = AuditLog(tmp_path, key, 0)
    log.add(RoundRecord(1, audit={"model": "m", "leases": [], "verdicts": []}))
    data = (tmp_path / FILE).read_bytes()
    assert verify(tmp_path).rounds == 1
    for place in range(len(data)):
        (tmp_path / FILE).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CorruptError):
            verify(tmp_path)


@pytest.mark.slow
def test_every_changed_byte_of_a_finished_run_is_found(finished, tmp_path):
    """Each byte in two ways, its lowest bit and its case; and each one left out."""
    folder = copied(finished[0], tmp_path / "run")
    data = (folder / FILE).read_bytes()
    for place in range(len(data)):
        for changed in (
            data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :],
            data[:place] + bytes([data[place] ^ 32]) + data[place + 1 :],
            data[:place] + data[place + 1 :],
        ):
            (folder / FILE).write_bytes(changed)
            with pytest.raises(CorruptError):
                verify(folder)
    (folder / FILE).write_bytes(data)
    verify(folder)


def test_the_first_bad_round_is_named(finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    lines[2] = lines[2].replace(b'"merged"', b'"absent"', 1)
    (folder / FILE).write_bytes(b"".join(lines))
    with pytest.raises(CorruptError, match=r"audit.jsonl: line 3 \(round 2\): its signature"):
        verify(folder)
    found = CliRunner().invoke(app, ["audit", str(folder)])
    assert found.exit_code != 0
    assert "round 2" in str(found.exception)


def test_lines_that_are_missing_swapped_or_of_another_log_are_found(finished, tmp_path):
    folder = copied(finished[0], tmp_path / "run")
    lines = (folder / FILE).read_bytes().splitlines(keepends=True)
    head = verify(folder).head
    for changed, reason in (
        (lines[1:], "expected the public key"),
        ([*lines[:2], *lines[3:]], "does not follow"),
        ([lines[0], lines[2], lines[1], *lines[3:]], "does not follow"),
        (lines[:-1], "does not say that the run is finished"),
        ([], "line 1 is cut short"),
    ):
        (folder / FILE).write_bytes(b"".join(changed))
        with pytest.raises(CorruptError, match=reason):
            verify(folder)
    (folder / FILE).write_bytes(b"".join(lines[:-2]))
    (folder / "weights.safetensors").unlink()
    with pytest.raises(CorruptError, match=r"metrics.jsonl has 3 rounds, but the log only 2"):
        verify(folder)
    with pytest.raises(CorruptError, match="has no line with the hash"):
        verify(folder, head=head)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("metrics.jsonl", "metrics.jsonl: round 2 is not what the log says"),
        ("coverage.jsonl", "coverage.jsonl: round 2 is not what the log says"),
        ("weights.safetensors", "is not the result that the log says"),
        ("call.json", "call.json is not what the log says: the settings"),
    ],
)
def test_files_that_the_log_speaks_of_are_checked_too(finished, tmp_path, name, message):
    folder = copied(finished[0], tmp_path / "run")
    data = (folder / name).read_bytes()
    place = data.index(b"\n") + 5 if name.endswith("jsonl") else len(data) - 1
    (folder / name).write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    with pytest.raises(CorruptError, match=message):
        verify(folder)


@pytest.mark.parametrize("between", ["log and checkpoint", "half a line", "checkpoint and next round"])
def test_a_run_that_was_killed_goes_on_with_its_log(between, tmp_path, key, monkeypatch):
    """The kill is after the line and before the checkpoint, inside the line, or after both."""
    folder, add = tmp_path / "run", AuditLog.add

    def cut(log: AuditLog, record: RoundRecord) -> None:
        add(log, record)
        if record.round == 2:
            raise CutError

    def stop(record: RoundRecord) -> None:
        if record.round == 2:
            raise CutError

    late = between == "checkpoint and next round"
    if not late:
        monkeypatch.setattr(AuditLog, "add", cut)
    with pytest.raises(CutError):
        trained(folder, key, on_round=stop if late else None)
    monkeypatch.setattr(AuditLog, "add", add)
    if between == "half a line":
        data = (folder / FILE).read_bytes()
        (folder / FILE).write_bytes(data[: len(data) - 50])
        with pytest.raises(CorruptError, match="is cut short"):
            verify(folder)
    else:
        assert not verify(folder).finished
    whole = trained(folder, key, resume=True)
    found = verify(folder)
    assert (found.rounds, found.finished, found.redone) == (ROUNDS, True, [])
    assert found.resumed == [2 if late else 1]
    rounds = [each["round"] for each in entries(folder) if each["event"] == "round"]
    assert rounds == ([1, 2, 2, 3] if between == "log and checkpoint" else [1, 2, 3])
    assert entries(folder)[-2]["model"] == digest_of(whole.state.weights)


def test_a_log_of_another_key_or_one_that_is_not_whole_is_not_added_to(finished, tmp_path, key):
    folder = copied(finished[0], tmp_path / "run")
    data = (folder / FILE).read_bytes()
    other = tmp_path / "other.pem"
    public = new_key(other)
    with pytest.raises(FedtailorError, match=r"audit.key is not the key that began"):
        AuditLog(folder, other, ROUNDS)
    with pytest.raises(CorruptError, match=f"was signed by .*: expected {public}"):
        verify(folder, public)
    (folder / FILE).write_bytes(data.replace(b"merged", b"Merged", 1))
    with pytest.raises(CorruptError, match="is damaged: line 2"):
        AuditLog(folder, key, ROUNDS)
    assert (folder / FILE).read_bytes() == data.replace(b"merged", b"Merged", 1)


def test_keys_are_private_new_and_checked(tmp_path):
    path = tmp_path / "audit.pem"
    public = new_key(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_public(str(path) + ".pub") == public == read_public(public)
    with pytest.raises(FedtailorError, match="is there already"):
        new_key(path)
    with pytest.raises(
        FedtailorError, match=r"audit.key = '.*none': no such file; `fedtailor audit --new-key"
    ):
        read_key(tmp_path / "none")
    (tmp_path / "odd").write_text("no key")
    with pytest.raises(FedtailorError, match="expected an Ed25519 private key"):
        read_key(tmp_path / "odd")
    with pytest.raises(FedtailorError, match="expected a public key of 64"):
        read_public("abc")


def test_what_cannot_be_signed_is_refused_before_anything_is_written(tmp_path, key):
    with pytest.raises(FedtailorError, match="no such file"):
        trained(tmp_path / "run", tmp_path / "none")
    assert not (tmp_path / "run").exists()
    with pytest.raises(FedtailorError, match="a log lies in the run's folder"):
        fedtailor.train(
            cnn_model().module, image_data((6,) * 4), "equal", "fedavg", rounds=1, audit={"key": str(key)}
        )
    with pytest.raises(FedtailorError, match=r"no audit.jsonl there"):
        verify(tmp_path)


def test_without_the_package_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(FedtailorError, match=r"pip install 'fedtailor\[trust\]'"):
        new_key(tmp_path / "key")


def test_the_command_makes_a_key_and_says_what_it_proves(finished, tmp_path, key):
    folder, _ = finished
    told = CliRunner().invoke(app, ["audit", "--new-key", str(tmp_path / "mine")])
    assert told.exit_code == 0
    assert (tmp_path / "mine.pub").is_file()
    shown = CliRunner().invoke(app, ["audit", str(folder), "--key", f"{key}.pub"])
    assert shown.exit_code == 0, shown.output
    assert "3 rounds, finished; nothing was changed" in " ".join(shown.output.split())
    table = json.loads(CliRunner().invoke(app, ["audit", str(folder), "--json"]).stdout)
    assert table["rounds"] == ROUNDS
