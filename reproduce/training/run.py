"""What optimisers bring: on the server to FedAvg, HeteroFL and FjORD, and on clients to Transformers.

    FEDTAILOR_DATA=... python -m reproduce.training.run [--list] [experiment ...]

Rates are found first, on seed 1 and with HeteroFL alone, among those of ``GRID`` (``fashion-rates``,
``femnist-rates``) and of ``CLIENT_GRID`` (``gpt-rates``, ``llama-rates``). The others take the best of each from
``results.json``, by the mean over the tiers (accuracy, of text perplexity), and are there once all rates are: call it
again then. After an interruption finished runs are not repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

from reproduce.shared.figures import ending, perplexity
from reproduce.shared.papers import Experiment, Paper, Variants
from reproduce.shared.results import Result, Results

TEXTS = {
    "gpt": "reproduce/training/shakespeare-gpt-small.toml",
    "llama": "reproduce/training/shakespeare-llama-small.toml",
}
CONFIGS = {
    "fashion": "reproduce/training/fashion-mnist-small.toml",
    "femnist": "reproduce/training/femnist-small.toml",
}
METHODS = ("fedavg:width=1/4", "heterofl", "fjord")

SERVERS = {
    "momentum": ("server.optimiser=sgd", "server.momentum=0.9"),  # FedAvgM
    "adagrad": ("server.optimiser=adagrad",),
    "adam": ("server.optimiser=adam",),
    "yogi": ("server.optimiser=yogi",),
}
GRID = {
    "momentum": ("0.1", "0.3", "1.0"),
    "adagrad": ("0.01", "0.03", "0.1"),
    "adam": ("0.003", "0.01", "0.03"),
    "yogi": ("0.003", "0.01", "0.03"),
}
CLIENTS = {
    "adamw": (),  # as the config says
    "sgd": (
        "training.optimiser=sgd",
        "training.momentum=0.9",
        "training.weight_decay=0",
        "training.warmup_steps=0",
    ),
}
CLIENT_GRID = {"adamw": ("0.003", "0.01"), "sgd": ("0.3", "1.0")}
RESULTS = Results(Path(__file__).parent / "results.json")


def best_rates(
    experiment: str, grid: Mapping[str, Sequence[str]], score: Callable[[Result], float]
) -> dict[str, str]:
    """Of each optimiser the rate with the lowest score; nothing before all have been tried."""
    runs = RESULTS.runs(experiment)
    if any(f"{name}-{rate}" not in runs for name, tried in grid.items() for rate in tried):
        return {}
    return {
        name: min(tried, key=lambda rate: score(runs[f"{name}-{rate}"]["1"])) for name, tried in grid.items()
    }


def last_perplexity(run: Result) -> float:
    """The mean over the tiers at the end."""
    course = run["perplexity"]
    return fmean(course[max(course, key=int)].values())


def rates(dataset: str) -> Variants:
    """One seed of the mean itself and of every rate of the grid."""
    tried = {
        f"{name}-{rate}": (*settings, f"server.lr={rate}")
        for name, settings in SERVERS.items()
        for rate in GRID[name]
    }
    return Variants(f"{dataset}-rates", CONFIGS[dataset], {"mean": (), **tried})


def servers(dataset: str) -> list[Experiment]:
    """Three seeds of the mean itself and of every optimiser at the rate that was found."""
    found = best_rates(f"{dataset}-rates", GRID, lambda run: -fmean(run["accuracy"].values()))
    return [
        Experiment(f"{dataset}-mean", CONFIGS[dataset], METHODS, 3),
        *(
            Experiment(
                f"{dataset}-{name}", CONFIGS[dataset], METHODS, 3, (*SERVERS[name], f"server.lr={rate}")
            )
            for name, rate in found.items()
        ),
    ]


def client_rates(network: str) -> Variants:
    """One seed of every local optimiser and rate."""
    tried = {
        f"{name}-{rate}": (*settings, f"training.lr={rate}")
        for name, settings in CLIENTS.items()
        for rate in CLIENT_GRID[name]
    }
    return Variants(f"{network}-rates", TEXTS[network], tried, figures=(ending, perplexity))


def clients(network: str) -> list[Experiment]:
    """Three seeds of both local optimisers at the rates that were found."""
    found = best_rates(f"{network}-rates", CLIENT_GRID, last_perplexity)
    tried = {name: (*CLIENTS[name], f"training.lr={rate}") for name, rate in found.items()}
    return [Variants(network, TEXTS[network], tried, 3, figures=(ending, perplexity))] if tried else []


EXPERIMENTS = [
    *(experiment for dataset in CONFIGS for experiment in (rates(dataset), *servers(dataset))),
    *(experiment for network in TEXTS for experiment in (client_rates(network), *clients(network))),
]

if __name__ == "__main__":
    Paper(Path(__file__), __doc__, EXPERIMENTS).main()
