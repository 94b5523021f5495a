"""`diagnose` leaves everything as it was, takes what people have, and refuses what cannot work in a sentence."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from torch import nn

import accumulus as acc
from tests.reference import assert_same, snapshot

from .models import Run, classes, honest, rows, squares


def make_step(precision="fp16", **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.2), nn.LayerNorm(16), nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    options = {"microbatch": 4, "scheduler": scheduler, "max_grad_norm": 1.0} | options
    return acc.TrainStep(model, optimizer, squares, precision=precision, **options), model, optimizer, scheduler


def random_states():
    return torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_nothing_is_changed_bit_for_bit(precision):
    step, model, optimizer, scheduler = make_step(precision)
    batches = rows(3)
    step(batches[0])
    before, state, states = snapshot(model, optimizer, scheduler), step.state_dict(), random_states()
    hooks = [len(module._forward_hooks) for module in model.modules()]
    report = acc.diagnose(step, batches, rounds=1)
    assert_same(before, snapshot(model, optimizer, scheduler))
    assert step.state_dict() == state
    assert random_states() == states
    assert hooks == [len(module._forward_hooks) for module in model.modules()]
    assert all(parameter.grad is None for parameter in model.parameters())
    assert model.training
    assert report.precision == precision and report.num_steps == 3
    step(batches[1])


def test_nothing_is_changed_after_an_error():
    step, model, optimizer, scheduler = make_step()
    wrong = torch.randn(4, 9)
    before, states = snapshot(model, optimizer, scheduler), random_states()
    with pytest.raises(RuntimeError):
        acc.diagnose(step, [wrong])
    assert_same(before, snapshot(model, optimizer, scheduler))
    assert random_states() == states
    step(torch.randn(8, 8))


def test_batchnorm_buffers_stay():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    before = snapshot(model)
    acc.diagnose(model, rows(), loss_fn=squares, rounds=0)
    assert_same(before, snapshot(model))


def test_a_report_is_plain_values():
    model, loss_fn, batches = honest()["mlp"]
    optimizer = torch.optim.AdamW(model.parameters())
    report = acc.diagnose(model, batches, loss_fn=loss_fn, optimizer=optimizer, rounds=1)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["findings"] == [] and content["precision"] == "fp16"
    kinds = {row["kind"] for row in content["ranges"]}
    assert kinds == {"activation", "activation gradient", "weight", "weight gradient", "update"}
    gradient = next(row for row in content["ranges"] if row["kind"] == "weight gradient")
    assert set(gradient["shares"]) == {f"{n}{s}" for n in ("fp16", "bf16", "e4m3", "e5m2") for s in ("", " scaled")}
    assert content["scales"]["one_serves_all"] is True
    assert content["payoff"]["time_ratio"] > 0
    assert sum(gradient["exponents"].values()) + gradient["num_zero"] == gradient["num_counted"]


def test_other_precisions_of_a_step():
    step, *_ = make_step("fp32")
    assert acc.diagnose(step, rows(), rounds=0).precision == "fp32"
    report = acc.diagnose(step, rows(), precision="fp16", rounds=0)
    assert report.precision == "fp16" and report.loss_scale == 2.0**16
    assert report.trace.outputs["0"] == "float16"


def test_batches_are_taken_as_needed():
    taken = []

    def endless():
        while True:
            taken.append(1)
            yield torch.randn(4, 8)

    model = nn.Linear(8, 1)
    assert acc.diagnose(model, endless(), loss_fn=squares, max_steps=2, rounds=0).num_steps == 2
    assert len(taken) == 2


def test_collate_and_several_optimizers():
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 1))
    optimizers = [torch.optim.SGD(part.parameters(), lr=0.1) for part in model]
    samples = [list(torch.randn(6, 8)) for _ in range(2)]
    report = acc.diagnose(
        model, samples, loss_fn=squares, optimizer=optimizers, collate=torch.stack, microbatch=2, rounds=0
    )
    assert {row.name for row in report.rows if row.kind == "update"} == {name for name, _ in model.named_parameters()}


def test_16_bit_parameters_are_measured_in_float32():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1)).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    report = acc.diagnose(model, [row.bfloat16() for row in rows()], loss_fn=squares, optimizer=optimizer, rounds=0)
    assert report.precision == "bf16 parameters"
    assert {row.dtype for row in report.rows} == {torch.float32}
    assert model[0].weight.dtype == torch.bfloat16


def test_code_that_only_runs_in_16_bits_is_measured_there():
    model = nn.Sequential(nn.Linear(8, 16), Run(lambda x: x.half()), nn.Linear(16, 1))
    report = acc.diagnose(model, rows(), loss_fn=squares, precision="fp16", rounds=0)
    assert any("does not run in float32" in note for note in report.notes)


def test_what_the_device_cannot_run_is_said(monkeypatch):
    from accumulus.numerics import diagnosis

    def cannot(subject, batch):
        raise RuntimeError("no kernel for Half\nmore")

    monkeypatch.setattr(diagnosis, "trace_operators", cannot)
    report = acc.diagnose(nn.Linear(8, 1), rows(), loss_fn=squares)
    assert any("does not run in float16 on cpu (no kernel for Half)" in note for note in report.notes)
    assert report.payoff is None and report.scales is not None


@pytest.mark.parametrize(
    ("arguments", "options", "error", "says"),
    [
        ((object(), [1]), {}, acc.OptimizerError, "give a TrainStep, or a torch.nn.Module"),
        ((nn.Linear(8, 1), [1]), {}, acc.LossError, "a model needs loss_fn="),
        ((nn.Linear(8, 1), []), {"loss_fn": squares}, acc.BatchError, "there is no batch"),
        ((nn.Linear(8, 1), torch.ones(4, 8)), {"loss_fn": squares}, acc.BatchError, "such as .batch."),
        ((nn.Linear(8, 1), rows()), {"loss_fn": squares, "max_steps": 0}, acc.BatchError, "max_steps must be"),
        ((nn.Linear(8, 1), rows()), {"loss_fn": squares, "precision": "fp4"}, acc.PrecisionError, "fp4"),
        ((nn.Linear(8, 1).half(), rows()), {"loss_fn": squares, "precision": "bf16"}, acc.PrecisionError, "float16"),
        ((nn.Sequential(), rows()), {"loss_fn": squares}, acc.OptimizerError, "no parameters"),
    ],
)
def test_bad_input_is_one_sentence(arguments, options, error, says):
    with pytest.raises(error, match=says):
        acc.diagnose(*arguments, **options)


def test_a_step_has_its_own_parts():
    step, *_ = make_step()
    with pytest.raises(acc.LossError, match="has its own"):
        acc.diagnose(step, rows(), loss_fn=squares)


def test_a_loss_function_that_uses_another_model():
    model = nn.Linear(8, 1)
    with pytest.raises(acc.LossError, match="use its first argument"):
        acc.diagnose(model, rows(), loss_fn=lambda _, x: model(x).square().mean())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_that_cannot_be_copied():
    model = nn.Linear(8, 1)
    model.kept = model.weight * 2  # a tensor that was computed
    with pytest.raises(acc.UnsupportedError, match="cannot be copied"):
        acc.diagnose(model, rows(), loss_fn=squares)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["GPT2", "Llama", "Bert", "T5"])
def test_real_architectures_get_no_finding(name):
    """From small configurations, with padding and torch's own minimum in the masks."""
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    build = {
        "GPT2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 32}),
        "Llama": ("LlamaForCausalLM", sizes | {"num_key_value_heads": 2}),
        "Bert": ("BertForMaskedLM", sizes),
        "T5": (
            "T5ForConditionalGeneration",
            {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "decoder_start_token_id": 0},
        ),
    }
    head, options = build[name]
    model = getattr(transformers, head)(getattr(transformers, f"{name}Config")(**small, **options))
    tokens, seen = torch.randint(5, 90, (4, 12)), torch.ones(4, 12, dtype=torch.int64)
    seen[0, 6:] = 0
    batch = {"input_ids": tokens, "attention_mask": seen, "labels": tokens.masked_fill(seen == 0, -100)}
    optimizer = torch.optim.AdamW(model.parameters())
    for precision in ("fp16", "bf16"):
        report = acc.diagnose(
            model,
            [batch],
            loss_fn=lambda m, b: m(**b).loss,
            optimizer=optimizer,
            precision=precision,
            rounds=0,
        )
        assert [str(finding) for finding in report.findings] == []
        assert report.scales.one_serves_all


def test_findings_do_not_depend_on_how_a_batch_is_cut():
    batches = [(torch.randn(8, 8), torch.randint(0, 3, (8,)))]
    model = nn.Sequential(nn.Linear(8, 8), Run(lambda x: x * 1e-9 + x.detach()), nn.Linear(8, 3))
    kinds = {
        tuple(
            (finding.kind, finding.module)
            for finding in acc.diagnose(
                model, batches, loss_fn=lambda m, b: classes(m, b) * 1e-6, microbatch=size, rounds=0
            ).findings
        )
        for size in (8, 3, 1)
    }
    assert len(kinds) == 1


def test_what_no_scale_cures_is_not_put_down_to_the_scale():
    """A root of zero, whose derivative no loss scale makes finite; the scaled loss overflows fp16 besides."""
    model = nn.Linear(4, 1)

    def rooted(model, rows):
        return (model(rows) * 0).abs().sqrt().mean()

    report = acc.diagnose(model, [torch.randn(8, 4)], loss_fn=rooted, rounds=0)
    assert report.origin.operator in ("div", "sqrt", "mul")
    assert report.origin.is_backward


def test_large_data_is_not_called_a_mask():
    report = acc.diagnose(nn.Linear(4, 1), [1e6 * torch.randn(8, 4)], loss_fn=squares, rounds=0)
    assert "inf" in str(report.origin) and "mask" not in str(report.origin)


@pytest.mark.parametrize("ratio", ["a", -1, 1.5, True, float("nan")])
def test_a_ratio_that_is_none_is_one_sentence(ratio):
    with pytest.raises(acc.BatchError, match="underflow_ratio must be a number between 0 and 1"):
        acc.diagnose(nn.Linear(4, 1), [torch.randn(8, 4)], loss_fn=squares, underflow_ratio=ratio)
