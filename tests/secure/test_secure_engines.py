"""The layer over engines: the same sums, and so the same weights, in one process and with workers."""

from __future__ import annotations

import pytest

from fedtailor.config import make_config
from fedtailor.run.interface import run_config
from fedtailor.storage.run_folder import RunFolder
from helpers import differing, final_weights


@pytest.mark.slow
@pytest.mark.parametrize("method", ["heterofl", "fedrolex"])  # nested pieces, and windows that roll
def test_one_process_and_workers_give_the_same_weights(method, tmp_path):
    for workers in (0, 2):
        config = make_config(
            {
                "rounds": 2, "clients_per_round": 6, "evaluate_every": 2,
                "data": {"dataset": "digits", "clients": 6, "partition": "iid"},
                "model": {"name": "mlp", "hidden": [8]},
                "fleet": {"name": "uniform-3"},
                "method": {"name": method, "label_rows": False},
                "engine": {"workers": workers},
                "secure": {"threshold": 2},
            }
        )  # fmt: skip
        run_config(config, tmp_path / str(workers))
    assert differing(final_weights(tmp_path / "0"), final_weights(tmp_path / "2")) == set()
    assert RunFolder(tmp_path / "2").records()[-1].privacy["rested"] == {}
