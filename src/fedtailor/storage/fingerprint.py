"""What decides the bits of a run, as names and short values: compared field by field before a run goes on."""

from __future__ import annotations

import hashlib
import inspect
import platform
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.errors import FedtailorError
from fedtailor.method import Method

Fingerprint = dict[str, Any]

RECORDED_PACKAGES = ("fedtailor", "torch", "numpy", "safetensors", "pydantic", "scikit-learn")
COMPUTING_PACKAGES = ("fedtailor", "torch", "numpy")


def describe_environment(threads: int, device: str) -> dict[str, Any]:
    """Versions and settings, for the record; the part that may change the bits is in the fingerprint too."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(terse=True),
        "packages": {name: _version(name) for name in RECORDED_PACKAGES},
        "threads": threads,
        "device": device,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
    }


def fingerprint(
    settings: Mapping[str, Any], method: Method, model: ElasticModel, data: FederatedData, threads: int
) -> Fingerprint:
    """``settings`` are the run's own (nested tables); the rest is looked at here."""
    examples, split = data.fingerprint().split("-")
    device = str(next(iter(model.module.parameters())).device)
    return {
        **flat(settings),
        "data.examples": examples,
        "data.split": split,
        "model.layers": _digest(repr(model.module)),
        "model.tensors": _digest(repr(sorted(shapes(model).items()))),
        "model.constants": _digest(*map(_bytes, model.constants.values())),
        "model.code": _code(*{type(layer) for layer in model.module.modules()}),
        "model.objective": _code(model.objective.loss, *model.objective.metrics.values()),
        "model.task": model.learning_task.name,
        "method.code": _code(*type(method).__mro__),
        **{f"version.{name}": _version(name) for name in COMPUTING_PACKAGES},
        "version.python": ".".join(platform.python_version_tuple()[:2]),
        "machine.threads": threads,
        "machine.device": device,
        "machine.processor": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
        "machine.deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "machine.default_dtype": str(torch.get_default_dtype()),
    }


def flat(table: Mapping[str, Any], prefix: str = "") -> Fingerprint:
    """Nested tables as one, with dots in the names; what JSON does not know becomes its text.

    >>> flat({"training": {"lr": 0.1}, "rounds": 3})
    {'training.lr': 0.1, 'rounds': 3}
    """
    result: Fingerprint = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = (
                value if isinstance(value, str | int | float | bool | None) else str(value)
            )
    return result


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """One line for each field that is not what it was."""
    absent = "(absent)"
    changed = [
        (name, saved.get(name, absent), now.get(name, absent))
        for name in sorted(saved.keys() | now.keys())
        if repr(saved.get(name, absent)) != repr(now.get(name, absent))
    ]
    return [f"{name}: saved {before!r}, now {after!r}" for name, before, after in changed]


def refuse_drift(path: object, changed: list[str]) -> None:
    """A run that goes on under other conditions is another run: say what changed, and what to do."""
    if changed:
        lines = "\n  ".join(changed)
        raise FedtailorError(
            f"{path} was saved under other conditions:\n  {lines}\nPut them back; or go on with --allow-drift "
            "(allow_drift=True), and the result is that of neither."
        )


def shapes(model: ElasticModel) -> dict[str, str]:
    """Type and shape of every weight, as texts."""
    return {name: f"{value.dtype}{tuple(value.shape)}" for name, value in model.weights().items()}


def _bytes(tensor: Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)


def _code(*objects: type[Any] | Callable[..., Any]) -> str:
    """A digest of the source of classes and functions, those of PyTorch and Python left out: they have versions."""
    sources = []
    for item in objects:
        if getattr(item, "__module__", "").partition(".")[0] not in ("torch", "builtins", "abc"):
            try:
                sources.append(inspect.getsource(item))
            except (OSError, TypeError):  # typed into a prompt, or a callable object: its name has to do
                sources.append(getattr(item, "__qualname__", type(item).__qualname__))
    return _digest(*sorted(sources))


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else part)
        digest.update(b"\0")
    return digest.hexdigest()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"
