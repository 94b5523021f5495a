"""Real architectures, built from configurations without downloads: the verdicts that their loss functions deserve."""

from __future__ import annotations

import pytest
import torch

import accumulus as acc
from accumulus.equivalence import Kind

transformers = pytest.importorskip("transformers", reason="needs the extra 'transformers'")

TINY = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2, "intermediate_size": 32, "vocab_size": 40}


def text(lengths=(9, 3, 6, 9, 4, 7), vocabulary=40):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (len(lengths), max(lengths)), generator=generator)
    mask = torch.arange(max(lengths))[None] < torch.tensor(lengths)[:, None]
    return {
        "input_ids": torch.where(mask, ids, 1),
        "attention_mask": mask.long(),
        "labels": torch.where(mask, ids, -100),
    }


def own_loss(model, batch):
    """What a plain loop does: the mean that the model returns."""
    return model(**batch).loss


def next_token_loss(model, batch):
    """The same, with the number of labels that it is a mean over: the first of each row is nobody's next token."""
    return acc.Loss.mean(model(**batch).loss, (batch["labels"][:, 1:] != -100).sum())


def all_tokens_loss(model, batch):
    return acc.Loss.mean(model(**batch).loss, (batch["labels"] != -100).sum())


def gpt2(**options):
    config = transformers.GPT2Config(n_embd=16, n_head=2, n_layer=2, vocab_size=40, n_positions=16, **options)
    return transformers.GPT2LMHeadModel(config)


def llama(**options):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY, num_key_value_heads=1, **options))


def mixtral(**options):
    config = transformers.MixtralConfig(**TINY, num_key_value_heads=1, num_local_experts=4, **options)
    return transformers.MixtralForCausalLM(config)


def bert():
    config = transformers.BertConfig(**TINY, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1)
    return transformers.BertForMaskedLM(config)


def t5():
    config = transformers.T5Config(
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        vocab_size=40,
        decoder_start_token_id=1,
    )
    return transformers.T5ForConditionalGeneration(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=16, num_attention_heads=2, num_hidden_layers=1, intermediate_size=32, image_size=8, patch_size=4
    )
    return transformers.ViTForImageClassification(config)


def clip():
    layers = {"num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 32, "hidden_size": 16}
    config = transformers.CLIPConfig(
        text_config={**layers, "vocab_size": 40, "max_position_embeddings": 16, "eos_token_id": 2},
        vision_config={**layers, "image_size": 8, "patch_size": 4},
        projection_dim=8,
    )
    return transformers.CLIPModel(config)


def images():
    generator = torch.Generator().manual_seed(0)
    return {"pixel_values": torch.randn(6, 3, 8, 8, generator=generator), "labels": torch.arange(6) % 2}


def pairs():
    batch = text()
    del batch["labels"]
    return batch | {"pixel_values": images()["pixel_values"]}


def pair_loss(model, batch):
    return model(**batch, return_loss=True).loss


CASES = {
    "GPT-2, own loss": (gpt2, own_loss, text, {Kind.WEIGHT, Kind.RANDOM}, "[:, 1:]"),
    "GPT-2": (gpt2, next_token_loss, text, {Kind.RANDOM}, ""),
    "Llama, own loss": (llama, own_loss, text, {Kind.WEIGHT}, "[:, 1:]"),
    "Llama": (llama, next_token_loss, text, set(), ""),
    "BERT, own loss": (bert, own_loss, text, {Kind.WEIGHT, Kind.RANDOM}, '["labels"] != -100).sum()'),
    "BERT": (bert, all_tokens_loss, text, {Kind.RANDOM}, ""),
    "T5": (t5, all_tokens_loss, text, {Kind.RANDOM}, ""),
    "ViT": (vit, own_loss, images, set(), ""),
    "CLIP": (clip, pair_loss, pairs, {Kind.COMPARISON}, "visual_projection"),
    "Mixtral": (mixtral, next_token_loss, text, set(), ""),
    "Mixtral, balanced": (
        lambda: mixtral(output_router_logits=True, router_aux_loss_coef=0.1),
        next_token_loss,
        text,
        {Kind.BALANCE},
        "router_logits",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_verdict(name):
    make, loss_fn, batch, kinds, says = CASES[name]
    torch.manual_seed(0)
    report = acc.check(make().train(), loss_fn, batch())
    assert report.kinds == kinds, str(report)
    assert bool(report) is (kinds <= {Kind.RANDOM})
    assert says in "\n".join(map(str, report.causes))
