"""Small runs of every method whose every bit is recorded: what they are, and what is recorded of them."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fedtailor
from fedtailor.methods.registry import get_method
from fedtailor.record import RoundRecord
from fedtailor.seeds import Seeds
from helpers import DEEP, LOW_RANK, bits
from odd_networks import adapted, deep

ROUNDS = 4

EVERYONE = 20  # all clients of the data set

# Name of a recording -> (method, settings): four rounds show all that a method does (stages, pruning, search ...).
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "apfl": ("apfl", {"warmup": 1, "search_examples": 32, "shrink": 0.4}),
    "depthfl": ("depthfl", {"ramp": 2}),
    "efd": ("efd", {}),
    "fedavg": ("fedavg", {}),
    "fedavg-narrow": ("fedavg", {"width": "2/5"}),
    "fedcs": ("fedcs", {"warmup": 2, "search_examples": 32, "shrink": 0.4, "search_at_once": 3}),
    "federated-dropout": ("federated-dropout", {"keep": 0.5}),
    "fedpa": ("fedpa", {"architectures": {"0": {"0": 1, "4": 4}, "4": {"0": 3, "4": 8}}}),
    "fedrolex": ("fedrolex", {"phase": "independent"}),
    "feduniform": ("feduniform", {"recalibrate": True}),
    "fiarse": ("fiarse", {}),
    "fiarse-channels": ("fiarse", {"granularity": "channels", "norm": "averaged"}),
    "fjord": ("fjord", {}),
    "fjord-per-width": ("fjord", {"norm": "per_width"}),
    "fjord-random": ("fjord", {"random_drop": 0.4}),
    "flado": ("flado", {"sketch": 64, "alignment_share": 0.2}),
    "flado-score": ("flado", {"sketch": 64, "alignment_share": 0.2, "estimator": "score"}),
    "flanc": ("flanc", {"widths": "uniform-5"}),
    "flexlora": ("flexlora", {}),
    "flanc-two-step": ("flanc", {"widths": "uniform-5", "form": "two_step", "biases": False}),
    "heterofl": ("heterofl", {}),
    "hetlora": ("hetlora", {}),
    "heterofl-averaged": ("heterofl", {"norm": "averaged", "align": 4}),
    "heterofl-per-width": ("heterofl", {"norm": "per_width", "label_rows": False}),
    "nefl": ("nefl", {"level_widths": ("1/5", "3/5", 1)}),
    "ofa-fl": ("ofa-fl", {"ratios": (1, "1/2", "1/40"), "trigger": "schedule", "first": 1, "every": 1}),
    "ofa-fl-per-width": (
        "ofa-fl",
        {"ratios": (1, "1/2", "1/40"), "trigger": "schedule", "first": 1, "every": 1, "norm": "per_width"},
    ),
    "scalefl": ("scalefl", {}),
    "splitmix": ("splitmix", {"base": "1/5"}),
    "tailor": ("tailor", {"few_holders": 0.5}),
    "uniprob": ("uniprob", {}),
}
NETWORKS = ("norm", "plain")


def network(kind: str, method: str) -> nn.Module:
    """With batch norm or without; an adapted one, or one with exits, where a method trains no other."""
    with Seeds(7).scope("golden network"):
        normed = kind == "norm"
        if method in LOW_RANK:
            return adapted((1, 8, 8), 10, rank=10, norm=normed)
        if method in DEEP:
            return deep((1, 8, 8), 10, norm=normed)
        return nn.Sequential(
            nn.Conv2d(1, 10, 3, padding=1),
            nn.BatchNorm2d(10) if normed else nn.Identity(),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(10, 20, 3, padding=1),
            nn.BatchNorm2d(20) if normed else nn.Identity(),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(80, 10),
        )


@dataclass(frozen=True)
class Outcome:
    """What a run ends with: its weights, and one plain row per round."""

    weights: Mapping[str, Tensor]
    rows: tuple[Mapping[str, Any], ...]

    @property
    def weights_hash(self) -> str:
        """Of the name, type, shape and every bit of every tensor."""
        digest = hashlib.sha256()
        for name in sorted(self.weights):
            digest.update(name.encode() + b"\0" + bits(self.weights[name]))
        return digest.hexdigest()[:16]

    @property
    def rows_hash(self) -> str:
        """Of what the rounds measured; floats by their exact text."""
        return hashlib.sha256(json.dumps(self.rows, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def sums(self) -> dict[str, tuple[float, float]]:
        """Of every tensor: the sum, and the sum of absolute values."""
        return {
            name: (float(value.double().sum()), float(value.double().abs().sum()))
            for name, value in sorted(self.weights.items())
        }


def golden_run(name: str, kind: str) -> Outcome:
    """Four rounds on digits, in process, with a fleet of five tiers."""
    method, settings = RUNS[name]
    run = fedtailor.train(
        network(kind, method), "digits", "uniform-5", get_method(method)(**settings),
        rounds=ROUNDS, clients_per_round=EVERYONE if method == "apfl" else 5, evaluate_every=2,
        seed=3, engine={"workers": 0},
        training={"lr": 0.05, "momentum": 0.9, "weight_decay": 1e-4, "batch_size": 16},
    )  # fmt: skip
    return Outcome(run.state.weights, tuple(plain_row(record) for record in run.history))


def plain_row(record: RoundRecord) -> dict[str, Any]:
    """The measured values of a round under fixed names, whatever the fields of a record are called today."""
    return {
        "round": record.round,
        "asked": record.cohort.asked,
        "merged": record.cohort.merged,
        "refused": record.cohort.refused,
        "abandoned": record.cohort.abandoned,
        "down": record.training.bytes_down,
        "up": record.training.bytes_up,
        "macs": record.training.macs,
        "loss": record.train_loss,
        "tiers": record.tiers,
        "best": record.best_round,
        "reported": record.reported,
        "stage": record.method.get("stage"),
    }


def machine_key() -> str:
    """What decides the last bits: PyTorch, vector instructions, and the libraries behind products, which ask who made
    the processor."""
    there = {"mkl": torch.backends.mkl.is_available(), "onednn": torch.backends.mkldnn.is_available()}
    libraries = [name for name, available in there.items() if available]
    capability = torch.backends.cpu.get_cpu_capability()
    version = torch.__version__.partition("+")[0]
    return f"torch {version}, {capability}, {'+'.join(libraries) or 'plain'}, {processor_maker()}"


def processor_maker() -> str:
    """As the processor names it (``GenuineIntel``, ``AuthenticAMD``); elsewhere the kind of machine."""
    known = Path("/proc/cpuinfo")
    lines = known.read_text(encoding="utf-8").splitlines() if known.exists() else []
    makers = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(makers, platform.machine())
