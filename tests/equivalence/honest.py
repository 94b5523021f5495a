"""Small models whose batch may be cut in any way; `check` must stay quiet about them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import accumulus as acc

from . import layers as L


@dataclass(frozen=True)
class Honest:
    name: str
    model: object
    loss_fn: object
    batch: object
    options: dict = field(default_factory=dict)
    is_random: bool = False


def counted(model, batch):
    return acc.Loss(L.token_sum(model, batch), (batch["labels"] != -100).sum())


def counted_mean(model, batch):
    return acc.Loss.mean(L.token_mean(model, batch), (batch["labels"] != -100).sum())


def in_float(model, batch):
    """As many models do: the loss in float32, whatever the model computes in."""
    logits, labels = model(batch).float(), batch["labels"]
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    return acc.Loss(loss.to(torch.float32), (labels != -100).sum())


def regress(model, batch):
    return F.mse_loss(model(batch["x"])[:, 0], batch["r"])


def multi_task(model, batch):
    z = model(batch["x"])
    known = batch["r"] > 0.5
    return {
        "labels": F.cross_entropy(z, batch["y"]),
        "reward": acc.Loss(((z[:, 0] - batch["r"]).square() * known).sum(), known.sum()),
    }


def penalised(model, batch):
    decay = sum(p.square().sum() for p in model.parameters())
    return F.cross_entropy(model(batch["x"]), batch["y"]) + 1e-2 * decay


def dice_by_sample(model, batch):
    p, t = model(batch["x"]).sigmoid(), batch["t"]
    return (1 - 2 * (p * t).sum(1) / (p.sum(1) + t.sum(1) + 1e-3)).mean()


def contrast_within(model, batch):
    """Each sample brings its own negatives."""
    z, others = model(batch["x"]), model(batch["negatives"].flatten(0, 1)).unflatten(0, batch["negatives"].shape[:2])
    return F.cross_entropy((z[:, None] * others).sum(-1), torch.zeros(len(z), dtype=torch.int64))


def advantage_given(model, batch):
    taken = model(batch["x"]).log_softmax(-1).gather(1, batch["y"][:, None])[:, 0]
    return -(taken * batch["r"]).mean()


def teacher():
    torch.manual_seed(3)
    wise = nn.Linear(4, 3).requires_grad_(False)

    def loss_fn(model, batch):
        return F.kl_div(
            model(batch["x"]).log_softmax(-1), wise(batch["x"]).softmax(-1), reduction="batchmean", log_target=False
        )

    return loss_fn


def class_weights():
    weight = torch.tensor([1.0, 2.0, 0.5])

    def loss_fn(model, batch):
        loss = F.cross_entropy(model(batch["x"]), batch["y"], weight=weight, reduction="sum")
        return acc.Loss(loss, weight[batch["y"]].sum())

    return loss_fn


def denoise(model, batch):
    x = batch["x"] + 0.1 * torch.randn_like(batch["x"])
    return F.mse_loss(model(x), batch["x"][:, :3])


def masked_tokens(model, batch):
    chosen = (torch.rand(batch["input_ids"].shape) < 0.4) & (batch["attention_mask"] > 0)
    inputs = batch | {"input_ids": torch.where(chosen, 0, batch["input_ids"])}
    each = F.cross_entropy(model(inputs).transpose(1, 2), batch["input_ids"], reduction="none")
    return acc.Loss((each * chosen).sum(), chosen.sum())


def diffuse(model, batch):
    time = torch.rand(len(batch["x"]), 1)
    noise = torch.randn_like(batch["x"])
    return F.mse_loss(model(batch["x"] * (1 - time) + noise * time), noise[:, :3])


class Recurrent(nn.Module):
    def __init__(self, kind, **options):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(L.VOCABULARY, 8)
        self.inner = kind(8, 8, batch_first=True, **options)
        self.head = nn.Linear(8, L.VOCABULARY)

    def forward(self, batch):
        return self.head(self.inner(self.embedding(batch["input_ids"]))[0])


class TimeFirst(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.head = nn.GRU(4, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.inner(x.transpose(0, 1))[0][-1])


class Bag(nn.Module):
    def __init__(self, sparse=False):
        super().__init__()
        torch.manual_seed(0)
        self.bag, self.head = (
            nn.EmbeddingBag(L.VOCABULARY, 8, mode="mean", padding_idx=0, sparse=sparse),
            nn.Linear(8, 3),
        )

    def forward(self, ids):
        return self.head(self.bag(ids))


class Shared(nn.Module):
    """One layer used three times, and a parameter that is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.layer, self.head = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x):
        x = self.first(x)
        for _ in range(3):
            x = x + self.layer(x).tanh()
        return self.head(x)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = L.mlp(nn.GELU())

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class OwnLoss(nn.Module):
    """Returns its own loss, as the models of large libraries do."""

    def __init__(self):
        super().__init__()
        self.inner = L.mlp()

    def forward(self, x, y):
        logits = self.inner(x)
        return {"loss": F.cross_entropy(logits, y), "logits": logits}


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.inner, self.head = nn.Embedding(L.VOCABULARY, 8), nn.GRU(8, 8), nn.Linear(8, 3)

    def forward(self, batch):
        lengths = batch["attention_mask"].sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            self.embedding(batch["input_ids"]), lengths, batch_first=True, enforce_sorted=False
        )
        return self.head(self.inner(packed)[1][0])


class Renormed(nn.Module):
    """Its forward changes its own weights in place, to the same end each time."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(L.VOCABULARY, 8, max_norm=1.0), nn.Linear(8, 3)

    def forward(self, ids):
        return self.head(self.embedding(ids).mean(1))


class DropPath(nn.Module):
    def forward(self, x):
        return x * torch.empty(len(x), 1, dtype=x.dtype).bernoulli_(0.5)


def normed():
    model = L.mlp()
    nn.utils.parametrizations.weight_norm(model[0])
    return model


class Quiet(nn.Module):
    """Keeps what it saw last, and looks at it no more."""

    def __init__(self):
        super().__init__()
        self.inner = L.mlp()
        self.register_buffer("last", torch.zeros(()), persistent=False)
        self.seen = 0

    def forward(self, x):
        self.seen += 1
        self.last = x.detach().mean()
        return self.inner(x)


def frozen_batchnorm():
    model = L.mlp(nn.BatchNorm1d(8))
    model[1].eval()
    return model


def convolve(inside):
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), inside, nn.Flatten(), nn.Linear(288, 3))


def augmenting(samples):
    """Collates, and masks some tokens at random, as collators for masked language models do."""
    batch = L.pad(samples)
    masked = torch.bernoulli(torch.full(batch["input_ids"].shape, 0.3)).bool() & (batch["attention_mask"] > 0)
    return batch | {"input_ids": torch.where(masked, 0, batch["input_ids"])}


def pooled(model, batch):
    return F.cross_entropy(model(batch["ids"]), batch["y"])


def own_loss(model, batch):
    return model(batch["x"], batch["y"])["loss"]


def experts(model, batch):
    return F.cross_entropy(model(batch["x"])[0], batch["y"])


def honest() -> list[Honest]:
    from .planted import MoE, penalty
    from .planted import pooled_loss as L_pooled

    x, text, images = L.vectors(), L.tokens((2, 7, 3, 5, 4, 6, 3)), L.pictures()
    ids = {"ids": L.tokens((2, 7, 3, 5, 4, 6, 3))["input_ids"], "y": torch.arange(7) % 3}
    series = {"x": torch.randn(7, 5, 4, generator=torch.Generator().manual_seed(1)), "y": torch.arange(7) % 3}
    collate = {"collate": L.pad}
    negatives = x | {"negatives": torch.randn(9, 3, 4, generator=torch.Generator().manual_seed(2))}
    random = {"is_random": True}
    return [
        Honest("linear", nn.Linear(4, 3), L.classify, x),
        Honest("regression", L.mlp(), regress, x),
        Honest("transformer", L.Transformer(), counted, text),
        Honest("transformer, mean", L.Transformer(), counted_mean, text),
        Honest("transformer, collated", L.Transformer(), counted, L.sentences(), collate),
        Honest("transformer, float loss", L.Transformer(), in_float, text),
        Honest("tied weights", L.Transformer(tied=True), counted, text),
        Honest("convolutions, GroupNorm", L.Residual(lambda width: nn.GroupNorm(2, width)), L.classify, images),
        Honest("frozen BatchNorm", frozen_batchnorm(), L.classify, x),
        Honest("evaluation mode", L.Residual(nn.BatchNorm2d).eval(), L.classify, images),
        Honest("LSTM", Recurrent(nn.LSTM), counted, text),
        Honest("LSTM, collated", Recurrent(nn.LSTM), counted, L.sentences(), collate),
        Honest("GRU, time first", TimeFirst(), L.classify, series),
        Honest("embedding bag", Bag(), pooled, ids),
        Honest("sparse embedding bag", Bag(sparse=True), pooled, ids),
        Honest("multi-task", L.mlp(), multi_task, x),
        Honest("weight penalty", L.mlp(), penalised, x),
        Honest("dice by sample", L.mlp(), dice_by_sample, x),
        Honest("own negatives", L.mlp(), contrast_within, negatives),
        Honest("given advantages", L.mlp(), advantage_given, x),
        Honest("distillation", L.mlp(), teacher(), x),
        Honest("class weights", L.mlp(), class_weights(), x),
        Honest("shared layer", Shared(), L.classify, x),
        Honest("checkpointed", Checkpointed(), L.classify, x),
        Honest("own loss", OwnLoss(), own_loss, x),
        Honest("unsaved memory", Quiet(), lambda model, batch: L.classify(model, batch), x),
        Honest("experts", MoE(), experts, x),
        Honest("float64", L.mlp().double(), L.classify, {"x": x["x"].double(), "y": x["y"]}),
        Honest(
            "instance norm",
            convolve(nn.InstanceNorm2d(8)),
            L.classify,
            images,
        ),
        Honest("weight norm", normed(), L.classify, x),
        Honest("gradient penalty", L.mlp(), penalty, x),
        Honest("packed sequences", Packed(), L_pooled, L.sentences(), collate),
        Honest("pair tuple", L.mlp(), lambda m, b: F.cross_entropy(m(b[0]), b[1]), (x["x"], x["y"])),
        Honest("renormed embedding", Renormed(), pooled, ids),
        Honest("drop path", L.mlp(DropPath()), L.classify, x, **random),
        Honest("dropout", L.mlp(nn.Dropout(0.5)), L.classify, x, **random),
        Honest("transformer with dropout", L.Transformer(dropout=0.2), counted, text, **random),
        Honest(
            "channel dropout",
            convolve(nn.Dropout2d(0.4)),
            L.classify,
            images,
            **random,
        ),
        Honest("LSTM with dropout", Recurrent(nn.LSTM, num_layers=2, dropout=0.3), counted, text, **random),
        Honest("noise on the input", L.mlp(), denoise, x, **random),
        Honest("masked tokens", L.Transformer(), masked_tokens, text, **random),
        Honest("diffusion", L.mlp(), diffuse, x, **random),
        Honest("random collate", L.Transformer(), counted, L.sentences(), {"collate": augmenting}, **random),
        Honest("collated dropout", L.Transformer(dropout=0.2), counted, L.sentences(), collate, **random),
    ]
