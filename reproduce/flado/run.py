"""Flado at equal FLOPs: all of 20 clients in a round, mildly and strongly skewed, a tenth of 200, CIFAR-10.

    FEDTAILOR_DATA=... python -m reproduce.flado.run [--list] [experiment ...]

Without names all experiments run. Call it again after an interruption: what is in results.json or finished below
runs/flado is not repeated. Each run says what it had spent when it reached an accuracy with the network of the largest
budget; each run of Flado also how well local steps followed the global update, and how far probabilities moved.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import torch

from fedtailor.report.accounting import Reached, best, course_of, to_reach
from fedtailor.storage.run_folder import RunFolder
from fedtailor.storage.saved import read_end
from reproduce.shared.figures import accuracies, ending, percent
from reproduce.shared.papers import Experiment, Paper
from reproduce.shared.results import Result

FASHION = "reproduce/flado/fashion-mnist-small.toml"
CIFAR10 = "reproduce/flado/cifar10-small.toml"
FJORD = "fjord:distillation=false:mean_budget=true:widths=uniform-20"
METHODS = ("flado", "uniprob", "efd", FJORD, "heterofl")
SKEWED = ("data.alpha=0.05", "data.min_examples=5")
TENTH = ("data.clients=200", "data.limit=20000", "clients_per_round=20")
SETTLED = 10  # rounds before alignment is looked at
TARGETS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8)
LAST = 5  # evaluations that are averaged: single ones vary by several points


def spent(folder: RunFolder) -> Result:
    """Best accuracy, the mean over the last evaluations, and the cost of common targets, in FLOPs and parameters."""
    records = folder.records()
    course = course_of(records)
    late = [accuracies(record.tiers) for record in records if record.tiers][-LAST:]
    reached = {f"{100 * target:g}": to_reach(course, target) for target in TARGETS}
    found: Result = {
        "last_five": {tier: round(fmean(each[tier] for each in late), 2) for tier in late[0]},
        "best": _point(best(course)),
        "to_reach": {target: _point(point) if point else None for target, point in reached.items()},
        "course": [percent(point.value) for point in course],
    }
    return found


def _point(point: Reached) -> Result:
    parameters = round(point.parameters)
    return {
        "round": point.round, "accuracy": percent(point.value), "flops": point.flops, "parameters": parameters,
    }  # fmt: skip


def alignment(folder: RunFolder) -> Result:
    """How well local steps follow the last global update, and how far probabilities moved; nothing for others."""
    told = [each for record in folder.records()[SETTLED:] for each in record.reported.values()]
    cosines = [each["cosine"] for each in told if "cosine" in each]
    if not cosines:
        return {}
    end, _ = read_end(folder.path, torch.device("cpu"))
    kept = [end.memory_of(client)[1]["probabilities"] for client in end.memories]
    return {
        "alignment": {
            "mean_cosine": round(fmean(cosines), 4),
            "share_above_zero": round(fmean(cosine > 0 for cosine in cosines), 3),
            "mean_deviation_of_p_within_a_client": round(fmean(float(p.std(correction=0)) for p in kept), 4),
            "mean_smallest_p": round(fmean(float(p.min()) for p in kept), 4),
            "mean_largest_p": round(fmean(float(p.max()) for p in kept), 4),
        }
    }


READ = (ending, spent, alignment)
EXPERIMENTS = (
    Experiment("everyone", FASHION, METHODS, 3, figures=READ),
    Experiment("everyone-skewed", FASHION, METHODS, 3, SKEWED, READ),
    Experiment("tenth", FASHION, METHODS, 3, TENTH, READ),
    Experiment("cifar10", CIFAR10, METHODS, 3, figures=READ),
)

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
