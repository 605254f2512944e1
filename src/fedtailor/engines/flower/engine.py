"""The engine whose clients are Flower nodes: it finds out who is there, hands out tasks and collects answers.

A node answers for one client, its own device, or for several parts of a split (trying things out). All tasks of a node
go out in one message. Nothing waits: whoever has not answered is asked about again in a moment, until the deadline.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fedtailor.client.evaluate import evaluate_deployed
from fedtailor.data.batches import Examples
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.flower.choice import Able, Choice
from fedtailor.engines.flower.frames import answer_from, state_key, task_head
from fedtailor.engines.flower.ledger import Ledger
from fedtailor.engines.flower.post import Failed, Head, Parcel, Post
from fedtailor.engines.protocol import Answer
from fedtailor.errors import FedtailorError, one_line
from fedtailor.fleet.roster import Profile, Roster
from fedtailor.messages import Measure, Refused, Task
from fedtailor.steps import WAITING, step
from fedtailor.storage.wire import DecodeError

POLL, LONGEST_POLL = 0.2, 2.0  # seconds between two looks at what has arrived
SHARE = 0.05  # of the time waited so far, until the next look: every look costs the SuperLink 10 ms or more
LOOK = 5.0  # seconds between two looks at who is connected, while a round goes on
# Seconds after which a node that was refused is asked again: it may be a device that was restarted.
AGAIN = 15.0
VERSION = 1  # of what heads look like
MOST_PARTS = 10**6  # of a split: the server counts all of them
Event = Callable[[str, Mapping[str, object]], None]
Read = Callable[[object, Mapping[str, bytes], Mapping[int, Task], ElasticModel], Answer]


def _lacks_maps(answer: Parcel | Failed) -> bool:
    return isinstance(answer, Parcel) and bool(answer.head.get("missing"))


def _silent(_event: str, _fields: Mapping[str, object]) -> None:
    """Nobody wants to know."""


@dataclass
class FlowerEngine:
    """Runs tasks on the nodes that have joined; ``common`` is what every task of the run says."""

    post: Post
    roster: Roster
    model: ElasticModel
    common: Head
    test: Examples
    able: Able  # whether a device can run a network
    check: Callable[[Profile], None] = lambda _profile: None  # refuses what no run can do with
    note: Event = _silent
    ledger: Ledger = field(default_factory=Ledger)
    moved: Callable[[], None] = lambda: None  # is told when something came or went
    homes: dict[int, int] = field(default_factory=dict)  # client -> the node that answers for it
    asked: dict[str, int] = field(default_factory=dict)  # messages that ask who a node is
    met: set[int] = field(default_factory=set)  # nodes that were asked
    known: dict[int, set[str]] = field(default_factory=dict)  # maps of masks that a node has been sent
    refused: dict[int, str] = field(default_factory=dict)  # nodes that answer for nobody, and why
    again: dict[int, float] = field(default_factory=dict)  # when to ask them again

    def look(self) -> None:
        """Who has come and who has gone."""
        there = self.post.nodes()
        for client, node in list(self.homes.items()):
            if node not in there:
                self._gone(client)
        self._ask_new(there)
        for number, answer in list(self.post.received(self.asked.keys())):
            node = self.asked.pop(number)
            if isinstance(answer, Failed):
                self._refuse(node, answer.reason)
            else:
                self._introduce(node, answer.head)

    def _ask_new(self, there: set[int]) -> None:
        """Ask nodes who they are that have come, or that it is time to ask again."""
        self.met &= there - {node for node, due in self.again.items() if time.monotonic() >= due}
        new = {node: Parcel({**self.common, "ask": "join", "version": VERSION}) for node in there - self.met}
        self.asked |= self.post.send(new, "query", "join")
        self.again = {node: due for node, due in self.again.items() if node not in new}
        self.met |= new.keys()

    def _refuse(self, node: int, reason: str, client: str | None = None) -> None:
        """Note why a node, or one of its clients, is not taken in; it is asked again: people mend their devices."""
        self.again[node] = time.monotonic() + AGAIN
        reason = one_line(reason)
        if self.refused.get(node) != reason:
            of_client = {} if client is None else {"client": client}
            what = "node refused" if client is None else "client refused"
            self.note(what, {"node": str(node), **of_client, "reason": reason})
        self.refused[node] = reason

    def _introduce(self, node: int, head: Head) -> None:
        """Take in those that a node says it answers for; what cannot be true is refused, with everyone beside it."""
        split = self.roster.split
        try:
            said = head.get("clients")
            if head.get("error") or not isinstance(said, list):
                raise FedtailorError(str(head.get("error") or "names no clients"))
            if head.get("model") not in (None, state_key(self.model)):
                raise FedtailorError("builds another model than the server: is its code of the same version?")
            profiles = [Profile.of(each) for each in said]
            self._settle(head.get("parts"))
        except FedtailorError as error:
            self._refuse(node, str(error))
            return
        here = {
            client for client in (self._take(node, profile) for profile in profiles) if client is not None
        }
        if not self.roster.numbers:
            self.roster.split = split  # nobody has joined: the next node decides
        if len(here) == len(profiles):
            self.refused.pop(node, None)
        for client in [each for each, home in self.homes.items() if home == node and each not in here]:
            self._gone(client)  # under another name now, or with limits that nothing fits

    def _take(self, node: int, profile: Profile) -> int | None:
        """The number of a client of a node, if it may join."""
        try:
            self._check_home(profile.name, node)
            self.check(profile)
            client = self.roster.join(profile)
        except FedtailorError as error:
            self._refuse(node, str(error), profile.name)
            return None
        if self.homes.get(client) != node:
            self.note("joined", {"node": str(node), "client": profile.name, "examples": profile.examples})
        self.homes[client] = node
        return client

    def _check_home(self, name: str, node: int) -> None:
        """Nobody answers for a client of another node, as long as that one is there."""
        home = self.homes.get(self.roster.numbers.get(name, -1), node)
        if home != node:
            raise FedtailorError(f"client {name} belongs to node {home}, which is connected")

    def _settle(self, parts: object) -> None:
        """The first node to join says whether clients are parts of a split, and of how many; the others agree."""
        whole = isinstance(parts, int) and not isinstance(parts, bool) and 0 < parts <= MOST_PARTS
        if not (whole or parts is None) or (len(self.roster) and parts != self.roster.split):
            raise FedtailorError(
                f"holds a part of {parts!r:.80}: expected one of {self.roster.split}, like the others"
                if len(self.roster)
                else f"parts = {parts!r:.80}: expected a whole number from 1 to {MOST_PARTS:,}"
            )
        if isinstance(parts, int):
            self.roster.split = parts

    def _gone(self, client: int) -> None:
        self.note("left", {"node": str(self.homes.pop(client)), "client": self.roster.name(client)})
        self.roster.leave(client)

    def wait_for(self, clients: int, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Until so many clients have joined; all parts of a split, if they are parts; and all that a resumed run knows.

        After the time is up the run begins with those who are there, or, if they are too few, is refused.
        """
        end = clock() + seconds
        while True:
            self.look()
            here, late = len(self.roster.present), clock() > end
            known = 0 if self.roster.fresh else len(self.roster.numbers)
            wanted = max(clients, self.roster.split or 0, known)
            if here >= (clients if late else wanted):
                moved = self.roster.sort()
                self.homes = {moved[client]: node for client, node in self.homes.items()}
                return
            step(f"{WAITING}: {here} of {wanted}, {len(self.met)} nodes are connected{self._complaints()}")
            if late:
                names = ", ".join(sorted(map(self.roster.name, self.roster.present))[:10])
                raise FedtailorError(
                    f"{here} of {clients} clients have joined after {seconds:g} s{f' ({names})' if names else ''}, "
                    f"{len(self.met)} nodes are connected to the SuperLink{self._remedy()}{self._complaints()}"
                )
            time.sleep(POLL * 5)

    def _remedy(self) -> str:
        """What a person can do about clients that have not joined, for a sentence that says how many have."""
        if self.asked:
            return (
                f", of which {len(self.asked)} have not said yet who they are: a busy machine takes a minute to "
                "begin; raise engine.wait, or look at what their SuperNodes log"
            )
        return ": start more SuperNodes, or lower clients_per_round"

    def _complaints(self) -> str:
        """What was wrong with nodes that could not be taken in, for the end of a sentence."""
        told = [f"node {node}: {reason}" for node, reason in list(self.refused.items())[:3]]
        return f". Refused: {'; '.join(told)}" if told else ""

    def run(
        self, tasks: Sequence[Task], beside: Mapping[int, Head] | None = None, read: Read = answer_from
    ) -> Iterator[Answer | None]:
        """One result per task, as they come; None when nothing has come for a moment.

        ``beside`` is what clients are told beside their tasks, and ``read`` reads what they answer.
        """
        homeless = [task for task in tasks if task.client.id not in self.homes]
        for task in homeless:
            yield Refused(task.client.id, task.round, "no-answer", "its node is not connected")
        of_node: dict[int, dict[int, Task]] = {}
        for task in tasks:
            if task.client.id in self.homes:
                of_node.setdefault(self.homes[task.client.id], {})[task.client.id] = task
        waiting = self._send(of_node, beside or {})
        for node, answer in self.heard(waiting):
            if answer is None:
                yield None
            elif _lacks_maps(answer):
                self.known.pop(node, None)  # it has lost what it was sent once
                waiting |= self._send({node: of_node[node]}, beside or {})
            else:
                yield from self._answers(node, answer, of_node[node], read)

    def measure(
        self, deployed: Sequence[Sequence[Patch]], action: Measure = "evaluate"
    ) -> list[dict[str, float]]:
        """Loss and metrics on the server's test examples, or on those that clients keep back to choose by.

        Of the latter every client that is there scores the networks that it can run; who has not answered by the
        deadline is left out. A network that nobody scores has no numbers: NaN is better than nothing else.
        """
        if action == "evaluate":
            return evaluate_deployed(self.model, deployed, self.test)
        choice = Choice.among(self.roster, self.homes, deployed, self.able)
        waiting = self._ask_scores(choice, choice.of_node)
        end = time.monotonic() + self.post.patience
        for node, answer in self.heard(waiting):
            if time.monotonic() > end:
                break
            if answer is not None and _lacks_maps(answer):
                self.known.pop(node, None)
                waiting |= self._ask_scores(choice, [node])
            elif answer is not None:
                if isinstance(answer, Parcel):
                    self.ledger.heard(list(choice.of_node[node]), answer)
                for client, problem in choice.take(node, answer, self.model).items():
                    fields = {"node": str(node), "client": self.roster.name(client), "reason": problem}
                    self.note("validation refused", fields)
        return choice.scores(self.model)

    def _ask_scores(self, choice: Choice, nodes: Collection[int]) -> dict[str, int]:
        parcels = {}
        for node in nodes:
            head, pieces, levels = choice.question(node)
            parcels[node] = self._parcel(node, {"ask": "measure", **head}, pieces, levels)
            self.ledger.sent(list(choice.of_node[node]), parcels[node])
        return self.post.send(parcels, "evaluate", "validate")

    def heard(self, waiting: dict[str, int]) -> Iterator[tuple[int, Parcel | Failed | None]]:
        """Nodes with what they answer, until nobody is waited for; None when nothing has come for a moment."""
        began = looked = time.monotonic()
        while waiting:
            heard = False
            for number, answer in list(self.post.received(waiting.keys())):
                heard = True
                yield waiting.pop(number), answer
            self.moved()
            if not heard:
                yield -1, None
                time.sleep(min(LONGEST_POLL, max(POLL, SHARE * (time.monotonic() - began))))
            if time.monotonic() - looked > LOOK:
                looked, there = time.monotonic(), self.post.nodes()
                self._ask_new(there)  # so that who comes now has answered when the next round begins
                for number, node in list(waiting.items()):
                    if node not in there:
                        del waiting[number]
                        yield node, Failed("its node left")

    def ask(
        self, clients: Sequence[int], head: Head, kind: str
    ) -> tuple[dict[str, int], dict[int, list[int]]]:
        """Ask nodes something of their own about clients: messages with their nodes, and nodes with their clients."""
        of_node: dict[int, list[int]] = {}
        for client in clients:
            if client in self.homes:
                of_node.setdefault(self.homes[client], []).append(client)
        parcels = {
            node: self._parcel(node, {**head, "clients": here}, {}, {}) for node, here in of_node.items()
        }
        for node, here in of_node.items():
            self.ledger.sent(here, parcels[node])
        return self.post.send(parcels, "query", kind), of_node

    def _parcel(self, node: int, head: Head, pieces: dict[str, bytes], levels: dict[str, bytes]) -> Parcel:
        """A message to a node, with the maps of masks that it has not been sent yet."""
        known = self.known.setdefault(node, set())
        new = {name: maps for name, maps in levels.items() if name not in known}
        known.update(levels)
        return Parcel({**self.common, "version": VERSION, **head}, {**pieces, **new})

    def _send(self, of_node: dict[int, dict[int, Task]], beside: Mapping[int, Head]) -> dict[str, int]:
        parcels, action, round = {}, "train", 0
        for node, tasks in of_node.items():
            heads: list[Head] = []
            pieces: dict[str, bytes] = {}
            levels: dict[str, bytes] = {}
            for task in tasks.values():
                head, frame, maps = task_head(task)
                heads.append({**head, **beside.get(task.client.id, {})})
                pieces |= frame
                levels |= maps
                action, round = task.action, task.round
            parcels[node] = self._parcel(node, {"ask": "tasks", "tasks": heads}, pieces, levels)
            self.ledger.tier_of |= {client: task.client.tier for client, task in tasks.items()}
            self.ledger.sent(list(tasks), parcels[node])
        kind = {"train": "train", "evaluate": "evaluate", "validate": "evaluate"}.get(action, "query")
        return self.post.send(parcels, kind, str(round + 1))

    def _answers(
        self, node: int, answer: Parcel | Failed, tasks: dict[int, Task], read: Read
    ) -> Iterator[Answer]:
        left = dict(tasks)
        if isinstance(answer, Failed):
            answer = Parcel({"error": answer.reason})
        else:
            self.ledger.heard(list(tasks), answer)
        problem, said = one_line(str(answer.head.get("error") or "")), answer.head.get("answers")
        for head in said if isinstance(said, list) else []:
            try:
                found = read(head, answer.pieces, tasks, self.model)
            except DecodeError as error:
                problem = problem or str(error)
                continue
            left.pop(found.client, None)
            yield found
        if "clients" in answer.head:
            self._introduce(node, {name: answer.head.get(name) for name in ("clients", "parts")})
        for client, task in left.items():
            yield Refused(client, task.round, "no-answer", problem or "gave no answer for this client")
