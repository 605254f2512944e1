"""The fast Johnson-Lindenstrauss transform: angles stay, under one and the same transform."""

from __future__ import annotations

import pytest
import torch

from fedtailor.errors import FedtailorError
from fedtailor.methods.flado.sketch import Transform, cosine, hadamard_


def pair(size: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors at an angle, one of them mostly zeros: what a sketch without signs and H would miss."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.randn(size, generator=generator)
    one[torch.rand(size, generator=generator) < 0.95] = 0
    return one, one + 0.3 * torch.randn(size, generator=generator)


@pytest.mark.parametrize("size", [1, 2, 64, 128, 2**13])
def test_hadamard_twice_is_the_identity(size):
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(hadamard_(hadamard_(vector.clone())), vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("bits", [1, 3, 6, 7, 9])
def test_hadamard_is_the_matrix_of_signs(bits):
    """Entry (i, j) is (-1)^(number of ones that i and j share) / sqrt(d)."""
    size = 2**bits
    signs = [[(-1) ** (i & j).bit_count() for j in range(size)] for i in range(size)]
    matrix = torch.tensor(signs, dtype=torch.float64) / size**0.5
    vector = torch.randn(size, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert torch.allclose(hadamard_(vector.clone()), matrix @ vector, rtol=0, atol=1e-12)


@pytest.mark.parametrize("size", [63, 1000, 40_000])
@pytest.mark.parametrize("rows", [256, 1024, 16384])
def test_cosines_stay_within_four_over_the_root_of_k(size, rows):
    for seed in range(5):
        one, other = pair(size, seed)
        transform = Transform(size, rows, seed)
        sketched = cosine(transform([one]), transform([other]))
        assert abs(sketched - cosine(one, other)) < 4 / rows**0.5


def test_lengths_stay_too():
    one, _ = pair(40_000)
    assert Transform(40_000, 1024, 1)([one]).norm().item() == pytest.approx(one.norm().item(), rel=0.125)


def test_transforms_of_different_seeds_cannot_be_compared():
    """The trap of the paper's algorithm: a vector sketched twice has no angle with itself."""
    one, _ = pair(40_000)
    same = cosine(Transform(40_000, 1024, 1)([one]), Transform(40_000, 1024, 1)([one]))
    other = cosine(Transform(40_000, 1024, 1)([one]), Transform(40_000, 1024, 2)([one]))
    assert same == pytest.approx(1)
    assert abs(other) < 4 / 1024**0.5


def test_it_is_linear_and_the_split_into_tensors_does_not_matter():
    one, other = (vector.double() for vector in pair(1000))
    transform = Transform(1000, 64, 3)
    both = transform([2 * one - other])
    assert torch.allclose(both, 2 * transform([one]) - transform([other]), atol=1e-12)
    assert torch.equal(transform([one[:600].view(20, 30), one[600:]]), transform([one]))


def test_the_adjoint_is_the_transpose():
    one, _ = (vector.double() for vector in pair(1000))
    transform = Transform(1000, 64, 3)
    sketch = torch.randn(64, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    assert float(transform([one]) @ sketch) == pytest.approx(
        float(one @ transform.adjoint(sketch)), abs=1e-10
    )


def test_bad_input_is_refused_by_name():
    with pytest.raises(FedtailorError, match="a power of two"):
        hadamard_(torch.zeros(3))
    with pytest.raises(FedtailorError, match="a vector of 4 numbers: expected 5"):
        Transform(5, 2, 0)([torch.zeros(4)])
    with pytest.raises(FedtailorError, match="shape of a sketch"):
        Transform(5, 2, 0).adjoint(torch.zeros(3))
    with pytest.raises(FedtailorError, match="numbers in a sketch"):
        Transform(5, 0, 0)
    assert cosine(torch.zeros(3), torch.ones(3)) == 0
