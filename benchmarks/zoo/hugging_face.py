"""Models of the transformers library, built from configurations with random weights: nothing is downloaded.

Small ones have every kind of layer of the real model, in small widths. All are called as model(**batch) and compute their own
loss, unless their docstring says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.case import PADDING, VOCABULARY, ZooCase, causal_text, images, keyword_case, text

TOKENS = frozenset({1})
"""The dimension of token sequences that varies from batch to batch."""

_SMALL_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_REDUCED_DECODER = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1_376,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1_024,
    "pad_token_id": 0,
}


def _decoder(model: Callable[[Any], nn.Module], configuration: Callable[..., Any], full: bool, **settings: Any) -> ZooCase:
    shape = _REDUCED_DECODER if full else _SMALL_DECODER
    config = configuration(**shape, **settings)
    batch = causal_text(2, 128, 32_000) if full else causal_text(4, 12)
    return keyword_case(model(config), batch, varying=TOKENS)


def resnet50(*, full: bool) -> ZooCase:
    """Return ResNet-50 (the library's default configuration); small: the same layers with an eighth of the widths."""
    from transformers import ResNetConfig, ResNetForImageClassification

    widths = {} if full else {"embedding_size": 8, "hidden_sizes": [32, 64, 128, 256]}
    x, y = images(4, 224, 1000) if full else images(4, 64, 10)
    model = ResNetForImageClassification(ResNetConfig(num_labels=1000 if full else 10, **widths))
    return keyword_case(model, {"pixel_values": x, "labels": y})


def vit(*, full: bool) -> ZooCase:
    """Return a vision transformer; full: ViT-base."""
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = (
        {"num_labels": 1000}
        if full
        else {
            "num_labels": 10,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "image_size": 32,
            "patch_size": 8,
        }
    )
    config = ViTConfig(hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1, **shape)
    x, y = images(2, 224, 1000) if full else images(4, 32, 10)
    return keyword_case(ViTForImageClassification(config), {"pixel_values": x, "labels": y})


def bert(*, full: bool) -> ZooCase:
    """Return BERT for pre-training: masked tokens and the next sentence; full: BERT-base."""
    from transformers import BertConfig, BertForPreTraining

    vocabulary = 30_522 if full else VOCABULARY
    shape = {} if full else {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    config = BertConfig(vocab_size=vocabulary, **shape)
    samples, length = (2, 128) if full else (4, 12)
    batch = text(samples, length, vocabulary)
    masked = (torch.rand(samples, length) < 0.3) & (batch["attention_mask"] == 1)
    masked[:, 0] = True
    segments = (torch.arange(length) >= length // 2).long().repeat(samples, 1)
    batch["token_type_ids"] = segments
    batch["labels"] = batch["input_ids"].masked_fill(~masked, PADDING)
    batch["input_ids"] = batch["input_ids"].masked_fill(masked, 2)
    batch["next_sentence_label"] = torch.randint(2, (samples,))
    return keyword_case(BertForPreTraining(config), batch, varying=TOKENS)


def gpt2(*, full: bool) -> ZooCase:
    """Return GPT-2; full: GPT-2 small. Its head is tied to the embedding."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {} if full else {"vocab_size": VOCABULARY, "n_positions": 64, "n_embd": 32, "n_layer": 3, "n_head": 4}
    batch = causal_text(2, 128, 50_257) if full else causal_text(4, 12)
    return keyword_case(GPT2LMHeadModel(GPT2Config(**shape)), batch, varying=TOKENS)


def llama(*, full: bool) -> ZooCase:
    """Return a Llama decoder with grouped-query attention and attention dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return _decoder(LlamaForCausalLM, LlamaConfig, full, attention_dropout=0.1)


def qwen(*, full: bool) -> ZooCase:
    """Return a Qwen3 decoder: grouped-query attention, normed queries and keys, tied embeddings."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _decoder(Qwen3ForCausalLM, Qwen3Config, full, head_dim=64 if full else 8, tie_word_embeddings=True, attention_dropout=0.1)


def bf16_llama(*, full: bool) -> ZooCase:
    """Return a Llama decoder whose parameters are bfloat16."""
    case = llama(full=full)
    case.model.to(torch.bfloat16)
    return case


def t5(*, full: bool) -> ZooCase:
    """Return T5, an encoder and a decoder with one embedding; full: T5-small."""
    from transformers import T5Config, T5ForConditionalGeneration

    small = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    config = T5Config(**({} if full else small), decoder_start_token_id=0, pad_token_id=0)
    vocabulary = config.vocab_size
    samples, length = (2, 128) if full else (4, 12)
    batch = text(samples, length, vocabulary)
    targets = text(samples, length - 2, vocabulary)
    batch["labels"] = targets["input_ids"].masked_fill(targets["attention_mask"] == 0, PADDING)
    return keyword_case(T5ForConditionalGeneration(config), batch, varying=TOKENS)


def mixtral(*, full: bool) -> ZooCase:
    """Return a Mixtral decoder, each token to two of four experts, with its balancing loss.

    Its experts are those called "batched_mm": their sizes do not depend on the routing.
    """
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "output_router_logits": True}
    case = _decoder(MixtralForCausalLM, MixtralConfig, full, attention_dropout=0.1, **experts)
    case.model.set_experts_implementation("batched_mm")
    return case


class Adapted(nn.Module):
    """A frozen linear layer and a trainable low-rank one beside it (LoRA, arXiv 2106.09685): (..., in) -> (..., out)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)
        self.first = nn.Linear(base.in_features, rank, bias=False)
        self.second = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.second(self.first(self.dropout(x)))


def lora_llama(*, full: bool) -> ZooCase:
    """Return a frozen Llama decoder with adapters on queries and values, written here."""
    case = llama(full=full)
    case.model.requires_grad_(False)
    for layer in case.model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj, 4)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj, 4)
    return case


def peft_llama(*, full: bool) -> ZooCase:
    """Return a Llama decoder adapted by the peft library."""
    from peft import LoraConfig, get_peft_model

    case = llama(full=full)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(case.model, config)
    return ZooCase(model=adapted, loss=case.loss, inputs=case.inputs, layout=case.layout, dynamic=case.dynamic)
