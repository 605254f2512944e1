"""The wheel: built, installed into an environment of its own, and run from there."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel_runs_from_a_clean_environment(tmp_path: Path):
    """Nothing outside the wheel is needed: not the checkout, not its configs.

    The new environment sees the installed dependencies (installing PyTorch again would take minutes), but the
    package itself comes from the wheel alone.
    """
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True)
    wheel = next(tmp_path.glob("fedtailor-*.whl"))
    names = zipfile.ZipFile(wheel).namelist()
    assert "fedtailor/py.typed" in names
    assert "fedtailor/cli/template.toml" in names
    assert "fedtailor/methods/heterofl.md" in names
    assert "fedtailor/data/embedded/fashion-mnist-8k.npz" in names
    assert "fedtailor/data/embedded/LICENSE-fashion-mnist" in names
    assert wheel.stat().st_size < 5_000_000
    assert not [name for name in names if name.startswith("tests")]

    environment = tmp_path / "environment"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    site = next(environment.glob("lib/python*/site-packages"))
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    dependencies = next(path for path in sys.path if path.endswith("site-packages"))
    # appended behind the environment's own folder, and as plain path: an editable install there does not count
    (site / "dependencies.pth").write_text(dependencies + "\n")
    python = environment / "bin" / "python"
    outside = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    where = subprocess.run(
        [python, "-c", "import fedtailor; print(fedtailor.__file__)"],
        check=True,
        capture_output=True,
        text=True,
        env=outside,
    )
    assert where.stdout.startswith(str(environment))
    for words in (["init"], ["run", "fedtailor.toml", "--set", "rounds=1", "--set", "model.channels=[4,8]"]):
        subprocess.run(
            [python, "-m", "fedtailor", *words], check=True, cwd=tmp_path, capture_output=True, env=outside
        )
    assert (tmp_path / "runs/first/weights.safetensors").is_file()
