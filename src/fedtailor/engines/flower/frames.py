"""Tasks and answers as heads and pieces. A client's patch is read against its lease, byte by byte."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from torch import Tensor

from fedtailor.elasticity.cutting.encoding import cut_from
from fedtailor.elasticity.cutting.levels import Levels
from fedtailor.elasticity.cutting.names import is_tagged
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.flower.post import Head
from fedtailor.engines.protocol import Answer
from fedtailor.engines.values import masked_cut, task_of, task_value
from fedtailor.errors import one_line
from fedtailor.messages import Refused, Task, Update, kept_elsewhere, version_of
from fedtailor.privacy.guard import KEPT_METRIC
from fedtailor.secure.streams import Words
from fedtailor.storage.fingerprint import shapes
from fedtailor.storage.patch_frames import LeasedFrame, decode_patch, encode_levels, encode_patch
from fedtailor.storage.wire import DecodeError, decode

UNREADABLE = "unreadable"  # the reason for a patch that is not what was leased
WORDS = "<u4"  # how words under masks travel
Values = Callable[[Any, Task], tuple[Patch, float]]  # reads the patch and the weight of an answer to a task


def digest_of(piece: bytes) -> str:
    """The name of a piece: equal pieces have equal names."""
    return hashlib.blake2b(piece, digest_size=16).hexdigest()


def patch_head(patch: Patch, levels: Levels | None) -> tuple[Head, dict[str, bytes], dict[str, bytes]]:
    """The head of a patch, its frame, and the map of its masks, which a client may know already."""
    frame = b"".join(encode_patch(patch))
    maps = b"" if levels is None else b"".join(encode_levels(levels))
    piece, name = digest_of(frame), digest_of(maps)
    place = {name: number for number, name in enumerate(sorted(patch.values))}
    # Frames are sorted; what sums over tensors depends on their order.
    order = [place[name] for name in patch.values]
    head = {"piece": piece, "levels": name if maps else None, "order": order}
    return head, {piece: frame}, {name: maps} if maps else {}


def patch_from(head: Mapping[str, Any], pieces: Mapping[str, bytes], levels: Levels | None) -> Patch:
    """The patch of a head, on the client's side."""
    framed = decode(pieces[head["piece"]])
    names = list(framed["values"])
    values = {names[number]: framed["values"][names[number]] for number in head["order"]}
    return Patch(values, cut_from(framed["cut"], levels))


def task_head(task: Task) -> tuple[Head, dict[str, bytes], dict[str, bytes]]:
    """The head of a task, its patch, and the map of its masks."""
    value = task_value(replace(task, memory={}))
    del value["levels"], value["memory"]
    mask = masked_cut(task).mask
    head, frame, maps = patch_head(task.patch, None if mask is None else mask.levels)
    return {**value, **head, "memory": list(version_of(task.memory) or ())}, frame, maps


def task_from(
    head: Mapping[str, Any], pieces: Mapping[str, bytes], levels: Levels | None, memory: dict[str, Tensor]
) -> Task:
    """The task of a head, on the client's side."""
    value = {**head, "levels": None if levels is None else dict(levels.maps), "memory": memory}
    patch = patch_from(head, pieces, levels)
    return replace(task_of(value, patch.values), patch=patch)


def answer_head(answer: Answer, kept: bool, lost: bool) -> tuple[Head, dict[str, bytes]]:
    """An answer, and its patch as a frame; what the client keeps for itself stays there."""
    if isinstance(answer, Refused):
        return {"refused": [answer.client, answer.round, answer.reason, answer.detail]}, {}
    frame = b"".join(encode_patch(answer.patch))
    metrics = {name: float(value) for name, value in answer.metrics.items()}
    piece = digest_of(frame)
    head = {
        "update": [answer.client, answer.round, answer.base_round], "weight": float(answer.weight), "metrics": metrics,
        "piece": piece, "kept": kept, "lost": lost, "nonce": answer.nonce,
    }  # fmt: skip
    return head, {piece: frame}


def answer_from(
    head: object, pieces: Mapping[str, bytes], tasks: Mapping[int, Task], model: ElasticModel
) -> Answer:
    """The answer that a head stands for; whatever it claims, it is read against the task of its client."""
    try:
        return _answer(head, tasks, lambda head, task: _patch(head, pieces, task, model))
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DecodeError(f"no answer to a task: {error!r}") from None


def _answer(head: Any, tasks: Mapping[int, Task], values: Values) -> Answer:
    if "refused" in head:
        client, _, reason, detail = head["refused"]
        return Refused(
            client, _asked(client, tasks).round, one_line(str(reason), 40), one_line(str(detail), 2000)
        )
    client, round, base = (_whole(number) for number in head["update"])
    task = _asked(client, tasks)
    metrics = {str(name): float(value) for name, value in head["metrics"].items()}
    if head["lost"]:
        metrics["memory lost"] = 1.0
    if round != task.round:
        return Refused(client, task.round, "wrong-round", f"answers round {round}")
    try:
        patch, weight = values(head, task)
    except DecodeError as error:
        return Refused(client, task.round, UNREADABLE, str(error))
    memory = kept_elsewhere(task.round, task.action) if head["kept"] else dict(task.memory)
    return Update(client, round, base, patch, weight, metrics, memory, str(head["nonce"]))


def masked_head(update: Update, rows: Mapping[str, Words], kept: bool) -> tuple[Head, dict[str, bytes]]:
    """An answer whose values are words under masks, class after class; neither weight nor metrics tell of them."""
    labels = sorted(rows)
    frame = b"".join(rows[label].astype(WORDS).tobytes() for label in labels)
    metrics = {name: value for name, value in update.metrics.items() if name == KEPT_METRIC}
    head, _ = answer_head(
        replace(update, patch=Patch({}, update.patch.cut), metrics=metrics), kept, lost=False
    )
    piece = digest_of(frame)
    del head["weight"]
    return {**head, "piece": piece, "classes": labels, "words": WORDS}, {piece: frame}


def masked_from(
    head: object,
    pieces: Mapping[str, bytes],
    tasks: Mapping[int, Task],
    lengths: Mapping[int, Mapping[str, int]],
) -> tuple[Answer, dict[str, Words]]:
    """The answer that such a head stands for, with its rows; ``lengths`` is what each client was asked for.

    Its patch is what the client was sent, and its weight what it may have at most: the server knows no others.
    """
    rows: dict[str, Words] = {}

    def values(head: Any, task: Task) -> tuple[Patch, float]:
        rows.update(_rows(head, pieces, lengths[task.client.id]))
        sent = {name: task.patch.values[name] for name in task.patch.values if name in task.lease.names}
        return Patch(sent, task.patch.cut), float(task.client.num_examples)

    try:
        return _answer(head, tasks, values), rows
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise DecodeError(f"no answer to a task under masks: {error!r}") from None


def _rows(head: Any, pieces: Mapping[str, bytes], lengths: Mapping[str, int]) -> dict[str, Words]:
    """Words of the classes that were asked for, neither more nor fewer."""
    labels = sorted(lengths)
    if head["words"] != WORDS or head["classes"] != labels:
        raise DecodeError(
            f"{head['words']!r:.20} of classes {head['classes']!r:.80}: expected {WORDS} of {labels}"
        )
    frame, starts = pieces[head["piece"]], [0]
    for label in labels:
        starts.append(starts[-1] + lengths[label])
    words = np.dtype(WORDS)
    if len(frame) != words.itemsize * starts[-1]:
        raise DecodeError(f"{len(frame)} bytes under masks instead of {words.itemsize * starts[-1]}")
    whole = np.frombuffer(frame, dtype=words).astype(np.uint32, copy=False)
    return {label: whole[start:end] for label, start, end in zip(labels, starts, starts[1:], strict=False)}


def _patch(head: Any, pieces: Mapping[str, bytes], task: Task, model: ElasticModel) -> tuple[Patch, float]:
    return decode_patch(pieces[head["piece"]], leased(task, model)), float(head["weight"])


def _asked(client: object, tasks: Mapping[int, Task]) -> Task:
    """The task of a client; a node speaks for those alone that it was asked about, also when it refuses."""
    number = _whole(client)
    if number not in tasks:
        raise DecodeError(f"answers for client {number}, who was not asked there")
    return tasks[number]


def leased(task: Task, model: ElasticModel) -> LeasedFrame:
    """What the answer to a task must look like."""
    sent = task.patch.values
    shapes = {name: tuple(sent[name].shape) for name in task.lease.names if is_tagged(name) and name in sent}
    return LeasedFrame(task.lease, model, shapes)


def _whole(number: object) -> int:
    if not isinstance(number, int) or isinstance(number, bool):
        raise DecodeError(f"{number!r} is no whole number")
    return number


def state_key(model: ElasticModel) -> str:
    """What a model is to both sides: the names, shapes and types of its weights."""
    texts = [f"{name} {shape}" for name, shape in sorted(shapes(model).items())]
    return digest_of("\n".join(texts).encode())
