"""FedRolex: the window of channels that a client trains rolls through the layer with the rounds.

Alam et al., "FedRolex: Model-Heterogeneous Federated Learning with Rolling Sub-Model Extraction", NeurIPS 2022.
Symbols: beta = the client's width, K = a layer's units, window = {(s + j) mod K : j < ceil(beta K)}, s = t mod K.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from fedtailor.charts.coverage import trained_so_far
from fedtailor.charts.panel import ROUNDS, Chart, Panel, ReportedRun, axis, lines, panel
from fedtailor.elasticity.costing.budget import Budget
from fedtailor.elasticity.costing.fitting import fit
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.selections import window
from fedtailor.elasticity.groups import ChannelGroups
from fedtailor.elasticity.model import ElasticModel
from fedtailor.elasticity.running.norm import Policy
from fedtailor.errors import unknown
from fedtailor.messages import Client, ServerState
from fedtailor.methods.heterofl import HeteroFL
from fedtailor.methods.registry import register
from fedtailor.seeds import Seeds


@register("fedrolex")
@dataclass(frozen=True)
class FedRolex(HeteroFL):
    """HeteroFL whose window rolls: every unit is trained equally often.

    The original ``lockstep`` phase moves all layers together. Every *unit* is then trained equally often, but not every
    *weight*: with all clients at width 1/4, half of a square layer's weights are never touched. ``independent`` gives
    every channel group a phase of its own.
    """

    policies: ClassVar[tuple[Policy, ...]] = ("averaged", "static")  # a window has no width of its own

    phase: Literal["lockstep", "independent"] = "lockstep"  # whether all layers roll together

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.phase not in ("lockstep", "independent"):
            raise unknown("phase", self.phase, ("lockstep", "independent"))

    def cut_for(self, state: ServerState, budget: Budget, model: ElasticModel) -> Cut:
        """No prefix is trained more than the rest: every device is given the full model."""
        return Cut.everything()

    def select(self, state: ServerState, client: Client, model: ElasticModel, seeds: Seeds) -> Cut:
        """All clients of a round share the start of the window."""
        starts = window_starts(model.groups, state.round, self.phase, seeds)
        size = fit(model.costs, client.budget, self.grid, workload=self.workload)
        return window(model.groups, size, starts.__getitem__)


def window_starts(groups: ChannelGroups, round: int, phase: str, seeds: Seeds) -> dict[str, int]:
    """Where each group's window begins in a round.

    Independent windows take their starts in random order, each of the K starts once in every pass of K rounds.
    """
    if phase == "lockstep":
        return {group: round % width for group, width in groups.counts.items()}
    starts = {}
    for group, width in groups.counts.items():
        order = seeds.numpy(f"window {group}", step=round // width).permutation(width)
        starts[group] = int(order[round % width])
    return starts


@panel("fedrolex")
def trained_over_rounds(runs: Sequence[ReportedRun]) -> Panel | None:
    """How fast the rolling window reaches every weight, and what it never reaches."""
    first = {run.variant: run for run in reversed(runs)}  # one seed of each variant
    rows = [row for run in reversed(first.values()) for row in trained_so_far(run)]
    if not rows:
        return None
    share = axis("trained", "weights trained so far (%)", scale={"domain": [0, 100]})
    text = (
        "A window that moves in lockstep through all layers meets every unit but not every pair of units: where the "
        "curve stays below 100 %, the rest of the layer keeps its starting weights. One seed."
    )
    spec = lines(ROUNDS, share, series="layer")
    chart = Chart("fedrolex", "What the window has reached", text, rows, {"rounds": spec}, ("method",))
    return Panel("fedrolex", "FedRolex: the rolling window", charts=[chart])
