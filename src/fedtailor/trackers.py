"""Where metrics go beside ``metrics.jsonl``, which is always written: TensorBoard, Weights & Biases, MLflow.

A tracker is a context that is called with every record. Nothing here is imported until it is asked for, and nothing is
sent anywhere unless it is.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from fedtailor.errors import FedtailorError, unknown
from fedtailor.record import RoundRecord

LEFT_OUT = ("round", "reported", "by_tier", "tiers")  # keys of a row; tiers are told under another name

Log = Callable[[Mapping[str, float], int], None]  # values by name, and the round
OnRound = Callable[[RoundRecord], None]
Open = Callable[[Path, Mapping[str, Any]], AbstractContextManager[Log]]  # the run's folder and settings


def flat(record: RoundRecord) -> dict[str, float]:
    """The numbers of a record under flat names: those of its row, and below it ``tier/0.5/accuracy``, ``method/rank``.

    Left out are ``reported``, because an entry for each client would be a curve with gaps for each, what a method notes
    in tables and lists, what each tier spent and coverage: all of it stands in the run's folder.

    >>> values = flat(RoundRecord(2, tiers={"0.5": {"accuracy": 0.9}}, method={"stage": "search", "rank": 3}))
    >>> "round" in values, values["measuring/macs"], values["tier/0.5/accuracy"], values["method/rank"]
    (False, 0, 0.9, 3)
    """
    row = {**record.as_row(), "seconds": record.seconds}
    noted = {name: value for name, value in row.get("method", {}).items() if not isinstance(value, Mapping)}
    kept = {name: value for name, value in row.items() if name not in LEFT_OUT}
    return dict(_numbers({**kept, "method": noted, "tier": record.tiers or {}}))


def _numbers(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{above}{name}/")
        elif isinstance(value, int | float):
            yield f"{above}{name}", value


@contextmanager
def _tensorboard(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    writer = _import("tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def log(values: Mapping[str, float], round: int) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, round)

    try:
        writer.add_text("settings", "\n".join(f"    {key} = {value}" for key, value in settings.items()))
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    wandb = _import("wandb")
    run = wandb.init(project="fedtailor", name=folder.name, dir=str(folder), config=dict(settings))

    def log(values: Mapping[str, float], round: int) -> None:
        run.log(dict(values), step=round)

    try:
        yield log
    finally:
        run.finish()


@contextmanager
def _mlflow(folder: Path, settings: Mapping[str, Any]) -> Iterator[Log]:
    mlflow = _import("mlflow")
    with mlflow.start_run(run_name=folder.name):
        mlflow.log_params({key: str(value)[:500] for key, value in settings.items()})

        def log(values: Mapping[str, float], round: int) -> None:
            mlflow.log_metrics(dict(values), step=round)

        yield log


TRACKERS: dict[str, Open] = {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow}
MODULES = {"tensorboard": "torch.utils.tensorboard", "wandb": "wandb", "mlflow": "mlflow"}


@contextmanager
def tracking(
    names: Sequence[str], folder: Path, settings: Mapping[str, Any], on_round: OnRound
) -> Iterator[OnRound]:
    """``on_round`` that also tells these trackers, which are closed with the block, also after an error.

    A tracker that is not installed is refused at once; it is opened with the first record, when the folder is there.
    """
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
        _import(name)
    logs: list[Log] = []
    with ExitStack() as opened:

        def tell(record: RoundRecord) -> None:
            on_round(record)
            if not logs:
                logs.extend(opened.enter_context(TRACKERS[name](folder, settings)) for name in names)
            for log in logs:
                log(flat(record), record.round)

        yield tell


def _import(name: str) -> Any:
    try:
        return importlib.import_module(MODULES[name])
    except ImportError as error:
        raise FedtailorError(
            f"--track {name}: it is not installed: pip install 'fedtailor[track-{name}]'"
        ) from error
