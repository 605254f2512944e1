"""``.safetensors``: weights alone, and what a class at full size must be told to become the small network.

``about`` in the file's metadata is JSON: ``sizes`` has the attributes of layers that differ from the full network,
``ties`` the second names of shared tensors, ``skipped`` the layers that are left out, ``members`` how many networks
answer together, ``inputs`` what is done to raw inputs. An int8 tensor ``w`` stands beside its ``w.scale``.
``examples/device.py`` reads it without fedtailor.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from fedtailor.deploying.formats.base import Format, Program
from fedtailor.deploying.formats.exporting import first_line
from fedtailor.deploying.inputs import Inputs, answers_of
from fedtailor.deploying.int8 import quantised
from fedtailor.deploying.network import Network
from fedtailor.elasticity.running.ensemble import Ensemble
from fedtailor.elasticity.running.skipping import Skipped, skipped_layers
from fedtailor.errors import CorruptError, FedtailorError

FORMAT = "fedtailor-network-1"
SCALE = ".scale"


class Safetensors(Format):
    """Weights by their names; small, and nothing but numbers."""

    name, suffix = "safetensors", ".safetensors"
    needs_class = True
    int8 = "weights alone, computed in floats: smaller, no faster"

    def pack(self, network: Network, calibration: Inputs | None) -> bytes:
        model, patches = network.model, network.patches
        if not model.own_class and patches[0].cut.channels:
            raise FedtailorError(
                f"--format safetensors: the forward of {type(model.module).__name__} has sizes written in it, so its "
                "class does not run at this width; expected --format pt2, onnx or pte, which hold the code too"
            )
        kind = (network.about.get("preparation") or {}).get("kind")
        if kind not in (None, "pixels", "features"):
            raise FedtailorError(
                f"--format safetensors: raw inputs go through a preparation of your own ({kind}), which numbers alone "
                "do not describe; expected --format pt2, onnx or pte, which hold it as a layer"
            )
        tensors: dict[str, Tensor] = {}
        for number, patch in enumerate(patches):
            whole = model.spread(patch)
            for name, value in whole.values.items():
                tensors[f"{_member(number)}{name}"] = value.detach().cpu().contiguous()
        if calibration is not None:
            tensors = _as_int8(tensors)
        return save(tensors, metadata={"about": json.dumps(_about(network))})

    def open(self, file: Path, module: nn.Module | None = None) -> Program:
        about, tensors = read(file)
        if module is None:
            raise FedtailorError(
                f"{file} holds the weights of a network alone; expected the network at full size beside it"
            )
        network = rebuilt(about, tensors, module, str(file))
        prepare = preparation_of(about["inputs"].get("preparation"))
        return lambda inputs: answers_of(network, prepare(inputs))


def _about(network: Network) -> dict[str, Any]:
    model, first = network.model, network.patches[0]
    layers = dict(model.build(first).named_modules())
    sizes: dict[str, dict[str, Any]] = {}
    for size in model.groups.sizes:
        if size.layer in layers and hasattr(layers[size.layer], size.attribute):
            sizes.setdefault(size.layer, {})[size.attribute] = getattr(layers[size.layer], size.attribute)
    return {
        "format": FORMAT,
        "sizes": sizes if model.own_class else {},
        "ties": dict(model.groups.ties),
        "skipped": skipped_layers(model.module, first.cut),
        "members": len(network.patches),
        "keywords": list(network.example.kwargs),  # inputs that the class is given by name, behind the others
        "inputs": dict(network.about),
    }


def _member(number: int) -> str:
    return f"{number}/"


def _as_int8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if value.dim() < 2 or value.dtype != torch.float32:
            found[name] = value
            continue
        found[name], found[f"{name}{SCALE}"] = quantised(value)
    return found


def read(file: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What a file says of itself, and its tensors, int8 ones as floats again."""
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {}).get("about", "{}"))
            found = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118  (it is no dict)
    except (OSError, SafetensorError, ValueError) as error:
        raise CorruptError(f"{file} cannot be read: {first_line(error)}") from error
    if not isinstance(about, dict) or about.get("format") != FORMAT:
        raise FedtailorError(
            f"{file}: its metadata names no format {FORMAT!r}; expected a file of fedtailor deploy"
        )
    scales = {name: found.pop(f"{name}{SCALE}") for name in [*found] if f"{name}{SCALE}" in found}
    return about, {n: value * scales[n] if n in scales else value for n, value in found.items()}


def rebuilt(
    about: Mapping[str, Any], tensors: Mapping[str, Tensor], full: nn.Module, where: str
) -> nn.Module:
    """The small network: a copy of the class at full size, with the file's sizes and tensors."""
    members = []
    for number in range(about["members"]):
        start = _member(number)
        values = {
            name.removeprefix(start): value for name, value in tensors.items() if name.startswith(start)
        }
        values |= {second: values[first] for second, first in about["ties"].items() if first in values}
        members.append(_filled(copy.deepcopy(full), about, values, where))
    return (members[0] if len(members) == 1 else Ensemble(members)).eval()


def _filled(
    module: nn.Module, about: Mapping[str, Any], values: Mapping[str, Tensor], where: str
) -> nn.Module:
    try:
        for path in about["skipped"]:
            owner, _, leaf = path.rpartition(".")
            setattr(module.get_submodule(owner), leaf, Skipped())
        for path, sizes in about["sizes"].items():
            for name, size in sizes.items():
                setattr(module.get_submodule(path), name, tuple(size) if isinstance(size, list) else size)
    except AttributeError as error:
        raise _another_class(where, error) from error
    return with_tensors(module, values, where)


def with_tensors(module: nn.Module, values: Mapping[str, Tensor], where: str) -> nn.Module:
    """The module with these tensors in place of its own, whatever their sizes."""
    for name, value in values.items():
        owner, _, leaf = name.rpartition(".")
        try:
            layer = module.get_submodule(owner)
        except AttributeError as error:
            raise _another_class(where, error) from error
        setattr(layer, leaf, nn.Parameter(value, requires_grad=False) if leaf in layer._parameters else value)
    return module


def _another_class(where: str, error: Exception) -> FedtailorError:
    return FedtailorError(f"{where}: the class at hand is not the one that was trained: {first_line(error)}")


def preparation_of(known: Mapping[str, Any] | None) -> Callable[[Inputs], Inputs]:
    """What the metadata says about raw inputs, as a function on inputs."""
    if not known:
        return lambda inputs: inputs
    shape = (1, -1, 1, 1) if known["kind"] == "pixels" else (1, -1)
    white = known.get("white", 1.0)
    mean, std = (torch.tensor(known[name], dtype=torch.float32).view(shape) for name in ("mean", "std"))

    def prepare(inputs: Inputs) -> Inputs:
        key = known.get("input")
        raw = inputs.kwargs[key] if key else inputs.args[0]
        scaled = raw.to(torch.float32) * (1 / (white * std)) + (-mean / std)
        if known.get("fill"):
            scaled = scaled.masked_fill(scaled.isnan(), 0.0)
        if key:
            return Inputs(inputs.args, {**inputs.kwargs, key: scaled})
        return Inputs((scaled, *inputs.args[1:]), inputs.kwargs)

    return prepare
