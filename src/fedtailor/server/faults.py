"""What becomes of a round when clients fail: deadline, quorum and strikes, for every engine.

engine.run → Timely: until the deadline        → late, no-answer
           → check_answers                     → refused with a reason
refused    → strikes: three, and a client rests for the run
updates    → enough for the quorum?            → merge, or abandon the round and try again with other clients
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from fedtailor.engines.protocol import FAILED, Answer, Engine, Starting
from fedtailor.engines.settings import EngineSettings
from fedtailor.errors import ClientsFailedError, QuorumError
from fedtailor.fleet.devices.trips import Timetable
from fedtailor.messages import Client, Refused, Task, UnderWay, Update

# No fault of the client, or one that it has owned up to: nothing that would be worse the next time.
FORGIVEN = frozenset({"late", "surplus", "stale", "no-answer", "worker-died", "diverged", FAILED})

MOST_NAMED = 10  # clients in a sentence
LONGEST_PAUSE = 300.0  # seconds between two tries of a round
DESERTED_PAUSE = 30.0  # at least, where nobody was there: networks come back, and nodes join again

Strikes = Mapping[int, int]
Clock = Callable[[], float]


@dataclass(frozen=True)
class Timely:
    """An engine with a deadline: whoever has not answered by then is late, and the round goes on without."""

    engine: Engine
    seconds: float
    clock: Clock = time.monotonic  # not the time of day, which jumps

    def run(self, tasks: Sequence[Task]) -> Iterator[Answer | None]:
        """At least one result per task, at the latest when an answer or a sign of waiting comes after the deadline.

        Signs of waiting are handed on. While the engine cannot work yet, because its workers are being started, no time
        passes.
        """
        missing = {task.client.id: task for task in tasks}
        seen = self.clock()
        end = seen + self.seconds
        answers, reason = self.engine.run(tasks), "no-answer"
        starts = self.engine if isinstance(self.engine, Starting) else None
        try:
            for answer in answers:
                now = self.clock()
                if starts is not None and starts.starting:
                    end += now - seen
                seen = now
                if now > end:  # what has just come is late too
                    reason = "late"
                    break
                if answer is None:
                    yield None
                    end += self.clock() - now  # what the caller did meanwhile is no client's time
                    continue
                if _is_awaited(answer, missing):
                    del missing[answer.client]
                yield answer
        finally:
            close = getattr(answers, "close", None)  # only generators have one
            if close is not None:
                close()
        for client, task in missing.items():
            yield Refused(client, task.round, reason)


def _is_awaited(answer: Answer, missing: Mapping[int, Task]) -> bool:
    """Whether an answer is that of a client that was asked: only then is this client not missed any more."""
    task = missing.get(answer.client) if type(answer.client) is int else None
    return task is not None and (isinstance(answer, Refused) or answer.nonce == task.lease.nonce)


@dataclass(frozen=True)
class Try:
    """One cohort that was asked, and what came of it."""

    tasks: list[Task]
    updates: list[Update]
    refused: list[Refused]
    table: Timetable | None = None  # in simulated time


@dataclass(frozen=True)
class Held:
    """A round before its merge: all tries, of which the last counts, the new strikes, who was there, and the time."""

    tries: list[Try]
    strikes: dict[int, int]
    clients: Sequence[Client]
    under_way: UnderWay


def resting(strikes: Strikes, rules: EngineSettings) -> frozenset[int]:
    """The clients that are not asked any more."""
    return frozenset(client for client, count in strikes.items() if rules.strikes and count >= rules.strikes)


def awake(clients: Sequence[Client], strikes: Strikes, rules: EngineSettings) -> Sequence[Client]:
    """The clients that may still be asked."""
    tired = resting(strikes, rules)
    return [client for client in clients if client.id not in tired] if tired else clients


def with_strikes(strikes: Strikes, asked: Sequence[Client], refused: Sequence[Refused]) -> dict[int, int]:
    """One more for every client that was asked and refused; nobody pays for what others send in their name."""
    bad = {each.client for each in refused if each.reason not in FORGIVEN}
    bad &= {client.id for client in asked} if bad else set()
    return {client: strikes.get(client, 0) + (client in bad) for client in sorted({*strikes, *bad})}


def counted(refused: Sequence[Refused]) -> dict[str, int]:
    """How often each reason was given, in the order of their names."""
    total = Counter(each.reason for each in refused)
    return {reason: total[reason] for reason in sorted(total)}


def counted_by_client(refused: Sequence[Refused]) -> dict[str, dict[str, int]]:
    """How often each client was refused for which reason, in the order of their numbers."""
    of_client: dict[int, list[Refused]] = {}
    for each in refused:
        of_client.setdefault(each.client, []).append(each)
    return {str(client): counted(of_client[client]) for client in sorted(of_client)}


def failures(refused: Sequence[Refused]) -> dict[str, tuple[str, ...]]:
    """What clients' code raised: each error in one line, and whom it befell."""
    of_error: dict[str, list[int]] = {}
    for each in refused:
        if each.reason == FAILED:
            of_error.setdefault(each.detail, []).append(each.client)
    return {error: tuple(map(str, sorted(set(clients)))) for error, clients in sorted(of_error.items())}


def nobody_got_through(
    what: str, refused: Sequence[Refused], name_of: Callable[[int], str] = str
) -> ClientsFailedError | None:
    """The error for work that no client could do: with the first exception that was raised, if any was."""
    first = next((each for each in refused if each.reason == FAILED), None)
    if first is None:
        return None
    where = first.trace or first.detail
    return ClientsFailedError(f"{what}; the first, client {name_of(first.client)}, {_raised(where)}")


def _raised(where: str) -> str:
    """A traceback has lines of its own."""
    return f"raised\n{where}" if "\n" in where else f"refused: {where}"


def cohort_size(clients_per_round: int, rules: EngineSettings) -> int:
    """How many clients are asked."""
    return math.ceil(round(clients_per_round * rules.over_selection, 6))  # 1.1 * 10 is a little above 11


def enough(tried: Try, clients_per_round: int, rules: EngineSettings) -> bool:
    """Whether a round may be merged; one in which clients raised exceptions and nobody got through never may."""
    if not tried.updates and any(each.reason == FAILED for each in tried.refused):
        return False
    return len(tried.updates) >= needed(tried, clients_per_round, rules)


def needed(tried: Try, clients_per_round: int, rules: EngineSettings) -> int:
    """The quorum as a number; a cohort that could not be larger is measured by its own size."""
    return math.ceil(round(min(clients_per_round, len(tried.tasks)) * rules.quorum, 6))


def pause_before(retry: int, rules: EngineSettings, *, deserted: bool = False) -> float:
    """Seconds to wait before a retry, the first of which is number 1; ``deserted``: there was nobody to ask."""
    first = max(rules.pause, DESERTED_PAUSE) if deserted else rules.pause
    return min(LONGEST_PAUSE, first * 2.0 ** min(retry - 1, 60))  # 2.0 ** 1024 is no float


def give_up(
    round: int,
    tries: Sequence[Try],
    clients_per_round: int,
    rules: EngineSettings,
    name_of: Callable[[int], str] = str,
) -> QuorumError | ClientsFailedError:
    """The error for a round that never had its quorum; ``name_of`` a client is how users call it."""
    last = tries[-1]
    if not any(each.updates for each in tries):
        what = f"round {round + 1}: no client got through, in {len(tries)} tries"
        broken = nobody_got_through(what, [each for tried in tries for each in tried.refused], name_of)
        if broken is not None:
            return broken
    if not last.tasks:
        return QuorumError(
            f"round {round + 1} has nobody to ask: of {len(tries)} tries the last found no client connected. "
            f"The model is that of round {round}; see engine.retries and engine.pause"
        )
    counted = Counter(each.reason for each in last.refused).most_common()
    reasons = ", ".join(f"{count} x {reason}" for reason, count in counted)
    asked = {task.client.id for task in last.tasks}
    who = [name_of(client) for client in sorted({each.client for each in last.refused} & asked)]
    more = f" and {len(who) - MOST_NAMED} more" if len(who) > MOST_NAMED else ""
    named = f"client{'s' if len(who) > 1 else ''} {', '.join(who[:MOST_NAMED])}{more}" if who else ""
    example = next((each.detail for each in last.refused if each.detail), "")
    details = f" ({'; '.join(filter(None, (named, example)))})" if named or example else ""
    return QuorumError(
        f"round {round + 1} was tried {len(tries)} times and never had a quorum: the last time "
        f"{len(last.updates)} of {len(last.tasks)} clients gave an update that can be used, and "
        f"{needed(last, clients_per_round, rules)} are needed; {reasons}{details}. "
        f"The model is that of round {round}. See engine.quorum, engine.deadline and engine.retries; if clients "
        "diverged, lower training.lr"
    )


def nobody_left(round: int, rules: EngineSettings) -> QuorumError:
    """The error for a run whose clients have all been refused too often."""
    return QuorumError(
        f"round {round + 1} has nobody to ask: every client that could take part had {rules.strikes} updates refused "
        f"(engine.strikes). The model is that of round {round}; metrics.jsonl says why updates were refused"
    )
