"""One deployed network that changes its width while it runs: accuracy and latency against width, in about a minute.

    python examples/dynamic_inference.py

A network is trained once with FjORD over unequal devices. What a device is given is one plain module; when the battery
runs low or another program needs the processor, `network.switch(0.4)` makes every following call cheaper.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from fedtailor import train
from fedtailor.data import inputs_of
from fedtailor.models import build_model


def latency(network: nn.Module, x: Tensor, repeats: int = 30) -> float:
    """Milliseconds for one batch: the fastest quarter of the calls, so that a busy machine does not count."""
    times = []
    with torch.inference_mode():
        for _ in range(repeats):
            started = time.perf_counter()
            network(x)
            times.append(time.perf_counter() - started)
    return 1000 * sorted(times)[repeats // 4]


def main() -> None:
    """Train, deploy once, and run at every width."""
    torch.set_num_threads(1)
    module = build_model("cnn", input_shape=(1, 8, 8), num_classes=10, channels=[64, 128, 256])
    run = train(
        module,
        "digits",
        fleet="uniform-5",
        method="fjord",
        rounds=20,
        training={"lr": 0.05, "momentum": 0.9, "batch_size": 16},
    )
    network = run.switchable()  # it answers raw pixels: how they are scaled is its first layer
    x, labels = inputs_of(run.data.test.columns)[0][0], run.data.test.targets
    print("width   accuracy   ms per 64 images   ms to switch")
    for width in network.widths:
        started = time.perf_counter()
        network.switch(width)
        switching = 1000 * (time.perf_counter() - started)
        with torch.inference_mode():
            right = (network(x).argmax(1) == labels).double().mean().item()
        print(f"{width:>5}   {100 * right:6.1f} %   {latency(network, x[:64]):13.2f}   {switching:14.2f}")


if __name__ == "__main__":
    main()
