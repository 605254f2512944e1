"""Shared by all tests: one PyTorch thread, property tests that are the same on every machine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "fedtailor",
    deadline=None,  # a loaded machine is no bug
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("fedtailor")


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    torch.set_num_threads(1)
