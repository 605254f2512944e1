"""Adapters of the real peft on models of the real transformers: ranks as elastic axes, runs, collators, folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fedtailor
from fedtailor.elasticity.adapters import factors
from fedtailor.elasticity.cutting.cut import Cut
from fedtailor.elasticity.front_door import elastic
from fedtailor.errors import FedtailorError
from fedtailor.models import build_model

pytestmark = pytest.mark.zoo
peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")

TIERS = [{"name": f"rank {rank}", "width": rank / 8} for rank in (2, 4, 8)]
SYMBOLS, LENGTH, WORDS = 40, 7, 3


def llama(**options: Any) -> nn.Module:
    sizes = {"vocab_size": SYMBOLS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_attention_heads=4, **options))


def bert(kind: str, classes: int = 3) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=SYMBOLS, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_labels=classes, max_position_embeddings=16,
    )  # fmt: skip
    return getattr(transformers, f"BertFor{kind}")(config)


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": SYMBOLS, "n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


class OwnImages(nn.Module):
    """A network of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear = nn.Conv2d(4, 6, 3, padding=1), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).relu().mean((2, 3)))


def tokens(count: int = 4) -> torch.Tensor:
    return torch.randint(1, SYMBOLS, (count, LENGTH), generator=torch.Generator().manual_seed(0))


def lora(network: nn.Module, targets: list[str], **options: Any) -> nn.Module:
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=targets, **options)
    return peft.get_peft_model(network, settings)


def texts(mask: bool = True) -> dict[str, torch.Tensor]:
    ids = tokens()
    there = torch.ones_like(ids)
    there[1, 4:] = 0
    labels = ids.masked_fill(there == 0, -100)
    return {"input_ids": ids, **({"attention_mask": there} if mask else {}), "labels": labels}


CASES: dict[str, Any] = {
    "llama": lambda: (lora(llama(), ["q_proj", "v_proj"]), texts()),
    "llama, dora": lambda: (lora(llama(), ["q_proj", "down_proj"], use_dora=True), texts(False)),
    "llama, embedding": lambda: (lora(llama(), ["embed_tokens", "q_proj"]), texts(False)),
    "llama, rank-stabilised": lambda: (lora(llama(), ["o_proj"], use_rslora=True), texts()),
    "gpt2": lambda: (lora(gpt2(), ["c_attn"], fan_in_fan_out=True), texts()),
    "bert, classifier trained": lambda: (
        lora(bert("SequenceClassification"), ["query", "value"], modules_to_save=["classifier"]),
        {**texts(), "labels": torch.tensor([0, 1, 2, 0])},
    ),
    "convolution of one's own": lambda: (
        lora(OwnImages(), ["conv", "linear"]), (torch.randn(4, 4, 6, 6), torch.tensor([0, 1, 2, 0])),
    ),
}  # fmt: skip
FRIENDS: dict[str, dict[str, Any]] = {
    "AdaLoraConfig": {"init_r": 8, "total_step": 10},
    "LoHaConfig": {"r": 8},
}


@pytest.mark.parametrize("case", CASES)
def test_any_backbone_becomes_elastic_by_its_ranks(case):
    module, batch = CASES[case]()
    model = elastic(module, batch)
    assert set(model.groups.counts.values()) == {8}
    trained = {name for name, value in module.named_parameters() if value.requires_grad}
    assert set(model.weights()) == trained, "only what is trained travels"
    assert len(factors(model)) == len(model.groups.counts)
    full, quarter = model.cost(Cut.everything()), model.submodel(0.25)
    ours = sum(value.nbytes for name, value in model.weights().items())
    assert full.bytes == ours
    adapters = [
        value for name, value in quarter.named_parameters() if "lora_" in name and "magnitude" not in name
    ]
    assert {min(value.shape[:2]) for value in adapters if value.dim() >= 2} == {2}


@pytest.mark.parametrize("kind", FRIENDS)
def test_friends_of_lora_have_ranks_too(kind):
    torch.manual_seed(1)
    settings = getattr(peft, kind)(target_modules=["q_proj", "v_proj"], **FRIENDS[kind])
    model = elastic(peft.get_peft_model(llama(), settings), texts(False))
    assert set(model.groups.counts.values()) == {8}


def tokeniser() -> Any:
    """Of numbers in words, made here: nothing is downloaded."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1, **{str(number): number for number in range(2, SYMBOLS)}}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, pad_token="[PAD]", unk_token="[UNK]")


def collated(count: int = 30) -> Any:
    """Texts of different lengths, padded, with labels that are the text and -100 where there is none."""
    tokenise = tokeniser()
    texts = [" ".join(str(2 + (n * 7 + place) % 38) for place in range(3 + n % 5)) for n in range(count)]
    collate = transformers.DataCollatorForLanguageModeling(tokenise, mlm=False)
    return collate([tokenise(text, return_token_type_ids=False) for text in texts])


def test_a_batch_as_the_collator_makes_it_trains_by_the_models_own_loss(tmp_path):
    batch = collated()
    assert isinstance(batch, transformers.BatchEncoding)
    assert bool((batch["labels"] == -100).any())
    run = fedtailor.train(
        lora(llama(), ["q_proj", "v_proj", "up_proj"]), {"dataset": batch, "clients": 5, "min_examples": 2}, TIERS,
        "hetlora", rounds=3, clients_per_round=4, training={"lr": 0.5, "batch_size": 4, "epochs": 3},
        metrics=["accuracy"], engine={"workers": 0}, folder=tmp_path / "run",
    )  # fmt: skip
    assert run.model.learning_task.name == "causal"
    before = run.model.module(**batch).loss.item()
    assert run.tiers["rank 8"]["loss"] < before
    spent = {tier: each for record in run.history for tier, each in record.by_tier.items()}
    small, large = (spent[tier].bytes_down // spent[tier].asked for tier in ("rank 2", "rank 8"))
    assert 4 * small == large == run.model.cost(Cut.everything()).bytes
    device = run.submodel(0.25)
    assert device(input_ids=batch["input_ids"]).logits.shape[-1] == SYMBOLS
    again = fedtailor.Run.load(
        tmp_path / "run", module=lora(llama(), ["q_proj", "v_proj", "up_proj"]), data=run.setup.data
    )
    assert torch.equal(
        again.submodel(0.25)(input_ids=batch["input_ids"]).logits, device(input_ids=batch["input_ids"]).logits
    )


def test_a_list_of_dicts_with_labels_of_every_word_ignores_those_without(tmp_path):
    examples = [
        {"input_ids": [1 + (n + p) % 9 for p in range(6)], "attention_mask": [1] * 6,
         "labels": [(n + p) % 3 if p < 4 else -100 for p in range(6)]}
        for n in range(30)
    ]  # fmt: skip
    run = fedtailor.train(
        lora(bert("TokenClassification"), ["query", "value"], modules_to_save=["classifier"]),
        {"dataset": examples, "clients": 5, "min_examples": 2}, TIERS, "flexlora", rounds=4, clients_per_round=5,
        training={"lr": 0.5, "batch_size": 4, "epochs": 4}, task="token classification", metrics=["F1", "accuracy"],
        engine={"workers": 0},
    )  # fmt: skip
    assert run.tiers["rank 8"]["macro F1"] > 0.5
    assert [record.cohort.refused for record in run.history] == [{}] * 4


def test_a_folder_is_read_offline_and_what_is_wrong_is_said(tmp_path):
    llama().save_pretrained(tmp_path / "folder")
    settings = {"input_shape": (LENGTH,), "num_classes": SYMBOLS, "backbone": str(tmp_path / "folder")}
    module = build_model("adapted", **settings, rank=4, targets=["q_proj"])
    frozen = {name: value for name, value in module.named_parameters() if not value.requires_grad}
    assert all("lora" not in name for name in frozen)
    theirs = llama().model.embed_tokens.weight
    assert torch.equal(next(value for name, value in frozen.items() if "embed_tokens" in name), theirs)
    with pytest.raises(FedtailorError, match=r"model.targets = \['no_such'\]"):
        build_model("adapted", **settings, targets=["no_such"])
    with pytest.raises(FedtailorError, match="expected a folder with config.json and model.safetensors"):
        build_model("adapted", **{**settings, "backbone": str(tmp_path)}, targets=["q_proj"])
    (tmp_path / "folder" / "model.safetensors").unlink()
    with pytest.raises(FedtailorError, match="cannot be read as causal-lm"):
        build_model("adapted", **settings, targets=["q_proj"])


def test_a_network_by_name_is_adapted_from_a_file_of_its_weights(tmp_path):
    from safetensors.torch import save_file

    plain = build_model("mlp", input_shape=(1, 4, 4), num_classes=3, hidden=[8])
    save_file(plain.state_dict(), tmp_path / "mlp.safetensors")
    linear = [name for name, layer in plain.named_modules() if isinstance(layer, nn.Linear)]
    module = build_model(
        "adapted", input_shape=(1, 4, 4), num_classes=3, backbone="mlp", start=str(tmp_path / "mlp.safetensors"),
        targets=linear, rank=4,
        options={"hidden": [8]},
    )  # fmt: skip
    model = elastic(module, (torch.randn(4, 1, 4, 4), torch.tensor([0, 1, 2, 0])))
    assert set(model.groups.counts.values()) == {4}


def test_small_ranks_are_saved_as_peft_wants_them(tmp_path: Path):
    model = elastic(lora(llama(), ["q_proj"]), texts())
    small = fedtailor.as_peft(model.submodel(0.25))
    small.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(llama(), tmp_path / "adapter")
    ids = tokens()
    torch.testing.assert_close(again(input_ids=ids).logits, small(input_ids=ids).logits)
    assert small.peft_config["default"].r == 2
    assert small.peft_config["default"].lora_alpha == 4


def test_the_page_about_adapters_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    import re

    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL):
        exec(compile(block, "docs/adapters.md", "exec"), names)
    perplexity = [names["run"].tiers[tier]["perplexity"] for tier in ("phone", "tablet", "laptop")]
    assert max(perplexity) < 29, "thirty symbols of which nothing is known have 30"
    assert names["phone"].peft_config["default"].r == 2
    assert (tmp_path / "phone" / "adapter_model.safetensors").is_file()
