"""Sums under masks: seconds and bytes for clients of one class, with and without drop-outs.

python benchmarks/secure_sums.py --clients 20 --parameters 1000000
"""

from __future__ import annotations

import argparse
import secrets
import time

import numpy as np

from fedtailor.secure.protocol import Collector, Participant, Plan
from fedtailor.secure.quantising import Scale


def measured(clients: int, parameters: int, lost: int) -> tuple[float, float, float]:
    """Seconds of one client and of the server, and the bytes that a client sends over those of a plain update."""
    plan = Plan(f"benchmark {secrets.token_hex(8)}", {"all": range(clients)}, 2)
    scale, draws = Scale(clients, 1.0, 1), np.random.default_rng(0)
    words = [scale.words(draws.normal(0, 0.01, parameters), 1) for _ in range(clients)]
    began = time.perf_counter()
    people = {client: Participant(client, plan) for client in range(clients)}
    keys = {client: each.advertise() for client, each in people.items()}
    shares = {client: each.share(keys) for client, each in people.items()}
    arrived = {to: {sender: shares[sender][to] for sender in people} for to in people}
    alive = list(range(lost, clients))
    masked = {client: people[client].masked(arrived[client], {"all": words[client]}) for client in alive}
    openings = {client: people[client].unmask(alive) for client in alive}
    of_clients = (time.perf_counter() - began) / clients
    began = time.perf_counter()
    total, _ = Collector(plan, keys).sums(masked, range(clients), openings)["all"]
    of_server = time.perf_counter() - began
    assert np.array_equal(total, sum(words[client].astype(np.uint64) for client in alive))
    sealed = sum(map(len, shares[0].values()))
    sent = 64 + sealed + openings[alive[0]].nbytes + masked[alive[0]]["all"].nbytes
    return of_clients, of_server, sent / (4 * parameters)


def main() -> None:
    """Print a line for nobody lost and one for 30 % lost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--parameters", type=int, default=1_000_000)
    given = parser.parse_args()
    for lost in (0, int(0.3 * given.clients)):
        client, server, share = measured(given.clients, given.parameters, lost)
        print(
            f"{lost} of {given.clients} lost: {client:.2f} s per client, {server:.2f} s server, {share:.4f} x bytes"
        )


if __name__ == "__main__":
    main()
