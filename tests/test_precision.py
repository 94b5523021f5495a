"""`Precision`: names, what "auto" decides and why, and the region that casts each weight once."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import accumulus as acc
from accumulus import precision

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_names_round_trip(name):
    assert str(acc.Precision.parse(name)) == name
    assert acc.Precision.parse(str(acc.Precision.parse(name))) == acc.Precision.parse(name)
    assert acc.Precision.parse(acc.Precision.parse(name)) == acc.Precision.parse(name)


@pytest.mark.parametrize(
    ("name", "param", "compute", "scaled"),
    [
        ("fp32", None, None, False),
        ("tf32", None, None, False),
        ("bf16", torch.float32, torch.bfloat16, False),
        ("fp16", torch.float32, torch.float16, True),
    ],
)
def test_what_each_name_means(name, param, compute, scaled):
    found = acc.Precision.parse(name)
    assert (found.param, found.compute, found.needs_loss_scale) == (param, compute, scaled)
    assert found.accumulate == found.reduce == param  # sums of 16-bit gradients are held in 32


@pytest.mark.parametrize("name", ["fp64", "BF16", "", "half", "16"])
def test_unknown_names(name):
    with pytest.raises(acc.PrecisionError, match="use one of fp32, tf32, bf16, fp16, auto"):
        acc.Precision.parse(name)


@pytest.mark.parametrize("name", ["bf16-pure", "fp8"])
def test_planned_names_say_so(name):
    with pytest.raises(acc.UnsupportedError, match="not available yet"):
        acc.Precision.parse(name)


class TestAuto:
    @pytest.mark.parametrize(
        ("amx", "avx512", "right", "why"),
        [(True, True, "bf16", "AMX"), (False, True, "bf16", "AVX512-BF16"), (False, False, "fp32", "emulated")],
    )
    def test_cpu(self, monkeypatch, amx, avx512, right, why):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: amx)
        monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: avx512)
        found = acc.Precision.parse("auto", "cpu")
        assert str(found) == right
        assert why in found.reason

    @pytest.mark.parametrize(
        ("capability", "right"),
        [((9, 0), "bf16"), ((8, 0), "bf16"), ((7, 5), "fp16"), ((7, 0), "fp16"), ((6, 1), "fp32")],
    )
    def test_cuda(self, monkeypatch, capability, right):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
        found = acc.Precision.parse("auto", "cuda:0")
        assert str(found) == right
        assert "Some GPU (compute capability " in found.reason

    @pytest.mark.parametrize(("new", "right"), [(True, "bf16"), (False, "fp16")])
    def test_mps(self, monkeypatch, new, right):
        monkeypatch.setattr(torch.backends.mps, "is_macos_or_newer", lambda major, minor: new)
        assert str(acc.Precision.parse("auto", "mps")) == right

    def test_xpu_and_unknown(self):
        assert str(acc.Precision.parse("auto", "xpu")) == "bf16"
        unknown = acc.Precision.parse("auto", "meta")
        assert str(unknown) == "fp32"
        assert "nothing is known" in unknown.reason

    def test_looks_at_the_models_device(self):
        model = nn.Linear(2, 2)
        step = acc.TrainStep(model, torch.optim.SGD(model.parameters()), lambda m, b: m(b).mean(), microbatch=1)
        assert step.precision == acc.Precision.parse("auto", "cpu")
        assert step.precision.reason


class Casts(TorchDispatchMode):
    """Counts the copies of weights into another dtype."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.count = shape, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default and args[0].shape == self.shape:
            self.count += args[0].dtype == torch.float32
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_each_weight_is_cast_once_per_window(name):
    model = nn.Linear(7, 5, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = acc.TrainStep(model, optimizer, lambda m, b: m(b).float().square().mean(), precision=name, microbatch=1)
    for _ in range(2):
        with Casts(model.weight.shape) as casts:
            step(torch.randn(6, 7))
        assert casts.count == 1


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_one_region_gives_bitwise_the_gradient_of_one_region_per_micro_batch(name):
    dtype = acc.Precision.parse(name).compute
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(9, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3))
    batch = torch.randn(8, 9)
    for part in batch.split(2):
        with torch.autocast("cpu", dtype):
            loss = model(part).float().square().sum()
        loss.backward(torch.tensor(0.125))
    right = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    found = []
    optimizer.register_step_post_hook(lambda *_: found.extend(p.grad.clone() for p in model.parameters()))
    step = acc.TrainStep(
        model, optimizer, lambda m, b: acc.Loss(m(b).float().square().sum(), len(b)), precision=name, microbatch=2,
        loss_scale=acc.NoScale(),
    )  # fmt: skip
    step(batch)
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_backward_runs_with_autocast_off():
    class Spy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            seen.append(torch.is_autocast_enabled("cpu"))
            return gradient

    seen: list[bool] = []
    model = nn.Linear(3, 3)

    def loss_fn(model, batch):
        assert torch.is_autocast_enabled("cpu")
        return Spy.apply(model(batch)).float().square().mean()

    step = acc.TrainStep(model, torch.optim.SGD(model.parameters()), loss_fn, precision="bf16", microbatch=1)
    step(torch.randn(2, 3))
    assert seen == [False, False]
    assert not torch.is_autocast_enabled("cpu")


def test_tf32_asks_for_it_inside_and_puts_the_setting_back():
    before = torch.get_float32_matmul_precision()
    with acc.Precision.parse("tf32").region(CPU):
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == before


def test_a_device_without_autocast(monkeypatch):
    monkeypatch.setattr(torch.amp, "is_autocast_available", lambda device: False)
    with pytest.raises(acc.PrecisionError, match="no autocast on 'cpu'"):
        acc.Precision.parse("bf16").region(CPU)
    with acc.Precision.parse("fp32").region(CPU):
        pass


def test_a_float64_model_stays_so_in_fp32_and_is_refused_in_bf16():
    model = nn.Linear(2, 2).double()
    acc.Precision.parse("fp32").check(model)
    with pytest.raises(acc.PrecisionError, match=r"weight is torch\.float64"):
        acc.Precision.parse("bf16").check(model)


def test_default_device_is_the_accelerator_or_the_cpu():
    assert isinstance(precision._default_device(), torch.device)
