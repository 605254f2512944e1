"""What ``extract`` returns is an ordinary module: it copies, saves, loads, trains, compiles and exports."""

from __future__ import annotations

import copy
import io
import pickle
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from elasticity.odd_constructions import ZOO
from elasticity.traced import case, close, run, some_loss, tensors
from fedtailor.data.batches import inputs_of, map_tensors
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic

EXPORTED = [
    "ResNet",
    "LiteralLeNet",
    "BidirectionalGRU",
    "ViT",
    "SmallGPT",
    "MultiInputOutput",
    "PreNormTransformer",
]


@pytest.mark.parametrize("name", ZOO)
def test_copies_and_state_dicts(name):
    this = case(name)
    cut, weights = this.cut(0), this.model.weights()
    small = this.model.extract(weights, cut).eval()
    expected = run(small, this.batch)
    close(run(copy.deepcopy(small), this.batch), expected, 0)
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    other = this.model.extract({key: torch.zeros_like(value) for key, value in weights.items()}, cut).eval()
    other.load_state_dict(torch.load(file, weights_only=True))
    close(run(other, this.batch), expected, 0)
    assert not any(type(part).__module__.startswith("fedtailor") for part in small.modules())
    assert {name for name, _ in small.named_parameters()} == {
        name for name, _ in this.module.named_parameters()
    }
    assert set(small.state_dict()) == set(this.module.state_dict())


@pytest.mark.parametrize("name", ZOO)
def test_pieces_have_exactly_the_size_of_their_cut(name):
    this = case(name)
    cut = this.cut(1)
    small = this.model.extract(this.model.weights(), cut)
    for key, value in [*small.named_parameters(), *small.named_buffers()]:
        assert tuple(value.shape) == this.model.shape(key, cut)
        assert value.device.type == "cpu"
        assert value.dtype == this.model.dtype(key)


@pytest.mark.parametrize("name", ZOO)
def test_shared_tensors_stay_shared(name):
    this = case(name)
    small = this.model.extract(this.model.weights(), this.cut(0))
    held = dict(small.named_parameters(remove_duplicate=False))
    for second, first in this.model.groups.ties.items():
        if second in held:
            assert held[second] is held[first]


@pytest.mark.parametrize(
    "name", ["ResNet", "LiteralLeNet", "TiedLanguageModel", "PostNormEncoder", "LSTMClassifier"]
)
def test_pieces_train_by_themselves(name):
    this = case(name)
    small = this.model.extract(this.model.weights(), this.cut(2)).train()
    optimiser = torch.optim.Adam(small.parameters(), lr=0.05)
    losses = []
    for _ in range(4):
        optimiser.zero_grad()
        loss = torch.stack([out.square().mean() for out in run(small, this.batch)]).sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("name", ZOO)
def test_elastic_models_travel_to_worker_processes(name):
    this = case(name)
    there = pickle.loads(pickle.dumps(this.model))
    weights = this.model.weights()
    for seed in (0, 1):
        cut = this.cut(seed)
        mine = tensors(
            this.model.forward(this.model.cut(weights, cut).values, cut, copy.deepcopy(this.batch))
        )
        theirs = tensors(there.forward(there.cut(weights, cut).values, cut, copy.deepcopy(this.batch)))
        close(theirs, mine, 1e-12)
        close(run(there.extract(weights, cut).eval(), this.batch), mine, 1e-12)


def test_a_graph_piece_follows_the_mode_and_writes_plain_numbers():
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.fc = nn.Conv2d(1, 8, 3), nn.Linear(8 * 6 * 6, 3)

        def forward(self, x):
            x = F.relu(self.conv(x)).view(-1, 8 * 6 * 6)
            return self.fc(F.dropout(x, p=0.9 if self.training else 0.0, training=self.training))

    model = elastic(Dropping(), (torch.randn(2, 1, 8, 8), torch.tensor([0, 1])))
    small = model.extract(model.weights(), prefix(model.groups, Fraction(1, 2)))
    assert type(small).__mro__[1] is fx.GraphModule
    assert "view(-1, 144)" in small.code
    assert "size_" not in small.code
    images = torch.randn(2, 1, 8, 8)
    assert torch.equal(small.eval()(images), small(images))
    assert not torch.equal(small.train()(images), small(images))


def test_the_fast_path_of_transformers_uses_the_weights_it_is_given():
    layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
    module = nn.Sequential(nn.Linear(5, 16), nn.TransformerEncoder(layer, 2), nn.Linear(16, 3)).eval()
    batch = (torch.randn(2, 6, 5), torch.randn(2, 6, 3))
    model = elastic(module, batch)
    assert torch.backends.mha.get_fastpath_enabled()
    weights = {name: value * 1.1 for name, value in model.weights().items()}
    cut = prefix(model.groups, Fraction(1, 2))
    values = model.cut(weights, cut).values
    small = model.extract(weights, cut).eval()
    with torch.no_grad():  # this is when PyTorch fuses the layer
        fused = model.forward(values, cut, batch)
        torch.testing.assert_close(fused, small(batch[0]))
        norm = "1.layers.0.norm1"
        replaced = model.forward(values, cut, batch, replace={norm: lambda x: x * 0})
    torch.testing.assert_close(fused, small(batch[0]).detach(), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(replaced, fused)  # a fused layer would not have asked


@pytest.mark.parametrize("name", EXPORTED)
def test_torch_export(name):
    this = case(name)
    small = this.model.extract(this.model.weights(), this.cut(0)).eval()
    args, kwargs = inputs_of(map_tensors(this.batch, torch.clone))
    program = torch.export.export(small, args, kwargs)
    close(tensors(program.module()(*args, **kwargs)), run(small, this.batch), 1e-10)


@pytest.mark.parametrize(
    "name",
    [
        "LiteralLeNet",
        *(pytest.param(each, marks=pytest.mark.slow) for each in ("ResNet", "PreNormTransformer")),
    ],
)
def test_torch_compile_can_follow(name):
    _compiles(name, "aot_eager")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("name", EXPORTED)
def test_torch_compile(name):
    _compiles(name, "inductor")


def _compiles(name: str, backend: str) -> None:
    this = case(name)
    small = this.model.extract(this.model.weights(), this.cut(0)).train()
    torch.compiler.reset()
    compiled = torch.compile(copy.deepcopy(small), backend=backend)
    mine, theirs = run(compiled, this.batch), run(small, this.batch)
    close(mine, theirs, 1e-10)
    some_loss(mine).backward()
    some_loss(theirs).backward()
    for key, parameter in small.named_parameters():
        if parameter.grad is not None:
            close([dict(compiled._orig_mod.named_parameters())[key].grad], [parameter.grad], 1e-10)


WITHOUT_FEDTAILOR = """
import sys
sys.modules["fedtailor"] = None      # importing it fails
sys.path.insert(0, sys.argv[1])
import torch
for name in ("ResNet", "LiteralLeNet"):
    small, inputs, expected = torch.load(f"{sys.argv[2]}/{name}.pt", weights_only=False)
    assert torch.equal(small(inputs), expected), name
    small.load_state_dict(torch.load(f"{sys.argv[2]}/{name}.state.pt", weights_only=True))
    small.train()(inputs).sum().backward()
print("fine")
"""


def test_a_process_without_fedtailor_runs_and_loads_pieces(tmp_path):
    for name in ("ResNet", "LiteralLeNet"):
        this = case(name)
        small = this.model.extract(this.model.weights(), this.cut(0)).eval()
        torch.save((small, this.batch[0], small(this.batch[0]).detach()), tmp_path / f"{name}.pt")
        torch.save(small.state_dict(), tmp_path / f"{name}.state.pt")
    command = [sys.executable, "-c", WITHOUT_FEDTAILOR, str(Path(__file__).parents[2]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "fine", done.stderr


def test_an_incomplete_patch_is_refused():
    this = case("ResNet")
    patch = this.model.cut(this.model.weights(), Cut.everything(), {"stem.weight"})
    with pytest.raises(ValueError, match="the patch has no values for"):
        this.model.build(patch)
