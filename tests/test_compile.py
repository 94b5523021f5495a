"""torch.compile: the same update as uncompiled, and as few compilations as sizes allow."""

from __future__ import annotations

import copy
import shutil

import pytest
import torch
from torch import nn

import accumulus as acc

from .reference import relative_error

needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler on the CPU")
MICROBATCH = 4
WIDTH = 6  # unlike MICROBATCH: dimensions of equal length would be taken for one and the same


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=["TrainStep", "Accumulator"])
def form(request):
    """Trains on the batches, in micro-batches of four; nothing is compiled but what the caller compiled."""

    def train(model, loss_fn, batches, *, precision, **options):
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        if request.param == "TrainStep":
            step = acc.TrainStep(model, optimizer, loss_fn, precision=precision, microbatch=MICROBATCH, **options)
            return [step(batch) for batch in batches]
        accumulator = acc.Accumulator(model, optimizer, precision=precision, **options)
        return [streamed(accumulator, loss_fn, batch) for batch in batches]

    return train


def streamed(accumulator, loss_fn, batch):
    parts = [dict(zip(batch, p, strict=True)) for p in zip(*(t.split(MICROBATCH) for t in batch.values()), strict=True)]
    for part, is_last in acc.windows(parts, size=len(parts)):
        with accumulator.microbatch(is_last):
            accumulator.backward(loss_fn(accumulator.model, part))
    return accumulator.step()


class Network(nn.Module):
    """Of a class of its own: torch leaves its own containers, compiled in place, uncompiled."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 3))

    def forward(self, x):
        return self.layers(x)


def batch_of(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(count, WIDTH, generator=generator), "y": torch.randn(count, 3, generator=generator)}


def squares(model, part):
    return (model(part["x"]).float() - part["y"]).square().sum()


def compile_what(what, model, loss_fn, **options):
    """Compiles the model, the model in place, the loss function or nothing; returns what to train with."""
    if what == "loss function":
        loss_fn = torch.compile(loss_fn, **options)
    elif what == "model":
        model = torch.compile(model, **options)
    elif what == "model in place":
        model.compile(**options)
    return model, lambda model, part: acc.Loss(loss_fn(model, part), len(part["x"]))


WHAT = pytest.mark.parametrize("what", ["model", "model in place", "loss function"])


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method:DeprecationWarning")  # torch's own, as it loads inductor
@WHAT
@pytest.mark.parametrize(("precision", "bound"), [("fp32", 5e-6), ("bf16", 1e-2)])
def test_gives_the_same_update(form, what, precision, bound):
    """With the real compiler; in bf16 it may leave out roundings between operations that it fuses."""
    batches = [batch_of(10, seed) for seed in range(2)]
    before = Network()
    plain, compiled = copy.deepcopy(before), copy.deepcopy(before)
    right = form(*compile_what("nothing", plain, squares), batches, precision=precision, max_grad_norm=0.1)
    results = form(*compile_what(what, compiled, squares), batches, precision=precision, max_grad_norm=0.1)
    for result, expected in zip(results, right, strict=True):
        assert result.applied
        assert float(result.loss) == pytest.approx(float(expected.loss), rel=bound)
        assert float(result.grad_norm) == pytest.approx(float(expected.grad_norm), rel=bound)
    updates = [[a.detach() - b.detach() for a, b in zip(m.parameters(), before.parameters(), strict=True)]
               for m in (compiled, plain)]  # fmt: skip
    assert relative_error(*updates) <= bound


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@WHAT
class TestCompilations:
    """Counted by a backend that compiles nothing."""

    @staticmethod
    def count(form, what, precision, sizes, loss_fn=squares, **options):
        graphs = []

        def backend(graph, inputs):
            graphs.append(graph)
            return graph.forward

        model, returned = compile_what(what, Network(), loss_fn, backend=backend, **options)
        results = form(model, returned, [batch_of(size, seed) for seed, size in enumerate(sizes)], precision=precision)
        assert [result.num_samples for result in results] == sizes
        return len(graphs)

    def test_one_for_micro_batches_of_one_size(self, form, what, precision):
        assert self.count(form, what, precision, [8, 12, 4]) == 1

    def test_one_with_dynamic_true_however_the_last_one_is(self, form, what, precision):
        assert self.count(form, what, precision, [10, 8, 11, 2], dynamic=True) == 1

    def test_one_more_for_all_sizes_where_the_inputs_are_made_by_the_loss_function(self, form, what, precision):
        """Nobody can mark those beforehand; torch itself compiles for any size at the first other one."""
        if what == "loss function":
            pytest.skip("its inputs are the micro-batch itself")

        def loss_fn(model, part):
            return squares(model, {name: tensor * 1.0 for name, tensor in part.items()})

        assert self.count(form, what, precision, [8, 10, 11, 2, 3, 10], loss_fn) == 2

    def test_none_for_the_short_last_micro_batch(self, form, what, precision):
        assert self.count(form, what, precision, [10, 8, 11, 10]) == 1

    def test_none_for_the_short_last_batch(self, form, what, precision):
        """As at the end of an epoch."""
        assert self.count(form, what, precision, [8, 8, 6, 8]) == 1

    def test_one_for_a_single_sample_which_torch_always_compiles_by_itself(self, form, what, precision):
        assert self.count(form, what, precision, [9, 8, 9, 10]) == 2
