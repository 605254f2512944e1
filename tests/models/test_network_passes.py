"""Every network trains on a small batch and can be traced by torch.fx for any batch size."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from fedtailor.errors import FedtailorError
from fedtailor.models import build_model, model_names
from fedtailor.objective import cross_entropy

SMALL_RESNET = {"widths": (4, 6, 8, 10), "stem": 4}

# Small settings for speed: input shape and options. A new model needs a line here.
SETTINGS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "char-lstm": ((12,), {"hidden": 16}),
    "cnn": ((1, 8, 8), {"channels": (4, 6, 8, 10)}),
    "femnist-cnn": ((1, 28, 28), {}),
    "flanc-cnn": ((1, 8, 8), {"channels": (8, 8), "stem": 4}),
    "heterofl-resnet": ((3, 16, 16), SMALL_RESNET),
    "lenet5": ((1, 28, 28), {"channels": (4, 6, 8), "hidden": 12}),
    "llama": ((12,), {"embedding": 16, "heads": 2, "shared": 1, "hidden": 32}),
    "mlp": ((1, 8, 8), {"hidden": (20, 10)}),
    "mnist-cnn": ((1, 28, 28), {}),
    "mobilenetv2": ((3, 16, 16), {"width": 0.25}),
    "preresnet18": ((3, 16, 16), SMALL_RESNET),
    "resnet18": ((3, 16, 16), SMALL_RESNET),
    "resnet50": ((3, 16, 16), SMALL_RESNET),
    "text-classifier": ((12,), {"vocabulary": 20, "hidden": 16, "reader": "gru"}),
    "transformer": ((12,), {"embedding": 16, "heads": 2, "hidden": 32}),
    "vgg9": ((3, 8, 8), {"channels": (4, 4, 6, 6, 8, 8), "hidden": (12, 12)}),
    "vit": ((1, 28, 28), {"embedding": 16, "heads": 2, "hidden": 32, "depth": 2}),
}
CLASSES = 7


def build(name: str, **more: Any) -> nn.Module:
    torch.manual_seed(0)
    input_shape, options = SETTINGS[name]
    return build_model(name, input_shape=input_shape, num_classes=CLASSES, **options, **more)


def batch(name: str, size: int = 4) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    input_shape, _ = SETTINGS[name]
    if len(input_shape) == 1:
        return torch.randint(CLASSES, (size, *input_shape), generator=generator)
    return torch.randn(size, *input_shape, generator=generator)


def test_every_model_has_settings() -> None:
    assert sorted(SETTINGS) == [name for name in model_names() if name != "adapted"]  # another's network
    assert len(SETTINGS) == 17


@pytest.mark.parametrize("name", SETTINGS)
def test_every_parameter_learns(name: str) -> None:
    module = build(name)
    scores = module(batch(name))
    assert scores.shape == (4, CLASSES)
    F.cross_entropy(scores, torch.arange(4)).backward()
    for parameter_name, parameter in module.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert torch.isfinite(parameter.grad).all(), parameter_name


@pytest.mark.parametrize("name", SETTINGS)
def test_fx_trace_computes_the_same(name: str) -> None:
    module = build(name).eval()
    traced = fx.symbolic_trace(module)
    for size in (1, 3):
        assert torch.equal(traced(batch(name, size)), module(batch(name, size)))


@pytest.mark.parametrize("name", SETTINGS)
def test_copies_and_pickles_compute_the_same(name: str) -> None:
    module = build(name).eval()
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(twin(batch(name)), module(batch(name)))


@pytest.mark.parametrize("name", SETTINGS)
def test_weights_are_given_by_the_seed_alone(name: str) -> None:
    first, second = build(name).state_dict(), build(name).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", SETTINGS)
def test_examples_do_not_see_each_other_in_evaluation(name: str) -> None:
    module, inputs = build(name).eval(), batch(name)
    torch.testing.assert_close(module(inputs)[:1], module(inputs[:1]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["cnn", "resnet18", "resnet50", "preresnet18", "heterofl-resnet"])
@pytest.mark.parametrize(
    ("norm", "kind"), [("batch", nn.BatchNorm2d), ("group", nn.GroupNorm), ("none", None)]
)
def test_norm_option(name: str, norm: str, kind: type | None) -> None:
    module = build(name, norm=norm, groups=2)
    found = {type(layer) for layer in module.modules()} & {nn.BatchNorm2d, nn.GroupNorm}
    assert found == ({kind} if kind else set())
    assert module(batch(name)).shape == (4, CLASSES)


@pytest.mark.parametrize("name", ["char-lstm", "llama", "transformer"])
def test_every_position_predicts_from_the_past_only(name: str) -> None:
    last, every = build(name).eval(), build(name, predict="every").eval()
    characters = batch(name)
    scores = every(characters)
    assert scores.shape == (4, 12, CLASSES)
    torch.testing.assert_close(scores[:, -1], last(characters))
    changed = characters.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % CLASSES
    torch.testing.assert_close(every(changed)[:, :6], scores[:, :6])
    assert not torch.allclose(every(changed)[:, 6], scores[:, 6])
    cross_entropy(scores, (characters, characters)).backward()
    traced = fx.symbolic_trace(every)
    assert torch.equal(traced(characters), scores)


def test_vocabulary_may_differ_from_classes() -> None:
    module = build("char-lstm", vocabulary=50)
    assert module(torch.full((2, 12), 49)).shape == (2, CLASSES)


def test_a_classifier_of_texts_does_not_see_padding() -> None:
    module = build_model("text-classifier", input_shape=(12,), num_classes=CLASSES, symbols=20).eval()
    assert module.embedding.num_embeddings == 20
    text = torch.tensor([[3, 4, 5]])
    padded = F.pad(text, (0, 9))
    torch.testing.assert_close(module(text), module(padded))
    assert module(torch.zeros(2, 12, dtype=torch.long)).isfinite().all()  # a text of padding alone
    with pytest.raises(FedtailorError, match="unknown reader 'lstm'"):
        build_model("text-classifier", input_shape=(12,), num_classes=2, reader="lstm")


def test_preactivation_shortcut_branches_after_the_activation() -> None:
    """With the convolutions of a block at zero, its output is the projected, activated input."""
    block = build("preresnet18").eval().stages[1][0]
    nn.init.zeros_(block.conv2.weight)
    x = torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(block(x), block.shortcut(F.relu(block.norm1(x))))


@pytest.mark.parametrize("shape", [(1, 28, 28), (3, 32, 32), (1, 8, 8), (3, 16, 24)])
def test_vit_takes_images_of_other_sizes(shape: tuple[int, ...]) -> None:
    module = build_model("vit", input_shape=shape, num_classes=3, embedding=8, heads=2, hidden=8, depth=1)
    assert module(torch.randn(2, *shape)).shape == (2, 3)


@pytest.mark.parametrize(
    ("name", "smallest", "options"),
    [
        ("cnn", 8, {}),
        ("cnn", 2, {"channels": (4, 4)}),
        ("vgg9", 8, {}),
        ("lenet5", 12, {}),
        ("lenet5", 18, {"padding": 1}),
        ("lenet5", 24, {"padding": 0}),
        ("femnist-cnn", 16, {}),
        ("mnist-cnn", 16, {}),
        ("flanc-cnn", 4, {}),
        ("resnet18", 1, {}),
        ("mobilenetv2", 1, {}),
    ],
)
def test_the_smallest_image_passes(name: str, smallest: int, options: dict[str, Any]) -> None:
    """The stated limit is the true one: at it the network runs, and one pixel less is refused."""
    shape = (1, smallest, smallest)
    with torch.device("meta"):
        module = build_model(name, input_shape=shape, num_classes=3, **options)
    assert module(torch.zeros(2, *shape, device="meta")).shape == (2, 3)
    with pytest.raises(ValueError, match="input_shape = "):
        build_model(name, input_shape=(1, smallest - 1, smallest), num_classes=3, **options)


def test_what_a_vgg_passes_on_keeps_its_size_with_the_start_of_he() -> None:
    """Without norms, PyTorch's own start lets almost nothing through nine layers."""
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    spread = {}
    for start in ("torch", "he"):
        torch.manual_seed(0)
        network = build_model("vgg9", input_shape=(3, 32, 32), num_classes=CLASSES, start=start).eval()
        spread[start] = network(x).std(dim=0).mean().item()  # how much outputs depend on the input
    assert spread["torch"] < 1e-3
    assert spread["he"] > 0.05


@pytest.mark.parametrize("norm", ["batch", "group"])
def test_a_vgg_with_norms_lets_its_input_through_without_it(norm: str) -> None:
    torch.manual_seed(0)
    network = build_model("vgg9", input_shape=(3, 32, 32), num_classes=CLASSES, norm=norm)
    assert sum(isinstance(layer, nn.BatchNorm2d | nn.GroupNorm) for layer in network.modules()) == 6
    x = torch.randn(16, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    assert network(x).std(dim=0).mean() > 0.01
