"""Methods that do not merge as all others do: one that says so, and one that does not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from fedtailor.messages import ServerState
from fedtailor.method import Method


@dataclass(frozen=True)
class OwnMerge(Method):
    shared_merge: ClassVar = False

    def merge(self, state: Any, updates: Any, model: Any) -> ServerState:
        return replace(state, round=state.round + 1)


class Forgetful(OwnMerge):
    shared_merge: ClassVar = True
