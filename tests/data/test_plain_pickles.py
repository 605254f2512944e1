"""The reader of CIFAR's python archives runs nothing that a file names."""

from __future__ import annotations

import os
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_files import python2_pickle, some_images

from fedtailor.data.formats.pickled import NotPlainError, read_plain

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=10) | st.binary(max_size=300),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(plain, st.sampled_from([2, 3, 4]))
def test_plain_values_come_back(value, protocol: int) -> None:
    assert read_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", [2, 3, 4])
@pytest.mark.parametrize("order", ["C", "F"])
def test_byte_arrays_come_back(protocol: int, order: str) -> None:
    array = np.array(some_images(4, 6), order=order)
    read = read_plain(pickle.dumps({"data": array, "labels": [1, 300, -5]}, protocol))
    assert np.array_equal(read["data"], array)
    assert read["labels"] == [1, 300, -5]


def test_what_python_2_wrote() -> None:
    array = some_images(2, 3072)
    content = python2_pickle({"batch_label": "training batch 1 of 5", "labels": [6, 9], "data": array})
    assert pickle.loads(content, encoding="bytes")[b"labels"] == [6, 9]  # the test's own writer is right
    read = read_plain(content)
    assert read[b"labels"] == [6, 9]
    assert np.array_equal(read[b"data"], array)


class Evil:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
@pytest.mark.parametrize(
    "value",
    [
        Evil(os.system, "true"),
        Evil(eval, "1 + 1"),
        Evil(getattr, "text", "upper"),
        {"data": Evil(np.load, "x")},
        np.arange(3.0),
        np.array(["a"], dtype=object),
        {1, 2},
        Evil,
    ],
    ids=["system", "eval", "getattr", "load", "floats", "objects", "set", "class"],
)
def test_everything_else_is_refused_and_nothing_runs(value, protocol: int) -> None:
    content = pickle.dumps(value, protocol)
    with no_calls(), pytest.raises(NotPlainError):
        read_plain(content)


@given(st.binary(max_size=200))
def test_random_bytes_give_the_one_error(content: bytes) -> None:
    for beginning in (b"", b"\x80\x02", b"\x80\x02}q\x00("):
        try:
            read_plain(beginning + content)
        except NotPlainError:
            continue


@given(st.data())
def test_changed_bytes_give_the_one_error(data: st.DataObject) -> None:
    content = bytearray(python2_pickle({"labels": [6, 9], "data": some_images(2, 12)}))
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    try:
        read_plain(bytes(content[: data.draw(st.integers(0, len(content)))]))
    except NotPlainError:
        return


class no_calls:  # noqa: N801 - reads as a statement
    """Fails if any import, process or code is started inside the block."""

    active = False
    installed = False

    def __enter__(self) -> None:
        if not no_calls.installed:
            sys.addaudithook(no_calls.hook)
            no_calls.installed = True
        no_calls.active = True

    def __exit__(self, *_: object) -> None:
        no_calls.active = False

    @staticmethod
    def hook(event: str, arguments: object) -> None:
        forbidden = ("import", "exec", "os.system", "subprocess.Popen", "pickle.find_class", "open")
        if no_calls.active and event in forbidden:
            raise AssertionError(f"{event} {arguments}")
