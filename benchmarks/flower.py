"""Measure what running on Flower costs: seconds per round in four ways, which take turns.

    FEDTAILOR_DATA=data python benchmarks/flower.py overhead        # --rounds 4 --repeats 3
    python benchmarks/flower.py message                             # processor time of one message, ours and plain

Here, with two workers, over a SuperLink on loopback (TLS, two SuperNodes), and a plain Flower app on the same nodes
(``plain_flower/``): the same network, the same examples per client, the same clients in every round, one thread per
process. Of every run the first round is left out, since nodes join in it, and the last, in which ours evaluates.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import results

from fedtailor.config import make_config
from fedtailor.engines.flower.post import Parcel, content_of, parcel_of
from fedtailor.flower.device import respond
from fedtailor.flower.link import CONNECTION, Link
from fedtailor.flower.local import LocalLink, local_link
from fedtailor.flower.server import serve
from fedtailor.flower.submit import submit
from fedtailor.run.interface import run_config
from fedtailor.seeds import Seeds

CLIENTS, COHORT, NODES, SEED = 100, 10, 2, 0
OURS, PLAIN_FLOWER = "ours on Flower", "plain Flower"
WAYS = ["in process", "two workers", OURS, PLAIN_FLOWER]
PLAIN = Path(__file__).with_name("plain_flower")
CONFIG = """
name = "w1"
seed = {seed}
rounds = {rounds}
clients_per_round = {cohort}
evaluate_every = {rounds}
threads = 1
[data]
dataset = "fashion-mnist"
clients = {clients}
partition = "iid"
validation = 0
[model]
name = "mnist-cnn"
channels = [16, 32]
hidden = 128
[fleet]
name = "equal"
[method]
name = "fedavg"
[training]
lr = 0.1
batch_size = 32
[engine]
workers = {workers}
deadline = 600
wait = 600
"""


def config(rounds: int, workers: int) -> str:
    """The run as text."""
    return CONFIG.format(seed=SEED, rounds=rounds, cohort=COHORT, clients=CLIENTS, workers=workers)


def ends_of(folder: Path) -> list[float]:
    """When each round of ours ended."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    ends = [event["time"] for event in events if event["event"] == "round"]
    return [datetime.fromisoformat(end).timestamp() for end in ends]


class Meter:
    """Processor seconds of this process, of its children and of all that they start, by the clock."""

    def __init__(self) -> None:
        self.samples: list[tuple[float, float]] = [(time.time(), self._used())]
        threading.Thread(target=self._follow, daemon=True).start()

    def _follow(self) -> None:
        while True:
            time.sleep(0.5)
            self.samples.append((time.time(), self._used()))

    @staticmethod
    def _used() -> float:
        """Of those that are there, and, through their parents, of those that are gone."""
        parents, ticks = dict[int, int](), dict[int, int]()
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                fields = file.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
                number = int(file.parent.name)
                parents[number], ticks[number] = int(fields[1]), sum(map(int, fields[11:15]))

        def ours(number: int) -> bool:
            while number > 1 and number != os.getpid():
                number = parents.get(number, 0)
            return number == os.getpid()

        return sum(used for number, used in ticks.items() if ours(number)) / os.sysconf("SC_CLK_TCK")

    def between(self, ends: list[float]) -> list[tuple[float, float]]:
        """Seconds and processor seconds of the rounds that ended then, but for the first and the last one."""
        clock, spent = (list(column) for column in zip(*self.samples, strict=True))
        used = np.interp(ends, clock, spent)
        pairs = list(pairwise(zip(ends, used.tolist(), strict=True)))
        return [(after[0] - before[0], after[1] - before[1]) for before, after in pairs][:-1]


def here(folder: Path, rounds: int, workers: int) -> list[float]:
    """In this process, or in workers of it."""
    run_config(make_config(tomllib.loads(config(rounds, workers))), folder, on_notice=lambda _: None)
    return ends_of(folder)


def ours(folder: Path, rounds: int, link: LocalLink) -> list[float]:
    """The same run on the nodes of a SuperLink."""
    submit(config(rounds, 0), folder, Link(link.address, link.authority), lambda _: None)
    return ends_of(folder)


def plain(rounds: int, link: LocalLink) -> list[float]:
    """Flower's FedAvg on the same nodes, for the same clients."""
    cohorts = [
        sorted(
            map(int, Seeds(SEED).numpy("cohort", round=number).choice(CLIENTS, size=COHORT, replace=False))
        )
        for number in range(rounds)
    ]
    images = Path(os.environ.get("FEDTAILOR_DATA", "data")).absolute() / "fashion-mnist"
    settings = f"cohorts='{json.dumps(cohorts)}' images='{images}'"
    program = str(Path(sys.executable).parent / "flwr")
    done = subprocess.run(
        [program, "run", str(PLAIN), CONNECTION, "--stream", "--run-config", settings],
        env=link.environment, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    times = [float(found) for found in re.findall(r"round \d+ at ([\d.]+)", done.stdout)]
    if len(times) != rounds + 1:
        raise RuntimeError(f"the plain app did not finish: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return times[1:]


def measure_overhead(arguments: argparse.Namespace) -> dict[str, Any]:
    """Seconds and processor seconds per round of each way, and ours over plain Flower."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in WAYS}
    turns: list[float] = []
    loads, rounds, meter = [os.getloadavg()[0]], arguments.rounds + 2, Meter()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        nodes = [
            {"partition-id": n, "num-partitions": NODES, "state": str(folder / f"state{n}")}
            for n in range(NODES)
        ]
        with local_link(folder / "link", nodes) as link:
            for repeat in range(arguments.repeats):
                for name in WAYS[:: 1 if repeat % 2 == 0 else -1]:
                    ends = one_run(name, folder / f"{name}{repeat}", rounds, link)
                    found[name] += meter.between(ends)
                    print(name, found[name][-arguments.rounds :], file=sys.stderr, flush=True)
                loads.append(os.getloadavg()[0])
                last = {name: [pair[0] for pair in found[name][-arguments.rounds :]] for name in WAYS[2:]}
                turns.append(statistics.median(last[OURS]) / statistics.median(last[PLAIN_FLOWER]))
    seconds, used = (
        {name: statistics.median(pair[place] for pair in pairs) for name, pairs in found.items()}
        for place in (0, 1)
    )
    return {
        "setting": "Fashion-MNIST, conv5-16, conv5-32, FC128; 100 clients x 600 images, 10 per round, batch 32, FedAvg",
        "rounds_measured": {name: len(pairs) for name, pairs in found.items()},
        "median_seconds_per_round": {name: round(value, 2) for name, value in seconds.items()},
        "median_cpu_seconds_per_round": {name: round(value, 2) for name, value in used.items()},
        "ours_over_plain_flower": round(seconds[OURS] / seconds[PLAIN_FLOWER], 3),
        "ours_over_plain_flower_of_each_turn": [round(value, 3) for value in turns],
        "ours_over_plain_flower_by_cpu_time": round(used[OURS] / used[PLAIN_FLOWER], 3),
        "load_average_seen": [round(min(loads), 2), round(max(loads), 2)],
        "cores": os.cpu_count(),
    }


def one_run(name: str, folder: Path, rounds: int, link: LocalLink) -> list[float]:
    """When each round of a run ended."""
    if name == PLAIN_FLOWER:
        return plain(rounds, link)
    if name == OURS:
        return ours(folder, rounds, link)
    return here(folder, rounds, WAYS.index(name) * 2)


class Recorder:
    """A grid of one node in this process: it introduces itself, and what it is asked to train is kept."""

    def __init__(self, text: str, node: dict[str, Any]) -> None:
        from flwr.supercore.task_identity import TaskIdentity

        TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1  # as Flower's own processes do
        self.text, self.node = text, node
        self.asked: Parcel | None = None
        self.answers: dict[str, Any] = {}

    def get_node_ids(self) -> list[int]:
        """The one node."""
        return [1]

    def push_messages(self, messages: list[Any]) -> list[str]:
        """Answer who is there; a task is kept, and ends the run."""
        for message in messages:
            parcel = parcel_of(message.content)
            if parcel.head["ask"] == "tasks":
                self.asked = parcel
                raise KeyboardInterrupt
            said = content_of(respond(parcel, {"config": self.text}, self.node))
            number = str(len(self.answers))
            reply = SimpleNamespace(
                content=said, has_error=lambda: False, metadata=SimpleNamespace(reply_to_message_id=number)
            )
            self.answers[number] = reply
        return list(self.answers)[-len(messages) :]

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        """What was answered."""
        return [self.answers[number] for number in numbers]


MESSAGE = """
import json, resource, sys
import flwr.supernode.runtime.run_clientapp
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
which, folder, node, run = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), json.loads(sys.argv[4])
if which == "ours":
    from fedtailor.engines.flower.post import Parcel, content_of
    from fedtailor.flower.apps import client
    head = json.load(open(folder + "/head.json"))
    content = content_of(Parcel(head, {name: open(f"{folder}/{name}", "rb").read() for name in run.pop("pieces")}))
else:
    sys.path.insert(0, folder)
    from plain.app import client, network
    content = RecordDict({"arrays": ArrayRecord(network().state_dict()), "config": ConfigRecord({"server-round": 1})})
message = Message(content, dst_node_id=1, message_type="train", ttl=600, group_id="1")
message.metadata.__dict__["_message_id"] = "1"
reply = client(message, Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=run))
assert reply.has_content()
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""


def measure_message(arguments: argparse.Namespace) -> dict[str, Any]:
    """Processor seconds of a whole client process that trains five clients: ours, and the plain app's, in turns."""
    text, images = config(1, 0), Path(os.environ.get("FEDTAILOR_DATA", "data")).absolute() / "fashion-mnist"
    whole, cohort = {"partition-id": 0, "num-partitions": 1}, [0, 2, 4, 6, 8]
    with tempfile.TemporaryDirectory() as place:
        node = {**whole, "state": f"{place}/state"}
        grid = Recorder(text, node)
        with contextlib.suppress(KeyboardInterrupt):
            serve(grid, make_config(tomllib.loads(text)), Path(place) / "run")
        assert grid.asked is not None
        head = {**grid.asked.head, "tasks": grid.asked.head["tasks"][: len(cohort)]}
        pieces = {task["piece"] for task in head["tasks"]}
        Path(place, "head.json").write_text(json.dumps(head), encoding="utf-8")
        for name in pieces:
            Path(place, name).write_bytes(grid.asked.pieces[name])
        words = {
            "ours": [place, json.dumps(node), json.dumps({"config": text, "pieces": sorted(pieces)})],
            "plain": [
                str(PLAIN), json.dumps(whole), json.dumps({"cohorts": json.dumps([cohort]), "images": str(images)}),
            ],
        }  # fmt: skip
        used: dict[str, list[float]] = {name: [] for name in words}
        for _ in range(arguments.repeats):
            for name, each in words.items():
                done = subprocess.run(
                    [sys.executable, "-c", MESSAGE, name, *each],
                    capture_output=True, text=True, timeout=600, check=False,
                )  # fmt: skip
                if done.returncode:
                    raise RuntimeError(done.stderr[-2000:])
                used[name].append(float(done.stdout.split()[-1]))
                print(name, used[name][-1], file=sys.stderr, flush=True)
    best = {name: min(values) for name, values in used.items()}
    return {
        "setting": "a message to a node: imports, data, model, one epoch of each of five clients x 600 images",
        "median_cpu_seconds": {name: round(statistics.median(values), 2) for name, values in used.items()},
        "best_cpu_seconds": {name: round(value, 2) for name, value in best.items()},
        "ours_over_plain_flower_by_cpu_time": round(best["ours"] / best["plain"], 3),
        "repeats": arguments.repeats,
        "load_average_seen": round(os.getloadavg()[0], 2),
    }


MEASURES = {"overhead": measure_overhead, "message": measure_message}


def main() -> None:
    """Measure what was named."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("measure", choices=MEASURES)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    results.add_option(parser)
    arguments = parser.parse_args()
    results.report(arguments.measure, MEASURES[arguments.measure](arguments), arguments)


if __name__ == "__main__":
    main()
