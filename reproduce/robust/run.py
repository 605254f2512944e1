"""What one or two bad clients of eleven do to every method with the shared merge, and what each rule of [merge] saves.

    FEDTAILOR_DATA=... python -m reproduce.robust.run [--list] [--tables] [--summary] [--seconds N] [method ...]

Each cell of the table is one run: a method, an attack, a rule. Call it again after an interruption: what is in
results.json is not repeated. HetLoRA needs the extra: pip install 'fedtailor[adapters]'.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedtailor.attacks.attack import Attack
from fedtailor.attacks.trial import absent, outcome
from fedtailor.config import RunConfig, load_config
from fedtailor.merging.robust.settings import RULES
from fedtailor.storage.files import replace_file

ROOT = Path(__file__).parents[2]
CONFIG = "reproduce/robust/fashion-mnist-bad-clients.toml"
# Every method that merges by the shared rule; FedCS is the first half of APFL, and FlexLoRA merges products of its own.
BLOCKS = "model={name = 'reproduce/robust/blocks.py:ResidualMLP', exits = 2}"
DENSITIES = "{name = 'narrow', density = 0.5, share = 1}, {name = 'wide', density = 1, share = 1}"
DEPTHS = "{name = 'narrow', depth = 0.5, share = 1}, {name = 'wide', depth = 1, share = 1}"
ADAPTED = (
    "{name = 'adapted', backbone = 'mlp', options = {hidden = [64, 64]}, targets = ['1', '3'], train = ['5']}"
)
METHODS = {
    "heterofl": ["method.name=heterofl"],
    "fedavg": ["method={name = 'fedavg', width = 1}"],
    "fedrolex": ["method.name=fedrolex"],
    "fjord": ["method.name=fjord"],
    "federated-dropout": ["method.name=federated-dropout"],
    "splitmix": ["method.name=splitmix"],
    "tailor": ["method.name=tailor"],
    "flanc": ["method.name=flanc"],
    "fiarse": ["method.name=fiarse"],
    "ofa-fl": [
        "method={name = 'ofa-fl', ratios = [1, 0.5], trigger = 'schedule', first = 3, every = 2}",
        f"fleet={{tiers = [{DENSITIES}]}}",
    ],
    "feduniform": ["method.name=feduniform"],
    "fedpa": ["method.name=fedpa"],
    "apfl": ["method={name = 'apfl', warmup = 3, inherit = true}", "rounds=10", "evaluate_every=10"],
    "depthfl": ["method={name = 'depthfl', ramp = 0}", BLOCKS, f"fleet={{tiers = [{DEPTHS}]}}"],
    "scalefl": ["method={name = 'scalefl', level_widths = [0.5, 1]}", BLOCKS],
    "nefl": ["method={name = 'nefl', level_widths = [0.5, 1], level_depths = [0.5, 1]}", BLOCKS],
    "efd": ["method.name=efd"],
    "uniprob": ["method.name=uniprob"],
    "flado": ["method.name=flado"],
    "hetlora": ["method={name = 'hetlora', zero_padding = false}", f"model={ADAPTED}"],
}
ATTACKS = {
    "scale x100": Attack("scale", 0.1, 100),
    "sign-flip x5": Attack("sign-flip", 0.1, 5),
    "noise x10": Attack("noise", 0.1, 10),
    "nan": Attack("nan", 0.1),
    "label-flip": Attack("label-flip", 0.1),
    "backdoor x5": Attack("backdoor", 0.1, 5),
    "top tier, sign-flip x5": Attack("sign-flip", 0.1, 5, tier="wide"),
    "two, sign-flip x5": Attack("sign-flip", 0.2, 5),
}
# Krum compares clients that hold the same.
REFUSED = {(method, "krum") for method in ("federated-dropout",)}
FILE = Path(__file__).parent / "results.json"


@dataclass(frozen=True)
class Cell:
    """One run."""

    method: str
    attack: str  # of ATTACKS; "none": all honest; "without ...": the bad clients never answer
    rule: str

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.method} | {self.attack} | {self.rule}"

    @property
    def config(self) -> RunConfig:
        """What is run."""
        return load_config(ROOT / CONFIG, [*METHODS[self.method], f"merge.rule={self.rule}"])

    @property
    def meant(self) -> Attack | None:
        """What bad clients do."""
        if self.attack.startswith("without "):
            return absent(ATTACKS[self.attack.removeprefix("without ")])
        return ATTACKS.get(self.attack)


def cells(methods: list[str]) -> Iterator[Cell]:
    """All runs, method by method: first what the others are measured against, then attack by attack."""
    for method in methods:
        # The same clients are bad in all attacks of a share and a tier.
        for without in ("nan", "top tier, sign-flip x5", "two, sign-flip x5"):
            yield Cell(method, f"without {without}", "mean")
        rules = [rule for rule in RULES if (method, rule) not in REFUSED]
        yield from (Cell(method, attack, rule) for attack in ("none", *ATTACKS) for rule in rules)


def run(chosen: list[str], seconds: float) -> None:
    """Run what is not there yet."""
    started, found = time.monotonic(), read()
    for cell in cells(chosen):
        if cell.key in found or time.monotonic() - started > seconds:
            continue
        begun = time.process_time()
        figures = outcome(cell.config, cell.meant).as_row()
        found[cell.key] = {**figures, "seconds": round(time.process_time() - begun, 1)}
        replace_file(FILE, [(json.dumps(found, indent=1) + "\n").encode()])
        print(f"{cell.key}: {100 * figures['mean']:.1f}, {found[cell.key]['seconds']} s", flush=True)


def read() -> dict[str, Any]:
    """What was run before."""
    return dict(json.loads(FILE.read_text(encoding="utf-8"))) if FILE.is_file() else {}


def reference(attack: str) -> str:
    """The run without the bad clients of an attack."""
    known = ("top tier, sign-flip x5", "two, sign-flip x5")
    return f"without {attack if attack in known else 'nan'}"


def tables(chosen: list[str]) -> Iterator[str]:
    """Accuracy by rule, as the page shows it; in brackets how often a backdoor works."""
    found = read()
    for method in chosen:
        yield from (f"### {method}", "", f"| bad clients | without them | {' | '.join(RULES)} |")
        yield "|---|" + "---:|" * (len(RULES) + 1)
        for attack in ("none", *ATTACKS):
            shown = [_shown(found.get(Cell(method, attack, rule).key)) for rule in RULES]
            without = (
                "" if attack == "none" else _shown(found.get(Cell(method, reference(attack), "mean").key))
            )
            if any(shown):
                yield f"| {attack} | {without} | {' | '.join(shown)} |"
        yield ""


def summary(chosen: list[str]) -> Iterator[str]:
    """The two tables of docs/trust.md: the most that one bad client costs, and what honesty and two of them cost."""
    found = read()
    head = " | ".join(RULES)
    yield from (f"| | {head} |", "|---|" + "---:|" * len(RULES))
    for method in chosen:
        cells = [_most_lost(found, method, rule) for rule in RULES]
        yield f"| `{method}` | {' | '.join(cells)} |"
    yield from (
        "",
        f"| | honest: {head} | without the two | {head} |",
        "|---|" + "---:|" * (2 * len(RULES) + 1),
    )
    two = "two, sign-flip x5"
    for method in chosen:
        honest = found[Cell(method, "none", "mean").key]["mean"]
        costs = [_cost(found.get(Cell(method, "none", rule).key), honest) for rule in RULES[1:]]
        left = [_left(found.get(Cell(method, two, rule).key)) for rule in RULES]
        without = found[Cell(method, f"without {two}", "mean").key]["mean"]
        yield f"| `{method}` | {100 * honest:.1f} | {' | '.join(costs)} | {100 * without:.1f} | {' | '.join(left)} |"


def _most_lost(found: dict[str, Any], method: str, rule: str) -> str:
    """Points below the run without the bad client, over all attacks by one; a run that stopped has lost everything."""
    lost = []
    for attack in ATTACKS:
        figures = found.get(Cell(method, attack, rule).key)
        if figures is not None and not attack.startswith("two"):
            lost.append(found[Cell(method, reference(attack), "mean").key]["mean"] - figures["mean"])
    return (f"{100 * max(lost):.1f}" if max(lost) > 0 else "none") if lost else "refused"


def _cost(figures: dict[str, Any] | None, honest: float) -> str:
    return "refused" if figures is None else f"{100 * (figures['mean'] - honest):+.1f}"


def _left(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return "refused"
    return "diverged" if figures["stopped"] else f"{100 * figures['mean']:.1f}"


def _shown(figures: dict[str, Any] | None) -> str:
    if figures is None:
        return ""
    backdoor = figures["backdoor"]
    works = f" ({100 * sum(backdoor.values()) / len(backdoor):.0f})" if backdoor else ""
    return f"{100 * figures['mean']:.1f}{works}"


def commands(chosen: list[str]) -> Iterator[str]:
    """The calls of ``fedtailor attack`` that make the same runs."""
    for method in chosen:
        for attack in ATTACKS.values():
            asked = ["--kind", attack.kind, "--share", str(attack.share)]
            asked += ["--factor", str(attack.factor)] if attack.factor is not None else []
            asked += ["--tier", attack.tier] if attack.tier else []
            sets = [part for setting in METHODS[method] for part in ("--set", setting)]
            yield shlex.join(["fedtailor", "attack", CONFIG, *asked, *sets])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m reproduce.robust.run", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(
        "methods", nargs="*", choices=[*METHODS, []], metavar="method", help=", ".join(METHODS)
    )
    parser.add_argument("--list", action="store_true", help="show the commands and stop")
    parser.add_argument("--tables", action="store_true", help="show what came out as tables, and stop")
    parser.add_argument("--summary", action="store_true", help="show the tables of docs/trust.md, and stop")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no run later than that")
    options = parser.parse_args()
    chosen = options.methods or list(METHODS)
    shown = commands if options.list else tables if options.tables else summary if options.summary else None
    if shown is not None:
        print("\n".join(shown(chosen)))
    else:
        run(chosen, options.seconds)


if __name__ == "__main__":
    main()
