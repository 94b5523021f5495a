"""The same laws on a CUDA device, and that the host does not wait there. Skips, with a reason, where there is none."""

from __future__ import annotations

import pytest
import torch

import accumulus as acc

from .reference import applied_gradients, relative_error, token_loss, tokens_batch, tokens_model, whole_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 5e-6)])
def test_the_law_of_the_split(fused, dtype, bound):
    batch = tokens_batch([100, 1, 0, 50, 2, 7])
    right = whole_batch(tokens_model(dtype), token_loss, batch)
    for size in (1, 4, 6):
        model = tokens_model(dtype).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=fused)
        step = acc.TrainStep(model, optimizer, token_loss, precision="fp32", microbatch=size)
        found: list[torch.Tensor] = []
        optimizer.register_step_post_hook(lambda *_, m=model, f=found: f.extend(p.grad.cpu() for p in m.parameters()))
        result = step(batch)
        assert relative_error(found, right.gradients) <= bound
        assert float(result.loss) == pytest.approx(right.loss, rel=bound)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_no_host_sync_with_a_fused_optimizer(make, precision):
    model = tokens_model(torch.float32).cuda()
    step = acc.TrainStep(
        model, make(model.parameters(), fused=True), token_loss, precision=precision, microbatch=2, max_grad_norm=1.0
    )
    batches = [tokens_batch([3, 0, 9, 20], seed=i) for i in range(4)]
    step(batches[0])
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for batch in batches[1:]:
            step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert step.state_dict()["num_applied"] == 4


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_non_finite_step_changes_nothing(precision, fused):
    model = tokens_model(torch.float32).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    factor = 1.0
    step = acc.TrainStep(
        model, optimizer, lambda m, b: acc.Loss(token_loss(m, b).sum * factor, 3), precision=precision, microbatch=1
    )
    step(tokens_batch([3, 4]))
    before = [p.clone() for p in model.parameters()]
    state = [s["exp_avg"].clone() for s in optimizer.state.values()]
    factor = float("nan")
    assert not step(tokens_batch([3, 4])).applied
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(torch.equal(a, s["exp_avg"]) for a, s in zip(state, optimizer.state.values(), strict=True))


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_token_budgets_and_metrics_per_sample(where):
    """From the CPU without a wait; a batch that lies on the device is read, and gives the same."""
    batch = tokens_batch([3, 0, 90, 20, 41, 7])
    batch["tokens"] = torch.where(batch["labels"] == -100, 0, batch["tokens"])
    model = tokens_model(torch.float32)
    right = whole_batch(model, token_loss, batch)

    def loss_fn(model, part):
        loss = token_loss(model, part)
        counts = (part["labels"] != -100).sum(1)
        return acc.Loss(loss.sum, loss.weight, metrics={"count": acc.Metric(counts, per_sample=True)})

    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, fused=True)
    rule = acc.by_tokens(100, length="labels")
    step = acc.TrainStep(model, optimizer, loss_fn, precision="fp32", microbatch=rule)
    batch = {name: leaf.to(where) for name, leaf in batch.items()}
    found = [gradient.cpu() for gradient in applied_gradients(step, batch)]
    assert relative_error(found, right.gradients) <= 5e-6
    assert step.last.metrics["count"].device.type == "cuda"
    assert step.last.metrics["count"].tolist() == [3, 0, 90, 20, 41, 7]
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error" if where == "cpu" else "default")
    try:
        step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")
