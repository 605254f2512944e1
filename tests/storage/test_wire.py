"""The wire format: one value has one frame, and nothing but a frame gets in."""

from __future__ import annotations

import json
import math
import random
import resource
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.cutting.selections import prefix
from fedtailor.errors import FedtailorError
from fedtailor.messages import Lease
from fedtailor.storage.patch_frames import LeasedFrame, decode_patch, encode_patch
from fedtailor.storage.wire import MAGIC, MAX_DEPTH, TYPES, Buffer, DecodeError, decode, encode, settled
from helpers import bits, cnn_model

MODEL = cnn_model()
OUTPUT = MODEL.groups.outputs[0]


def joined(chunks: list[Buffer]) -> bytes:
    return b"".join(chunks)


def same(first: Any, second: Any) -> bool:
    """Equal in every type, every order and every bit."""
    if type(first) is not type(second):
        return False
    if isinstance(first, Tensor):
        return bits(first) == bits(second)
    if isinstance(first, list | tuple):
        return len(first) == len(second) and all(map(same, first, second))
    if isinstance(first, dict):
        return list(first) == list(second) and all(same(first[key], second[key]) for key in first)
    if isinstance(first, float):
        return math.copysign(1, first) == math.copysign(1, second) and (first == second or first != first)
    return bool(first == second)


def frame(header: Any, body: bytes = b"", text: bytes | None = None) -> bytes:
    """A frame with any header at all."""
    text = text if text is not None else json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(4, "little") + text + body


# Values

tensors = st.builds(
    lambda kind, shape, seed: torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)).to(
        TYPES[kind]
    ),
    st.sampled_from(sorted(TYPES)),
    st.lists(st.integers(0, 3), max_size=4).map(tuple),
    st.integers(0, 1000),
)
leaves = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats() | st.text(max_size=5) | tensors
)
keys = st.text(max_size=3) | st.integers(-(2**63), 2**63 - 1)
values = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(keys, inner, max_size=3)
    ),
    max_leaves=8,
)


@given(values)
def test_what_goes_in_comes_out_and_has_one_spelling(value):
    data = joined(encode(value))
    again = decode(data)
    assert same(again, value)
    assert joined(encode(again)) == data


@pytest.mark.parametrize("kind", sorted(TYPES))
def test_every_bit_pattern_of_every_type_survives(kind):
    dtype = TYPES[kind]
    raw = torch.randint(0, 2 if kind == "bool" else 256, (4096 * dtype.itemsize,), dtype=torch.uint8)
    value = raw.view(dtype)
    assert bits(decode(joined(encode({"x": value})))["x"]) == bits(value)


def test_tensors_own_their_memory_and_come_back_contiguous():
    base = torch.arange(24.0).view(2, 3, 4)
    value = base.permute(2, 0, 1)
    data = bytearray(joined(encode(value)))
    again = decode(data)
    assert torch.equal(again, value)
    assert again.is_contiguous()
    data[-1] ^= 255
    assert torch.equal(again, value)
    again += 1  # writable


def test_tensors_on_the_cpu_are_not_copied():
    value = torch.zeros(1000)
    _head, raw = encode(value)
    value[0] = 1.0
    assert bytes(raw[:4]) == np.float32(1.0).tobytes()


def test_a_tensor_of_another_device_goes_to_the_device_that_is_asked_for():
    data = frame({"tensors": [["float32", [2]]], "value": {"device_tensor": 0}}, bytes(8))
    assert decode(data).device.type == "cpu"
    assert decode(data, "meta").device.type == "meta"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(1.0), "value is of type float64"),
        (np.int64(1), "of type int64"),
        (np.zeros(3), "of type ndarray"),
        (Fraction(1, 2), "of type Fraction"),
        (OrderedDict(a=1), "of type OrderedDict"),
        ({1, 2}, "of type set"),
        (b"bytes", "of type bytes"),
        (range(3), "of type range"),
        ([1, {"masks": [object()]}], r"value\[1\]\['masks'\]\[0\] is of type object"),
        ({1.5: 1}, "the key 1.5"),
        ({True: 1}, "the key True"),
        ({(1, 2): 1}, "the key"),
        (2**63, "more than 64 bits"),
        (torch.zeros(2, dtype=torch.float8_e4m3fn), "float8"),
        (torch.zeros(2, 2).to_sparse(), "sparse"),
        (torch.zeros(2, device="meta"), "on meta"),
    ],
)
def test_what_cannot_be_saved_is_refused_by_name(value, words):
    for function in (encode, settled):
        with pytest.raises(FedtailorError, match=words):
            function(value)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def test_nesting_has_a_limit_in_both_directions():
    assert decode(joined(encode(nested(MAX_DEPTH)))) == nested(MAX_DEPTH)
    for function in (encode, settled):
        with pytest.raises(FedtailorError, match="deep"):
            function(nested(MAX_DEPTH + 1))
    with pytest.raises(DecodeError, match="deep"):
        decode(frame({"tensors": [], "value": nested(MAX_DEPTH + 1)}))


@given(values)
def test_settled_values_are_what_would_be_read_back(value):
    assert same(settled(value), decode(joined(encode(value))))


def test_complex_numbers_that_wait_to_be_conjugated():
    value = torch.tensor([1 + 2j, 3 - 4j]).conj()
    assert value.is_conj()
    assert torch.equal(decode(joined(encode(value))), value.resolve_conj())
    assert not settled(value).is_conj()


def test_settled_tensors_have_no_history_and_the_usual_layout():
    value = torch.randn(2, 3, 4, 5, requires_grad=True).to(memory_format=torch.channels_last)
    kept = settled({"a": (value,)})["a"][0]
    assert kept.is_contiguous()
    assert not kept.requires_grad
    assert torch.equal(kept, value)


# Patches


def patch_at(width: Fraction, units: list[int] | None = None) -> tuple[Patch, LeasedFrame]:
    """A patch of a width, of which only some rows of the output are credited, and its lease."""
    cut = prefix(MODEL.groups, width)
    patch = MODEL.cut(MODEL.weights(), cut)
    partial = frozenset() if units is None else frozenset({OUTPUT})
    leased = LeasedFrame(Lease(frozenset(patch.values), cut, partial), MODEL)
    if units is not None:
        credited = Cut.of(MODEL.groups, {**cut.channels, OUTPUT: units}, cut.tag, cut.width)
        patch = MODEL.narrow(patch, credited)
    return patch, leased


@pytest.mark.parametrize("width", [Fraction(1, 4), Fraction(1, 2), Fraction(1)])
@pytest.mark.parametrize("units", [None, [0], [2], [1, 3], [0, 1], [0, 1, 2, 3]])
def test_a_patch_comes_back_and_its_length_is_known_in_advance(width, units):
    patch, leased = patch_at(width, units)
    data = joined(encode_patch(patch))
    again = decode_patch(data, leased)
    assert again.cut == patch.cut
    assert again.cut.tag == patch.cut.tag
    assert {name: bits(value) for name, value in again.values.items()} == {
        name: bits(value) for name, value in patch.values.items()
    }
    assert len(data) <= leased.limit
    if units is None:
        assert len(data) == leased.limit
    assert joined(encode_patch(again)) == data


def test_a_lease_knows_the_shapes_of_tensors_that_no_cut_sizes():
    cut = prefix(MODEL.groups, Fraction(1, 2))
    patch = Patch(
        {"8.weight@basis": torch.ones(2, 3), "8.weight@1/2": MODEL.weights()["8.weight"][:, :4]}, cut
    )
    shapes = {name: tuple(value.shape) for name, value in patch.values.items()}
    leased = LeasedFrame(Lease(frozenset(shapes), cut), MODEL, shapes)
    again = decode_patch(joined(encode_patch(patch)), leased)
    assert {name: bits(value) for name, value in again.values.items()} == {
        name: bits(value) for name, value in patch.values.items()
    }
    other = Patch({**patch.values, "8.weight@basis": torch.ones(3, 2)}, cut)
    with pytest.raises(DecodeError):
        decode_patch(joined(encode_patch(other)), leased)


def test_the_order_of_the_tensors_in_a_patch_does_not_matter():
    patch, _ = patch_at(Fraction(1, 2))
    backwards = Patch(dict(reversed(patch.values.items())), patch.cut)
    assert joined(encode_patch(backwards)) == joined(encode_patch(patch))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: Patch({**patch.values, "8.bias": torch.zeros(1)}, patch.cut),  # would broadcast
        lambda patch: Patch({**patch.values, "8.bias": torch.zeros(4, dtype=torch.float64)}, patch.cut),
        lambda patch: Patch({**patch.values, "8.weight": patch.values["8.weight"].t()}, patch.cut),
        lambda patch: Patch({**patch.values, "extra": torch.zeros(1)}, patch.cut),
        lambda patch: Patch({k: v for k, v in patch.values.items() if k != "8.bias"}, patch.cut),
        lambda patch: Patch(patch.values, Cut.everything()),
        lambda patch: Patch(patch.values, Cut(patch.cut.channels, "another tag")),
        lambda patch: MODEL.narrow(patch, prefix(MODEL.groups, Fraction(1, 4))),
        lambda patch: MODEL.cut(MODEL.weights(), Cut.everything()),
    ],
)
@pytest.mark.parametrize("units", [None, [1, 3]])
def test_a_patch_that_was_not_leased_is_refused(change, units):
    _, leased = patch_at(Fraction(1, 2), units)
    whole, _ = patch_at(Fraction(1, 2))
    with pytest.raises(DecodeError):
        decode_patch(joined(encode_patch(change(whole))), leased)


@pytest.mark.parametrize(
    "units", [[], [1, 1], [3, 1], [4], [-1], [0, 1, 2, 3, 4], ["1"], [True], [1.0], 0, 5, -1, None]
)
def test_units_that_do_not_exist_are_refused(units):
    patch, leased = patch_at(Fraction(1, 2), [1, 3])
    head, *body = encode_patch(patch)
    header = json.loads(bytes(head)[len(MAGIC) + 4 :])
    channels = header["value"]["dict"][0][1]["dict"][0][1]["dict"]
    next(pair for pair in channels if pair[0] == OUTPUT)[1] = units
    with pytest.raises(DecodeError):
        decode_patch(frame(header, joined(body)), leased)


def test_a_boolean_is_0_or_1():
    data = frame({"tensors": [["bool", [3]]], "value": {"tensor": 0}}, b"\0\1\2")
    with pytest.raises(DecodeError, match="neither 0 nor 1"):
        decode(data)


# Bombs: everything that claims to be larger, deeper or otherwise than it is

HUGE = 2**62


def head_only(**header: Any) -> bytes:
    return frame({"tensors": [], "value": None, **header})


BOMBS: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"f",
    "magic only": MAGIC,
    "another version": MAGIC[:-1] + b"\x02" + joined(encode(1))[len(MAGIC) :],
    "header of 4 GiB": MAGIC + b"\xff\xff\xff\xff" + b"{}",
    "header of 2 GiB": MAGIC + b"\xff\xff\xff\x7f" + b"{}",
    "header longer than the frame": MAGIC + (100).to_bytes(4, "little") + b"{}",
    "no header": frame(None, text=b""),
    "not JSON": frame(None, text=b"\x00\x01\x02"),
    "not ASCII": frame(None, text='{"tensors":[],"value":"é"}'.encode()),
    "another encoding": frame(None, text='{"tensors":[],"value":1}'.encode("utf-16")),
    "byte order mark": frame(None, text=b'\xef\xbb\xbf{"tensors":[],"value":1}'),
    "a space": frame(None, text=b'{"tensors": [],"value":1}'),
    "trailing space": frame(None, text=b'{"tensors":[],"value":1} '),
    "order of keys": frame(None, text=b'{"value":1,"tensors":[]}'),
    "duplicate keys": frame(None, text=b'{"tensors":[],"tensors":[],"value":1}'),
    "duplicate value": frame(None, text=b'{"tensors":[],"value":1,"value":2}'),
    "another key": head_only(extra=1),
    "missing key": frame({"value": 1}),
    "a list": frame([]),
    "a number": frame(1),
    "NaN": frame(None, text=b'{"tensors":[],"value":NaN}'),
    "Infinity": frame(None, text=b'{"tensors":[],"value":-Infinity}'),
    "1e999": frame(None, text=b'{"tensors":[],"value":1e999}'),
    "1.0 as 1e0": frame(None, text=b'{"tensors":[],"value":1e0}'),
    "leading zero": frame(None, text=b'{"tensors":[],"value":01}'),
    "a million digits": frame(None, text=b'{"tensors":[],"value":' + b"9" * 10**6 + b"}"),
    "65 bits": head_only(value=2**64),
    "nesting of 100,000": frame(None, text=b'{"tensors":[],"value":' + b"[" * 10**5 + b"]" * 10**5 + b"}"),
    "objects of 100,000": frame(None, text=b'{"tensors":[],"value":' + b'{"tuple":[' * 10**5 + b"}"),
    "unclosed": frame(None, text=b"[" * 10**6),
    "8 EiB": head_only(tensors=[["float64", [2**60]]], value={"tensor": 0}),
    "8 EiB in two axes": head_only(tensors=[["float64", [2**30, 2**30]]], value={"tensor": 0}),
    "more than 64 bits of bytes": head_only(tensors=[["float64", [2**48, 2**48]]], value={"tensor": 0}),
    "an axis of 64 bits": head_only(tensors=[["uint8", [2**64]]], value={"tensor": 0}),
    "zero times huge": head_only(tensors=[["uint8", [0, HUGE]]], value={"tensor": 0}),
    "huge times zero": head_only(tensors=[["uint8", [2**40, 2**40, 0]]], value={"tensor": 0}),
    "negative axis": head_only(tensors=[["uint8", [-1]]], value={"tensor": 0}),
    "negative product": head_only(tensors=[["uint8", [-2, -2]]], value={"tensor": 0}),
    "axis as text": head_only(tensors=[["uint8", ["1"]]], value={"tensor": 0}),
    "axis as float": head_only(tensors=[["uint8", [1.0]]], value={"tensor": 0}),
    "axis as bool": head_only(tensors=[["uint8", [True]]], value={"tensor": 0}),
    "17 axes": head_only(tensors=[["uint8", [1] * 17]], value={"tensor": 0}),
    "100,000 axes": head_only(tensors=[["uint8", [1] * 10**5]], value={"tensor": 0}),
    "type V0": head_only(tensors=[["V0", [10**12]]], value={"tensor": 0}),
    "type object": head_only(tensors=[["object", [1]]], value={"tensor": 0}),
    "type as list": head_only(tensors=[[["uint8"], [1]]], value={"tensor": 0}),
    "type as dict": head_only(tensors=[[{}, [1]]], value={"tensor": 0}),
    "a million tensors": head_only(tensors=[["uint8", [0]]] * 10**6, value=None),
    "tensors as dict": head_only(tensors={"0": ["uint8", [1]]}),
    "tensors as number": head_only(tensors=1),
    "no such tensor": head_only(value={"tensor": 0}),
    "tensor -1": head_only(tensors=[["uint8", [0]]], value={"tensor": -1}),
    "tensor twice": head_only(tensors=[["uint8", [0]]], value=[{"tensor": 0}, {"tensor": 0}]),
    "tensors out of order": head_only(tensors=[["uint8", [0]]] * 2, value=[{"tensor": 1}, {"tensor": 0}]),
    "tensor number as bool": head_only(tensors=[["uint8", [0]]], value={"tensor": False}),
    "tensor not named": head_only(tensors=[["uint8", [0]]], value=1),
    "missing body": head_only(tensors=[["uint8", [1]]], value={"tensor": 0}),
    "extra body": frame({"tensors": [], "value": 1}, b"\0"),
    "unknown kind": head_only(value={"object": "os.system"}),
    "two kinds": head_only(value={"tuple": [], "dict": []}),
    "no kind": head_only(value={}),
    "float that is finite": head_only(value={"float": "1.0"}),
    "float as list": head_only(value={"float": ["nan"]}),
    "tuple of nothing": head_only(value={"tuple": None}),
    "dict as object": head_only(value={"dict": {"a": 1}}),
    "dict of triples": head_only(value={"dict": [[1, 2, 3]]}),
    "dict with equal keys": head_only(value={"dict": [["a", 1], ["a", 2]]}),
    "dict with a list as key": head_only(value={"dict": [[[], 1]]}),
    "dict with a bool as key": head_only(value={"dict": [[True, 1]]}),
    "dict with a huge key": head_only(value={"dict": [[2**64, 1]]}),
    "zip": b"PK\x03\x04" + bytes(100),
    "npy": b"\x93NUMPY\x01\x00v\x00" + bytes(100),
    "pickle": b"\x80\x04\x95" + bytes(100),
}


def readers() -> dict[str, Callable[[Buffer], Any]]:
    _, exact = patch_at(Fraction(1, 2))
    _, partial = patch_at(Fraction(1, 2), [1, 3])
    return {
        "value": decode,
        "patch": lambda data: decode_patch(data, exact),
        "partial patch": lambda data: decode_patch(data, partial),
    }


@pytest.mark.parametrize("reader", sorted(readers()))
def test_bombs_are_refused_without_memory_or_time(reader):
    assert len(BOMBS) >= 60
    read = readers()[reader]
    for name, data in BOMBS.items():
        if name == "a million tensors" and reader == "value":
            continue  # what this machine wrote itself may be long, and is read in linear time
        tracemalloc.start()
        begin = time.thread_time()
        with pytest.raises(DecodeError):
            read(data)
        seconds, (_, peak) = time.thread_time() - begin, tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 64 * 2**20, name
        assert seconds < 5, name


# Mutations: what is left of a good frame after an accident or an attack


def corpus() -> dict[str, list[bytes]]:
    """Good frames for each reader."""
    value = {
        "round": 3, "weights": {"a": torch.arange(6.0).view(2, 3), "b": torch.tensor([True, False])},
        "memory": {7: [1, -2.5, math.inf, None, "é"], "t": (torch.zeros(0, 3), {"x": 1})},
    }  # fmt: skip
    patches = [
        joined(encode_patch(patch_at(width)[0])) for width in (Fraction(1, 4), Fraction(1, 2), Fraction(1))
    ]
    partial = [
        joined(encode_patch(patch_at(Fraction(1, 2), units)[0])) for units in ([0], [1, 3], [0, 1, 2, 3])
    ]
    return {"value": [joined(encode(value)), *patches], "patch": patches, "partial patch": partial}


TOKENS = [
    b'"tensor"', b'"dict"', b'"tuple"', b'"float"', b'"nan"', b"-1", b"0", b"1e999", b"18446744073709551616",
    b"[", b"]", b"{", b"}", b",", b":", b"null", b"true", b"NaN", b'"bool"', b'"float64"', b"\\u0000", b"[[", b"]]",
    b" ", b"\x00", b"\xff",
]  # fmt: skip


def mutated(data: bytes, draw: random.Random) -> bytes:
    """One to four random changes; about half keep the header's length honest, so that they get past the first check."""
    changed = bytearray(data)
    for _ in range(draw.randint(1, 4)):
        kind, place = draw.randrange(8), draw.randrange(max(1, len(changed)))
        if kind == 0 and changed:
            changed[place] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[place:]
        elif kind == 2:
            changed[place:place] = draw.choice(TOKENS)
        elif kind == 3:
            token = draw.choice(TOKENS)
            changed[place : place + len(token)] = token
        elif kind == 4:
            del changed[place : place + draw.randint(1, 8)]
        elif kind == 5:
            changed[place:place] = changed[place : place + draw.randint(1, 64)]
        elif kind == 6:
            changed[8:12] = draw.randrange(2**32).to_bytes(4, "little")
        else:
            changed += draw.randbytes(draw.randint(1, 16))
    if draw.random() < 0.5 and len(changed) > 12:
        end = changed.rfind(b"}", 12, 12 + len(data))
        changed[8:12] = max(0, end + 1 - 12).to_bytes(4, "little")
    return bytes(changed)


def attack(count: int, seed: int) -> dict[str, Any]:
    """Feed mutated frames to every reader; only ``DecodeError`` may come out, or a value that writes the same bytes."""
    draw = random.Random(seed)
    entry, frames = readers(), corpus()
    accepted, slowest, seconds = 0, 0.0, []
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(count):
        name = ("value", "patch", "partial patch")[number % 3]
        data = mutated(draw.choice(frames[name]), draw)
        begin = time.thread_time()  # of a processor: how long that takes depends on who else wants it
        try:
            result = entry[name](data)
        except DecodeError:
            result = None
        seconds.append(time.thread_time() - begin)
        slowest = max(slowest, seconds[-1])
        if result is not None:
            accepted += 1
            spelt = encode_patch(result) if isinstance(result, Patch) else encode(result)
            assert joined(spelt) == data
    seconds.sort()
    return {
        "inputs": count,
        "refused": count - accepted,
        "accepted_and_canonical": accepted,
        "p99_milliseconds": round(1000 * seconds[int(0.99 * count)], 3),
        "slowest_milliseconds": round(1000 * slowest, 1),
        "memory_growth_mebibytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024,
    }


def test_twenty_thousand_mutated_inputs():
    figures = attack(20_000, seed=6)
    # Where bits of tensors change, a frame stays a frame.
    assert figures["accepted_and_canonical"] > 100
    assert figures["memory_growth_mebibytes"] < 64
    assert figures["p99_milliseconds"] < 10


@pytest.mark.slow
def test_a_million_mutated_inputs():
    figures = attack(1_000_000, seed=7)
    assert figures["memory_growth_mebibytes"] < 64
    assert figures["p99_milliseconds"] < 10
