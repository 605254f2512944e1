"""A call of ``train`` in words (``call.json``): what ``Run.load`` builds the run from again."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedtailor.config import build_method, validated
from fedtailor.data.batches import Batch, Examples
from fedtailor.data.federated import FederatedData
from fedtailor.data.transforms import preparation_from
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.errors import FedtailorError
from fedtailor.fleet import Fleet, Tier
from fedtailor.importing import import_path_of
from fedtailor.method import Method, own_settings
from fedtailor.methods.registry import name_of
from fedtailor.objective import OWN, Objective
from fedtailor.seeds import Seeds
from fedtailor.server.setup import RoundSettings, Setup

Words = dict[str, Any]


def called(setup: Setup, module: Any, data: Any, learnt: Words) -> Words:
    """What ``train`` was given; None for what only an object can say."""
    method = setup.method
    settings = {name: getattr(method, name) for name in own_settings(method)}
    return {
        "module": _module_words(module),
        "data": _data_words(data),
        "method": {"name": name_of(type(method)), **_plain(settings)},
        "training": _plain(dataclasses.asdict(method.local)),
        "server": _plain(dataclasses.asdict(method.server)),
        "merge": _plain(dataclasses.asdict(method.merging)),
        "fleet": _fleet_words(setup.fleet),
        "settings": _plain(dataclasses.asdict(setup.settings)),
        "seed": setup.seeds.root,
        **learnt,
        "examples": _examples_words(setup.data),
    }


def method_of(words: Words) -> Method:
    """The method of a call, as its fleet had settled it."""
    if words["method"]["name"] is None:
        raise FedtailorError("the class of its method cannot be imported: pass it, Run.load(..., method=...)")
    rounds = words["settings"]["rounds"]
    return build_method(words["method"], words["training"], rounds, words.get("server"), words.get("merge"))


def fleet_of(words: Words) -> Fleet:
    """The fleet of a call."""
    fleet = words["fleet"]
    between = fleet["macs_range"] and tuple(map(Fraction, fleet["macs_range"]))
    return Fleet(
        tuple(map(_tier, fleet["tiers"])),
        fleet["dynamic"],
        between,
        fleet["only_top"],
        fleet["too_small"],
        tuple(map(_tier, fleet["whole"])),
        fleet["least_macs"] and Fraction(fleet["least_macs"]),
    )


def rounds_of(words: Words) -> RoundSettings:
    """The settings of the rounds of a call."""
    return validated(RoundSettings, words["settings"], "")


def objective_of(words: Words) -> Objective:
    """What was learnt; of a loss or metrics of one's own nothing is known, and nothing needs them any more."""
    learnt = words["objective"]
    task = learnt["task"] if learnt["task"] != OWN.name else None
    return Objective.of(task, learnt["loss"], learnt["metrics"])


def stand_in(words: Words) -> FederatedData:
    """Two made-up examples like those of a call, for tracing its model where the data is not at hand."""
    like = words["examples"]
    generator = Seeds(0).torch("stand-in")

    def column(described: Mapping[str, Any]) -> Tensor:
        kind = getattr(torch, described["type"])
        shape = (2, *described["shape"])
        if kind.is_floating_point:
            return torch.randn(shape, generator=generator).to(kind)
        if kind is torch.uint8 and len(shape) > 2:  # pixels
            return torch.randint(0, 256, shape, generator=generator).to(kind)
        return torch.zeros(shape, dtype=kind)

    made = {name: column(each) for name, each in like["columns"].items()}
    columns = made if like["named"] else tuple(made.values())
    examples = Examples(columns, preparation=preparation_from(like.get("preparation")))
    return FederatedData.from_examples(
        examples, examples, parts=[[0, 1]], num_classes=like["classes"] or None, dataset=like["name"]
    )


def _module_words(module: Any) -> str | None:
    if isinstance(module, str):
        return module
    path = import_path_of(type(module) if isinstance(module, nn.Module) else module)
    return (
        None if path is None or path.startswith("torch.") else path
    )  # a Sequential says nothing of its layers


def _data_words(data: Any) -> Words | None:
    table = dict(data) if isinstance(data, Mapping) and "dataset" in data else {"dataset": data}
    return {**table, "dataset": str(table["dataset"])} if isinstance(table["dataset"], str | Path) else None


def _examples_words(data: FederatedData) -> Words:
    known = data.preparation
    batch: Batch = data.example() if known is None else data.train.prepared_by(None).take(torch.arange(1))
    named = isinstance(batch, dict)
    columns = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return {
        "name": data.name,
        "classes": data.num_classes,
        "prepared": data.train.preparation is not None,
        "preparation": None if known is None else known.as_data(),  # of the columns below, which are raw then
        "named": named,
        "columns": {
            str(name): {"type": str(value.dtype).removeprefix("torch."), "shape": list(value.shape[1:])}
            for name, value in columns
        },
    }


def _fleet_words(fleet: Fleet) -> Words:
    def tiers(listed: tuple[Tier, ...]) -> list[Words]:
        return [
            {"name": tier.name, "share": str(tier.share), "budget": _plain(dict(tier.budget.limits))}
            for tier in listed
        ]

    return {
        "tiers": tiers(fleet.tiers),
        "dynamic": fleet.dynamic,
        "macs_range": fleet.macs_range and [str(bound) for bound in fleet.macs_range],
        "only_top": fleet.only_top,
        "too_small": fleet.too_small,
        "whole": tiers(fleet.whole),
        "least_macs": fleet.least_macs and str(fleet.least_macs),
    }


def _tier(words: Words) -> Tier:
    return Tier(words["name"], Budget(**words["budget"]), Fraction(words["share"]))


def _plain(value: Any) -> Any:
    """A value as JSON; what JSON does not know becomes its text, what is None is left out."""
    if isinstance(value, Mapping):
        return {key: _plain(each) for key, each in value.items() if each is not None}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    known = isinstance(value, str | int | bool) or (isinstance(value, float) and math.isfinite(value))
    return value if known else str(value)
