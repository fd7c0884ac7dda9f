"""All models of the zoo by name."""

from __future__ import annotations

from typing import Protocol

import torch

from benchmarks.zoo import hugging_face, inception, sequences, vision
from benchmarks.zoo.case import ZooCase

DATA_SEED = 0


class Builder(Protocol):
    """Makes a model with a batch: the published size, or one of seconds."""

    def __call__(self, *, full: bool) -> ZooCase: ...


ZOO: dict[str, Builder] = {
    "cnn": vision.dropout_net,
    "resnet-50": hugging_face.resnet50,
    "inception-v3": inception.inception,
    "u-net": vision.unet,
    "vit": hugging_face.vit,
    "bert": hugging_face.bert,
    "gpt-2": hugging_face.gpt2,
    "llama": hugging_face.llama,
    "qwen3": hugging_face.qwen,
    "llama-bf16": hugging_face.bf16_llama,
    "llama-lora": hugging_face.lora_llama,
    "llama-peft": hugging_face.peft_llama,
    "t5": hugging_face.t5,
    "mixtral": hugging_face.mixtral,
    "dense-mixture": sequences.dense_mixture,
    "lstm": sequences.lstm,
    "two-towers": sequences.two_towers,
    "autoencoder": sequences.autoencoder,
}
"""docs/models.md has a row for each."""


def build(name: str, *, full: bool) -> ZooCase:
    """Return a model of the zoo with its data, the same every time."""
    torch.manual_seed(DATA_SEED)
    return ZOO[name](full=full)
