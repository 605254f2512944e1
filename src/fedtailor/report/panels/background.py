"""What stands behind the scores: which weights were trained, who holds which data, what was run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from fedtailor.charts.coverage import coverage, map_cells, never_trained
from fedtailor.charts.grouping import Runs, by_setting, round_to, setting_filter
from fedtailor.charts.panel import Chart, Panel, Row, axis, heat, lying_bars
from fedtailor.errors import counted
from fedtailor.report.likeness import flat


def covered(runs: Runs) -> Panel:
    """Which weights were trained by how many clients."""
    shares: list[Row] = []
    cells: list[Row] = []
    for setting, methods in by_setting(runs).items():
        for variant, each in methods.items():
            counts = coverage(each[0])  # one seed: the map is about the method, not about chance
            at = {"method": variant, **({"setting": setting} if setting else {}), "seed": each[0].seed}
            shares += [
                {**at, "layer": name, "never": round_to(s)} for name, s in never_trained(counts).items()
            ]
            cells += [{**at, **cell} for cell in map_cells(counts)]
    if not cells:
        return Panel("coverage", "Which weights were trained")
    seed = _of_one_seed(runs, cells)
    clients = axis("clients", "clients")
    inputs = axis("inputs", "inputs", "ordinal", sort={"field": "input"})
    outputs = axis("outputs", "outputs", "ordinal", sort={"field": "output"})
    charts = [
        Chart(
            "coverage", "Coverage map",
            f"How many clients, over all rounds, trained the weights in each cell (mean of the cell).{seed}",
            cells, {"map": heat(inputs, outputs, clients)}, ("method", "layer", *setting_filter(runs)),
        )
    ]  # fmt: skip
    text = "Every weight of every layer was trained at least once, by every method."
    whole = {share["method"] for share in shares} - {share["method"] for share in shares if share["never"]}
    shares = [share for share in shares if share["method"] not in whole]
    if shares:
        some = ", ".join(dict.fromkeys(share["method"] for share in shares))
        text = f"Some weights were never trained by {some}: they keep their starting values."
        text += f" Every weight was trained at least once by {', '.join(sorted(whole))}." if whole else ""
        layer = axis("layer", "layer", "nominal", sort=None)
        bars = max(Counter(share.get("setting") for share in shares).values())
        never = lying_bars(axis("never", "never trained (%)", scale={"domain": [0, 100]}), layer, bars)
        told = f"Per layer, the share of its (output, input) pairs that no client of any round held.{seed}"
        title = "Weights that nobody ever trained"
        charts.insert(0, Chart("never-trained", title, told, shares, {"share": never}, setting_filter(runs)))
    return Panel("coverage", "Which weights were trained", text, charts)


def _of_one_seed(runs: Runs, cells: Sequence[Row]) -> str:
    """Which seed a map is of, where there are several; the first that a method has."""
    if len({run.seed for run in runs}) == 1:
        return ""
    shown = {cell["seed"] for cell in cells}
    return (
        f" Shown is seed {shown.pop()} alone."
        if len(shown) == 1
        else " Shown is one seed of each method alone."
    )


def data(runs: Runs) -> Panel:
    """Who holds which classes."""
    rows: list[Row] = []
    words: list[str] = []
    for setting, methods in by_setting(runs).items():
        found = next(iter(methods.values()))[0].setup.get("data", {})
        if {"skew", "clients", "train_examples"} <= found.keys():
            words.append(
                f"{setting + ': ' if setting else ''}{counted(found['clients'], 'client')}, "
                f"{counted(found['train_examples'], 'training example')}, label skew {found['skew']:.2f} (0: all "
                "alike, 1: nothing shared)."
            )
        for client in found.get("rows", ()):
            for label, count in enumerate(client.get("label_counts", ())):
                at: Row = {"setting": setting} if setting else {}
                rows.append({**at, "client": client["client"], "class": label, "examples": count})
    if not rows:
        hint = "Single clients are told where report.client_details = true asks for it."
        return Panel("data", "Who holds which data", "\n".join([*words, hint]) if words else "")
    value = axis("examples", "examples")
    spec = heat(axis("client", "client", "ordinal"), axis("class", "class", "ordinal"), value)
    text = "Examples of each class that each client trains on, in the first seed; all methods share it."
    chart = Chart(
        "data", "Examples per client and class", text, rows, {"classes": spec}, setting_filter(runs)
    )
    return Panel("data", "Who holds which data", "\n".join(words), [chart])


def provenance(runs: Runs) -> Panel:
    """What was run, where, with which versions."""
    rows: list[Row] = []
    machines: dict[str, Row] = {}
    for run in runs:
        rows.append(
            {
                "method": run.variant, **({"setting": run.setting} if run.setting else {}), "seed": run.seed,
                "state": run.state, "rounds": run.records[-1].round, "folder": run.folder,
            }
        )  # fmt: skip
        rows += [{**rows[-1], "state": "left out: same seed", "rounds": "", "folder": f} for f in run.repeats]
        flat = {key: value for key, value in run.environment.items() if not isinstance(value, Mapping)}
        flat |= {f"{name}": v for name, v in dict(run.environment.get("packages", {})).items()}
        machines[str(sorted(flat.items()))] = {key: str(value) for key, value in flat.items()}
    environment = [
        {"what": key, "value": value} for machine in machines.values() for key, value in machine.items()
    ]
    shared, own = _settings(runs)
    tables = [("Runs", rows), ("Settings that all runs share", shared)]
    tables += [("Settings in which runs differ", own)] if own else []
    return Panel("provenance", "What was run", tables=[*tables, ("Versions and machine", environment)])


def _settings(runs: Runs) -> tuple[list[Row], list[Row]]:
    each = [flat(run.config) for run in runs]
    keys = [
        key
        for key in dict.fromkeys(key for settings in each for key in settings)
        if key not in ("name", "seed")
    ]
    shared = [key for key in keys if len({settings.get(key) for settings in each}) == 1]
    first = {run.variant: settings for run, settings in reversed(list(zip(runs, each, strict=True)))}
    own: list[Row] = [
        {"setting": key, **{variant: first[variant].get(key, "") for variant in reversed(first)}}
        for key in keys
        if key not in shared
    ]
    return [{"setting": key, "value": each[0][key]} for key in shared], own
