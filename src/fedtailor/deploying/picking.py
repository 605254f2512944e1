"""Which file of a bundle a device is given: the most capable one that its limits allow."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from fedtailor.deploying.formats import format_named
from fedtailor.elasticity.costing.budget import Budget, Limit, amount, limit_text
from fedtailor.errors import FedtailorError

# What a limit of a device means of a file: memory is that of an answer, bytes are those of the file.
MEANT = {"macs": "macs", "params": "params", "memory": "peak_memory", "bytes": "size"}

Candidate = tuple[Mapping[str, Any], Mapping[str, Any]]  # a network of a manifest, and one of its files


def pick(manifest: Mapping[str, Any], limits: Budget, form: str | None = None) -> Candidate:
    """The network and the file for a device; shares are those of the largest network in the bundle.

    Among those that fit, the one with the most multiply-accumulates; of its files the smallest.
    """
    for name in limits.limits:
        if name not in MEANT:
            raise FedtailorError(f"--pick {name}: expected limits of {', '.join(MEANT)}, which files have")
    if form is not None:
        format_named(form)
    networks = [each for each in manifest["networks"] if each["client"] is None]
    found = [
        (each, file) for each in networks for file in each["files"] if form is None or file["format"] == form
    ]
    if not found:
        raise FedtailorError(
            f"the bundle has no file{f' of format {form}' if form else ''} for a tier or a budget"
        )
    allowed = {name: _absolute(name, limit, found) for name, limit in limits.limits.items()}
    fitting = [each for each in found if all(_amount(name, each) <= most for name, most in allowed.items())]
    if not fitting:
        raise FedtailorError(_nothing_fits(found, limits, allowed))
    return max(fitting, key=lambda each: (each[0]["macs"], -each[1]["size"]))


def _amount(name: str, candidate: Candidate) -> int:
    network, file = candidate
    return int(file["size"] if name == "bytes" else network[MEANT[name]])


def _absolute(name: str, limit: Limit, found: list[Candidate]) -> int | Fraction:
    return limit * max(_amount(name, each) for each in found) if isinstance(limit, Fraction) else limit


def _nothing_fits(found: list[Candidate], limits: Budget, allowed: Mapping[str, int | Fraction]) -> str:
    least = {name: min(_amount(name, each) for each in found) for name in allowed}
    name = max(allowed, key=lambda name: least[name] / allowed[name])
    return (
        f"no file fits: {name} is limited to {limit_text(name, limits.limits[name])}, and the smallest has "
        f"{amount(name, least[name])}"
    )
