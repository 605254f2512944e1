"""``card.md``: a bundle in the form that model hubs read, a head of YAML and a page of Markdown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def card(manifest: Mapping[str, Any]) -> str:
    """The card of a bundle, from its manifest alone."""
    run, networks = manifest["run"], manifest["networks"]
    head = {
        "license": manifest["licence"] or "unknown",
        "library_name": "pytorch",
        "tags": ["federated-learning", "fedtailor", run["method"]],
        "datasets": [run["data"]],
        "metrics": manifest["metrics"],
    }
    lines = ["---", *(f"{key}: {json.dumps(value)}" for key, value in head.items()), "---", ""]
    lines += [f"# {run['name']}", ""]
    lines += [
        f"{run['model']}, trained for {run['rounds']} rounds with {run['method']} on {run['data']} by federated "
        "learning; one network for each kind of device. `manifest.json` has the same for programs.",
        "",
        "## Files",
        "",
    ]
    lines += _files(networks)
    lines += ["", "## Inputs and outputs", ""]
    lines += [f"- input `{each['name']}`: {_shape(each)}" for each in manifest["inputs"]]
    lines += [f"- output `{each['name']}`: {_shape(each)}" for each in manifest["outputs"]]
    if manifest["preparation"].get("preparation"):
        lines += [
            "- raw inputs go in: their normalisation is the first layer (of safetensors: in its metadata)"
        ]
    if manifest["labels"]:
        lines += [f"- labels, in the order of the outputs: {', '.join(manifest['labels'])}"]
    lines += _by_class(networks)
    lines += ["", "## Licence and data", ""]
    lines += [
        f"Licence: {manifest['licence'] or 'not stated'}.",
        "",
        manifest["notes"] or "No notes on the data.",
    ]
    return "\n".join(lines) + "\n"


def _files(networks: list[dict[str, Any]]) -> list[str]:
    metric = next((name for each in networks if each["score"] for name in each["score"]["metrics"]), None)
    head = ["network", "file", "bytes", "parameters", "MACs", "peak memory", metric or "score"]
    rows = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for each in networks:
        for file in each["files"]:
            measured = file.get("score") or each["score"]
            shown = f"{measured['metrics'][metric]:.4f}" if measured and metric else "not measured"
            numbers = (file["size"], each["params"], each["macs"], each["peak_memory"])
            cells = [each["name"], f"`{file['file']}`", *(f"{number:,}" for number in numbers), shown]
            rows.append(f"| {' | '.join(cells)} |")
    return rows


def _by_class(networks: list[dict[str, Any]]) -> list[str]:
    known = [each for each in networks if each["score"] and each["score"]["classes"]]
    if not known:
        return []
    classes = list(known[0]["score"]["classes"])
    rows = ["", "## Right answers by class", "", f"| class | {' | '.join(each['name'] for each in known)} |"]
    rows.append(f"|{'---|' * (len(known) + 1)}")
    for label in classes:
        shares = [each["score"]["classes"].get(label) for each in known]
        rows.append(f"| {label} | {' | '.join('' if s is None else f'{s:.3f}' for s in shares)} |")
    return rows


def _shape(each: Mapping[str, Any]) -> str:
    return f"{each['type']}, {' x '.join(map(str, each['shape']))}"
