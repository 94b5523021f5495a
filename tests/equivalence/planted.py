"""Small models, each with one planted reason why a split is not the whole batch."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import accumulus as acc
from accumulus.equivalence import Kind

from . import layers as L


@dataclass(frozen=True)
class Planted:
    name: str
    kind: Kind
    where: str  # part of what the report must name
    model: object
    loss_fn: object
    batch: object
    options: dict = field(default_factory=dict)
    says: str = ""  # part of evidence or remedy


def two_towers(model, batch):
    logits = F.normalize(model(batch["x"]), dim=-1) @ F.normalize(model(batch["z"]), dim=-1).T / 0.1
    return F.cross_entropy(logits, torch.arange(len(logits)))


def symmetric_pairs(model, batch):
    logits = model(batch["x"]) @ model(batch["z"]).T
    labels = torch.arange(len(logits))
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def ranking(model, batch):
    scores, wanted = model(batch["x"])[:, 0], batch["r"]
    better = (wanted[:, None] > wanted[None]).to(scores.dtype)
    return (F.softplus(scores[None] - scores[:, None]) * better).sum() / better.sum()


def margin_ranking(model, batch):
    scores, wanted = model(batch["x"])[:, 0], batch["r"]
    better = (wanted[:, None] > wanted[None]).to(scores.dtype)
    return (F.relu(1.0 + scores[None] - scores[:, None]) * better).mean()


def hardest_triplet(model, batch):
    z, y = model(batch["x"]), batch["y"]
    distance = (z[:, None] - z[None]).square().sum(-1)
    same = y[:, None] == y[None]
    farthest = torch.where(same, distance, 0).amax(1)
    nearest = torch.where(same, torch.inf, distance).amin(1)
    return F.relu(farthest - nearest.clamp(max=1e6) + 1.0).mean()


def dice(model, batch):
    p, t = model(batch["x"]).sigmoid(), batch["t"]
    return 1 - 2 * (p * t).sum() / (p.sum() + t.sum())


def f_score(model, batch):
    p = model(batch["x"]).softmax(-1)
    t = F.one_hot(batch["y"], 3).to(p.dtype)
    return 1 - (2 * (p * t).sum(0) / (p.sum(0) + t.sum(0) + 1e-3)).mean()


def advantages(model, batch):
    reward = batch["r"]
    advantage = (reward - reward.mean()) / (reward.std(unbiased=False) + 1e-6)
    taken = model(batch["x"]).log_softmax(-1).gather(1, batch["y"][:, None])[:, 0]
    return acc.Loss(-(advantage * taken).sum(), len(reward))


def class_balance(model, batch):
    counts = torch.bincount(batch["y"], minlength=3).clamp(min=1)
    weight = len(batch["y"]) / counts
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return acc.Loss((each * weight[batch["y"]].to(each.dtype)).sum(), len(each))


def whitened(model, batch):
    z = model(batch["x"])
    z = z - z.mean(0)
    return acc.Loss((z.std(0, unbiased=False) - 1).square().sum() * len(z), len(z))


class GhostNorm(nn.Module):
    """Normalises over the batch without being called a BatchNorm, and keeps no statistics."""

    def forward(self, x):
        if not self.training:
            return x
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3)


class Neighbour(nn.Module):
    """Mixes each sample with the next one, in evaluation mode too."""

    def forward(self, x):
        return x + 0.5 * x.roll(1, 0)


class Inside(nn.Module):
    """Mixes samples in its own forward, between two ordinary layers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        return self.second(x - x.mean(0, keepdim=True))


class Counter(nn.Module):
    """Scales by how often it was called, as warm-ups inside of forward do."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return x * min(1.0, 0.1 * self.calls)


class Memory(nn.Module):
    """Adds the mean of what it saw last, kept in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("last", torch.zeros(8))

    def forward(self, x):
        out = x + self.last
        self.last.copy_(0.9 * self.last + x.detach()[0] * 0.1)
        return out


class Cached(nn.Module):
    """Keeps the keys of earlier forwards, as a cache that nobody empties."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def forward(self, x):
        self.seen.append(x.shape[1])
        return x * (1 + 0.01 * sum(self.seen))


class ForwardCounts(nn.Module):
    """Counts forwards in a saved buffer that nothing else depends on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.num_forwards += 1
        return x


class Clock(nn.Module):
    """As a kernel whose sums come out in another order each time, only worse."""

    def forward(self, x):
        return x * (1 + (time.perf_counter_ns() % 997) / 997)


class Unseeded(nn.Module):
    def forward(self, x):
        return x + torch.from_numpy(np.random.default_rng().normal(size=x.shape[1:])).to(x)


class Pooled(nn.Module):
    """Mean over the padded length."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(L.VOCABULARY, 8, padding_idx=0), nn.Linear(8, 3)

    def forward(self, batch):
        return self.head(self.embedding(batch["input_ids"]).mean(1))


class FromTheEnd(nn.Module):
    """Counts positions from the end of the padded row."""

    def __init__(self):
        super().__init__()
        self.inner = L.Transformer(num_blocks=1)
        self.position = Positions()

    def forward(self, batch):
        x = self.position(self.inner.embedding(batch["input_ids"]))
        x = self.inner.blocks[0](x, batch["attention_mask"] == 0)
        return self.inner.head(x)


class Positions(nn.Module):
    def forward(self, x):
        return x + L.sinusoid(x.shape[1], x.shape[2]).flip(0).to(x)


class SequenceNorm(nn.Module):
    """Normalises over the whole padded sequence."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(L.VOCABULARY, 8), nn.Linear(8, L.VOCABULARY)
        self.norm = nn.InstanceNorm1d(8)

    def forward(self, batch):
        return self.head(self.norm(self.embedding(batch["input_ids"]).transpose(1, 2)).transpose(1, 2))


class MoE(nn.Module):
    def __init__(self, capacity=None):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.moe, self.head = nn.Linear(4, 8), L.Experts(capacity=capacity), nn.Linear(8, 3)

    def forward(self, x):
        h, rates = self.moe(self.stem(x))
        return self.head(h), rates


class HiddenBalance(nn.Module):
    """Keeps its balance loss as an attribute, as many mixtures of experts do."""

    def __init__(self):
        super().__init__()
        self.inner = MoE()
        self.balance = None

    def forward(self, x):
        logits, rates = self.inner(x)
        self.balance = balance_of(rates)
        return logits


def balance_of(rates):
    chosen = F.one_hot(rates.argmax(-1), rates.shape[-1]).to(rates.dtype).mean(0)
    return rates.shape[-1] * (chosen * rates.mean(0)).sum()


def with_balance(model, batch):
    logits, rates = model(batch["x"])
    return {"main": F.cross_entropy(logits, batch["y"]), "balance": 0.1 * balance_of(rates)}


def with_hidden_balance(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"]) + 0.1 * model.balance


def first_of_two(model, batch):
    return F.cross_entropy(model(batch["x"])[0], batch["y"])


def masked_bare_mean(model, batch):
    each = F.cross_entropy(model(batch).transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none")
    mask = batch["attention_mask"]
    return (each * mask).sum() / mask.sum()


def shifted_mean(model, batch):
    logits, labels = model(batch)[:, :-1], batch["labels"][:, 1:]
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)


def weighted_mean(model, batch):
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["r"]).sum() / batch["r"].sum()


def sum_as_scalar(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="sum")


def mean_as_sum(model, batch):
    return acc.Loss(F.cross_entropy(model(batch["x"]), batch["y"]), len(batch["y"]))


def padded_mean(model, batch):
    each = F.cross_entropy(model(batch).transpose(1, 2), batch["labels"], ignore_index=-100, reduction="none")
    return each.mean()  # over padding too, and padding differs


def moving_baseline():
    seen = {"mean": 0.0}

    def loss_fn(model, batch):
        value = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        baseline = seen["mean"]
        seen["mean"] = 0.5 * baseline + 0.5 * float(value.detach().mean())
        return (value * (1 + baseline)).mean()

    return loss_fn


def two_terms(model, batch):
    z = model(batch["x"])
    return {"labels": F.cross_entropy(z, batch["y"]), "pairs": two_towers(model, batch)}


def centred_input(model, batch):
    x = batch["x"]
    return F.cross_entropy(model(x - x.mean(0)), batch["y"])


def by_largest(model, batch):
    """Weights scaled by the largest of the batch: right in direction, each micro-batch by a factor of its own."""
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return (each * batch["r"] / batch["r"].max()).mean()


def hard_examples(model, batch):
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return each.topk(max(1, len(each) // 2)).values.mean()


def mean_prediction(model, batch):
    mean = model(batch["x"]).softmax(1).mean(0)
    return acc.Loss((mean * mean.log()).sum() * len(batch["x"]), len(batch["x"]))


def penalty(model, batch):
    """A gradient taken in the loss function itself, through a layer that mixes."""
    x = batch["x"].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (gradient.norm(dim=1) - 1).square().mean()


def following_teacher():
    """A teacher that follows the student, moved in every forward."""
    torch.manual_seed(1)
    teacher = nn.Linear(4, 3).requires_grad_(False)

    def loss_fn(model, batch):
        with torch.no_grad():
            teacher.weight.add_(0.01 * next(model.parameters()).mean())
        return F.mse_loss(model(batch["x"]), teacher(batch["z"]))

    return loss_fn


def uneven_labels():
    batch = L.vectors()
    return batch | {"y": torch.where(torch.arange(9) < 4, -100, batch["y"])}


def spectral():
    model = L.mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    return model


def planted() -> list[Planted]:
    x, text = L.vectors(12), L.tokens((2, 7, 3, 5, 4, 6, 3))
    mixing, weight, padding = Kind.MIXING, Kind.WEIGHT, Kind.PADDING
    lists = L.sentences()
    collate = {"collate": L.pad}
    return [
        Planted("batchnorm", mixing, "1 (BatchNorm1d)", L.mlp(nn.BatchNorm1d(8)), L.classify, x, says="GroupNorm"),
        Planted("resnet", mixing, "norm2 (BatchNorm2d)", L.Residual(nn.BatchNorm2d), L.classify, L.pictures()),
        Planted("ghost norm", mixing, "1 (GhostNorm)", L.mlp(GhostNorm()), L.classify, x),
        Planted("neighbour", mixing, "1 (Neighbour)", L.mlp(Neighbour()), L.classify, x, says="evaluation mode too"),
        Planted("inside forward", mixing, "the model (Inside)", Inside(), L.classify, x),
        Planted(
            "batch first",
            mixing,
            "blocks.0.attention (MultiheadAttention)",
            L.Transformer(num_blocks=1, batch_first=False, masks=False),
            lambda model, batch: acc.Loss(L.token_sum(model, batch), (batch["labels"] != -100).sum()),
            L.tokens((7,) * 7),
        ),
        Planted("expert capacity", mixing, "moe (Experts)", MoE(capacity=1), first_of_two, x),
        Planted("centred input", mixing, "the loss function", L.mlp(), centred_input, x),
        Planted(
            "ignored labels", weight, "the loss", L.mlp(), L.classify, uneven_labels(), says='["y"] != -100).sum()'
        ),
        Planted(
            "token mean", weight, "the loss", L.Transformer(), L.token_mean, text, says='["labels"] != -100).sum()'
        ),
        Planted("mask mean", weight, "the loss", L.Transformer(), masked_bare_mean, text, says="Loss.mean(loss, "),
        Planted("shifted mean", weight, "the loss", L.Transformer(), shifted_mean, text, says='["labels"][:, 1:]'),
        Planted("sample weights", weight, "the loss", L.mlp(), weighted_mean, x, says='["r"].sum()'),
        Planted("sum as scalar", weight, "the loss", L.mlp(), sum_as_scalar, x, says="acc.Loss(loss, weight)"),
        Planted("mean as sum", weight, "the loss", L.mlp(), mean_as_sum, x, says="Loss.mean(loss, "),
        Planted("collated mean", weight, "the loss", L.Transformer(), L.token_mean, lists, collate),
        Planted("in-batch negatives", Kind.COMPARISON, "the loss", L.mlp(), two_towers, x, says="gradient caching"),
        Planted("symmetric pairs", Kind.COMPARISON, "the loss", L.mlp(), symmetric_pairs, x),
        Planted("ranking", Kind.COMPARISON, "the loss", L.mlp(), ranking, x),
        Planted("margin ranking", Kind.COMPARISON, "the loss", L.mlp(), margin_ranking, x),
        Planted("batch-hard triplet", Kind.COMPARISON, "the loss", L.mlp(), hardest_triplet, x),
        Planted("one of two terms", Kind.COMPARISON, "loss term 'pairs'", L.mlp(), two_terms, x),
        Planted("dice", Kind.STATISTIC, "the loss", L.mlp(), dice, x),
        Planted("f-score", Kind.STATISTIC, "the loss", L.mlp(), f_score, x),
        Planted("advantages", Kind.STATISTIC, "the loss", L.mlp(), advantages, x, says="data"),
        Planted("class balance", Kind.STATISTIC, "the loss", L.mlp(), class_balance, x, says="data"),
        Planted("largest weight", Kind.STATISTIC, "the loss", L.mlp(), by_largest, x, says="factor of its own"),
        Planted("mean prediction", Kind.STATISTIC, "the loss", L.mlp(), mean_prediction, x),
        Planted("hard examples", Kind.COMPARISON, "the loss", L.mlp(), hard_examples, x),
        Planted("gradient penalty", mixing, "1 (BatchNorm1d)", L.mlp(nn.BatchNorm1d(8)), penalty, x),
        Planted("following teacher", Kind.STATE, "the loss function", L.mlp(), following_teacher(), x),
        Planted("spectral norm", Kind.STATE, "_SpectralNorm", spectral(), L.classify, x),
        Planted("whitening", Kind.STATISTIC, "the loss", L.mlp(), whitened, x),
        Planted("expert balance", Kind.BALANCE, "loss term 'balance'", MoE(), with_balance, x),
        Planted("hidden balance", Kind.BALANCE, "router", HiddenBalance(), with_hidden_balance, x),
        Planted("counter", Kind.STATE, "1 (Counter)", L.mlp(Counter()), L.classify, x),
        Planted("memory", Kind.STATE, "1 (Memory)", L.mlp(Memory()), L.classify, x),
        Planted("cache", Kind.STATE, "1 (Cached)", L.mlp(Cached()), L.classify, x),
        Planted("count buffer", Kind.STATE, "1.num_forwards", L.mlp(ForwardCounts()), L.classify, x),
        Planted("moving baseline", Kind.STATE, "the loss function", L.mlp(), moving_baseline(), x),
        Planted("clock", Kind.NONDETERMINISTIC, "1 (Clock)", L.mlp(Clock()), L.classify, x),
        Planted("unseeded", Kind.NONDETERMINISTIC, "1 (Unseeded)", L.mlp(Unseeded()), L.classify, x),
        Planted("padded mean pooling", padding, "the model (Pooled)", Pooled(), pooled_loss, L.sentences(), collate),
        Planted("trimmed pooling", padding, "the model (Pooled)", Pooled(), pooled_loss, text),
        Planted("positions", padding, "position (Positions)", FromTheEnd(), counted_loss, lists, collate),
        Planted(
            "sequence norm", padding, "norm (InstanceNorm1d)", SequenceNorm(), counted_loss, L.sentences(), collate
        ),
        Planted(
            "unmasked attention",
            padding,
            "blocks.0.attention (MultiheadAttention)",
            L.Transformer(masks=False, num_blocks=1),
            counted_loss,
            L.sentences(),
            collate,
        ),
        Planted(
            "padding in the mean",
            padding,
            "the loss function",
            L.Transformer(),
            padded_mean,
            L.sentences(),
            collate,
        ),
    ]


def pooled_loss(model, batch):
    return F.cross_entropy(model(batch), batch["input_ids"][:, 0] % 3)


def counted_loss(model, batch):
    return acc.Loss(L.token_sum(model, batch), (batch["labels"] != -100).sum())
