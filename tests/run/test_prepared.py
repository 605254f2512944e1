"""What fedtailor did to the inputs is part of what is deployed: sub-models answer raw inputs."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

import fedtailor
from fedtailor.data import Examples, FederatedData, ImagePreparation, Standardisation, load_dataset, target_of
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.methods.fjord.fjord import FjORD
from fedtailor.methods.splitmix import SplitMix
from helpers import CLASSES, tiny_cnn, tiny_mlp

SETTINGS = {"rounds": 2, "clients_per_round": 3, "engine": {"workers": 0}}
PIXELS = ImagePreparation(mean=(0.4,), std=(0.2,), padding=1, flip=True)


def pictures(key: str | None = None) -> FederatedData:
    """Bytes that are prepared batch by batch; ``key`` makes named columns of them."""
    generator = np.random.default_rng(0)
    labels = np.arange(60) % CLASSES
    shades = (60 * labels).astype(np.uint8)[:, None, None, None]
    pixels = generator.integers(0, 90, (60, 1, 4, 4), dtype=np.uint8) + shades
    preparation = ImagePreparation(PIXELS.mean, PIXELS.std, key=key)
    examples = (
        Examples.of(pixels, labels, preparation=PIXELS)
        if key is None
        else Examples.named({key: pixels, "label": labels}, preparation)
    )
    return FederatedData.from_examples(examples, examples, clients=4, num_classes=CLASSES)


def raw_and_prepared(data: FederatedData) -> tuple[Tensor, Tensor]:
    return data.test.columns[0], data.test.take(torch.arange(len(data.test)))[0]


@pytest.fixture(scope="module")
def run() -> fedtailor.Run:
    return fedtailor.train(tiny_cnn(4, 6), pictures(), "uniform-2", FjORD(), **SETTINGS)


def test_a_submodel_answers_raw_inputs_as_it_was_evaluated(run):
    raw, prepared = raw_and_prepared(run.data)
    small, bare = run.submodel(0.5), run.submodel(0.5, with_preparation=False)
    assert raw.dtype == torch.uint8
    torch.testing.assert_close(small(raw), bare(prepared))
    torch.testing.assert_close(small(raw.float()), bare(prepared))
    assert not torch.allclose(
        small(raw), bare(raw.float()), atol=0.1
    )  # what went wrong without the first layer
    right = (small(raw).argmax(-1) == run.data.test.targets).double().mean().item()
    assert right == pytest.approx(run.tiers["0.5"]["accuracy"])
    assert type(small.network) is type(bare)
    assert not small.training


def test_it_is_saved_and_loaded_like_any_module(run):
    raw, _ = raw_and_prepared(run.data)
    small, file = run.submodel(0.5), io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(again(raw), small(raw))
    assert {"preparation.scale", "preparation.shift"} <= set(small.state_dict())
    assert not any("fedtailor" in type(layer).__module__ for layer in small.modules())


def test_ensembles_switchable_and_named_inputs(run):
    raw, prepared = raw_and_prepared(run.data)
    network = run.switchable().switch(0.4)
    torch.testing.assert_close(network(raw), run.submodel(0.4)(raw))
    torch.testing.assert_close(run.switchable(with_preparation=False).switch(0.4)(prepared), network(raw))
    assert "preparation.scale" in network.state_dict()
    several = fedtailor.train(tiny_cnn(4, 6), pictures(), "uniform-2", SplitMix(base=0.5), **SETTINGS)
    torch.testing.assert_close(
        several.submodel(1)(raw), several.submodel(1, with_preparation=False)(prepared)
    )

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = tiny_cnn(4, 6)

        def forward(self, picture: Tensor) -> Tensor:
            return self.network(picture)

    data = pictures("picture")
    named = fedtailor.train(Named(), data, "uniform-2", FjORD(), **SETTINGS)
    batch = data.test.take(torch.arange(4))
    wanted = named.submodel(0.4, with_preparation=False)(picture=batch["picture"])
    stored = data.test.columns["picture"][:4]
    torch.testing.assert_close(named.submodel(0.4)(picture=stored), wanted)
    torch.testing.assert_close(named.switchable().switch(0.4)(picture=stored), wanted)
    assert len(target_of(batch)) == 4


def test_features_are_scaled_by_the_first_layer():
    generator = np.random.default_rng(0)
    y = np.arange(60) % CLASSES
    x = 500 + 100 * generator.normal(size=(60, 5)) + 80 * y[:, None]
    scaling = Standardisation(tuple(x.mean(0)), tuple(x.std(0)))
    examples = Examples.of(x, y, preparation=scaling)
    data = FederatedData.from_examples(examples, examples, clients=4, num_classes=CLASSES)
    run = fedtailor.train(tiny_mlp(8), data, "uniform-2", "heterofl", **SETTINGS)
    raw, prepared = raw_and_prepared(data)
    torch.testing.assert_close(run.submodel(0.5)(raw), run.submodel(0.5, with_preparation=False)(prepared))


def test_files_say_what_is_done_to_inputs(tmp_path: Path):
    run = fedtailor.train(
        tiny_cnn(4, 6), pictures(), "uniform-2", FjORD(), folder=tmp_path / "run", **SETTINGS
    )
    run.save_sparse(tmp_path / "small.safetensors", Budget(width=0.5))
    with safe_open(tmp_path / "run" / "weights.safetensors", framework="pt") as whole:
        about = json.loads(whole.metadata()["about"])
    with safe_open(tmp_path / "small.safetensors", framework="pt") as small:
        of_small = json.loads(small.metadata()["inputs"])
    for inputs in (about["inputs"], of_small):
        assert inputs["preparation"] == {
            "kind": "pixels",
            "mean": [0.4],
            "std": [0.2],
            "white": 255.0,
            "input": None,
        }


FRESH = """
import sys, numpy, torch
data = numpy.load(sys.argv[1] + "/digits.npz")
whole = torch.load(sys.argv[1] + "/whole.pt", weights_only=False)
exported = torch.export.load(sys.argv[1] + "/exported.pt2").module()
assert not any(name.startswith("fedtailor") for name in sys.modules)
for network, x in ((whole, data["x"]), (whole, data["x"].astype("float32")), (exported, data["x"])):
    print((network(torch.from_numpy(x)).argmax(1).numpy() == data["y"]).mean())
"""


@pytest.mark.slow
def test_digits_in_a_fresh_process(tmp_path: Path):
    """Raw digits in a process without fedtailor: as many right as when the run was evaluated."""
    known = load_dataset("digits")
    x_train, x = (part.columns[0].numpy() * 15 for part in (known.train, known.test))
    y_train, y = known.train.targets.numpy(), known.test.targets.numpy()
    np.savez(tmp_path / "own.npz", x_train=x_train[:, 0], y_train=y_train, x_test=x[:, 0], y_test=y)
    torch.manual_seed(0)
    module = nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
    )
    training = {"lr": 0.05, "momentum": 0.9, "epochs": 1, "batch_size": 16}
    with pytest.warns(UserWarning, match="is taken for images"):
        run = fedtailor.train(
            module, str(tmp_path / "own.npz"), "uniform-2", "fjord", rounds=10, training=training
        )
    small = run.submodel(0.5)
    np.savez(tmp_path / "digits.npz", x=x, y=y)
    torch.save(small, tmp_path / "whole.pt")
    sizes = ({0: torch.export.Dim("batch", min=2)},)
    example = (torch.from_numpy(x[:4]),)
    torch.export.save(torch.export.export(small, example, dynamic_shapes=sizes), tmp_path / "exported.pt2")
    done = subprocess.run(
        [sys.executable, "-c", FRESH, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert run.tiers["0.5"]["accuracy"] > 0.9
    for line in done.stdout.split():
        assert float(line) == pytest.approx(run.tiers["0.5"]["accuracy"], abs=0.003)
    raw, bare = torch.from_numpy(x).float(), run.submodel(0.5, with_preparation=False)
    assert not torch.allclose(bare(raw), small(raw), atol=0.1)  # the network alone is not for raw inputs
