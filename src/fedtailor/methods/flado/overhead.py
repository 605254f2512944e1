"""What alignment costs beside the local steps of a round."""

from __future__ import annotations

import math

from fedtailor.client.local_training import LocalTraining
from fedtailor.elasticity.costing.expected import allowed_macs
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.model import ElasticModel
from fedtailor.messages import Client
from fedtailor.methods.flado.alignment import estimate_macs


def alignment_macs(
    estimator: str, share: float, local: LocalTraining, client: Client, padded: int, model: ElasticModel
) -> float:
    """Multiply-accumulates of alignment for one example of a client's round, on average over rounds.

    ``update`` takes the transform once, of ``padded`` numbers, and two products for each number of the update; the
    others make an estimate for a ``share`` of the steps.
    """
    whole, examples = model.cost(Cut.everything()), client.num_examples
    full = float(whole.macs)
    drawn, steps = min(full, allowed_macs(model.costs, client.budget)), local.steps_for(examples)
    if estimator == "update":
        total = padded * math.log2(padded) + 2 * whole.params
    else:
        batch = min(local.batch_size, examples)
        total = share * steps * estimate_macs(estimator, drawn * batch, full * batch, padded)
    return total / local.examples_for(examples)
