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


class Network(torch.nn.Module):
    """Convolutions, or attention over 128 positions: large enough that kernels' own workspaces are a small share."""

    def __init__(self, kind):
        super().__init__()
        if kind == "convolutions":
            layers = [torch.nn.Conv2d(3, 64, 3, padding=1), torch.nn.GroupNorm(8, 64), torch.nn.ReLU()]
            layers += [torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.GroupNorm(8, 64), torch.nn.ReLU()]
            self.body = torch.nn.Sequential(*layers, torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten())
            width = 64
        else:
            layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.1, batch_first=True, norm_first=True)
            self.body = torch.nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
            width = 512
        self.head = torch.nn.Linear(width, 1000)

    def forward(self, x):
        return self.head(self.body(x))


def network_batch(kind, num_samples):
    shape = (3, 128, 128) if kind == "convolutions" else (128, 512)
    labels = torch.randint(1000, (num_samples,) if kind == "convolutions" else (num_samples, 128))
    return {"x": torch.randn(num_samples, *shape), "labels": labels}


def network_loss(model, batch):
    logits = model(batch["x"])
    return torch.nn.functional.cross_entropy(logits.reshape(-1, 1000), batch["labels"].reshape(-1))


@pytest.mark.parametrize(
    "make", [torch.optim.AdamW, lambda p: torch.optim.AdamW(p, fused=True)], ids=["foreach", "fused"]
)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["convolutions", "attention"])
def test_the_memory_estimate_is_what_the_allocator_saw(kind, precision, make):
    model = Network(kind).cuda()
    optimizer = make(model.parameters())
    arguments = (model, optimizer, network_loss, network_batch(kind, 4))
    found = acc.memory.estimate(*arguments, precision=precision, microbatch=64)
    assert found.method == "fake"
    line = acc.memory.curve(*arguments, precision=precision, largest=100)
    assert line.at(64).peak_bytes == pytest.approx(found.peak_bytes, rel=0.01)
    step = acc.TrainStep(model, optimizer, network_loss, precision=precision, microbatch=64)
    batch = network_batch(kind, 128)
    step(batch)
    outside = torch.cuda.memory_allocated() - sum(
        tensor.untyped_storage().nbytes()
        for tensor in [
            *model.parameters(),
            *model.buffers(),
            *(v for s in optimizer.state.values() for v in s.values()),
        ]
        if tensor.is_cuda
    )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        step(batch)
    assert found.peak_bytes == pytest.approx(torch.cuda.max_memory_allocated() - outside, rel=0.05)


def test_a_model_that_depends_on_data_is_measured():
    def loss_fn(model, batch):
        return network_loss(model, batch) * (1.0 if batch["x"].sum().item() < 1e30 else 2.0)

    model = Network("attention").cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = network_batch("attention", 8)
    state = torch.cuda.get_rng_state()
    before = [p.clone() for p in model.parameters()]
    found = acc.memory.estimate(model, optimizer, loss_fn, batch, precision="bf16", microbatch=64)
    assert found.method == "measured"
    assert torch.equal(state, torch.cuda.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    fake = acc.memory.estimate(model, optimizer, network_loss, batch, precision="bf16", microbatch=64)
    assert found.peak_bytes == pytest.approx(fake.peak_bytes, rel=0.1)


def test_free_memory_counts_what_the_allocator_holds_unused():
    torch.cuda.empty_cache()
    before = acc.memory.available_bytes("cuda")
    held = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    assert acc.memory.available_bytes("cuda") <= before - 2**28 + 2**22
    del held  # the allocator keeps it
    assert acc.memory.available_bytes("cuda") >= before - 2**22


def statistics_step(microbatch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 256), torch.nn.BatchNorm1d(256), torch.nn.Dropout(0.3), torch.nn.Linear(256, 8)
    ).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    return acc.TrainStep(
        model, optimizer, lambda model, x: model(x).square().mean(), precision="fp16", microbatch=microbatch
    )


@pytest.mark.filterwarnings("ignore:1 BatchNorm")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_running_out_of_memory_is_undone_bit_for_bit(where):
    """The device's own allocator fails, asked for more than any has."""
    batch = torch.randn(64, 64)
    right = statistics_step(16)
    torch.manual_seed(1)
    right(batch)
    step = acc.recover_from_oom(statistics_step(32))
    plain, calls = step.loss_fn, []

    def ask_for_too_much(*_):
        calls.append(1)
        if len(calls) == 2:
            torch.empty(2**48, device="cuda")

    def loss_fn(model, x):
        loss = plain(model, x)
        if type(x) is torch.Tensor and where == "forward":
            ask_for_too_much()
        elif type(x) is torch.Tensor:
            loss.register_hook(ask_for_too_much)
        return loss

    step.loss_fn = loss_fn
    torch.manual_seed(1)
    assert step(batch).num_microbatches == 4
    for a, b in zip(step.model.state_dict().values(), right.model.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    assert float(step.loss_scale) == float(right.loss_scale)


def test_auto_keeps_to_its_limit_and_settles():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(1024, 1024) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    held = torch.cuda.memory_allocated()
    limit = 512 * 2**20
    step = acc.TrainStep(
        model, optimizer, lambda model, x: model(x).square().mean(), precision="bf16", memory_limit=limit
    )
    torch.cuda.reset_peak_memory_stats()
    for _ in range(14):
        result = step(torch.randn(65536, 1024))
    assert torch.cuda.max_memory_allocated() - held <= 1.05 * limit
    assert result.choice.reason.startswith(("the smallest within 5 %", "the only size"))
    assert result.num_microbatches > 1


def layers_with(function):
    class Do(torch.nn.Module):
        def forward(self, x):
            return function(x)

    return torch.nn.Sequential(torch.nn.Linear(64, 64), Do(), torch.nn.Linear(64, 1)).cuda()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_doctor_names_what_is_planted_and_nothing_else(precision):
    def loss_fn(model, x):
        return model(x).float().square().mean()

    batches = [torch.randn(32, 64) for _ in range(2)]
    for function, kinds in ((torch.nn.functional.gelu, []), (lambda x: (x * 0).sqrt(), ["non-finite"])):
        model = layers_with(function)
        before = torch.cuda.get_rng_state()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        report = acc.diagnose(model, batches, loss_fn=loss_fn, optimizer=optimizer, precision=precision, rounds=1)
        assert [finding.kind for finding in report.findings] == kinds
        assert torch.equal(before, torch.cuda.get_rng_state())
        if kinds:
            assert report.findings[0].module == "1" and report.origin.is_backward


def test_a_watch_does_not_make_the_host_wait():
    model = layers_with(torch.nn.functional.gelu)
    x = torch.randn(32, 64, device="cuda")
    model(x).sum().backward()
    with acc.RangeWatch(model) as watch:
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                model(x).sum().backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        rows = watch.rows()
    assert {row.kind for row in rows} == {"activation", "activation gradient", "weight gradient"}
