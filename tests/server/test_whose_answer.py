"""An answer under a name counts only with the mark of its lease: nobody can answer, or be struck, for another."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from test_faults import SIZES, scaled

from fedtailor.engines.in_process import InProcess
from fedtailor.messages import Task, Update
from fedtailor.methods.registry import get_method
from helpers import cnn_model, differing, image_data, run


@dataclass(frozen=True)
class Impostor:
    """An engine on which somebody answers in the name of client 2, before it or after it, without having been asked."""

    inner: InProcess
    first: bool
    bad: bool
    guess: str = "0123456789abcdef"

    def run(self, tasks: Sequence[Task]) -> Iterator[Any]:
        for answer in self.inner.run(tasks):
            forged = (
                [replace(answer, nonce=self.guess)]
                if answer.client == 2 and isinstance(answer, Update)
                else []
            )
            forged = [
                replace(scaled(each, 1e30), weight=-5) if self.bad else scaled(each, 1.5) for each in forged
            ]
            yield from [*forged, answer] if self.first else [answer, *forged]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("bad", [True, False])
def test_who_answers_for_another_changes_nothing_and_the_honest_client_is_not_struck(first, bad):
    method, data = get_method("fedavg")(), image_data(SIZES)
    fine = run(method, cnn_model(), data, rounds=4)
    more = run(method, cnn_model(), data, rounds=4, engine=lambda inner: Impostor(inner, first, bad))
    assert differing(fine.state.weights, more.state.weights) == set()
    assert [record.cohort.refused for record in more.records] == [{"wrong-client": 1}] * 4
    assert [record.cohort.refused_by for record in more.records] == [{"-1": {"wrong-client": 1}}] * 4
    assert [record.cohort.merged for record in more.records] == [4] * 4
    assert more.records[-1].cohort.resting == 0


def test_every_task_has_a_mark_of_its_own():
    seen: list[str] = []

    class Noting:
        def __init__(self, inner):
            self.inner = inner

        def run(self, tasks):
            seen.extend(task.lease.nonce for task in tasks)
            return self.inner.run(tasks)

    run(get_method("heterofl")(), cnn_model(), image_data(SIZES), rounds=2, every=1, engine=Noting)
    assert len(set(seen)) == len(seen) == 2 * (4 + 4)
    assert all(len(each) == 16 for each in seen)
