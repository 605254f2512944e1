"""Depth as a cut: chains that are found, exits that are made, and pieces that end there."""

from __future__ import annotations

import copy
import pickle
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from fedtailor.data.batches import inputs_of
from fedtailor.elasticity.check import random_cut, shaken
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import TooSmallError, fitting_shapes, meets
from fedtailor.elasticity.costing.memory import Workload
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.depth import ending, ending_at_any_of, first_blocks, without_blocks
from fedtailor.elasticity.cutting.encoding import cut_from, cut_value
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.elasticity.front_door import elastic
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.skipping import Skipped
from fedtailor.elasticity.tracing.reference import Reference
from fedtailor.elasticity.tracing.trace import trace
from fedtailor.errors import FedtailorError
from fedtailor.models.attention import Attention
from fedtailor.models.registry import build_model
from helpers import slow_if, snapshot

HALF = Fraction(1, 2)


class Layer(nn.Module):
    """A post-norm layer of an encoder that hides padding."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.attention = Attention(features, 2, causal=False)
        self.norm1, self.norm2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.inner, self.outer = nn.Linear(features, 24), nn.Linear(24, features)

    def forward(self, x: Tensor, shown: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x * shown))
        return self.norm2(x + self.outer(F.gelu(self.inner(x))))


class Encoder(nn.Module):
    """As BERT: tokens and positions, layers in a ModuleList, a pooler of the first token, a classifier."""

    def __init__(self, layers: int = 4, features: int = 16) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, features)
        self.position = nn.Parameter(torch.randn(6, features))
        self.norm = nn.LayerNorm(features)
        self.layers = nn.ModuleList(Layer(features) for _ in range(layers))
        self.pooler = nn.Linear(features, features)
        self.classifier = nn.Linear(features, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        shown = (tokens != 0).unsqueeze(-1).to(self.position.dtype)
        x = self.norm(self.tokens(tokens) + self.position)
        for layer in self.layers:
            x = layer(x, shown)
        return self.classifier(torch.tanh(self.pooler(x[:, 0])))


NETWORKS = {
    "resnet18": {"widths": (4, 6, 8, 8), "stem": 4},
    "mobilenetv2": {"width": 0.25, "last": 16},
    "vit": {"embedding": 16, "heads": 2, "hidden": 24, "depth": 4, "patch": 4},
    "encoder": {},
}


# Biases and norms, which are counted here and not by PyTorch, are little of a transformer only where it is not tiny.
WIDER = {**NETWORKS, "vit": {**NETWORKS["vit"], "embedding": 64, "hidden": 128}, "encoder": {"features": 64}}


def network(name: str, settings: Any = NETWORKS) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        labels = torch.tensor([0, 2, 1])
        if name == "encoder":
            return Encoder(**settings[name]), (torch.randint(0, 11, (3, 6)), labels)
        module = build_model(name, input_shape=(3, 16, 16), num_classes=3, **settings[name])
        return module, (torch.randn(3, 3, 16, 16), labels)


@cache
def model_of(name: str) -> ElasticModel:
    module, batch = network(name)
    batch = tuple(x.double() if x.is_floating_point() else x for x in batch)
    return elastic(module.double(), batch, exits="auto")


@pytest.mark.parametrize("name", [slow_if(name, "mobilenetv2") for name in NETWORKS])
def test_a_piece_of_any_width_and_depth_is_the_masked_full_network_at_that_exit(name):
    model = model_of(name)
    assert len(model.exits) == 4
    weights = shaken(model)
    traced = trace(model.module, *inputs_of(model.example))
    generator = np.random.default_rng(3)
    for number, each in enumerate(model.exits):
        wide = random_cut(model.groups, generator)
        full = Reference(traced, traced.evaluation, model.shell(wide), wide, {**weights, **model.constants})
        outputs = full(model.module, *inputs_of(model.example))
        (expected,) = [output[number] for output in outputs if output.dim() == 3]
        cut = ending(wide, each)
        piece = model.extract(weights, cut).eval()
        small = model.forward(model.cut(weights, cut).values, cut, model.example)
        bound = 1e-10 * max(1.0, float(expected.abs().max()))
        torch.testing.assert_close(small, expected, rtol=0, atol=bound)
        torch.testing.assert_close(piece(model.example[0]), expected, rtol=0, atol=bound)
        # What was left out is not there: no parameters, and no code that would run without them.
        assert sum(value.numel() for value in piece.parameters()) == model.cost(cut).params
        assert any(isinstance(part, Skipped) for part in piece.modules())


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
def test_memory_is_as_predicted(name):
    """What a step of the extracted module itself keeps, its weights and their gradients."""
    model = model_of(name)
    for each in (model.exits[1], model.exits[-1]):
        cut = ending(prefix(model.groups, HALF), each)
        piece, (inputs, labels) = model.extract(model.weights(), cut).train(), model.example
        kept: dict[int, Tensor] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, kept=kept: kept.setdefault(x.untyped_storage()._cdata, x), lambda x: x
        ):
            F.cross_entropy(piece(inputs), labels)
        own = {value.untyped_storage()._cdata for value in (*piece.parameters(), *piece.buffers())}
        saved = sum(x.untyped_storage().nbytes() for place, x in kept.items() if place not in own)
        trained = sum(value.nbytes for value in piece.parameters())
        stored = trained + sum(value.nbytes for value in piece.buffers())
        predicted = model.cost(cut, Workload(batch_size=len(labels))).training_memory
        assert predicted == pytest.approx(2 * stored + trained + saved, rel=0.25)


@pytest.mark.parametrize("name", [slow_if(name, "mobilenetv2") for name in NETWORKS])
def test_a_shallow_piece_costs_what_its_module_computes_and_less_of_everything(name):
    model = elastic(*network(name, WIDER), exits="auto")
    costs = []
    for each in model.exits:
        cut = ending(prefix(model.groups, HALF), each)
        piece, inputs = model.extract(model.weights(), cut).eval(), model.example[0]
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            piece(inputs)
        costs.append(model.cost(cut))
        assert costs[-1].macs == pytest.approx(counter.get_total_flops() / 2 / len(inputs), rel=0.25)
    for one, other in pairwise(costs):
        assert one.params < other.params
        assert one.macs < other.macs
        assert one.bytes < other.bytes


def test_a_piece_with_all_exits_so_far_answers_at_each():
    model = model_of("vit")
    weights = model.weights()
    full = model.forward(weights, Cut.everything(), model.example, all_exits=True)
    cut = ending_at_any_of(Cut.everything(), model.exits[:3])
    answers = model.forward(model.cut(weights, cut).values, cut, model.example, all_exits=True)
    assert len(full) == 4
    assert [torch.equal(one, other) for one, other in zip(answers, full[:3], strict=True)] == [True] * 3
    assert torch.equal(model.forward(model.cut(weights, cut).values, cut, model.example), full[2])


def test_the_module_itself_is_left_alone():
    module, batch = network("vit")
    before, kind, names = snapshot(module.state_dict()), type(module), set(module.state_dict())
    model = elastic(module, batch, exits="auto")
    assert snapshot(module.state_dict()) == before
    assert type(module) is kind
    assert {name for name in model.weights() if not name.startswith("exits.")} == names
    own = ending(Cut.everything(), model.exits[-1])
    assert torch.equal(model.extract(model.weights(), own).eval()(batch[0]), module.eval()(batch[0]))


def test_it_is_copied_pickled_exported_and_trained():
    model = model_of("resnet18")
    piece = model.extract(model.weights(), ending(Cut.everything(), model.exits[0])).eval()
    inputs = model.example[0]
    expected = piece(inputs)
    assert torch.equal(copy.deepcopy(piece)(inputs), expected)
    assert torch.equal(pickle.loads(pickle.dumps(piece))(inputs), expected)
    exported = torch.export.export(piece, (inputs,), strict=False).module()
    torch.testing.assert_close(exported(inputs), expected)
    piece(inputs).sum().backward()
    assert all(value.grad is not None for value in piece.parameters())


def test_chains_and_what_may_be_left_out():
    chains = {chain.name: chain for chain in model_of("resnet18").chains}
    assert list(chains) == ["stages.0", "stages.1", "stages.2", "stages.3"]
    assert chains["stages.0"].spare == ("stages.0.0", "stages.0.1")
    assert chains["stages.1"].spare == ("stages.1.1",)  # the first one halves the image
    (layers,) = model_of("encoder").chains
    assert layers.spare == layers.blocks == tuple(f"layers.{n}" for n in range(4))
    assert first_blocks(chains["stages.1"], 0) == ("stages.1.0",)


def test_any_blocks_of_a_residual_chain_may_be_left_out():
    """The second layer of four: what is left is the network whose second layer is the identity."""
    module, batch = network("encoder")
    model = elastic(module, batch)
    cut = without_blocks(prefix(model.groups, HALF), model.chains, ["layers.1"], model.groups.extents)
    assert (cut.depth, cut.tag) == (Fraction(3, 4), "1/2x3/4")
    narrow = model.extract(model.weights(), prefix(model.groups, HALF)).eval()
    narrow.layers[1].forward = lambda x, shown: x
    small = model.extract(model.weights(), cut).eval()
    assert torch.equal(small(batch[0]), narrow(batch[0]))
    assert not any(name.startswith("layers.1.") for name, _ in small.named_parameters())


class Plain(nn.Module):
    """No residual: what it hands on has as many channels as what it is given, but not the same ones."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).relu()


def test_blocks_without_a_residual_have_exits_but_cannot_be_left_out():
    module = nn.Sequential(nn.Linear(5, 8), Plain(), Plain(), nn.Linear(8, 3))
    batch = torch.randn(3, 5), torch.tensor([0, 1, 2])
    model = elastic(module, batch, exits=2)
    assert [each.name for each in model.exits] == ["1", "end"]
    assert [(chain.name, chain.spare) for chain in model.chains] == [("", ())]
    assert len(model.module) == 4  # its exits are no layers of the Sequential
    full = model.forward(model.weights(), Cut.everything(), batch)
    torch.testing.assert_close(full, module.eval()(batch[0]))


def test_a_head_of_ones_own_and_blocks_by_name():
    module, batch = network("encoder")
    head = nn.Sequential(nn.Flatten(), nn.Linear(96, 3))
    model = elastic(module, batch, exits={"layers.1": head}, keep=["layers.*", "tokens", "norm"])
    first, _ = model.exits
    assert (first.name, first.depth) == ("layers.1", HALF)
    cut = ending(Cut.everything(), first)
    assert {"exits.0.1.weight", "layers.1.inner.weight"} <= set(model.cut(model.weights(), cut).values)
    assert not any(name.startswith("layers.2.") for name in model.cut(model.weights(), cut).values)
    assert model.module.exits[0] is not head
    named = elastic(module, batch, exits=2, chain=["layers.[01]"])
    assert [each.name for each in named.exits] == ["layers.0", "end"]


class Tied(nn.Module):
    """A decoder whose weight is the embedding's; its bias is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(Plain() for _ in range(2))
        self.decoder = nn.Linear(8, 11)
        self.decoder.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.decoder(x)


def test_a_tensor_that_is_needed_early_stays_where_its_second_owner_goes():
    tokens = torch.randint(0, 11, (3, 5), generator=torch.Generator().manual_seed(0))
    model = elastic(Tied(), (tokens, tokens), exits=2)
    cut = ending(prefix(model.groups, HALF), model.exits[0])
    assert "tokens.weight" in model.cut(model.weights(), cut).values
    assert "decoder.bias" not in model.cut(model.weights(), cut).values
    wide = prefix(model.groups, HALF)
    both = model.forward(model.cut(model.weights(), wide).values, wide, model.example, all_exits=True)
    piece = model.extract(model.weights(), cut).eval()
    torch.testing.assert_close(piece(tokens), both[0])


def test_what_cannot_be_is_refused_in_a_sentence():
    module, batch = network("encoder")
    with pytest.raises(
        FedtailorError, match=r"exits\['layers.1'\] = \(2, 6, 3\): expected answers of the module's own"
    ):
        elastic(module, batch, exits={"layers.1": nn.Linear(16, 3)})
    cases = {
        "exits: 'layers.9' is no part that runs once of Encoder: expected a block such as": ["layers.9"],
        "exits: 'layers.0.inner' is a single layer of Encoder": ["layers.0.inner"],
        "exits = 1: expected 'auto', a number of at least 2, or a list of blocks": 1,
        "exits = 'some': expected 'auto'": "some",
    }
    for sentence, wished in cases.items():
        with pytest.raises(FedtailorError) as caught:
            elastic(module, batch, exits=wished)
        assert sentence in str(caught.value)
    with pytest.raises(FedtailorError, match="model.chain = 'blocks.x'"):
        elastic(module, batch, exits=2, chain=["blocks.x"])
    plain = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    with pytest.raises(FedtailorError, match="no chain of like blocks was found in Sequential"):
        elastic(plain, (torch.randn(2, 5), torch.tensor([0, 1])), exits="auto")


def test_the_largest_piece_over_width_and_depth():
    model = model_of("vit")
    budget = Budget(macs="40%", params="60%")
    shapes = fitting_shapes(model.costs, budget)
    assert [shape.cut.depth for shape in shapes] == [each.depth for each in model.exits]
    widths = [shape.cut.width for shape in shapes]
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > widths[-1]
    assert all(meets(model.costs, shape.cut, budget) for shape in shapes)
    best = model.fit(budget, family="shapes")
    assert model.cost(best).macs == max(shape.cost.macs for shape in shapes)
    assert model.fit(Budget(depth=0.6)).tag == "1x1/2"
    assert model.fit(Budget(depth=0.6, width=0.5)).tag == "1/2x1/2"
    with pytest.raises(TooSmallError, match="no exit of this model is so early"):
        model.fit(Budget(depth=0.1))


def test_a_cut_in_depth_travels_as_plain_values():
    cut = ending(prefix(model_of("vit").groups, HALF), model_of("vit").exits[1])
    back = cut_from(cut_value(cut))
    assert back == cut
    assert (back.depth, back.width, back.tag) == (HALF, HALF, "1/2x1/2")


def test_the_report_shows_chains_and_exits():
    lines = [line.split() for line in model_of("resnet18").explain().splitlines()]
    assert ["stages.1", "2", "1", "stages.1.0", "stages.1.1"] in lines
    assert [line[:2] for line in lines if line[:1] == ["stages.2.1"]] == [["stages.2.1", "3/4"]]
