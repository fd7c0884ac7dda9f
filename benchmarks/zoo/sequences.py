"""Models of sequences, and models with unusual calls and results."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.zoo.case import VOCABULARY, ZooCase
from roost.capture.tracing import CallLayout

CHOSEN_EXPERTS = 2


class LanguageLSTM(nn.Module):
    """Two LSTM layers with dropout between them: (N, T) int64 -> (N, T, vocabulary)."""

    def __init__(self, vocabulary: int, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width, padding_idx=0)
        self.lstm = nn.LSTM(width, width, num_layers=2, dropout=0.3, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.dropout(self.tokens(tokens)))
        return self.head(self.dropout(states))


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean cross-entropy of (N, T, V) logits over all tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def lstm(*, full: bool) -> ZooCase:
    """Return a recurrent language model."""
    width, length, samples, vocabulary = (512, 64, 8, 10_000) if full else (16, 10, 6, VOCABULARY)
    ids = torch.randint(vocabulary, (samples, length + 1))
    labels = ids[:, 1:].contiguous()
    return ZooCase(model=LanguageLSTM(vocabulary, width), loss=token_loss, inputs=(ids[:, :-1].contiguous(),), labels=(labels,))


class DenseMixture(nn.Module):
    """Experts of which each token uses the best few; all compute every token, so that no size depends on the routing.

    (N, T, D) -> (N, T, D) and the balancing loss of arXiv 2101.03961, a scalar.
    """

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts, bias=False)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width**0.5)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width**0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.router(x).softmax(dim=-1)
        best, chosen = shares.topk(CHOSEN_EXPERTS, dim=-1)
        used = functional.one_hot(chosen, shares.shape[-1]).to(x.dtype)
        weights = torch.einsum("ntk,ntke->nte", best / best.sum(dim=-1, keepdim=True), used)
        hidden = functional.silu(torch.einsum("ntd,edh->enth", x, self.up))
        mixed = torch.einsum("enth,ehd,nte->ntd", hidden, self.down, weights)
        balance = (used.sum(dim=2).mean(dim=(0, 1)) * shares.mean(dim=(0, 1))).sum() * shares.shape[-1]
        return mixed, balance


class MixtureLayer(nn.Module):
    """Causal attention and a mixture of experts: (N, T, D) -> (N, T, D) and the balancing loss."""

    def __init__(self, width: int, heads: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = nn.MultiheadAttention(width, heads, dropout=0.1, batch_first=True)
        self.mixture = DenseMixture(width, experts)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        length = x.shape[1]
        later = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        y = self.norm1(x)
        x = x + self.attention(y, y, y, attn_mask=later, need_weights=False)[0]
        mixed, balance = self.mixture(self.norm2(x))
        return x + mixed, balance


class MixtureDecoder(nn.Module):
    """A decoder with mixtures of experts: (N, T) int64 -> (N, T, vocabulary) and the sum of the balancing losses."""

    def __init__(self, vocabulary: int, width: int, layers: int, experts: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(MixtureLayer(width, 4, experts) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        x, total = self.tokens(tokens), torch.zeros((), device=tokens.device)
        for layer in self.layers:
            x, balance = layer(x)
            total = total + balance
        return self.head(x), total


def balanced_loss(output: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """Return the cross-entropy of the tokens and a hundredth of the balancing loss."""
    return token_loss(output[0], labels) + 0.01 * output[1]


def dense_mixture(*, full: bool) -> ZooCase:
    """Return a mixture-of-experts decoder with dense dispatch and a tied embedding, which returns a tuple."""
    vocabulary, width, layers, length = (8_000, 256, 4, 64) if full else (VOCABULARY, 16, 2, 8)
    ids = torch.randint(vocabulary, (4, length + 1))
    return ZooCase(
        model=MixtureDecoder(vocabulary, width, layers, experts=4),
        loss=balanced_loss,
        inputs=(ids[:, :-1].contiguous(),),
        labels=(ids[:, 1:].contiguous(),),
        dynamic=(frozenset({1}), frozenset({1})),
    )


class TwoTowers(nn.Module):
    """A picture and a text in one space (arXiv 2103.00020): keyword-only inputs, a dict of results."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.picture = nn.Sequential(nn.Conv2d(3, width, 4, stride=4), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.text = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Dropout(0.1))
        self.temperature = nn.Parameter(torch.tensor(1.0))

    def forward(self, *, image: Tensor, text: Tensor, weight: Tensor) -> dict[str, Tensor | tuple[Tensor, ...]]:
        picture = functional.normalize(self.picture(image), dim=-1)
        words = functional.normalize(self.text(self.tokens(text)).mean(dim=1), dim=-1)
        return {"logits": picture @ words.T * self.temperature.exp(), "both": (picture, words), "weight": weight}


def contrastive_loss(output: dict[str, Tensor]) -> Tensor:
    """Return the symmetric contrastive loss, weighted by sample."""
    logits, weight = output["logits"], output["weight"]
    target = torch.arange(logits.shape[0], device=logits.device)
    there = functional.cross_entropy(logits, target, reduction="none")
    back = functional.cross_entropy(logits.T, target, reduction="none")
    return ((there + back) / 2 * weight).mean()


def two_towers(*, full: bool) -> ZooCase:
    """Return a model with keyword-only inputs that returns a dict with a tuple inside."""
    width, samples, side = (512, 32, 64) if full else (16, 6, 8)
    return ZooCase(
        model=TwoTowers(width),
        loss=contrastive_loss,
        inputs=(torch.randn(samples, 3, side, side), torch.randint(VOCABULARY, (samples, 9)), torch.rand(samples)),
        layout=CallLayout(positional=0, keywords=("image", "text", "weight")),
    )


class VariationalAutoencoder(nn.Module):
    """Encoder, a draw from its normal distribution, decoder (arXiv 1312.6114): returns a tuple of three."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, width), nn.ELU(inplace=True), nn.Linear(width, 2 * width))
        self.decoder = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, features))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        return self.decoder(drawn), mean, log_variance


def evidence_loss(output: tuple[Tensor, Tensor, Tensor], target: Tensor) -> Tensor:
    """Return the negative evidence lower bound per sample and feature."""
    decoded, mean, log_variance = output
    divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
    return functional.mse_loss(decoded, target) + divergence


def autoencoder(*, full: bool) -> ZooCase:
    """Return a variational autoencoder, which draws random numbers in evaluation as well."""
    features, width, samples = (784, 400, 64) if full else (12, 8, 8)
    x = torch.randn(samples, features)
    return ZooCase(model=VariationalAutoencoder(features, width), loss=evidence_loss, inputs=(x,), labels=(x.clone(),))
