"""Modules as Hugging Face has them: dict batches, output objects, a loss of their own; trained without a wrapper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

import fedtailor
from elasticity.tracing.test_transformer_constructions import TIME, WORDS, TinyLlama
from fedtailor import Budget, FedtailorError
from fedtailor.deploying.network import network_for

COUNT = 40


def columns() -> dict[str, Tensor]:
    """Texts that count on from their first word, so that the next token can be told."""
    generator = torch.Generator().manual_seed(0)
    ids = (torch.arange(TIME) + torch.randint(0, WORDS, (COUNT, 1), generator=generator)) % WORDS
    mask = torch.ones_like(ids)
    mask[::3, 4:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def as_dicts() -> list[dict[str, list[int]]]:
    return [{name: column[row].tolist() for name, column in columns().items()} for row in range(COUNT)]


class Texts(Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in columns().items()}


@pytest.mark.parametrize("given", [columns, as_dicts, Texts])
def test_a_causal_model_trains_with_its_own_loss(given):
    torch.manual_seed(0)
    module = TinyLlama()
    run = fedtailor.train(
        module,
        given(),
        "uniform-3",
        rounds=2,
        training={"lr": 0.5},
        model={"heads": "dimension"},
        progress=False,
    )
    assert run.model.learning_task.name == "causal"
    assert len(run.tiers) == 3
    assert all({"loss", "accuracy", "top-5 accuracy"} <= set(scores) for scores in run.tiers.values())
    small = run.submodel(Budget(width=1 / 3))
    assert type(small) is TinyLlama
    assert small.attention.head_dim < module.attention.head_dim
    output = small(**{name: column[:2] for name, column in columns().items()})
    assert output["logits"].shape == (2, TIME, WORDS)
    assert output["loss"].isfinite()


def test_what_is_reported_is_the_own_loss_of_the_module():
    torch.manual_seed(0)
    run = fedtailor.train(TinyLlama(), columns(), "uniform-3", rounds=1, progress=False)
    whole = run.submodel(1.0)
    with torch.no_grad():
        own = whole(**run.data.test.take(torch.arange(len(run.data.test))))["loss"]
    assert run.tiers["1"]["loss"] == pytest.approx(float(own), rel=1e-5)


def test_what_is_deployed_hands_out_the_logits():
    torch.manual_seed(0)
    run = fedtailor.train(TinyLlama(), columns(), "uniform-3", rounds=1, progress=False)
    network = network_for(run, "third", Budget(width=1 / 3))
    answer = network.module(**network.example.kwargs)
    assert isinstance(answer, Tensor)
    assert answer.shape[1:] == (TIME, WORDS)


def test_an_unknown_word_about_the_model_is_refused():
    with pytest.raises(FedtailorError, match=r"unknown model 'head'.*heads"):
        fedtailor.train(TinyLlama(), columns(), rounds=1, model={"head": "count"}, progress=False)
    with pytest.raises(FedtailorError, match="heads"):
        fedtailor.train(TinyLlama(), columns(), rounds=1, model={"heads": "all"}, progress=False)
