"""What a finished run says, for every paper: accuracy, costs, perplexity."""

from __future__ import annotations

import json
import math

from fedtailor.record import Tiers
from fedtailor.report.tables import totals
from fedtailor.report.targets import Records, last_evaluation
from fedtailor.storage.run_folder import ENVIRONMENT, RunFolder
from reproduce.shared.results import Result


def percent(share: float) -> float:
    """A share for people."""
    return round(100 * share, 3)


def accuracies(tiers: Tiers) -> dict[str, float]:
    """The accuracy of every tier in an evaluation."""
    return {tier: percent(values["accuracy"]) for tier, values in tiers.items()}


def costs(records: Records) -> Result:
    """What all rounds together cost; who was refused is named where anyone was."""
    total = totals(records)
    found = {
        "rounds": total["rounds"],
        "bytes": total["bytes_down"] + total["bytes_up"],
        "macs": total["macs"],
        "seconds": round(total["seconds"], 1),
    }
    return found | ({"refused": total["refused"]} if total["refused"] else {})


def ending(folder: RunFolder) -> Result:
    """The accuracy of every tier at the end of a run, and what it cost."""
    records = folder.records()
    return {"accuracy": accuracies(last_evaluation(records)), **costs(records)}


def perplexity(folder: RunFolder) -> Result:
    """Of every tier at every evaluation: language models are judged by how it falls."""
    course = {
        str(record.round): {
            tier: float(f"{math.exp(values['loss']):.5g}") for tier, values in record.tiers.items()
        }
        for record in folder.records()
        if record.tiers
    }
    return {"perplexity": course}


def versions(folder: RunFolder) -> str:
    """With what a run was made, as its folder says."""
    found = json.loads((folder.path / ENVIRONMENT).read_text(encoding="utf-8"))
    packages = found["packages"]
    return f"fedtailor {packages['fedtailor']}, torch {packages['torch']}, python {found['python']}"
