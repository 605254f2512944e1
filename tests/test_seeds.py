from __future__ import annotations

import hashlib
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedtailor.seeds import Seeds

numbers = st.one_of(st.none(), st.integers(0, 10**6))
keys = st.tuples(
    st.integers(0, 2**40),
    st.sampled_from(["cohort", "batches", "augment", "layers"]),
    numbers,
    numbers,
    numbers,
)


def seed_of(key) -> int:
    root, purpose, client, round_, step = key
    return Seeds(root).for_(purpose, client=client, round=round_, step=step)


@given(keys, keys)
def test_different_questions_get_different_seeds(one, other):
    assert (seed_of(one) == seed_of(other)) == (one == other)


@given(keys)
def test_seeds_are_63_bit_numbers(key):
    assert 0 <= seed_of(key) < 2**63


def test_the_same_number_in_another_role_is_another_seed():
    seeds = Seeds(0)
    answers = {seeds.for_("x"), seeds.for_("x", client=1), seeds.for_("x", round=1), seeds.for_("x", step=1)}
    assert len(answers) == 4


def test_the_derivation_is_fixed_for_ever():
    """A saved run can be repeated only as long as this formula stays."""
    digest = hashlib.blake2b(b"7|cohort|3|None|None", digest_size=8).digest()
    assert Seeds(7).for_("cohort", round=3) == int.from_bytes(digest, "little") >> 1
    assert Seeds(0).for_("batches", client=2, round=1, step=4) == 1964747242410597373


def test_generators_give_the_same_numbers_twice_and_do_not_share_state():
    seeds = Seeds(5)
    first, second = seeds.numpy("x", round=1), seeds.numpy("x", round=1)
    drawn = first.integers(0, 2**31, 10).tolist()
    assert second.integers(0, 2**31, 10).tolist() == drawn
    assert seeds.numpy("x", round=2).integers(0, 2**31, 10).tolist() != drawn
    one, two = seeds.torch("x", client=1), seeds.torch("x", client=1)
    assert torch.equal(torch.rand(10, generator=one), torch.rand(10, generator=two))
    assert not torch.equal(
        torch.rand(10, generator=one), torch.rand(10, generator=seeds.torch("x", client=1))
    )


def test_numpy_integers_are_the_same_key_as_python_ones():
    assert Seeds(0).for_("x", client=np.int64(3)) == Seeds(0).for_("x", client=3)  # type: ignore[arg-type]


def test_scope_seeds_pytorch_inside_and_restores_it_after():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with Seeds(0).scope("layers", client=1):
        inside = torch.rand(3)
    assert torch.equal(torch.rand(3), expected)
    with Seeds(0).scope("layers", client=1):
        assert torch.equal(torch.rand(3), inside)
    with Seeds(0).scope("layers", client=2):
        assert not torch.equal(torch.rand(3), inside)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator is seeded too")
def test_scope_writes_no_stacks(monkeypatch):
    """Three for every client, more than a step of a small network, is what torch.manual_seed writes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(Seeds(0).for_("layers"))
        expected = torch.rand(3)
    monkeypatch.setattr("traceback.format_stack", lambda *_: pytest.fail("a stack was written"))
    with Seeds(0).scope("layers"):
        assert torch.equal(torch.rand(3), expected)


def test_scope_restores_after_an_error():
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with pytest.raises(RuntimeError, match="shape"), Seeds(0).scope("layers"):
        torch.rand(5).reshape(3)
    assert torch.equal(torch.rand(3), expected)


def test_seeds_travel_as_one_number():
    assert pickle.loads(pickle.dumps(Seeds(9))) == Seeds(9)
    assert len(pickle.dumps(Seeds(9))) < 200
