"""A bundle of a run: what is written, what a manifest says, what is picked, and what is refused."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from networks import cnn, finished
from torch import nn

import fedtailor
from commands import call, small_config
from fedtailor import Budget, FedtailorError
from fedtailor.deploying.bundle import deploy, read_manifest
from fedtailor.deploying.checking import check
from fedtailor.deploying.formats import FORMATS
from fedtailor.deploying.formats import safetensors_file as weights
from fedtailor.deploying.formats.pt2 import refuse_pickles
from fedtailor.deploying.inputs import Inputs, answers_of
from fedtailor.deploying.int8 import quantised, with_int8_weights
from fedtailor.deploying.memory import peak_memory
from fedtailor.deploying.network import difference, network_for
from fedtailor.deploying.picking import pick
from fedtailor.deploying.wanted import Wanted
from fedtailor.errors import CorruptError
from helpers import slow_if

TIERS = Wanted(all_tiers=True)


@pytest.fixture(scope="module")
def run() -> fedtailor.Run:
    return finished("cnn", "heterofl")


@pytest.fixture(scope="module")
def bundle(run, tmp_path_factory) -> Path:
    return deploy(run, TIERS, tmp_path_factory.mktemp("run") / "deploy").folder


def test_a_bundle_holds_what_its_manifest_says(run, bundle):
    manifest = read_manifest(bundle)
    files = [file for network in manifest["networks"] for file in network["files"]]
    assert {each.name for each in bundle.iterdir()} == {
        "manifest.json",
        "card.md",
        *(f["file"] for f in files),
    }
    for file in files:
        found = (bundle / file["file"]).read_bytes()
        assert (len(found), hashlib.sha256(found).hexdigest()) == (file["size"], file["sha256"])
        assert file["difference"] <= 1e-6
    small, large = manifest["networks"]
    assert (small["name"], large["name"]) == ("0.5", "1")
    for network, tier in zip((small, large), run.fleet.tiers, strict=True):
        cost = run.model.cost(run.method.cut_for(run.state, tier.budget, run.model))
        assert (network["macs"], network["params"], network["bytes"]) == (cost.macs, cost.params, cost.bytes)
        assert network["score"]["metrics"]["accuracy"] == pytest.approx(run.tiers[tier.name]["accuracy"])
        classes = network["score"]["classes"]  # equally many examples of each
        assert sum(classes.values()) / len(classes) == pytest.approx(run.tiers[tier.name]["accuracy"])
    assert manifest["inputs"] == [{"name": "x", "type": "uint8", "shape": ["batch", 1, 8, 8]}]
    assert manifest["outputs"] == [{"name": "output", "type": "float32", "shape": ["batch", 4]}]
    assert manifest["preparation"]["preparation"]["mean"] == [0.4]


def test_the_card_has_a_head_that_hubs_read(run, tmp_path):
    wanted = Wanted(Budget(width=0.5), licence="mit", notes="Made-up pictures.")
    text = (deploy(run, wanted, tmp_path / "deploy").folder / "card.md").read_text()
    _, head, page = text.split("---\n", 2)
    fields = {line.partition(": ")[0]: json.loads(line.partition(": ")[2]) for line in head.splitlines()}
    assert fields["license"] == "mit"
    assert "heterofl" in fields["tags"]
    assert "Made-up pictures." in page
    assert "| `width-1_2.safetensors` |" in page


def test_weights_are_rebuilt_with_the_class_alone(run, bundle):
    about, tensors = weights.read(bundle / "0.5.safetensors")
    with torch.random.fork_rng():
        small = weights.rebuilt(about, tensors, cnn(), "file")
    network = network_for(run, "0.5", Budget(width=0.5))
    prepared = run.data.test.take(torch.arange(8))[0]
    assert difference(answers_of(small, Inputs((prepared,))), network.expected) <= 1e-6
    assert small(prepared).shape == (8, 4)


def test_a_second_call_adds_to_the_bundle_and_replaces_only_when_told(run, tmp_path):
    place = tmp_path / "deploy"
    deploy(run, Wanted(Budget(width=0.5)), place)
    before = read_manifest(place)
    with pytest.raises(FedtailorError, match="width-1_2.safetensors exists already: --overwrite"):
        deploy(run, Wanted(Budget(width=0.5)), place)
    assert read_manifest(place) == before
    deploy(run, Wanted(Budget(width=0.5)), place, overwrite=True)
    deploy(run, Wanted(Budget(width=0.5), quantize="int8", licence="mit"), place)
    (network,) = read_manifest(place)["networks"]
    assert [each["file"] for each in network["files"]] == [
        "width-1_2.safetensors",
        "width-1_2.int8.safetensors",
    ]
    assert network["files"][1]["score"]["examples"] == 40
    assert network["files"][1]["size"] < network["files"][0]["size"]


def test_the_file_for_a_device_is_the_most_capable_that_fits(bundle):
    manifest = read_manifest(bundle)
    small, large = manifest["networks"]
    between = (small["macs"] + large["macs"]) // 2
    assert pick(manifest, Budget(macs=between))[1]["file"] == "0.5.safetensors"
    assert pick(manifest, Budget(macs=large["macs"]))[1]["file"] == "1.safetensors"
    assert pick(manifest, Budget(memory=small["peak_memory"]))[0]["name"] == "0.5"
    assert pick(manifest, Budget(bytes=small["files"][0]["size"]))[0]["name"] == "0.5"
    with pytest.raises(FedtailorError, match="no file fits: macs is limited to 10, and the smallest has"):
        pick(manifest, Budget(macs=10))
    with pytest.raises(FedtailorError, match="the bundle has no file of format pte"):
        pick(manifest, Budget(macs=0.5), "pte")
    with pytest.raises(
        FedtailorError, match="--pick step_time: expected limits of macs, params, memory, bytes"
    ):
        pick(manifest, Budget(step_time="3ms"))


def test_the_file_for_a_device_that_wrote_down_what_it_can(bundle, tmp_path, monkeypatch, capsys):
    small, large = read_manifest(bundle)["networks"]
    profile = tmp_path / "phone.toml"
    macs = (small["macs"] + large["macs"]) // 2
    profile.write_text(f"""name = "phone-17"
step_time = "2s"

[measured]
overhead = 1.0
macs_per_second = {macs}.0
batch_size = 1
""")
    assert call(monkeypatch, "deploy", str(bundle), "--pick", str(profile)) == 0
    assert capsys.readouterr().out.strip() == str(bundle / "0.5.safetensors")
    profile.write_text('name = "phone-17"\n')
    assert call(monkeypatch, "deploy", str(bundle), "--pick", str(profile)) == 2
    assert "phone.toml has no limit: expected at least one of macs" in capsys.readouterr().err.replace(
        "\n", " "
    )


def nothing_written(place: Path) -> bool:
    return not place.exists() and not list(place.parent.iterdir())


def test_a_budget_that_nothing_meets(run, tmp_path):
    with pytest.raises(FedtailorError, match="no cut fits: macs is limited to 5, but the smallest cut"):
        deploy(run, Wanted(Budget(macs=5)), tmp_path / "deploy")
    assert nothing_written(tmp_path / "deploy")


def test_a_method_that_looks_at_no_budget(tmp_path):
    run = finished("cnn", "fedavg")
    with pytest.raises(
        FedtailorError, match=r"fedavg has no network for this budget: macs .* where 20 % is allowed"
    ):
        deploy(run, Wanted(Budget(macs=0.2)), tmp_path / "deploy")
    assert nothing_written(tmp_path / "deploy")


def test_what_is_asked_for_wrongly(run, tmp_path):
    with pytest.raises(FedtailorError, match="expected one of a budget, all tiers, a client or switchable"):
        Wanted()
    with pytest.raises(FedtailorError, match="unknown format 'onxx': did you mean 'onnx'"):
        Wanted(all_tiers=True, formats=("onxx",))
    with pytest.raises(FedtailorError, match="unknown quantisation 'int4'"):
        Wanted(all_tiers=True, quantize="int4")
    with pytest.raises(FedtailorError, match="devices of one budget are given the same network"):
        deploy(run, Wanted(client=1), tmp_path / "deploy")
    assert nothing_written(tmp_path / "deploy")


@pytest.mark.parametrize("form", ["onnx", "pte"])
def test_a_missing_extra_is_named_before_anything_is_made(run, form, tmp_path, monkeypatch):
    monkeypatch.setattr(type(FORMATS[form]), "needs", ("fedtailor_no_such_library",))
    extra = FORMATS[form].extra
    with pytest.raises(
        FedtailorError, match=rf"--format {form} needs the extra: pip install 'fedtailor\[{extra}\]'"
    ):
        deploy(run, Wanted(all_tiers=True, formats=(form,)), tmp_path / "deploy")
    assert nothing_written(tmp_path / "deploy")


def test_a_file_that_answers_otherwise_is_not_put_in_place(run, tmp_path, monkeypatch):
    """Where a converter went wrong: the file runs, and its answers are others."""
    true = weights.Safetensors.pack

    def wrong(self, network, calibration):
        about, tensors = _parts(true(self, network, calibration), tmp_path)
        return weights.save({n: v + 0.1 for n, v in tensors.items()}, metadata={"about": json.dumps(about)})

    monkeypatch.setattr(weights.Safetensors, "pack", wrong)
    with pytest.raises(
        FedtailorError, match=r"the file 0.5.safetensors for 0.5 answers otherwise .* nothing was"
    ):
        deploy(run, TIERS, tmp_path / "new" / "deploy")
    assert list((tmp_path / "new").iterdir()) == []


def _parts(packed: bytes, folder: Path):
    (folder / "packed.safetensors").write_bytes(packed)
    return weights.read(folder / "packed.safetensors")


def test_int8_weights_by_hand():
    weight = torch.tensor([[1.0, -0.5], [0.0, 0.0]])
    numbers, scale = quantised(weight)
    assert numbers.tolist() == [[127, -64], [0, 0]]
    assert torch.equal((numbers * scale)[0, 0], weight[0, 0])
    layer = nn.Linear(4, 3)
    small = with_int8_weights(layer)
    stored = dict(small.named_parameters())
    assert stored["parametrizations.weight.original"].dtype == torch.int8
    assert not torch.equal(small(torch.eye(4)), layer(torch.eye(4)))
    step = layer.weight.detach().abs().amax(1) / 127
    assert bool(((small(torch.eye(4)) - layer(torch.eye(4))).abs() <= step / 2 + 1e-6).all())


def test_peak_memory_by_hand():
    """4 inputs, 100 and 100 hidden, 2 outputs: worst where both hidden vectors are alive."""
    module = nn.Sequential(nn.Linear(4, 100), nn.ReLU(), nn.Linear(100, 2)).eval()
    values = 4 + 100 + 100
    weights_ = 4 * 100 + 100 + 100 * 2 + 2
    assert peak_memory(module, Inputs((torch.zeros(3, 4),))) == 4 * (values + weights_)


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

    def test_a_pt2_file_that_could_run_code(self, tmp_path):
        torch.export.save(torch.export.export(nn.Linear(2, 2), (torch.zeros(2, 2),)), tmp_path / "x.pt2")
        with pytest.raises(FedtailorError, match=r"sample_inputs/model.pt could run code when it is loaded"):
            refuse_pickles(tmp_path / "x.pt2")


class TestCommand:
    def test_deploy_pick_and_check(self, tmp_path, monkeypatch, capsys):
        monkeypatch.chdir(tmp_path)
        config = small_config(tmp_path)
        assert call(monkeypatch, "run", str(config)) == 0
        capsys.readouterr()
        assert (
            call(monkeypatch, "deploy", "runs/small", "--budget", "macs=0.2") == 2
        )  # fedavg has one network
        assert "fedavg has no network for this budget" in capsys.readouterr().err.replace("\n", " ")
        assert not (tmp_path / "runs" / "small" / "deploy").exists()
        assert call(monkeypatch, "deploy", "runs/small", "--all-tiers", "--json") == 0
        network = json.loads(capsys.readouterr().out)["networks"][0]  # the same for every tier
        assert call(monkeypatch, "deploy", "runs/small", "--pick", "bytes=1MB") == 0
        file = capsys.readouterr().out.strip()
        assert file in [str(each) for each in Path("runs/small/deploy").iterdir()]
        assert call(monkeypatch, "check", file, "--data", "digits", "--repeats", "2", "--json") == 0
        found = json.loads(capsys.readouterr().out)
        assert found["score"]["metrics"]["accuracy"] == pytest.approx(network["score"]["metrics"]["accuracy"])
        assert found["differences"] == []

    def test_an_unfinished_run(self, tmp_path, monkeypatch, capsys):
        folder = tmp_path / "runs" / "half"
        folder.mkdir(parents=True)
        (folder / "metrics.jsonl").write_text("")
        assert call(monkeypatch, "deploy", str(folder), "--all-tiers") == 2
        assert "has not come to its end: `fedtailor resume" in capsys.readouterr().err.replace("\n", " ")

    def test_one_of_four(self, tmp_path, monkeypatch, capsys):
        assert call(monkeypatch, "deploy", str(tmp_path)) == 2
        assert (
            "expected one of --budget, --all-tiers, --client, --switchable or --pick"
            in capsys.readouterr().err
        )
