"""Networks that oneDNN would corrupt the memory of keep the ordinary layout."""

from __future__ import annotations

import os
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fedtailor.elastic import elastic
from fedtailor.elastic.cut import Cut
from fedtailor.elastic.layout import Layouts
from fedtailor.elastic.selections import prefix
from fedtailor.models import build_model
from helpers import cnn_model

TRAIN_NARROW_SHORTCUTS = """
import torch
from fedtailor.client import sgd
from fedtailor.client.sgd import LocalTraining
from fedtailor.data.batches import Examples
from fedtailor.elastic import elastic
from fedtailor.methods.fjord import FjORD
from fedtailor.models import build_model
from fedtailor.server.seeds import Seeds
from helpers import client

torch.set_num_threads(1)
data = Examples.of(torch.randn(16, 3, 8, 8), torch.arange(16) % 10)
network = build_model("resnet18", input_shape=(3, 8, 8), num_classes=10, stem=20, widths=[20, 40, 80, 160])
model = elastic(network, data.take(torch.arange(2)))
method = FjORD(LocalTraining(batch_size=4, epochs=3))
for width in ("1/5", "1"):
    task = method.assign(method.init(model), client(0, width, 16), model, Seeds(0))
    sgd.train(method, task, data, model)
held = [torch.randn(size) for size in range(1, 2000)]
"""


def resnet(stem: int):
    widths = [stem, 2 * stem, 4 * stem, 8 * stem]
    network = build_model("resnet18", input_shape=(3, 8, 8), num_classes=10, stem=stem, widths=widths)
    return elastic(network, (torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)))


def test_channels_last_wherever_no_strided_pointwise_convolution_is_narrow():
    model = resnet(80)
    layouts = Layouts(model)
    assert len(layouts.pointwise) == 3
    assert layouts.at(Cut.everything()) == torch.channels_last
    assert layouts.at(prefix(model.groups, Fraction(1, 5))) == torch.channels_last  # 16 channels: one vector
    assert layouts.at(prefix(model.groups, Fraction(1, 16))) == torch.contiguous_format
    assert Layouts(cnn_model()).at(Cut.everything()) == torch.channels_last


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc to check its heap")
def test_narrow_shortcuts_train_without_harm_to_the_heap():
    environment = {**os.environ, "MALLOC_CHECK_": "3", "PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", TRAIN_NARROW_SHORTCUTS], env=environment, capture_output=True
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
