"""``check``: what a file does here, without the run; and files that are damaged, forged or of another class."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from networks import cnn
from torch import nn

import fedtailor
from fedtailor import Budget, FedtailorError
from fedtailor.deploying.bundle import MANIFEST, deploy, read_manifest
from fedtailor.deploying.checking import check
from fedtailor.deploying.formats import FORMATS
from fedtailor.deploying.formats.pt2 import refuse_pickles
from fedtailor.deploying.wanted import Wanted
from fedtailor.errors import CorruptError
from helpers import slow_if

# Parts of a .pt2 file that PyTorch unpickles or runs, and what stands in them.
CONFIG = "archive/data/constants/model_constants_config.json"
PARTS_THAT_RUN = {
    "archive/data/sample_inputs/model.pt": "pickled",
    "serialized_state_dict.pt": "of an older format, without a folder",
    "archive/data/aotinductor/model/x.so": "compiled",
    "archive/data/constants/opaque_obj_0": "pickled",
    "other/data/weights/weight_0": "a second folder",
    CONFIG: json.dumps({"config": {"c": {"path_name": "opaque_obj_0", "use_pickle": False}}}),
    "archive/data/weights/model_weights_config.json": json.dumps(
        {"config": {"w": {"path_name": "weight_0", "use_pickle": True}}}
    ),
}


class ByName(nn.Module):
    """Takes what a collator hands over, by its names."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.head = nn.Embedding(20, 4), nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, tokens=None, scale=None):
        return self.head(self.inner(self.embedding(tokens).mean(1) * scale))


class TestCheck:
    def test_a_file_is_run_and_compared(self, bundle):
        found = check(bundle / "0.5.safetensors", model=f"{__name__}:cnn", repeats=3)
        assert 0 < found.median_ms <= found.p95_ms
        assert found.differences == []

    def test_a_damaged_file(self, bundle, tmp_path):
        (tmp_path / "manifest.json").write_bytes((bundle / "manifest.json").read_bytes())
        (tmp_path / "0.5.safetensors").write_bytes((bundle / "0.5.safetensors").read_bytes()[:-7])
        with pytest.raises(CorruptError, match="is damaged or another file: its sha256 is not the one"):
            check(tmp_path / "0.5.safetensors")

    def test_files_that_are_none(self, bundle, tmp_path):
        with pytest.raises(FedtailorError, match="no such file"):
            check(tmp_path / "x.onnx")
        (tmp_path / "x.bin").write_bytes(b"")
        with pytest.raises(FedtailorError, match=r"ends with none of .safetensors, .pt2, .onnx, .pte"):
            check(tmp_path / "x.bin")
        (tmp_path / "x.pt2").write_bytes(b"no archive")
        with pytest.raises(CorruptError, match=r"x.pt2 cannot be read"):
            check(tmp_path / "x.pt2")
        with pytest.raises(
            FedtailorError, match=r"of a network alone; pass what builds it at full size: --model"
        ):
            check(bundle / "0.5.safetensors")

    @pytest.mark.slow
    def test_a_file_alone_says_itself_what_its_inputs_are(self, run, tmp_path):
        folder = deploy(run, Wanted(Budget(width=0.5), formats=("pt2",)), tmp_path / "deploy").folder
        (folder / "manifest.json").unlink()
        file = folder / "width-1_2.pt2"
        assert FORMATS["pt2"].inputs(file) == [{"name": "x", "type": "uint8", "shape": ["batch", 1, 8, 8]}]
        found = check(file, repeats=2)
        assert (found.expected, found.differences) == (None, [])
        with pytest.raises(FedtailorError, match=r"--data digits: no manifest.json beside .* outputs mean"):
            check(file, "digits")

    def test_weights_alone_need_their_manifest(self, bundle, tmp_path):
        (tmp_path / "0.5.safetensors").write_bytes((bundle / "0.5.safetensors").read_bytes())
        with pytest.raises(FedtailorError, match="does not say what its inputs are; expected its manifest"):
            check(tmp_path / "0.5.safetensors")

    @pytest.mark.parametrize("form", [slow_if(each, "pt2") for each in ("safetensors", "pt2")])
    def test_inputs_that_are_given_by_name(self, form, tmp_path):
        """Batches are dictionaries in an order that is not that of the parameters."""
        tokens = torch.arange(40).view(8, 5) % 20
        rows = [
            {"scale": torch.ones(4), "tokens": each, "labels": torch.tensor(place % 2)}
            for place, each in enumerate(tokens)
        ]
        run = fedtailor.train(
            ByName(), rows, "uniform-2", "fjord", rounds=1, engine={"workers": 0}, progress=False
        )
        folder = deploy(run, Wanted(Budget(width=1), formats=(form,)), tmp_path / "deploy").folder
        names = [(each["name"], each["keyword"]) for each in read_manifest(folder)["inputs"]]
        assert names == [("scale", True), ("tokens", True)]
        file = folder / f"width-1.{form}"
        assert check(file, model=f"{__name__}:ByName", repeats=1).differences == []
        if form == "pt2":
            assert FORMATS[form].inputs(file) == read_manifest(folder)["inputs"]

    @pytest.mark.parametrize("name", [slow_if(each, "onnx", "pte") for each in FORMATS])
    def test_damaged_bytes_are_refused_by_every_format(self, name, tmp_path):
        form = FORMATS[name]
        for library in form.needs:
            pytest.importorskip(library, reason=f"pip install 'fedtailor[{form.extra}]'")
        file = tmp_path / f"x{form.suffix}"
        file.write_bytes(b"nothing that anybody wrote")
        with pytest.raises(CorruptError, match="cannot be read"):
            form.open(file, nn.Linear(1, 1))

    @pytest.mark.parametrize("part", PARTS_THAT_RUN)
    def test_a_pt2_file_that_could_run_code(self, part, tmp_path):
        with zipfile.ZipFile(tmp_path / "x.pt2", "w") as archive:
            archive.writestr("archive/models/model.json", "{}")
            archive.writestr(part, PARTS_THAT_RUN[part])
        with pytest.raises(FedtailorError, match="could run code when it is loaded"):
            refuse_pickles(tmp_path / "x.pt2")


def another() -> nn.Module:
    module = cnn()
    module.more = nn.Linear(2, 2)
    return module


def test_a_class_with_a_layer_more_is_another_class(bundle):
    with pytest.raises(FedtailorError, match=r"not the one that was trained: the file has no more\.bias"):
        check(bundle / "0.5.safetensors", model=f"{__name__}:another")


def forged(bundle: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(bundle, folder)
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **changes}))
    return folder


def test_a_manifest_runs_no_code(bundle, tmp_path):
    command = f"touch {tmp_path / 'ran'}"
    words = {"name": "os:system", "options": {"command": command}, "input_shape": [1], "num_classes": 2}
    folder = forged(bundle, tmp_path / "forged", model=words)
    with pytest.raises(FedtailorError, match="pass what builds it at full size: --model"):
        check(folder / "0.5.safetensors")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "changes",
    [{"networks": None}, {"networks": [{}]}, {"networks": [{"name": "x"}]}, {"task": 3}, {"labels": None}],
    ids=str,
)
def test_a_manifest_that_is_none(bundle, tmp_path, changes):
    folder = forged(bundle, tmp_path / "forged", **changes)
    with pytest.raises(CorruptError, match="expected the manifest of a bundle"):
        read_manifest(folder)


def test_a_manifest_nested_without_end(tmp_path):
    (tmp_path / MANIFEST).write_text("[" * 100_000)
    with pytest.raises(CorruptError, match="cannot be read"):
        read_manifest(tmp_path)
