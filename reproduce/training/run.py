"""What optimisers bring: on the server to FedAvg, HeteroFL and FjORD, and on clients to Transformers.

    FEDTAILOR_DATA=... python -m reproduce.training.run [--list] [--draw] [experiment ...]

Rates come first, on a seed that is not one of the three: for every method and server's optimiser the best of ``GRID``,
by the mean over the tiers, for every network and local optimiser the best of ``CLIENT_GRID``, by perplexity. Then
three seeds at those rates. After an interruption finished runs are not repeated; ``--draw`` prints the tables of
docs/training.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

from fedtailor.report.differences import paired
from reproduce.shared.figures import ending, perplexity
from reproduce.shared.papers import Experiment, Paper
from reproduce.shared.results import Result, Results

TEXTS = {
    "gpt": "reproduce/training/shakespeare-gpt-small.toml",
    "llama": "reproduce/training/shakespeare-llama-small.toml",
}
CONFIGS = {
    "fashion": "reproduce/training/fashion-mnist-small.toml",
    "femnist": "reproduce/training/femnist-small.toml",
}
METHODS = {"fedavg": "fedavg:width=1/4", "heterofl": "heterofl", "fjord": "fjord:widths=[0.25,0.5,1]"}
MEAN = "mean"  # the server takes the mean itself

SERVERS = {
    "momentum": ("server.optimiser=sgd", "server.momentum=0.9"),  # FedAvgM
    "adagrad": ("server.optimiser=adagrad",),
    "adam": ("server.optimiser=adam",),
    "yogi": ("server.optimiser=yogi",),
}
GRID = {
    "momentum": ("0.1", "0.3", "0.5", "1.0"),
    "adagrad": ("0.003", "0.01", "0.03", "0.1"),
    "adam": ("0.003", "0.01", "0.03", "0.1"),
    "yogi": ("0.003", "0.01", "0.03", "0.1"),
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
CLIENT_GRID = {"adamw": ("0.003", "0.01", "0.03"), "sgd": ("0.1", "0.3", "1.0")}
# HeteroFL multiplies what narrow layers put out by 1 / width, which acts on steps as a rate of its own: both ways.
TEXT_METHODS = {"scaled": "heterofl", "unscaled": "heterofl:scaler=false"}
RATES_SEED, SEEDS = 4, 3


def experiments(results: Results) -> list[Experiment]:
    """What there is to run, as far as rates are known."""
    found: list[Experiment] = []
    for dataset in CONFIGS:
        found += [Experiment(f"{dataset}-{MEAN}", CONFIGS[dataset], tuple(METHODS.values()), SEEDS)]
        for server in SERVERS:
            found += _server(dataset, server, results)
    for network in TEXTS:
        found += _clients(network, results)
    return found


def _server(dataset: str, server: str, results: Results) -> Iterator[Experiment]:
    """One seed of all methods at every rate, then three of each method at its best."""
    tried = {rate: f"{dataset}-{server}-{rate}" for rate in GRID[server]}
    for rate, name in tried.items():
        settings = (*SERVERS[server], f"server.lr={rate}", f"seed={RATES_SEED}")
        yield Experiment(name, CONFIGS[dataset], tuple(METHODS.values()), 1, settings)
    for short, method in METHODS.items():
        if best := best_rate(tried, method, results, lambda run: -mean_accuracy(run)):
            settings = (*SERVERS[server], f"server.lr={best}")
            yield Experiment(f"{dataset}-{server}-{short}", CONFIGS[dataset], (method,), SEEDS, settings)


def _clients(network: str, results: Results) -> Iterator[Experiment]:
    """One seed of both local optimisers at every rate, then three at the best."""
    read = (ending, perplexity)
    for optimiser, own in CLIENTS.items():
        tried = {rate: f"{network}-{optimiser}-{rate}" for rate in CLIENT_GRID[optimiser]}
        for rate, name in tried.items():
            settings = (*own, f"training.lr={rate}", f"seed={RATES_SEED}")
            yield Experiment(name, TEXTS[network], tuple(TEXT_METHODS.values()), 1, settings, read)
        for short, method in TEXT_METHODS.items():
            if best := best_rate(tried, method, results, last_perplexity):
                name, settings = f"{network}-{optimiser}-{short}", (*own, f"training.lr={best}")
                yield Experiment(name, TEXTS[network], (method,), SEEDS, settings, read)


def best_rate(
    tried: Mapping[str, str], method: str, results: Results, score: Callable[[Result], float]
) -> str | None:
    """The rate with the lowest score; nothing before all have been tried. ``tried``: rate -> its experiment."""
    runs = {rate: results.runs(name).get(method, {}).get(str(RATES_SEED)) for rate, name in tried.items()}
    known = {rate: score(run) for rate, run in runs.items() if run is not None}
    return min(known, key=known.__getitem__) if len(known) == len(tried) else None


def mean_accuracy(run: Result) -> float:
    """Over the tiers."""
    return fmean(run["accuracy"].values())


def last_perplexity(run: Result) -> float:
    """The mean over the tiers at the end."""
    return fmean(_at_the_end(run).values())


def _at_the_end(run: Result) -> dict[str, float]:
    course = run["perplexity"]
    return dict(course[max(course, key=int)])


def tables(results: Results, _folder: Path) -> None:
    """Print what came out, as docs/training.md shows it."""
    for dataset in CONFIGS:
        print("\n".join([*_server_table(dataset, results), ""]))
    print("\n".join(_client_table(results)))


def _server_table(dataset: str, results: Results) -> Iterator[str]:
    """Mean and deviation over the seeds, and in brackets the rate."""
    yield from (f"| {dataset} | {' | '.join(METHODS)} |", "|---|" + "---|" * len(METHODS))
    plain = results.runs(f"{dataset}-{MEAN}")
    yield f"| {MEAN} | " + " | ".join(_spread(plain.get(method, {})) for method in METHODS.values()) + " |"
    for server in SERVERS:
        cells = []
        for short, method in METHODS.items():
            tried = {rate: f"{dataset}-{server}-{rate}" for rate in GRID[server]}
            rate = best_rate(tried, method, results, lambda run: -mean_accuracy(run))
            runs = results.runs(f"{dataset}-{server}-{short}").get(method, {})
            cells.append(f"{_spread(runs)} ({rate}){_against(runs, plain.get(method, {}))}")
        yield f"| {server} | {' | '.join(cells)} |"


def _client_table(results: Results) -> Iterator[str]:
    """Perplexity of every tier, mean and deviation over the seeds."""
    yield from (
        "| network | scaler | optimiser | rate | c (1/4) | b (1/2) | a (1) | mean |",
        "|---|" + "---|" * 7,
    )
    for network in TEXTS:
        for short, method in TEXT_METHODS.items():
            for optimiser in CLIENTS:
                tried = {rate: f"{network}-{optimiser}-{rate}" for rate in CLIENT_GRID[optimiser]}
                rate = best_rate(tried, method, results, last_perplexity)
                runs = results.runs(f"{network}-{optimiser}-{short}").get(method, {}).values()
                ends = [_at_the_end(run) for run in runs]
                cells = [_of([end[tier] for end in ends], 2) for tier in ("c", "b", "a")]
                mean = _of([last_perplexity(run) for run in runs], 2)
                yield f"| {network} | {short} | {optimiser} | {rate} | {' | '.join(cells)} | {mean} |"


def _spread(runs: Mapping[str, Result]) -> str:
    return _of([mean_accuracy(run) for run in runs.values()], 1)


def _of(values: Sequence[float], digits: int) -> str:
    return f"{fmean(values):.{digits}f} ± {stdev(values):.{digits}f}" if len(values) > 1 else ""


def _against(runs: Mapping[str, Result], plain: Mapping[str, Result]) -> str:
    """The difference from the mean itself, seed by seed, with its interval."""
    both = [seed for seed in runs if seed in plain]
    if len(both) < SEEDS:
        return ""
    other, own = ([mean_accuracy(each[seed]) for seed in both] for each in (plain, runs))
    found = paired(other, own)
    return f"; {found.mean:+.1f} ± {found.half_width:.1f}"


if __name__ == "__main__":
    Paper(Path(__file__), __doc__, experiments, draw=tables).main()
