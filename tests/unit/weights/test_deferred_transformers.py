from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from weights_kit import assert_same_bits, deferred

transformers = pytest.importorskip("transformers")

SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
DECODER = {**SMALL, "num_key_value_heads": 2, "vocab_size": 101, "bos_token_id": 0, "eos_token_id": 1}


def build(kind: str, config: str, **fields: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(transformers, kind)(getattr(transformers, config)(**fields))


MODELS = {
    "llama": build("LlamaForCausalLM", "LlamaConfig", **DECODER),
    "qwen2_tied": build("Qwen2ForCausalLM", "Qwen2Config", **DECODER, tie_word_embeddings=True),
    "mixtral": build("MixtralForCausalLM", "MixtralConfig", **DECODER, num_local_experts=4),
    "gpt2": build("GPT2LMHeadModel", "GPT2Config", n_embd=64, n_layer=2, n_head=4, vocab_size=101, bos_token_id=0, eos_token_id=1),
    "bert": build("BertForPreTraining", "BertConfig", **SMALL, vocab_size=101),
    "vit": build("ViTForImageClassification", "ViTConfig", **SMALL, image_size=32, patch_size=8),
    "t5": build("T5ForConditionalGeneration", "T5Config", d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, vocab_size=101),
    "resnet": build("ResNetForImageClassification", "ResNetConfig", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1]),
    "llama_converted": lambda: build("LlamaForCausalLM", "LlamaConfig", **DECODER)().to(torch.bfloat16),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_transformers_model_has_the_bits_of_an_eager_build(name: str) -> None:
    assert_same_bits(MODELS[name], seed=3, order=1)


def test_tied_weights_stay_tied() -> None:
    model = deferred(MODELS["qwen2_tied"])
    assert model.lm_head.weight is model.model.embed_tokens.weight
