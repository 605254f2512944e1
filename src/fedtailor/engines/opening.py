"""Which engine a run uses: every engine is opened here, from the settings that ask for it.

A new engine is a class with the ``run`` of ``protocol.Engine``, a setting in ``settings.EngineSettings`` and a line in
``open_engine``; ``tests/contract/test_engines.py`` then holds it to the bits of the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedtailor.data.federated import FederatedData
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.automatic import Automatic
from fedtailor.engines.in_process import InProcess
from fedtailor.engines.protocol import Engine
from fedtailor.engines.settings import EngineSettings, available_cores
from fedtailor.engines.workers.luggage import check_portable
from fedtailor.engines.workers.pool import WorkerPool, luggage_for
from fedtailor.method import Method
from fedtailor.steps import OnNotice, step


@contextmanager
def open_engine(
    method: Method,
    model: ElasticModel,
    data: FederatedData,
    settings: EngineSettings,
    on_notice: OnNotice = warnings.warn,
) -> Iterator[Engine]:
    """The engine that the settings ask for; its processes end with the block."""
    workers = settings.workers
    if workers == "auto":
        on_cpu = all(tensor.device.type == "cpu" for tensor in model.module.parameters())
        workers = available_cores() // torch.get_num_threads() if on_cpu else 0
        if workers > 1:
            with Automatic(method, model, data, workers, on_notice) as engine:
                yield engine
            return
        workers = 0
    if workers == 0:
        yield InProcess(method, model, data)
        return
    step(f"starting {workers} worker{'s' if workers > 1 else ''}")
    with WorkerPool(method, model, data, workers) as pool:
        yield pool


def check_workers(method: Method, model: ElasticModel, data: FederatedData, settings: EngineSettings) -> None:
    """Refuse a number of workers where there can be none, before anything is started or written."""
    if settings.workers not in ("auto", 0):
        check_portable(luggage_for(method, model, data).parts)
