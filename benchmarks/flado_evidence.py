"""Run Flado's evidence piece by piece and write docs/evidence/10 as each run finishes.

    FEDTAILOR_DATA=... python benchmarks/flado_evidence.py [--list] [--seconds N] [piece ...]

Without names all pieces run, one after the other. Call it again after an interruption: finished runs are skipped, begun
ones go on from their last round. Each finished run leaves a small JSON of its course (accuracy, FLOPs and parameters at
every evaluation); ``tables.json`` joins them: cost to reach common targets, and to match each other's best accuracy.
``alignment.json`` says how well local steps followed the global update, and how far probabilities moved.
``--seconds`` stops before the first run that would start later than that.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

import records

from fedtailor.report.accounting import FLOPS_PER_MAC, Reached, best, course_of, target_table
from fedtailor.storage import generations
from fedtailor.storage.checkpoint import decode_checkpoint
from fedtailor.storage.run_folder import CHECKPOINTS, RunFolder

COMMAND = "python benchmarks/flado_evidence.py"
RUNS = records.runs_of("10")
EVIDENCE = records.EVIDENCE / "10"

FJORD = "fjord:distillation=false:mean_budget=true:widths=uniform-20"
METHODS = ("flado", "uniprob", "efd", FJORD, "heterofl")
EVERYONE = ("clients_per_round=100", "rounds=30", "evaluate_every=2")
SHORTER = 50  # rounds of variants: at a constant rate they compare with the first rounds of the default
SETTLED = 10  # rounds before alignment is looked at


@dataclass(frozen=True)
class Piece:
    """Some methods under the same settings."""

    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    overrides: tuple[str, ...] = ()


PIECES = {
    "tenth": Piece(METHODS, (1, 2)),
    "everyone": Piece(METHODS, (1,), EVERYONE),
    "estimators": Piece(("flado:estimator=score", "flado:estimator=surrogate"), (1,), (f"rounds={SHORTER}",)),
    "tried": Piece(
        (
            "flado:alignment_step=0.3:smallest_probability=0.1",
            "flado:estimator=surrogate:alignment_network=full:alignment_step=0.5:smallest_probability=0.1",
            "flado:inverted_scaling=false",
            "uniprob:inverted_scaling=false",
        ),
        (1,),
        (f"rounds={SHORTER}",),
    ),
}


def command(piece: str, method: str, seed: int) -> list[str]:
    """One run: ``compare`` of a single method with a single seed."""
    settings = (*PIECES[piece].overrides, f"seed={seed}", f"name={piece}-{slug(method)}-{seed}")
    return records.compare_line("flado-fashion-mnist-small", method, RUNS, settings)


def slug(method: str) -> str:
    """The method with its settings as a file name."""
    return "".join(letter if letter.isalnum() else "-" for letter in method.split(":distillation")[0])


def run(piece: str, method: str, seed: int) -> None:
    """Run, or go on with a run, and write its course."""
    name = f"{piece}-{slug(method)}-{seed}"
    target = EVIDENCE / f"{name}.json"
    if target.exists():
        print(f"{name}: done before", flush=True)
        return
    line = command(piece, method, seed)
    records.call(line)
    (folder,) = (path for path in (RUNS / name).iterdir() if path.is_dir() and not path.name.startswith("."))
    rounds = RunFolder(folder).records()
    course = course_of(rounds)
    result = {
        "command": records.shown(line),
        "piece": piece,
        "method": method,
        "seed": seed,
        "seconds": round(sum(each.seconds for each in rounds), 1),
        "best": best(course).figures(),
        "course": [reached.figures() for reached in course],
    }
    records.write(target, result)
    print(f"{name}: best {100 * result['best']['value']:.2f} %, {result['seconds']} s", flush=True)


def write_tables() -> None:
    """What finished runs say together, by piece and seed, and variants beside the first rounds of the default."""
    found: dict[str, dict[str, list[Reached]]] = defaultdict(dict)
    for file in sorted(EVIDENCE.glob("*-[0-9].json")):
        (result,) = records.read([file])
        piece, method, seed = result["piece"], result["method"], result["seed"]
        course = [
            Reached(each["round"], each["flops"] // FLOPS_PER_MAC, each["bytes"], each["value"])
            for each in result["course"]
        ]
        if PIECES[piece].methods == METHODS:
            found[f"{piece}, seed {seed}"][method] = course
        if piece != "everyone" and method.split(":")[0] in ("flado", "uniprob"):
            early = [reached for reached in course if reached.round <= SHORTER]
            found[f"variants, {SHORTER} rounds, seed {seed}"][method] = early
    if found:
        tables = {name: target_table(courses, (0.02, 0.05, 0.1)) for name, courses in found.items()}
        records.write(EVIDENCE / "tables.json", {"command": COMMAND, **tables})


def write_alignment() -> None:
    """How well local steps follow the last global update, and how far probabilities moved, in Flado's finished runs."""
    found: dict[str, dict[str, float]] = {}
    for folder in sorted(RUNS.glob("*flado*/flado*")):
        run = RunFolder(folder)
        if not run.finished:
            continue
        told = [each for record in run.records()[SETTLED:] for each in record.reported.values()]
        cosines = [each["cosine"] for each in told if "cosine" in each]
        end = decode_checkpoint(generations.newest(folder / CHECKPOINTS).generation.payload)
        kept = [end.memory_of(client)[1]["probabilities"] for client in end.memories]
        found[folder.parent.name] = {
            "mean_cosine": round(fmean(cosines), 4),
            "share_above_zero": round(fmean(cosine > 0 for cosine in cosines), 3),
            "mean_deviation_of_p_within_a_client": round(fmean(float(p.std(correction=0)) for p in kept), 4),
            "mean_smallest_p": round(fmean(float(p.min()) for p in kept), 4),
            "mean_largest_p": round(fmean(float(p.max()) for p in kept), 4),
        }
    if found:
        records.write(EVIDENCE / "alignment.json", {"command": COMMAND, **found})


def main() -> None:
    """Run the pieces that were named, or all."""
    options = records.arguments(__doc__, PIECES).parse_args()
    started = time.monotonic()
    for piece in options.pieces or PIECES:
        for seed in PIECES[piece].seeds:
            for method in PIECES[piece].methods:
                if options.list:
                    print(records.shown(command(piece, method, seed)))
                elif time.monotonic() - started < options.seconds:
                    run(piece, method, seed)
                    write_tables()
    if not options.list:
        write_alignment()


if __name__ == "__main__":
    main()
