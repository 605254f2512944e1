"""Masks of single weights: their map, patches that hold survivors alone, merging, the sparse file, time and memory."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from safetensors import safe_open

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.levels import Levels, Mask, Survivors
from fedtailor.elasticity.cutting.patch import Patch, gather, scatter
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.merging import holder_mean
from fedtailor.methods.pruning import apportion, largest, prunable, prune, unpruned
from fedtailor.storage.sparse_file import load_sparse, load_sparse_parts, save_sparse
from helpers import bits, cnn_model, differing, mlp_model, update_of

DEPTH = 3


def levels_of(model: ElasticModel, seed: int = 0) -> Levels:
    generator = torch.Generator().manual_seed(seed)
    return Levels(
        {
            name: torch.randint(0, DEPTH + 1, model.weights()[name].shape, generator=generator).byte()
            for name in prunable(model)
        }
    )


def cut_of(levels: Levels, level: int) -> Cut:
    return Cut(tag=str(level), mask=Mask(levels, level))


def test_counts_depth_and_bytes():
    levels = Levels({"a": torch.tensor([[0, 2], [1, 2]]).byte(), "b": torch.tensor([0]).byte()})
    assert levels.counts == {"a": (4, 3, 2), "b": (1,)}
    assert [levels.count("b", level) for level in range(3)] == [1, 0, 0]
    assert (levels.depth, levels.nbytes) == (2, 5)
    assert Mask(levels, 1).pruned == {"a": 1, "b": 1}
    with pytest.raises(FedtailorError, match="levels of a are of type torch.float32"):
        Levels({"a": torch.zeros(1)})


def test_a_map_is_told_by_its_content():
    model = cnn_model()
    one, same, other = levels_of(model), levels_of(model), levels_of(model, 1)
    assert one == same
    assert one != other
    assert hash(one) == hash(same)
    assert cut_of(one, 2) == cut_of(same, 2)
    assert len({cut_of(one, 2), cut_of(same, 2), cut_of(one, 1), cut_of(other, 2)}) == 3
    assert cut_of(one, 2).digest != cut_of(one, 1).digest
    assert not cut_of(one, 1).holds(cut_of(other, 2))


def test_level_0_is_the_whole_model():
    cut = cut_of(levels_of(cnn_model()), 0)
    assert cut == Cut.everything()
    assert cut.sparse is None
    assert Cut.everything().holds(cut_of(levels_of(cnn_model()), 1))
    with pytest.raises(FedtailorError, match="whole channels or single weights"):
        replace(cut, channels={"conv": range(1)})


@pytest.mark.parametrize("level", range(1, DEPTH + 2))
def test_a_patch_holds_the_survivors_in_their_order_and_goes_back(level):
    model = cnn_model()
    cut = cut_of(levels_of(model), level)
    weights = model.weights()
    patch = model.cut(weights, cut)
    for name, value in weights.items():
        expected = value[cut.mask.of(name)] if name in prunable(model) else value
        assert bits(patch.values[name]) == bits(expected)
        assert model.shape(name, cut) == tuple(patch.values[name].shape)
    placed = model.place({n: torch.full_like(v, 7) for n, v in weights.items()}, patch)
    spread = model.spread(patch)
    for name in prunable(model):
        kept = cut.mask.of(name)
        assert bits(placed[name]) == bits(torch.where(kept, weights[name], 7.0))
        assert bits(spread.values[name]) == bits(torch.where(kept, weights[name], 0.0))
    assert model.spread(spread) is spread


def test_a_mask_inside_a_mask():
    model = cnn_model()
    levels, weights = levels_of(model), model.weights()
    cuts = [cut_of(levels, level) for level in range(DEPTH + 1)]
    for outer in cuts:
        for inner in cuts[outer.mask.level :]:
            narrowed = model.narrow(model.cut(weights, outer), inner)
            direct = model.cut(weights, inner)
            assert not differing(narrowed.values, direct.values)
    with pytest.raises(FedtailorError, match="only be narrowed to a part of itself"):
        model.inside(cuts[2], cuts[1])


def test_tensors_in_another_memory_layout():
    levels = torch.randint(0, 3, (4, 3, 2, 2), generator=torch.Generator().manual_seed(0)).byte()
    where, value = Survivors(levels, 1), torch.arange(48.0).view(4, 3, 2, 2)
    last = value.to(memory_format=torch.channels_last)
    assert torch.equal(gather(last, where), value[levels >= 1])
    target = torch.zeros(4, 3, 2, 2).to(memory_format=torch.channels_last)
    scatter(target, where, value[levels >= 1])
    assert torch.equal(target, value * (levels >= 1))


def test_the_network_of_a_patch_is_the_masked_network():
    model = cnn_model()
    batch = (torch.randn(3, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 1, 2]))
    cut = cut_of(levels_of(model), 2)
    patch = model.cut(model.weights(), cut)
    built = model.build(patch).eval()
    for name in prunable(model):
        assert bits(built.get_parameter(name)) == bits(model.spread(patch).values[name])
    assert torch.equal(model.forward(patch.values, cut, batch), built(batch[0]))


def test_merging_is_the_mean_over_those_who_hold_a_weight():
    """Against a loop over single coordinates; what nobody holds keeps its bits."""
    model = cnn_model()
    levels, old = levels_of(model), model.weights()
    updates = []
    for client, (level, weight) in enumerate([(1, 3.0), (2, 1.0), (2, 5.0), (3, 2.0)]):
        generator = torch.Generator().manual_seed(client)
        values = {
            n: torch.randn(v.shape, generator=generator) for n, v in old.items() if v.is_floating_point()
        }
        updates.append(update_of(client, model.cut(values, cut_of(levels, level)), weight))
    merged = holder_mean(old, list(reversed(updates)), model)
    for name in prunable(model):
        places = {u.client: model.spread(u.patch).values[name].reshape(-1) for u in updates}
        for position, level in enumerate(levels.maps[name].reshape(-1).tolist()):
            holders = [u for u in updates if u.patch.cut.mask.level <= level]
            found = merged[name].reshape(-1)[position]
            if not holders:
                assert bits(found) == bits(old[name].reshape(-1)[position])
                continue
            total = sum(u.weight * places[u.client][position].double() for u in holders)
            assert bits(found) == bits((total / sum(u.weight for u in holders)).float())


def test_index_tables_keep_no_map_alive():
    model = cnn_model()
    model.cut(model.weights(), cut_of(levels_of(model, 5), 2))
    model.cut(model.weights(), cut_of(levels_of(model, 5), 0))
    cached = [key for pair in model._tables for key in pair if key is not None] + list(model._slices)
    assert cached
    assert all(cut.mask is None for cut in cached)


# Pruning


def test_exactly_so_many_survive_and_equals_are_taken_in_order():
    scores = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0, 0.0])
    assert largest(scores, 3).tolist() == [True, True, False, True, False, False]
    assert largest(scores, 0).sum() == 0
    assert largest(scores, 6).all()
    assert largest(torch.zeros(5), 2).tolist() == [True, True, False, False, False]
    assert largest(torch.tensor([-1.0, 2, -1, 1, -1]), 2).tolist() == [False, True, False, True, False]
    assert largest(torch.tensor([-1.0, 2, -1, 1, -1]), 3).tolist() == [True, True, False, True, False]


def test_largest_remainders_respect_the_limits():
    assert apportion(3, [Fraction(3, 2), Fraction(3, 2)], [5, 5]) == [2, 1]
    assert apportion(3, [Fraction(3, 2), Fraction(3, 2)], [1, 5]) == [1, 2]
    assert apportion(4, [Fraction(1, 3)] * 3, [4, 4, 4]) == [2, 1, 1]


def test_a_ratio_above_the_mask_before_it_is_refused():
    model = mlp_model()
    levels = prune(model.weights(), unpruned(model.weights(), prunable(model)), 0, Fraction(1, 2))
    with pytest.raises(FedtailorError, match="ratio = '3/4'"):
        prune(model.weights(), levels, 1, Fraction(3, 4))


def test_eleven_million_weights_take_less_than_a_second_and_a_byte_each():
    """Processor time, so that a busy machine does not matter: pruning, and masking the weights again."""
    generator = torch.Generator().manual_seed(0)
    weights = {str(layer): torch.randn(1100, 1000, generator=generator) for layer in range(10)}
    levels, ratios = unpruned(weights, list(weights)), [Fraction(fifths, 5) for fifths in (4, 3, 2, 1)]
    for depth, ratio in enumerate(ratios):
        before = time.process_time()
        levels = prune(weights, levels, depth, ratio)
        masked = {name: value * (levels.maps[name] > depth) for name, value in weights.items()}
        assert time.process_time() - before < 1
        assert sum(int(value.count_nonzero()) for value in masked.values()) == ratio * 11_000_000
    stored = [each.untyped_storage().nbytes() for each in levels.maps.values()]
    assert sum(stored) == levels.nbytes == 11_000_000


# The sparse file


@pytest.fixture
def saved(tmp_path):
    model = cnn_model()
    patch = model.cut(model.weights(), cut_of(levels_of(model), 2))
    save_sparse(tmp_path / "small.safetensors", patch)
    return model, patch, tmp_path / "small.safetensors"


def test_the_file_gives_the_dense_state_back(saved):
    model, patch, path = saved
    weights = load_sparse(path)
    assert not differing(weights, model.spread(patch).values)
    model.build(patch).load_state_dict(weights)
    packed, masks = load_sparse_parts(path)
    assert not differing(packed, patch.values)
    assert all(torch.equal(masks[name], patch.cut.mask.of(name)) for name in prunable(model))


def test_the_file_is_read_without_fedtailor_as_documented(saved):
    model, patch, path = saved
    with safe_open(path, framework="np") as file:
        shapes = json.loads(file.metadata()["shapes"])
        state = {name: file.get_tensor(name) for name in file.keys() if not name.endswith(".mask")}  # noqa: SIM118
        for name, shape in shapes.items():
            kept = np.unpackbits(file.get_tensor(f"{name}.mask"), count=int(np.prod(shape))).astype(bool)
            dense = np.zeros(kept.size, state[name].dtype)
            dense[kept] = state[name]
            state[name] = dense.reshape(shape)
    expected = model.spread(patch).values
    assert state.keys() == expected.keys()
    assert all(np.array_equal(state[name], expected[name].numpy()) for name in state)


def test_the_file_is_as_small_as_promised(tmp_path):
    weights = {"w": torch.randn(1000, 1000, generator=torch.Generator().manual_seed(0))}
    levels = prune(weights, unpruned(weights, ["w"]), 0, Fraction(1, 5))
    mask = Mask(levels, 1)
    save_sparse(tmp_path / "f", Patch({"w": weights["w"][mask.of("w")]}, Cut(mask=mask)))
    assert 0 < (tmp_path / "f").stat().st_size - (4 * 200_000 + 125_000) < 1000


def test_broken_files_are_refused_by_name(saved, tmp_path):
    _, patch, _path = saved
    (tmp_path / "no").write_bytes(b"no safetensors")
    with pytest.raises(FedtailorError, match="cannot be read"):
        load_sparse(tmp_path / "no")
    name = next(iter(patch.cut.mask.levels.maps))
    save_sparse(tmp_path / "short", Patch({**patch.values, name: patch.values[name][:-1]}, patch.cut))
    with pytest.raises(FedtailorError, match=f"{name} has .* values for"):
        load_sparse(tmp_path / "short")
    save_sparse(tmp_path / "gone", Patch({n: v for n, v in patch.values.items() if n != name}, patch.cut))
    with pytest.raises(FedtailorError, match=f"{name} lacks its values"):
        load_sparse(tmp_path / "gone")
