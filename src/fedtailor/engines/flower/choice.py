"""Scores on examples that clients keep back to choose by: who is asked about which network, and what comes of it.

A device scores what it can run, on examples that never leave it; the score of a network is the mean over all examples
of those who scored it, summed in the order of clients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedtailor.client.evaluate import Score, mean_score
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.model import ElasticModel
from fedtailor.engines.answers import LARGEST_METRIC
from fedtailor.engines.flower.frames import patch_head
from fedtailor.engines.flower.post import Failed, Head, Parcel
from fedtailor.errors import one_line
from fedtailor.fleet.roster import Roster
from fedtailor.storage.wire import DecodeError

Able = Callable[[int, Sequence[Patch]], bool]  # whether a client can run a network
Framed = tuple[Head, dict[str, bytes], dict[str, bytes]]


@dataclass
class Choice:
    """One evaluation on clients: networks, and who scores which of them."""

    deployed: Sequence[Sequence[Patch]]
    kept: Mapping[int, int]  # client -> on how many examples it scores
    of_node: dict[int, dict[int, list[int]]]  # node -> client -> the networks that it can run
    found: dict[int, dict[int, Score]] = field(default_factory=dict)  # client -> network -> its score
    framed: dict[int, list[Framed]] = field(default_factory=dict)

    @classmethod
    def among(
        cls, roster: Roster, homes: Mapping[int, int], deployed: Sequence[Sequence[Patch]], able: Able
    ) -> Choice:
        """Everybody who is there and keeps examples back."""
        kept = {client: roster.kept(client) for client in sorted(roster.present & homes.keys())}
        of_node: dict[int, dict[int, list[int]]] = {}
        for client, count in kept.items():
            networks = [n for n, patches in enumerate(deployed) if able(client, patches)]
            if count and networks:
                of_node.setdefault(homes[client], {})[client] = networks
        return cls(deployed, kept, of_node)

    def question(self, node: int) -> Framed:
        """What a node is asked: the networks that anybody there can run, as heads, pieces and maps of masks."""
        asked = self.of_node[node]
        wanted = sorted({number for networks in asked.values() for number in networks})
        pieces: dict[str, bytes] = {}
        levels: dict[str, bytes] = {}
        heads: dict[str, list[Head]] = {}
        for number in wanted:
            if number not in self.framed:
                self.framed[number] = [_framed(patch) for patch in self.deployed[number]]
            heads[str(number)] = [head for head, _, _ in self.framed[number]]
            for _, frame, maps in self.framed[number]:
                pieces |= frame
                levels |= maps
        clients = {str(client): networks for client, networks in asked.items()}
        return {"networks": heads, "scores": clients}, pieces, levels

    def take(self, node: int, answer: Parcel | Failed, model: ElasticModel) -> dict[int, str]:
        """Keep what a node answers; of those whose scores cannot be used, why."""
        said = {} if isinstance(answer, Failed) else answer.head.get("scores")
        problem = (
            answer.reason if isinstance(answer, Failed) else str(answer.head.get("error") or "gave none")
        )
        refused = {}
        for client, networks in self.of_node[node].items():
            try:
                if not isinstance(said, dict) or str(client) not in said:
                    raise DecodeError(one_line(problem))
                self.found[client] = self._read(said[str(client)], client, networks, model)
            except DecodeError as error:
                refused[client] = str(error)
        return refused

    def _read(self, said: Any, client: int, networks: list[int], model: ElasticModel) -> dict[int, Score]:
        """A client's scores; it cannot count for more examples than it said it keeps."""
        names = {"loss", *model.objective.metrics}
        if not isinstance(said, list) or len(said) != len(networks):
            raise DecodeError(f"scores {len(networks)} networks with {said!r:.80}")
        found = {}
        for network, values in zip(networks, said, strict=True):
            numbers = values if isinstance(values, dict) and set(values) == names else {}
            fine = bool(numbers) and all(map(_is_score, numbers.values()))
            if not fine:
                raise DecodeError(f"{values!r:.80}: expected numbers for {', '.join(sorted(names))}")
            found[network] = self.kept[client], {name: float(value) for name, value in numbers.items()}
        return found

    def scores(self, model: ElasticModel) -> list[dict[str, float]]:
        """Loss and metrics of each network; one client's NaN spoils nothing, as long as others have numbers."""
        nothing = dict.fromkeys(["loss", *model.objective.metrics], math.nan)
        together = []
        for number in range(len(self.deployed)):
            found = [
                self.found[client][number] for client in sorted(self.found) if number in self.found[client]
            ]
            finite = [score for score in found if all(map(math.isfinite, score[1].values()))]
            together.append(mean_score(finite or found) if found else nothing)
        return together


def _is_score(value: object) -> bool:
    """A number that a mean can be taken of, or NaN, which is left out of it."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return value != value or -LARGEST_METRIC <= value <= LARGEST_METRIC


def _framed(patch: Patch) -> Framed:
    return patch_head(patch, None if patch.cut.mask is None else patch.cut.mask.levels)
