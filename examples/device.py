"""What a device does with a deployed file: load it and predict. Nothing of fedtailor is imported here.

    fedtailor deploy runs/first --all-tiers --format onnx
    python examples/device.py runs/first/deploy/0.2.onnx inputs.npy

Inputs are raw (pixels as they lie in the data set) and have the type and shape that ``manifest.json`` names. A file of
weights alone (``.safetensors``, ``.sparse.safetensors``) is put into the network's own class:
``load_safetensors(file, MyNet())``, ``load_sparse(file, MyNet())``.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Network = Callable[..., list[Array]]  # arrays in, arrays out


def load_onnx(file: str) -> Network:
    """ONNX Runtime: any number of examples in one call."""
    import onnxruntime

    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    names = [each.name for each in session.get_inputs()]
    return lambda *inputs: list(session.run(None, dict(zip(names, inputs, strict=True))))


def load_pt2(file: str) -> Network:
    """PyTorch: any number of examples in one call."""
    import torch

    program = torch.export.load(file)
    _, named = program.call_spec.in_spec.children()  # of what is given by place, and by name
    return _with_tensors(program.module(), named.context or [])


def load_pte(file: str) -> Network:
    """ExecuTorch, here from Python; phones call the same method from Kotlin, Swift or C++. One example in one call."""
    import torch
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(Path(file))
    method = program.load_method("forward")

    def predict(*inputs: Array, _owner: Any = program) -> list[Array]:
        count = len(inputs[0])
        rows = [[torch.from_numpy(each[place : place + 1]) for each in inputs] for place in range(count)]
        answers = [[np.array(each) for each in method.execute(row)] for row in rows]
        return [np.concatenate(parts) for parts in zip(*answers, strict=True)]

    return predict


def load_safetensors(file: str, full: Any) -> Network:
    """PyTorch and the network's own class: a fresh object at full size becomes the small network."""
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        about = json.loads(opened.metadata()["about"])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
    for name in [each for each in tensors if f"{each}.scale" in tensors]:  # int8 numbers, and their scale
        tensors[name] = tensors[name] * tensors.pop(f"{name}.scale")
    members = []
    for number in range(about["members"]):  # several networks answer with the mean of their outputs
        own = {
            name.split("/", 1)[1]: value for name, value in tensors.items() if name.startswith(f"{number}/")
        }
        own |= {second: own[first] for second, first in about["ties"].items() if first in own}
        member = copy.deepcopy(full).eval()
        for path in about["skipped"]:
            owner, _, leaf = path.rpartition(".")
            setattr(member.get_submodule(owner), leaf, torch.nn.Identity())
        for path, sizes in about["sizes"].items():
            for name, size in sizes.items():
                setattr(member.get_submodule(path), name, tuple(size) if isinstance(size, list) else size)
        _fill(member, own)
        members.append(_with_tensors(member, about.get("keywords", [])))

    def predict(*inputs: Array) -> list[Array]:
        first, *rest = inputs
        prepared = [_normalised(first, about["inputs"].get("preparation")), *rest]
        answers = [member(*prepared) for member in members]
        return [np.stack(parts).mean(0) for parts in zip(*answers, strict=True)]

    return predict


def load_sparse(file: str, full: Any) -> Network:
    """The same of weights of which most are left out: the zeros are put back, so that it runs like any other."""
    import torch
    from safetensors import safe_open

    with safe_open(file, framework="pt") as opened:
        about = {key: json.loads(opened.metadata()[key]) for key in ("shapes", "ties", "inputs")}
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
    for name, shape in about["shapes"].items():  # of every weight one bit: whether its value is there
        kept = np.unpackbits(tensors.pop(f"{name}.mask").numpy(), count=int(np.prod(shape))).astype(bool)
        dense = torch.zeros(shape, dtype=tensors[name].dtype)
        tensors[name] = dense.masked_scatter_(torch.from_numpy(kept).view(shape), tensors[name])
    tensors |= {second: tensors[first] for second, first in about["ties"].items()}
    member = copy.deepcopy(full).eval()
    _fill(member, tensors)
    network = _with_tensors(member)
    preparation = about["inputs"].get("preparation")
    return lambda first, *rest: network(_normalised(first, preparation), *rest)


def _fill(module: Any, tensors: dict[str, Any]) -> None:
    """Put tensors in place of those of a module, whatever their sizes."""
    import torch

    for name, value in tensors.items():
        owner, _, leaf = name.rpartition(".")
        layer = module.get_submodule(owner)
        setattr(layer, leaf, torch.nn.Parameter(value) if leaf in layer._parameters else value)


def _normalised(raw: Array, how: dict[str, Any] | None) -> Array:
    """``(raw / white - mean) / std``, of every channel or feature."""
    if how is None:
        return raw
    shape = (1, -1, 1, 1) if how["kind"] == "pixels" else (1, -1)
    mean, std = (np.array(how[name], dtype=np.float32).reshape(shape) for name in ("mean", "std"))
    scaled = (raw.astype(np.float32) / np.float32(how.get("white", 1)) - mean) / std
    return np.where(np.isnan(scaled), np.float32(0), scaled) if how.get("fill") else scaled


def _with_tensors(module: Any, names: Sequence[str] = ()) -> Network:
    """A PyTorch module as a function on arrays; the last ones are given to it by these names."""
    import torch
    from torch.utils._pytree import tree_leaves

    @torch.no_grad()
    def predict(*inputs: Array) -> list[Array]:
        tensors = [torch.from_numpy(each) for each in inputs]
        by_place = len(tensors) - len(names)
        answer = module(*tensors[:by_place], **dict(zip(names, tensors[by_place:], strict=True)))
        return [each.numpy() for each in tree_leaves(answer)]

    return predict


LOADERS = {".onnx": load_onnx, ".pt2": load_pt2, ".pte": load_pte}


def main() -> None:
    """Predict for the examples in ``.npy`` files, one for each input."""
    file, *inputs = sys.argv[1:]
    network = LOADERS[Path(file).suffix](file)
    for answers in network(*(np.load(each, allow_pickle=False) for each in inputs)):
        print(answers.argmax(-1) if answers.ndim == 2 else answers)


if __name__ == "__main__":
    main()
