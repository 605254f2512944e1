"""Over a real SuperLink on loopback, with TLS and registered SuperNodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra fedtailor[flower] is not installed")

from fedtailor.flower.local import LocalLink, local_link
from fedtailor.flower.submit import submit
from fedtailor.methods.registry import method_names
from flower.link.real import parts, same, there
from flower.link.warm import warm_processes
from flower.test_same_bits import CONFIG, config_of

pytestmark = pytest.mark.slow
NODES = 4


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalLink]:
    folder = tmp_path_factory.mktemp("link")
    with warm_processes(folder / "warm"), local_link(folder, parts(folder, NODES)) as running:
        yield running


@pytest.mark.parametrize("method", method_names())
def test_every_method_has_the_bits_of_the_run_in_process(
    method: str, link: LocalLink, tmp_path: Path
) -> None:
    text, said = config_of(method), list[str]()
    submit(text, tmp_path / "there", there(link), said.append)
    assert [line.split()[1] for line in said if line.startswith("round")] == ["1", "2", "3"]
    assert same(text, tmp_path / "there")


def test_processes_that_flower_starts_itself_have_the_same_bits(tmp_path: Path) -> None:
    with local_link(tmp_path / "link", parts(tmp_path / "link", 2)) as link:
        text = CONFIG.replace("{method}", "flado").replace("rounds = 3", "rounds = 2")
        submit(text, tmp_path / "there", there(link), lambda _: None)
    assert same(text, tmp_path / "there")


def test_a_message_loads_no_more_than_it_needs() -> None:
    """A process is started for every message: what only servers, reports or rare settings need is not imported."""
    code = "import sys; from fedtailor.flower.apps import client; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    heavy = {
        "fedtailor.flower.server",
        "fedtailor.report",
        "jinja2",
        "pandas",
        "scipy",
        "setuptools",
        "sklearn",
    }
    assert not heavy & set(done.stdout.split())
