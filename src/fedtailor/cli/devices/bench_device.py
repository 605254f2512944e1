"""``fedtailor bench-device``: what this device can do with a network, measured, and as the file that a client reads."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedtailor.charts.terminal import Titled, plain_table
from fedtailor.cli.grouping import grouped
from fedtailor.cli.output import JsonOption, console, load_torch, messages, print_json
from fedtailor.cli.profile import Network, traced_network
from fedtailor.errors import require

if TYPE_CHECKING:
    import torch

    from fedtailor.elasticity.costing.memory import Workload
    from fedtailor.elasticity.model import ElasticModel
    from fedtailor.fleet.bench import Bench


@dataclass(frozen=True)
class Says:
    """What goes into the file beside what is measured."""

    name: Annotated[str | None, typer.Option(help="How the device is called in the run.")] = None
    dataset: Annotated[
        str | None, typer.Option(help="Where its examples lie: what data.dataset of a run may be.")
    ] = None
    step_time: Annotated[str | None, typer.Option(help="How long a training step may take, e.g. 50ms.")] = (
        None
    )
    memory_share: Annotated[float, typer.Option(help="How much of the free memory training may take.")] = 0.5
    bandwidth: Annotated[str | None, typer.Option(help="Bytes in a second, each way, e.g. 2MB.")] = None
    transfer_time: Annotated[
        str | None, typer.Option(help="How long a round may send to this device and back, e.g. 30s.")
    ] = None

    @property
    def given(self) -> dict[str, Any]:
        """The keys that were given."""
        require(0 < self.memory_share <= 1, "--memory-share", self.memory_share, "above 0 and at most 1")
        named = ("name", "dataset", "step_time", "bandwidth", "transfer_time")
        return {key: getattr(self, key) for key in named if getattr(self, key) is not None}

    def limits(self, free: int | None) -> dict[str, Any]:
        """The keys that were given, and a share of the memory that is free."""
        share = None if free is None else int(free * self.memory_share) // 10**6
        return {**self.given, **({"memory": f"{share}MB"} if share else {})}


@grouped
def bench_device(
    network: Network,
    says: Says,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Examples in a step; of a run's file, its own.")
    ] = 32,
    threads: Annotated[int, typer.Option(min=1, help="PyTorch threads; of a run's file, its own.")] = 1,
    write: Annotated[
        Path | None,
        typer.Option(help="Write the device's file; what is there already and is not measured stays."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Train a few steps of a network at several widths, and say what this device can do."""
    load_torch()
    from fedtailor.fleet.bench import bench
    from fedtailor.flower.device_file import MEASURED, NO_TIME, curve_from, read_device, settled, write_device
    from fedtailor.run.setup import torch_threads
    from fedtailor.steps import heard_by

    known = read_device(write) if write is not None and write.exists() else {}
    known.pop(MEASURED, None)
    settled({**known, **says.given}, NO_TIME)  # what cannot be is refused before anything is measured
    model, workload, device, threads = _subject(network, says.dataset, batch_size, threads)
    with messages.status("measuring") as status, heard_by(status.update), torch_threads(threads):
        found = bench(model, workload, device, threads)
    limits, measured = says.limits(found.free), _measured(found, device, threads)
    table = {**known, **limits, MEASURED: measured}
    limit = settled({**known, **limits}, curve_from(measured))
    if write is not None:
        write_device(write, table)
    if as_json:
        print_json({"points": _points(found), "free_memory": found.free, "limits": limit, **table})
        return
    _show(network.model, found, limit, device, threads)
    if write is not None:
        console.print(
            f"Written to {write}: fedtailor flower-node ... --device {write}",
            markup=False,
            soft_wrap=True,
        )


def _subject(
    network: Network, dataset: str | None, batch_size: int, threads: int
) -> tuple[ElasticModel, Workload, torch.device, int]:
    """Which network in which training step; that of a run's file is built for the examples of this device."""
    from dataclasses import replace

    from fedtailor.config import load_config
    from fedtailor.elasticity.costing.memory import Workload
    from fedtailor.run.setup import pick_device, read_data, trace_model

    if not network.is_run:
        return traced_network(network), Workload(batch_size), pick_device("cpu"), threads
    config = load_config(network.model)
    own = replace(
        config.data, dataset=dataset or config.data.dataset, clients=1, partition="iid", validation=0.0
    )
    config = replace(config, data=own, clients_per_round=1)
    objective, device = config.objective.build(), pick_device(config.device)
    data = read_data(config, objective.task).to(device)
    return trace_model(config, data, objective), config.built_method.workload, device, config.threads


def _measured(found: Bench, device: torch.device, threads: int) -> dict[str, Any]:
    import platform
    from datetime import UTC, datetime

    import torch

    curve = found.curve
    return {
        "overhead": float(f"{curve.overhead:.4g}"), "macs_per_second": float(f"{curve.rate:.4g}"),
        "batch_size": curve.batch_size, "steps": [list(step) for step in curve.steps], "threads": threads,
        "device": device.type, "machine": platform.machine(),
        "torch": torch.__version__, "when": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip


def _points(found: Bench) -> list[dict[str, Any]]:
    return [
        {"width": float(each.width), "macs": each.macs, "step_seconds": each.seconds, "memory": each.memory}
        for each in found.points
    ]


def _show(model: str, found: Bench, limits: dict[str, Any], device: torch.device, threads: int) -> None:
    from fedtailor.elasticity.costing.budget import amount

    table, curve = plain_table(), found.curve
    for column in ("width", "MACs", "step", "by the curve", "memory*"):
        table.add_column(column, justify="right", no_wrap=True)
    for point in found.points:
        steps = (point.seconds, curve.seconds(point.macs))
        times = [amount("step_time", seconds * 1e9) for seconds in steps]
        table.add_row(
            f"{float(point.width):g}", amount("macs", point.macs), *times, amount("memory", point.memory)
        )
    where = f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
    note = f"* estimated for training on batches of {curve.batch_size}"
    console.print(Titled(f"{model} on this device ({where})", table, note))
    off = found.deviation
    told = f"; drawn without one of them, the curve is off there by {100 * off:.0f} % at most" if off else ""
    console.print(
        f"{amount('macs', curve.rate)}MAC/s in training, and {amount('step_time', curve.overhead * 1e9)} for each "
        f"step{told}.",
        markup=False,
    )
    free = "unknown" if found.free is None else amount("memory", found.free)
    console.print(f"Free memory: {free}.", markup=False)
    if found.too_large:
        console.print(
            f"Not run, for want of memory: width {', '.join(f'{float(each):g}' for each in found.too_large)}.",
            markup=False,
        )
    shown = {name: limits[name] for name in ("macs", "memory", "bytes", "params", "tier") if name in limits}
    if shown:
        told = ", ".join(f"{name} = {value}" for name, value in shown.items())
        console.print(f"Limits of this device: {told}", markup=False)
