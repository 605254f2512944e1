"""Updates that come as rows of one table are measured as those that come tensor by tensor, to the last bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.cutting.patch import Patch
from fedtailor.elasticity.front_door import elastic
from fedtailor.messages import Update
from fedtailor.server.checking import check_answers
from fedtailor.server.outliers import Outliers
from helpers import task_for, update_of


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(40, 33), nn.ReLU(), nn.Linear(33, 5))
    return elastic(module, (torch.randn(4, 40), torch.arange(4)))


def both_ways(model, factors):
    """The same updates with rows and without: steps of a normal size, times a factor for each client."""
    tasks = [task_for(model, number=number) for number in range(len(factors))]
    noise = torch.Generator().manual_seed(1)
    values = [
        {n: v + factor * torch.randn(v.shape, generator=noise) / 100 for n, v in task.patch.values.items()}
        for task, factor in zip(tasks, factors, strict=True)
    ]
    table = torch.stack([torch.cat([v.flatten() for v in each.values()]) for each in values])
    cut = Cut.everything()
    rows = Patch.of_rows([table], {n: (0, list(v.shape)) for n, v in values[0].items()}, cut)
    assert all(patch.row is not None for patch in rows)
    apart = [Patch({n: v.clone() for n, v in each.items()}, cut) for each in values]
    return tasks, *([update_of(number, patch) for number, patch in enumerate(each)] for each in (rows, apart))


@pytest.mark.parametrize("factors", [[1.0] * 4, [1.0, 1e6, 1.0, 1.0], [1.0, 1.0, 1.0, math.nan]])
def test_rows_are_measured_as_tensors_are(model, factors):
    tasks, rows, apart = both_ways(model, factors)
    by_id = {task.client.id: task for task in tasks}

    def sizes(updates: list[Update]) -> str:
        outliers = Outliers(by_id, model)
        finite = [outliers.measure(update) for update in updates]
        return repr((finite, outliers._sizes))  # exact text, also of what is no number

    assert sizes(rows) == sizes(apart)
    kept, refused = check_answers(tasks, rows, model)
    other_kept, other_refused = check_answers(tasks, apart, model)
    assert [each.client for each in kept] == [each.client for each in other_kept]
    assert refused == other_refused
    assert len(refused) == sum(factor != 1 for factor in factors)
