"""Nothing that fedtailor reads can run code: no file of it unpickles, evaluates or starts programs. Proved twice."""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

import fedtailor

ROOT = Path(fedtailor.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "joblib",
    "shelve",
    "marshal",
    "yaml",
    "jsonpickle",
}
FUNCTIONS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "torch.load", "torch.jit.load", "torch.package.PackageImporter", "torch.hub.load", "numpy.fromfile", "os.system",
    "os.popen", "subprocess.run", "subprocess.Popen", "subprocess.check_output", "subprocess.call",
    "pandas.read_pickle",
}  # fmt: skip
SHORT = {"np": "numpy", "pd": "pandas"}

# Bytes that are no input: written by this process for its own child, through memory that nobody else can open.
ALLOWED = {
    "engines/workers/luggage.py: pickle",
    "engines/workers/process.py: subprocess.Popen",
    "sweep/pool.py: subprocess.Popen",  # this program itself
    # Flower's own programs, from beside this Python, with words of our own.
    "flower/keeping.py: subprocess.Popen",
    "flower/local.py: subprocess.Popen",
    "flower/link.py: subprocess.run",
    "flower/submit.py: subprocess.Popen",
    "flower/submit.py: subprocess.run",
}


def dotted(node: ast.expr) -> str:
    """``np.load`` as written, with the usual short names spelt out."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return SHORT.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def findings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Everything that could turn data into code, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, name.name) for name in node.names if name.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            names = {f"{node.module}.{name.name}" for name in node.names}
            if (node.module or "").split(".")[0] in MODULES or names & CALLS:
                yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call):
            name = dotted(node.func)
            if name in FUNCTIONS | CALLS or name.endswith((".loads_pickle", ".unpickle")):
                yield node.lineno, name
            if name == "numpy.load" and not any(
                keyword.arg == "allow_pickle" and getattr(keyword.value, "value", True) is False
                for keyword in node.keywords
            ):
                yield node.lineno, "numpy.load without allow_pickle=False"


def test_no_file_of_the_package_could_turn_data_into_code():
    assert len(FILES) > 40
    found = {
        f"{path.relative_to(ROOT).as_posix()}: {what}": line
        for path in FILES
        for line, what in findings(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert found.keys() <= ALLOWED, {what: line for what, line in found.items() if what not in ALLOWED}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle", "from pickle import loads", "import torch\ntorch.load('x')", "from torch import load",
        "eval('1')", "import numpy as np\nnp.load('x')", "np.load('x', allow_pickle=True)", "import cloudpickle as c",
        "import os\nos.system('ls')", "def f():\n    import marshal", "from subprocess import run",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(code):
    assert list(findings(ast.parse(code)))


def test_the_scan_lets_harmless_code_pass():
    code = "import json\njson.loads('1')\nmodel.eval()\nnp.load('x', allow_pickle=False)\nre.compile('x')"
    assert list(findings(ast.parse(code))) == []


# The same at run time: Python itself reports what it is about to do.

PROGRAM = """
    import sys, warnings
    from pathlib import Path

    folder = Path(sys.argv[1])
    forbidden: set[str] = set()
    seen: list[str] = []

    def hook(event, arguments):
        if event in forbidden:
            seen.append(f"{event} {arguments[:1]}")

    import torch
    import fedtailor
    from fedtailor.storage import wire
    from fedtailor.run.interface import resume, run_config
    from fedtailor.run.setup import prepare_config
    from fedtailor.config import make_config

    config = make_config({
        "rounds": 3, "clients_per_round": 2, "data": {"clients": 4, "limit": 60}, "fleet": {"name": "uniform-2"},
        "model": {"name": "cnn", "channels": [4, 8]}, "engine": {"workers": 0},
    })

    class Cut(Exception):
        pass

    def cut(record):
        if record.round == 2:
            raise Cut

    try:
        run_config(config, folder, cut)
    except Cut:
        pass

    sys.addaudithook(hook)

    # Decoding: nothing at all may happen.
    forbidden |= {
        "pickle.find_class", "exec", "compile", "import", "marshal.loads", "os.system", "os.exec", "os.posix_spawn",
        "os.fork", "subprocess.Popen", "ctypes.dlopen", "socket.connect", "open",
    }
    value = {"a": [torch.arange(5), (1, None)], 3: {"b": torch.zeros(2, 2).bool()}}
    data = b"".join(wire.encode(value))
    assert wire.decode(data)[3]["b"].shape == (2, 2)
    pickled = b"\\x80\\x04cos\\nsystem\\n(S'true'\\ntR."
    for damaged in (data[:-1], data[:40], pickled, b"", data[:12] + b"x" + data[13:]):
        try:
            wire.decode(damaged)
        except wire.DecodeError:
            pass
    assert seen == [], seen

    # Resuming: modules are imported and files opened, but nothing is unpickled and no program is started.
    forbidden.clear()
    forbidden |= {
        "pickle.find_class", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen", "socket.connect",
        "shelve.open",
    }
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = resume(folder)
    assert run.state.round == 3
    assert seen == [], seen

    # The hook works.
    import pickle
    pickle.loads(pickle.dumps(Path))
    assert seen == ["pickle.find_class ('pathlib',)"], seen
    print("nothing")
"""


def test_python_reports_nothing_while_frames_are_read_and_a_run_is_resumed(tmp_path):
    program = [sys.executable, "-c", textwrap.dedent(PROGRAM), str(tmp_path / "run")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "nothing"
