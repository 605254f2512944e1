from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "your_own_data.py"


def test_every_kind_in_the_example(tmp_path: Path) -> None:
    specification = importlib.util.spec_from_file_location("your_own_data", EXAMPLE)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    sizes = {
        "tensors": example.from_tensors().num_clients,
        "dataset": example.from_torch_dataset().num_clients,
        "npz": example.from_npz(tmp_path).num_clients,
        "lines": example.from_json_lines(tmp_path).num_clients,
        "texts": example.from_texts(tmp_path).num_clients,
    }
    assert sizes == {"tensors": 10, "dataset": 3, "npz": 5, "lines": 4, "texts": 3}


def test_images_in_the_example(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    specification = importlib.util.spec_from_file_location("your_own_data", EXAMPLE)
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    assert example.from_image_folder(tmp_path).num_clients == 4
