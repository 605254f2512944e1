"""A small Llama to adapt: built from a configuration, trained for a short while on the roles that no client is."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch.nn import functional as F

from fedtailor.data.formats.lines import read_texts
from fedtailor.data.formats.text import Alphabet
from fedtailor.errors import FedtailorError

CLIENTS = 36  # roles, every fourth of those with enough text
ENOUGH = 5000  # characters of a role
WINDOW, BATCH, STEPS, RATE = 40, 32, 150, 3e-3
SIZES = {
    "vocab_size": 80, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 128,
}  # fmt: skip


def prepare(texts: Path, folder: Path) -> None:
    """The clients' roles as a data set of their own, and a network that has seen the others; once."""
    data, network = folder / "data" / "shakespeare.jsonl", folder / "backbone"
    if data.exists() and (network / "config.json").exists():
        return
    if not texts.exists():
        raise FedtailorError(f"{texts} is not there: expected Shakespeare by role (docs/data.md)")
    roles = read_texts(texts)
    chosen = [role for role, text in roles.items() if len(text) >= ENOUGH][::4][:CLIENTS]
    data.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"user": role, "text": roles[role]}) for role in chosen]
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    train("\n".join(text for role, text in roles.items() if role not in set(chosen)), network)


def train(text: str, folder: Path) -> None:
    """AdamW on random windows of a text; what comes out is a folder as any of transformers'."""
    from transformers import LlamaConfig, LlamaForCausalLM

    generator = torch.Generator().manual_seed(0)
    symbols = torch.as_tensor(Alphabet().indices(text)).long()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = LlamaForCausalLM(LlamaConfig(**SIZES))
    optimiser = torch.optim.AdamW(network.parameters(), lr=RATE)
    for step in range(STEPS):
        starts = torch.randint(len(symbols) - WINDOW - 1, (BATCH, 1), generator=generator)
        windows = symbols[starts + torch.arange(WINDOW + 1)]
        scores = network(input_ids=windows[:, :-1]).logits
        loss = F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 50 == 49:
            print(f"backbone, step {step + 1}: loss {loss.item():.3f}", flush=True)
    network.save_pretrained(folder)
