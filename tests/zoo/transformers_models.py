"""Models of Hugging Face transformers at tiny configurations: classifiers, causal models, vision, audio, and towers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fedtailor.data.batches import Batch
from zoo.entries import CLASSES, EXAMPLES, Entry, declare_operators

WORDS, LENGTH = 64, 7
TEXT: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": WORDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_kv": 8, "d_ff": 128, "num_layers": 2, "num_heads": 4}
VISION: dict[str, Any] = {
    "image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48,
}  # fmt: skip
# What comes out of a tower does not shrink: its embeddings are as small beside its layers as they are in large towers.
TOWER = {"image_size": 16, "patch_size": 4, "intermediate_size": 128}
TEXT_TOWER = {"intermediate_size": 128, "num_hidden_layers": 3, "bos_token_id": 1, "eos_token_id": 2}
STAGES: dict[str, Any] = {"depths": [1, 1], "hidden_sizes": [16, 32], "num_stages": 2}


def _tokens() -> Batch:
    return {
        "input_ids": torch.randint(3, WORDS, (EXAMPLES, LENGTH)),
        "attention_mask": torch.ones(EXAMPLES, LENGTH, dtype=torch.long),
        "labels": torch.arange(EXAMPLES),
    }


def _next_tokens() -> Batch:
    batch = _tokens()
    assert isinstance(batch, dict)
    return {**batch, "labels": batch["input_ids"]}


def _both() -> Batch:
    batch = _tokens()
    assert isinstance(batch, dict)
    return {**batch, "decoder_input_ids": batch["input_ids"], "labels": batch["input_ids"]}


def _pixels(size: int = 32) -> Callable[[], Batch]:
    return lambda: {
        "pixel_values": torch.randn(EXAMPLES, 3, size, size),
        "labels": torch.arange(EXAMPLES),
    }


def _sound() -> Batch:
    return {"input_values": torch.randn(EXAMPLES, 400), "labels": torch.arange(EXAMPLES)}


def _spectrum() -> Batch:
    return {"input_features": torch.randn(EXAMPLES, 8, 32), "labels": torch.arange(EXAMPLES)}


SOUND: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 16,
    "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "classifier_proj_size": 16,
    "apply_spec_augment": False, "layerdrop": 0.0,
}  # fmt: skip
ENCODER_DECODER: dict[str, Any] = {
    "vocab_size": WORDS, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# model class -> configuration class, its settings, the batch
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[], Batch]]] = {
    "BertForSequenceClassification": ("BertConfig", TEXT, _tokens),
    "RobertaForSequenceClassification": ("RobertaConfig", TEXT, _tokens),
    "XLMRobertaForSequenceClassification": ("XLMRobertaConfig", TEXT, _tokens),
    "ElectraForSequenceClassification": ("ElectraConfig", {**TEXT, "embedding_size": 16}, _tokens),
    "DebertaV2ForSequenceClassification": ("DebertaV2Config", {**TEXT, "pooler_hidden_size": 32}, _tokens),
    "DistilBertForSequenceClassification": (
        "DistilBertConfig", {"vocab_size": WORDS, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48}, _tokens,
    ),
    "AlbertForSequenceClassification": ("AlbertConfig", {**TEXT, "embedding_size": 16}, _tokens),
    "MPNetForSequenceClassification": ("MPNetConfig", TEXT, _tokens),
    "ModernBertForSequenceClassification": ("ModernBertConfig", TEXT, _tokens),
    "BertForMaskedLM": ("BertConfig", TEXT, _next_tokens),
    "GPT2ForSequenceClassification": ("GPT2Config", {**GPT2, "pad_token_id": 0}, _tokens),
    "GPT2LMHeadModel": ("GPT2Config", GPT2, _next_tokens),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", TEXT, _next_tokens),
    "OPTForCausalLM": ("OPTConfig", {**TEXT, "ffn_dim": 48, "word_embed_proj_dim": 32}, _next_tokens),
    "BloomForCausalLM": (
        "BloomConfig", {"vocab_size": WORDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, _next_tokens,
    ),
    "LlamaForCausalLM": ("LlamaConfig", GROUPED, _next_tokens),
    "LlamaForSequenceClassification": ("LlamaConfig", GROUPED, _tokens),
    "MistralForCausalLM": ("MistralConfig", GROUPED, _next_tokens),
    "Qwen2ForCausalLM": ("Qwen2Config", GROUPED, _next_tokens),
    "Qwen3ForCausalLM": ("Qwen3Config", GROUPED, _next_tokens),
    "GemmaForCausalLM": ("GemmaConfig", GROUPED, _next_tokens),
    "Gemma2ForCausalLM": ("Gemma2Config", GROUPED, _next_tokens),
    "PhiForCausalLM": ("PhiConfig", TEXT, _next_tokens),
    "Phi3ForCausalLM": ("Phi3Config", GROUPED, _next_tokens),
    "StableLmForCausalLM": ("StableLmConfig", GROUPED, _next_tokens),
    "Starcoder2ForCausalLM": ("Starcoder2Config", GROUPED, _next_tokens),
    "OlmoForCausalLM": ("OlmoConfig", GROUPED, _next_tokens),
    "GraniteForCausalLM": ("GraniteConfig", GROUPED, _next_tokens),
    "CohereForCausalLM": ("CohereConfig", GROUPED, _next_tokens),
    "FalconForCausalLM": ("FalconConfig", {**TEXT, "alibi": False}, _next_tokens),
    "GPTJForCausalLM": ("GPTJConfig", {**GPT2, "rotary_dim": 4}, _next_tokens),
    "T5ForConditionalGeneration": ("T5Config", {**T5, "decoder_start_token_id": 0}, _both),
    "T5EncoderModel": ("T5Config", T5, _tokens),
    "BartForConditionalGeneration": ("BartConfig", ENCODER_DECODER, _both),
    "ViTForImageClassification": ("ViTConfig", VISION, _pixels()),
    "DeiTForImageClassification": ("DeiTConfig", VISION, _pixels()),
    "Dinov2ForImageClassification": ("Dinov2Config", {**VISION, "mlp_ratio": 2}, _pixels()),
    "SwinForImageClassification": (
        "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 1], "num_heads": [2, 4], "window_size": 4},
        _pixels(),
    ),
    "ConvNextForImageClassification": ("ConvNextConfig", STAGES, _pixels()),
    "ConvNextV2ForImageClassification": ("ConvNextV2Config", STAGES, _pixels()),
    "BeitForImageClassification": ("BeitConfig", VISION, _pixels()),
    "ViTMSNForImageClassification": ("ViTMSNConfig", VISION, _pixels()),
    "RegNetForImageClassification": (
        "RegNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "groups_width": 8},
        _pixels(),
    ),
    "MobileNetV2ForImageClassification": ("MobileNetV2Config", {"image_size": 32, "depth_multiplier": 0.25}, _pixels()),
    "PoolFormerForImageClassification": (
        "PoolFormerConfig",
        {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_encoder_blocks": 4},
        _pixels(),
    ),
    "ResNetForImageClassification": (
        "ResNetConfig",
        {"embedding_size": 16, "hidden_sizes": [16, 32], "depths": [1, 1], "layer_type": "basic"},
        _pixels(),
    ),
    "MobileViTForImageClassification": (
        "MobileViTConfig",
        {
            "image_size": 64, "hidden_sizes": [16, 24, 32], "neck_hidden_sizes": [8, 8, 16, 16, 24, 24, 32],
            "num_attention_heads": 2,
        },
        _pixels(64),
    ),
    "CLIPVisionModel": ("CLIPVisionConfig", {**VISION, **TOWER}, _pixels(16)),
    "CLIPTextModel": ("CLIPTextConfig", {**TEXT, **TEXT_TOWER}, _tokens),
    "SiglipVisionModel": ("SiglipVisionConfig", VISION, _pixels()),
    "Wav2Vec2ForSequenceClassification": ("Wav2Vec2Config", SOUND, _sound),
    "HubertForSequenceClassification": ("HubertConfig", SOUND, _sound),
    "WhisperForAudioClassification": (
        "WhisperConfig",
        {**ENCODER_DECODER, "num_mel_bins": 8, "max_source_positions": 16, "classifier_proj_size": 16}, _spectrum,
    ),
    "ASTForAudioClassification": (
        "ASTConfig",
        {key: value for key, value in VISION.items() if key != "image_size"} | {"max_length": 32, "num_mel_bins": 16},
        lambda: {"input_values": torch.randn(EXAMPLES, 32, 16), "labels": torch.arange(EXAMPLES)},
    ),
}  # fmt: skip


def _entry(name: str, kind: str, settings: dict[str, Any], batch: Callable[[], Batch]) -> Entry:
    def build() -> nn.Module:
        declare_operators()  # transformers looks for torchvision
        import transformers

        labels = {"num_labels": CLASSES} if "Classification" in name else {}
        configuration = getattr(transformers, kind)(**settings, **labels, use_cache=False)
        module: nn.Module = getattr(transformers, name)(configuration).eval()
        return module

    return Entry("transformers", name, build, batch, "tiny configuration")


ENTRIES = [_entry(name, *settings) for name, settings in MODELS.items()]
