from __future__ import annotations

from pathlib import Path

import pytest

from fedtailor.data import files


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of this machine is seen or touched: data folder, cache and system folder are the test's own."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setenv(files.DATA_VARIABLE, str(folder))
    monkeypatch.setattr(files, "user_cache_path", lambda name: tmp_path / "cache" / name)
    monkeypatch.setattr(files, "SYSTEM_FOLDERS", (tmp_path / "system",))
    monkeypatch.setenv("FEDTAILOR_OFFLINE", "1")
    monkeypatch.delenv("FEDTAILOR_MIRROR", raising=False)
    return folder
