"""What does a device gain from a narrower network? Latency of deployed files by width, and where multiples of 8 matter.

    python benchmarks/latency.py [--record] [--draw]

Four networks at four widths, in three formats: the files of ``fedtailor deploy``, run on one thread, one example at a
time, by PyTorch, ONNX Runtime and ExecuTorch (XNNPACK). Files take turns, so that a busy machine slows all of them, and
the median of the turns is reported; a turn is the quickest of a few calls. Then single layers around 64 channels: what
one channel more or less costs. ``--draw`` makes the figure of ``docs/deploy.md`` from ``results.json`` alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import results
import torch
from torch import nn

import fedtailor
from fedtailor.data import Examples, FederatedData, ImagePreparation
from fedtailor.deploying.formats import FORMATS, Program
from fedtailor.deploying.inputs import Inputs, answers_of
from fedtailor.deploying.network import Network, network_for
from fedtailor.models import build_model
from fedtailor.storage.files import replace_file

FORMS = ("pt2", "onnx", "pte")
WIDTHS = (0.25, 0.5, 0.75, 1)
PICTURE = (3, 32, 32)
NETWORKS: dict[str, dict[str, Any]] = {
    "cnn": {"channels": [32, 64, 128]},
    "resnet18": {},
    "mobilenetv2": {},
    "vit": {"embedding": 128, "hidden": 256, "depth": 4},
}
CHANNELS = (48, 52, 55, 56, 57, 60, 63, 64, 65, 68, 72)
CALLS = 3  # in a turn: the quickest counts
FIGURE = Path(__file__).parents[1] / "docs" / "figures" / "latency.svg"

Files = dict[tuple[str, Any], Program]  # by format and width


def main() -> int:
    """Measure, or draw what was measured."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--turns", type=int, default=40, help="turns of every file (default: 40)")
    parser.add_argument(
        "--files", type=Path, help="keep the files there, and take those that are there already"
    )
    parser.add_argument("--draw", action="store_true", help="draw docs/figures/latency.svg from results.json")
    results.add_option(parser)
    options = parser.parse_args()
    if options.draw:
        draw(json.loads(results.FILE.read_text(encoding="utf-8"))["latency"]["widths"]["figures"])
        return 0
    torch.set_num_threads(1)
    with TemporaryDirectory() as made:
        files = Path(made) if options.files is None else options.files
        results.report("widths", widths(options.turns, files), options)
        results.report("channels", channels(options.turns, files), options)
    return 0


def widths(turns: int, files: Path) -> dict[str, Any]:
    """Milliseconds of every network, format and width, with MACs beside them."""
    found: dict[str, Any] = {}
    for name, settings in NETWORKS.items():
        run = finished(build_model(name, input_shape=PICTURE, num_classes=10, **settings))
        networks = {width: network_for(run, str(width), fedtailor.Budget(width=width)) for width in WIDTHS}
        example = networks[1].example.rows(0, 1)
        times = timed(opened(networks, files / name), example, turns)
        found[name] = {
            "params": networks[1].cost.params,
            "macs": {str(width): network.cost.macs for width, network in networks.items()},
            "ms": {form: {str(width): times[form, width] for width in WIDTHS} for form in FORMS},
        }
    return found


def channels(turns: int, files: Path) -> dict[str, Any]:
    """Milliseconds of single kinds of layers, by their number of channels."""
    found: dict[str, Any] = {}
    for kind, (layers, shape) in KINDS.items():
        inputs = Inputs((torch.randn(shape),))
        networks = {count: plain(layers(count).eval(), inputs) for count in CHANNELS}
        times = timed(opened(networks, files / kind), inputs, turns)
        found[kind] = {form: {str(count): times[form, count] for count in CHANNELS} for form in FORMS}
    return found


def chain(layer: Callable[[int, int], nn.Module], sizes: Sequence[int]) -> nn.Sequential:
    """Layers of one kind behind each other."""
    return nn.Sequential(*(each for one, other in pairwise(sizes) for each in (layer(one, other), nn.ReLU())))


# Each by its number of channels, and the inputs that it is given; linear layers are wider, to have some work at all.
KINDS: dict[str, tuple[Callable[[int], nn.Module], tuple[int, ...]]] = {
    "four 3 x 3 convolutions": (
        lambda count: chain(partial(nn.Conv2d, kernel_size=3, padding=1), [16, *[count] * 4]),
        (1, 16, 16, 16),
    ),
    "eight 1 x 1 convolutions": (
        lambda count: chain(partial(nn.Conv2d, kernel_size=1), [16, *[count] * 8]),
        (1, 16, 16, 16),
    ),
    "four linear layers, 448 more": (lambda count: chain(nn.Linear, [16, *[448 + count] * 4]), (1, 16)),
}


def plain(module: nn.Module, inputs: Inputs) -> Network:
    """A module as ``deploy`` hands it to a format; these formats ask for its graph alone."""
    model: Any = None
    return Network("layers", (), model, module, inputs, answers_of(module, inputs))


def finished(module: nn.Module) -> fedtailor.Run:
    """A run of one round on noise: latency does not ask what was learnt."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (40, *PICTURE), dtype=torch.uint8, generator=generator)
    examples = Examples.of(
        pixels, torch.arange(40) % 10, preparation=ImagePreparation((0.5,) * 3, (0.3,) * 3)
    )
    data = FederatedData.from_examples(examples, examples, clients=4, num_classes=10)
    settings: dict[str, Any] = {"clients_per_round": 4, "engine": {"workers": 0}, "progress": False}
    method = {"name": "fjord", "widths": list(WIDTHS)}
    return fedtailor.train(module, data, "uniform-4", method, rounds=1, **settings)


def opened(networks: Mapping[Any, Network], folder: Path) -> Files:
    """Every network as a file of every format, ready to be called."""
    found: Files = {}
    folder.mkdir(parents=True, exist_ok=True)
    for name in FORMS:
        for key, network in networks.items():
            file = folder / f"{key}{FORMATS[name].suffix}"
            if not file.exists():
                replace_file(file, [FORMATS[name].pack(network, None)])
            found[name, key] = FORMATS[name].open(file)
    return found


def timed(files: Files, example: Inputs, turns: int) -> dict[tuple[str, Any], float]:
    """Milliseconds of each, the median of their turns."""
    times: dict[tuple[str, Any], list[float]] = {key: [] for key in files}
    for turn in range(turns + 1):
        for key, program in files.items():
            program(example)  # what the one before it left in the caches does not count
            calls = []
            for _ in range(CALLS):
                started = time.perf_counter()
                program(example)
                calls.append(time.perf_counter() - started)
            if turn:  # the first one warms up
                times[key].append(1000 * min(calls))
    return {key: round(median(each), 4) for key, each in times.items()}


def draw(figures: Mapping[str, Any]) -> None:
    """One panel for each network: latency of every format and MACs, as shares of the widest."""
    import vl_convert

    rows = []
    for name, found in figures.items():
        shares = {"MACs": found["macs"], **found["ms"]}
        for what, values in shares.items():
            rows += [
                {"network": name, "of": what, "width": float(width), "share": value / values["1"]}
                for width, value in values.items()
            ]
    axis = {"values": list(WIDTHS), "format": ".2~f"}
    dashes = {"domain": ["MACs", *FORMS], "range": [[4, 4], [1, 0], [1, 0], [1, 0]]}
    colours = {"domain": ["MACs", *FORMS], "range": ["#777777", "#4477aa", "#ee6677", "#228833"]}
    chart = {
        "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
        "data": {"values": rows},
        "facet": {"field": "network", "sort": list(figures), "title": None},
        "columns": 2,
        "background": "white",
        "spec": {
            "width": 260,
            "height": 180,
            "mark": {"type": "line", "point": True},
            "encoding": {
                "x": {"field": "width", "type": "quantitative", "title": "width", "axis": axis},
                "y": {
                    "field": "share",
                    "type": "quantitative",
                    "title": "share of the widest",
                    "scale": {"domain": [0, 1]},
                },
                "color": {"field": "of", "type": "nominal", "title": None, "scale": colours},
                "strokeDash": {"field": "of", "type": "nominal", "title": None, "scale": dashes},
            },
        },
    }
    FIGURE.write_text(vl_convert.vegalite_to_svg(json.dumps(chart)), encoding="utf-8")


if __name__ == "__main__":
    raise SystemExit(main())
