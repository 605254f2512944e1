"""Downloads against a server on this machine that cuts, lies and refuses."""

from __future__ import annotations

import dataclasses
import fcntl
import hashlib
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from published_files import write_mnist

from fedtailor.data import datasets, describe, download, load_dataset, sources
from fedtailor.data.download import RemoteFile
from fedtailor.errors import FedtailorError

CONTENT = bytes(range(256)) * 400


@dataclass
class Server:
    """What each path answers, and what was asked."""

    address: str = ""
    files: dict[str, bytes] = field(default_factory=dict)
    cut_after: dict[str, list[int]] = field(
        default_factory=dict
    )  # bytes to send before the line drops, per try
    without_ranges: set[str] = field(default_factory=set)
    without_length: set[str] = field(default_factory=set)
    wrong_range: set[str] = field(default_factory=set)
    asked: list[tuple[str, str | None]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append((self.path, wanted))
            content = state.files.get(self.path)
            if content is None:
                self.send_error(404)
                return
            start = 0
            if wanted and self.path not in state.without_ranges:
                start = int(wanted.removeprefix("bytes=").rstrip("-"))
                if start >= len(content):
                    self.send_error(416)
                    return
            self.send_response(206 if start else 200)
            if start:
                shown = start + 1 if self.path in state.wrong_range else start
                self.send_header("Content-Range", f"bytes {shown}-{len(content) - 1}/{len(content)}")
            if self.path not in state.without_length:
                self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            cuts = state.cut_after.get(self.path)
            body = content[start:]
            self.wfile.write(body[: cuts.pop(0)] if cuts else body)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.address = f"http://127.0.0.1:{httpd.server_address[1]}"
    yield state
    httpd.shutdown()
    httpd.server_close()
    thread.join()


def remote(server: Server, *paths: str, content: bytes = CONTENT, algorithm: str = "sha256") -> RemoteFile:
    return RemoteFile(
        "set/file.bin",
        tuple(server.address + path for path in paths),
        f"{algorithm}:{hashlib.new(algorithm, content).hexdigest()}",
        len(content),
    )


def fetch(file: RemoteFile, folder: Path) -> Path:
    return download.download(file, folder, sleep=lambda _seconds: None)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("algorithm", ["sha256", "md5"])
def test_whole_file_with_progress(server: Server, tmp_path: Path, algorithm: str) -> None:
    server.files["/a"] = CONTENT
    seen: list[tuple[int, int]] = []
    file = remote(server, "/a", algorithm=algorithm)
    path = download.download(file, tmp_path / "new", progress=lambda *numbers: seen.append(numbers))
    assert path.read_bytes() == CONTENT
    assert names(tmp_path / "new") == ["file.bin"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_cut_line_is_resumed(server: Server, tmp_path: Path) -> None:
    server.files["/a"] = CONTENT
    server.cut_after["/a"] = [1000, 5000]
    assert fetch(remote(server, "/a"), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/a", None), ("/a", "bytes=1000-"), ("/a", "bytes=6000-")]
    assert names(tmp_path) == ["file.bin"]


def test_a_later_run_goes_on_where_the_last_one_was_cut(server: Server, tmp_path: Path) -> None:
    server.files["/a"] = CONTENT
    server.cut_after["/a"] = [100, 0, 0]
    with pytest.raises(FedtailorError, match=f"ended after 100 of {len(CONTENT)} bytes.*goes on from there"):
        fetch(remote(server, "/a"), tmp_path)
    assert names(tmp_path) == ["file.bin.part"]
    server.asked.clear()
    assert fetch(remote(server, "/a"), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/a", "bytes=100-")]


def test_server_without_ranges_begins_again(server: Server, tmp_path: Path) -> None:
    server.files["/a"] = CONTENT
    server.without_ranges.add("/a")
    server.cut_after["/a"] = [1000]
    assert fetch(remote(server, "/a"), tmp_path).read_bytes() == CONTENT


def test_wrong_range_is_refused(server: Server, tmp_path: Path) -> None:
    server.files |= {"/a": CONTENT, "/b": CONTENT}
    server.wrong_range.add("/a")
    server.cut_after["/a"] = [1000, 0]
    assert fetch(remote(server, "/a", "/b"), tmp_path).read_bytes() == CONTENT


def test_second_mirror_after_a_missing_file(server: Server, tmp_path: Path) -> None:
    server.files["/b"] = CONTENT
    assert fetch(remote(server, "/a", "/b"), tmp_path).read_bytes() == CONTENT
    assert [path for path, _ in server.asked] == ["/a", "/b"]


def test_second_mirror_after_a_wrong_checksum(server: Server, tmp_path: Path) -> None:
    server.files |= {"/a": CONTENT[:-1] + b"!", "/b": CONTENT}
    assert fetch(remote(server, "/a", "/b"), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/a", None), ("/b", None)]


def test_second_mirror_goes_on_where_the_first_was_cut(server: Server, tmp_path: Path) -> None:
    server.files |= {"/a": CONTENT, "/b": CONTENT}
    server.cut_after["/a"] = [500]
    assert fetch(remote(server, "/a", "/b"), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/a", None), ("/b", "bytes=500-")]


def test_nonsense_of_one_mirror_does_not_spoil_the_next(server: Server, tmp_path: Path) -> None:
    server.files |= {"/a": b"<html>sorry</html>", "/b": CONTENT}
    server.without_length.add("/a")
    assert fetch(remote(server, "/a", "/b"), tmp_path).read_bytes() == CONTENT
    assert server.asked == [("/a", None), ("/b", "bytes=18-"), ("/b", None)]


@pytest.mark.parametrize(
    ("content", "lengths", "words"),
    [
        (CONTENT[:-1] + b"!", True, "wrong content"),
        (CONTENT[: len(CONTENT) // 2], True, "not the right file"),
        (CONTENT[: len(CONTENT) // 2], False, "ended after"),
        (CONTENT + b"more", False, "sends more than"),
        (CONTENT + b"more", True, "not the right file"),
        (None, True, "404"),
    ],
    ids=["changed", "truncated", "truncated unannounced", "longer unannounced", "longer", "missing"],
)
def test_wrong_files_never_get_the_name(server: Server, tmp_path: Path, content, lengths, words) -> None:
    if content is not None:
        server.files["/a"] = content
    if not lengths:
        server.without_length.add("/a")
    with pytest.raises(FedtailorError, match=words):
        fetch(remote(server, "/a"), tmp_path)
    assert "file.bin" not in names(tmp_path)
    if words != "ended after":
        assert names(tmp_path) == []


def test_leftover_of_another_version_is_dropped(server: Server, tmp_path: Path) -> None:
    server.files["/a"] = CONTENT
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "file.bin.part").write_bytes(b"x" * (len(CONTENT) + 5))
    assert fetch(remote(server, "/a"), tmp_path).read_bytes() == CONTENT


def test_no_server_and_odd_addresses(server: Server, tmp_path: Path) -> None:
    file = dataclasses.replace(remote(server), mirrors=("http://127.0.0.1:1/x", "file:///etc/hostname"))
    with pytest.raises(FedtailorError, match=r"refused.*expected an http or https address"):
        fetch(file, tmp_path)


def test_read_only_cache(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server.files["/a"] = CONTENT
    if os.geteuid() == 0:  # root may write anywhere: let the system refuse instead
        monkeypatch.setattr(Path, "mkdir", refuse)
    folder = tmp_path / "locked"
    os.makedirs(folder)
    folder.chmod(0o500)
    with pytest.raises(FedtailorError, match=r"cannot write .*FEDTAILOR_DATA"):
        fetch(remote(server, "/a"), folder)
    assert names(folder) == []


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(13, "Permission denied")


def test_full_disk_keeps_the_name_free(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.files["/a"] = CONTENT
    monkeypatch.setattr(
        Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))
    )
    with pytest.raises(FedtailorError, match="No space left"):
        fetch(remote(server, "/a"), tmp_path)
    assert "file.bin" not in names(tmp_path)


def test_two_at_once_do_not_disturb_each_other(server: Server, tmp_path: Path) -> None:
    server.files["/a"] = CONTENT
    part = tmp_path / "set" / "file.bin.part"
    part.parent.mkdir()
    part.write_bytes(b"half of another process")
    with part.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert fetch(remote(server, "/a"), tmp_path).read_bytes() == CONTENT
    assert part.read_bytes() == b"half of another process"
    assert names(tmp_path) == ["file.bin", "file.bin.part"]


def test_a_data_set_is_downloaded_into_the_cache(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FEDTAILOR_OFFLINE")
    write_mnist(tmp_path / "origin", train=30)
    source = sources.known_sources()["mnist"]
    files = []
    for file in source.remote:
        content = (tmp_path / "origin" / Path(file.path).name).read_bytes()
        server.files["/" + file.path] = content
        checksum = f"sha256:{hashlib.sha256(content).hexdigest()}"
        files.append(dataclasses.replace(file, checksum=checksum, size=len(content)))
    monkeypatch.setitem(sources._sources, "mnist", dataclasses.replace(source, remote=tuple(files)))
    monkeypatch.setenv("FEDTAILOR_MIRROR", server.address)
    assert "would be downloaded" in describe("mnist")
    assert len(load_dataset("mnist").train) == 30
    assert len(server.asked) == 4
    assert len(load_dataset("mnist").train) == 30
    assert len(server.asked) == 4
    assert "found" in describe("mnist")


def test_progress_is_shown_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    with datasets._progress_bar("file") as progress:
        assert progress is None
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with datasets._progress_bar("file") as progress:
        assert progress is not None
        progress(1, 2)
    assert capsys.readouterr().out == ""


def test_a_data_set_that_cannot_be_had(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FEDTAILOR_OFFLINE")
    source = sources.known_sources()["svhn"]
    files = [dataclasses.replace(file, mirrors=(server.address + "/gone",)) for file in source.remote]
    monkeypatch.setitem(sources._sources, "svhn", dataclasses.replace(source, remote=tuple(files)))
    monkeypatch.setattr(download.time, "sleep", lambda _seconds: None)
    monkeypatch.setattr(download, "ATTEMPTS", 1)
    with pytest.raises(
        FedtailorError, match=r"404.*It wants svhn/train_32x32.mat.*Looked in .*FEDTAILOR_DATA"
    ):
        load_dataset("svhn")
