"""Ordered dropout recovers the singular value decomposition (Theorem 1 of FjORD), in about ten seconds.

    python examples/ordered_dropout_recovers_svd.py [figure.svg]

Two linear layers without bias learn the map x -> Ax. Every step trains a random prefix of the hidden units. At the end
the first b units compute A_b, the best approximation of A of rank b, for every b at once: the k-th hidden unit holds
the k-th singular direction. No step ever sees a singular vector.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from fedtailor import FederatedData, train
from fedtailor.data.batches import Batch, Examples, target_of
from fedtailor.methods.fjord.fjord import FjORD

SINGULAR_VALUES = (4.0, 3.0, 2.0, 1.0)
RANKS = (1, 2, 3, 4)


def matrix(seed: int = 0) -> Tensor:
    """A random 5 x 4 matrix A with the singular values 4, 3, 2, 1."""
    generator = torch.Generator().manual_seed(seed)
    left, _ = torch.linalg.qr(torch.randn(5, 4, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(4, 4, generator=generator, dtype=torch.float64))
    return left @ torch.diag(torch.tensor(SINGULAR_VALUES, dtype=torch.float64)) @ right.T


def best_approximation(a: Tensor, rank: int) -> Tensor:
    """A_b: the first b terms of the singular value decomposition."""
    left, values, right = torch.linalg.svd(a, full_matrices=False)
    return left[:, :rank] @ torch.diag(values[:rank]) @ right[:rank]


def network(seed: int = 0) -> nn.Module:
    """x -> W2 W1 x with four hidden units."""
    generator = torch.Generator().manual_seed(seed)
    module = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 5, bias=False)).double()
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.3, generator=generator)
    return module


def squared_error(output: Tensor, batch: Batch) -> Tensor:
    """The squared Frobenius norm of W2[:, :b] W1[:b] - A, because the inputs are the unit vectors."""
    return (output - target_of(batch)).square().sum()


def recover(rounds: int = 20, steps: int = 300, seed: int = 0) -> list[dict[int, float]]:
    """Train with ordered dropout; for each round, the largest error of every rank."""
    a = matrix(seed)
    unit_vectors = torch.eye(4, dtype=torch.float64)
    data = FederatedData.from_examples(*[Examples.of(unit_vectors, a.T)] * 2, parts=[[0, 1, 2, 3]])
    errors = {
        f"error {rank}": lambda output, _batch, rank=rank: float(
            (output.T - best_approximation(a, rank)).abs().max()
        )
        for rank in RANKS
    }
    run = train(
        network(seed),
        data,
        fleet="full-4",  # one client that holds everything, evaluated at widths 1/4 ... 1
        method=FjORD(widths="uniform-4", distillation=False),
        rounds=rounds,
        clients_per_round=1,
        evaluate_every=1,
        training={"lr": 0.05, "batch_size": 4, "steps": steps},
        loss=squared_error,
        metrics=errors,
        engine={"workers": 0},  # one client: a second process would only cost time
    )
    return [
        {rank: tier[f"error {rank}"] for rank, tier in zip(RANKS, record.tiers.values(), strict=True)}
        for record in run.history
        if record.tiers
    ]


def picture(history: list[dict[int, float]], steps: int) -> str:
    """The errors over the steps on a logarithmic scale, as SVG."""
    width, height, left, bottom, lowest = 640, 320, 70, 40, -14
    colours = dict(zip(RANKS, ("#4477aa", "#228833", "#ccbb44", "#ee6677"), strict=True))

    def across(step: float) -> float:
        return left + (width - left - 110) * step / (steps * len(history))

    def down(error: float) -> float:
        exponent = max(lowest, torch.tensor(error).log10().item())
        return 20 + (height - bottom - 20) * (1 - exponent) / (1 - lowest)

    lines = []
    for exponent in range(0, lowest - 1, -2):
        y = down(10.0**exponent)
        lines.append(
            f'<line x1="{left}" x2="{across(steps * len(history)):.0f}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>'
        )
        lines.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">1e{exponent}</text>')
    for rank, colour in colours.items():
        points = " ".join(
            f"{across(steps * (number + 1)):.1f},{down(errors[rank]):.1f}"
            for number, errors in enumerate(history)
        )
        lines.append(f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{width - 95}" y="{40 + 22 * rank}" fill="{colour}">rank {rank} of 4</text>')
    for step in range(0, steps * len(history) + 1, steps * len(history) // 3):
        lines.append(f'<text x="{across(step):.0f}" y="{height - 18}" text-anchor="middle">{step:,}</text>')
    lines.append(
        f'<text x="{width / 2 - 40}" y="{height - 2}" text-anchor="middle">steps of ordered dropout</text>'
    )
    lines.append(f'<text x="{left}" y="14">largest entry of |W2[:, :b] W1[:b] - A_b|</text>')
    body = "\n".join(lines)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


def main() -> None:
    """Print the errors; write the figure if a file is named."""
    steps = 300
    history = recover(steps=steps)
    print("steps   " + "".join(f"   rank {rank}" for rank in RANKS))
    for number, errors in enumerate(history, start=1):
        if number % 4 == 0:
            print(f"{steps * number:6d}  " + "".join(f"  {errors[rank]:7.1e}" for rank in RANKS))
    print(f"largest error over all ranks: {max(history[-1].values()):.1e}")
    for name in sys.argv[1:2]:
        Path(name).write_text(picture(history, steps), encoding="utf-8")


if __name__ == "__main__":
    main()
