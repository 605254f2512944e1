from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published_files import some_images

from fedtailor.data.transforms import ImagePreparation, Plain, TextWindows, crop_and_flip, normalise
from fedtailor.errors import FedtailorError


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_normalise_is_the_formula() -> None:
    images = torch.from_numpy(some_images(4, 3, 5, 5))
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    expected = (images.double() / 255 - torch.tensor(mean).double().view(1, 3, 1, 1)) / torch.tensor(
        std
    ).double().view(1, 3, 1, 1)
    assert torch.allclose(normalise(images, mean, std).double(), expected, atol=1e-6)
    assert images.dtype == torch.uint8
    floats = torch.ones(1, 1, 2, 2)
    normalise(floats, (0.5,), (0.5,), white=1.0)
    assert torch.equal(floats, torch.ones(1, 1, 2, 2))


@given(st.integers(0, 10**6), st.integers(0, 4), st.booleans())
def test_crop_and_flip_gives_windows_of_the_padded_image(seed: int, padding: int, flip: bool) -> None:
    images = torch.from_numpy(some_images(3, 2, 6, 7, seed=1))
    out = crop_and_flip(images, padding, flip, generator(seed))
    assert out.dtype == torch.uint8
    for image, made in zip(images.numpy(), out.numpy(), strict=True):
        padded = np.pad(image, ((0, 0), (padding, padding), (padding, padding)))
        windows = [
            padded[:, down : down + 6, right : right + 7][:, :, :: -1 if mirrored else 1]
            for down in range(2 * padding + 1)
            for right in range(2 * padding + 1)
            for mirrored in ([False, True] if flip else [False])
        ]
        assert any(np.array_equal(made, window) for window in windows)


def test_every_shift_and_flip_occurs() -> None:
    image = torch.arange(1, 10, dtype=torch.uint8).view(1, 1, 3, 3)
    seen = {
        tuple(made.flatten().tolist())
        for made in crop_and_flip(image.expand(2000, 1, 3, 3), 1, True, generator())
    }
    assert len(seen) == 9 * 2


def test_preparation_is_repeatable_and_plain_without_generator() -> None:
    preparation = ImagePreparation((0.5,), (0.25,), padding=2, flip=True)
    batch = (torch.from_numpy(some_images(8, 1, 6, 6)), torch.arange(8))
    first, second, other = (preparation(batch, generator(seed))[0] for seed in (3, 3, 4))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(preparation(batch, None)[0], normalise(batch[0], (0.5,), (0.25,)))
    assert torch.equal(Plain(preparation)(batch, generator())[0], preparation(batch, None)[0])
    assert isinstance(Plain(preparation).to("cpu"), Plain)


def test_dict_batches_name_their_images() -> None:
    batch = {"picture": torch.zeros(2, 1, 3, 3, dtype=torch.uint8), "y": torch.zeros(2)}
    assert ImagePreparation(key="picture")(batch, None)["picture"].dtype == torch.float32
    with pytest.raises(FedtailorError, match="picture"):
        ImagePreparation()(batch, None)


@pytest.mark.parametrize(
    "make",
    [
        lambda: ImagePreparation(std=(0.0,)),
        lambda: ImagePreparation(mean=(0.0, 0.0)),
        lambda: ImagePreparation(padding=-1),
        lambda: ImagePreparation(white=0),
        lambda: ImagePreparation().images(torch.zeros(2, 3, 4, 4), None),
    ],
)
def test_wrong_preparations_are_refused(make) -> None:
    with pytest.raises(FedtailorError):
        make()


def test_text_windows() -> None:
    text = torch.arange(20, dtype=torch.uint8)
    starts, targets = torch.tensor([0, 5]), torch.tensor([3, 8])
    windows, same = TextWindows(text, 3)((starts, targets), None)
    assert windows.tolist() == [[0, 1, 2], [5, 6, 7]]
    assert windows.dtype == torch.int64
    assert same is targets
    _, shifted = TextWindows(text, 3, shifted=True).to("cpu")((starts, targets), None)
    assert shifted.tolist() == [[1, 2, 3], [6, 7, 8]]
    with pytest.raises(FedtailorError, match="dicts"):
        TextWindows(text, 3)({"x": starts, "y": targets}, None)
