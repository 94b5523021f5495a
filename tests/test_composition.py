"""What people build around a step: checkpoints, tied and sparse weights, frozen layers, several losses and optimizers.

Both forms, `TrainStep` and `Accumulator`, against the whole batch in float64, or bit for bit against the loop that one
would write by hand. For the latter the weights add up to a power of two, so that dividing early or late is the same.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import accumulus as acc

from .reference import assert_same, relative_error, snapshot, token_loss, tokens_batch, whole_batch

PRECISIONS = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = (3, 1, 4)  # 8 samples: a power of two
SCALE = 2.0**10


class Sizes:
    """A rule that cuts a batch into pieces of these sizes."""

    def __init__(self, sizes):
        self._sizes = sizes

    def sizes(self, num_samples):
        return self._sizes


class Streamed:
    """The streaming form, called as a `TrainStep` is."""

    def __init__(self, model, optimizer, loss_fn, *, sizes, weigh=None, **options):
        self.accumulator = acc.Accumulator(model, optimizer, **options)
        self.loss_fn, self.sizes, self.weigh = loss_fn, sizes, weigh
        self.settle = self.accumulator.settle

    def __call__(self, batch):
        if self.weigh is not None:
            self.accumulator.begin(self.weigh(batch))
        for part, is_last in acc.windows(cut(batch, self.sizes), size=len(self.sizes)):
            with self.accumulator.microbatch(is_last):
                self.accumulator.backward(self.loss_fn(self.accumulator.model, part))
        return self.accumulator.step()


def whole_call(model, optimizer, loss_fn, *, sizes, **options):
    return acc.TrainStep(model, optimizer, loss_fn, microbatch=Sizes(sizes), **options)


@pytest.fixture(params=[whole_call, Streamed], ids=["TrainStep", "Accumulator"])
def form(request):
    """Makes a step in either form; what it returns is called with a batch."""

    def make(model, loss_fn, *, optimizer=None, lr=1.0, sizes=SIZES, precision="fp32", **options):
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
        return request.param(model, optimizer, loss_fn, sizes=sizes, precision=precision, **options)

    return make


def cut(batch, sizes):
    """The micro-batches of a tensor or of a dict of tensors."""
    if not isinstance(batch, dict):
        return list(batch.split(sizes))
    return [
        dict(zip(batch, parts, strict=True)) for parts in zip(*(t.split(sizes) for t in batch.values()), strict=True)
    ]


def plain_loop(model, optimizer, loss_fn, batch, *, sizes=SIZES, precision="fp32", scale=1.0):
    """The loop by hand: autocast around the forward pass only, one division by the whole batch's weight."""
    parts = cut(batch, sizes)
    for part in parts:
        with torch.autocast("cpu", PRECISIONS[precision] or torch.bfloat16, enabled=precision != "fp32"):
            loss = loss_fn(model, part)
        (loss.sum * (scale / sum(sizes))).backward()
    for parameter in {p for group in optimizer.param_groups for p in group["params"] if p.grad is not None}:
        parameter.grad /= scale
    optimizer.step()
    for parameter in model.parameters():
        parameter.grad = None


def samples(count=8, width=4, dtype=torch.float32, seed=0):
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def squares(model, x):
    """The sum of the samples' losses; made in float32 or better."""
    y = model(x)
    y = y if y.dtype == torch.float64 else y.float()
    return acc.Loss((y - 1.0).square().flatten(1).mean(1).sum(), len(x))


def network(dtype=torch.float32, *, dropout=0.0):
    torch.manual_seed(0)
    layers = nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.LayerNorm(8), nn.Linear(8, 3)
    return nn.Sequential(*layers).to(dtype)


def updates(after, before):
    return [a.detach() - b.detach() for a, b in zip(after.parameters(), before.parameters(), strict=True)]


def check_whole_batch(form, model, loss_fn, batch, *, sizes=SIZES, **options):
    """One step on a float64 model is the whole batch's, to 1e-12 of the update."""
    before = copy.deepcopy(model)
    right = whole_batch(model, loss_fn, batch)
    result = form(model, loss_fn, sizes=sizes, **options)(batch)
    assert result.applied
    assert relative_error(updates(model, before), updates(right.model, before)) <= 1e-12
    assert float(result.loss) == pytest.approx(right.loss, rel=1e-12)
    assert float(result.grad_norm) == pytest.approx(right.grad_norm, rel=1e-12)


def check_plain_loop(form, model, loss_fn, batches, precision, *, sizes=SIZES, optimizer=torch.optim.SGD, **options):
    """Steps over several batches leave the model as the loop by hand does, bit for bit, buffers included."""
    before, by_hand = snapshot(model), copy.deepcopy(model)
    plain_optimizer = optimizer(by_hand.parameters(), lr=0.1)
    scale = SCALE if precision == "fp16" else 1.0
    if precision == "fp16":
        options["loss_scale"] = acc.StaticScale(SCALE)
    step = form(
        model, loss_fn, optimizer=optimizer(model.parameters(), lr=0.1), sizes=sizes, precision=precision, **options
    )
    for seed, batch in enumerate(batches):
        torch.manual_seed(seed)
        plain_loop(by_hand, plain_optimizer, loss_fn, batch, sizes=sizes, precision=precision, scale=scale)
        torch.manual_seed(seed)
        assert step(batch).applied
    assert_same(by_hand.state_dict(), model.state_dict())
    assert any(not torch.equal(before[0][name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("precision", PRECISIONS)
class TestBitForBit:
    def test_a_plain_network(self, form, precision):
        check_plain_loop(form, network(), squares, [samples(seed=s) for s in range(3)], precision)

    def test_dropout_with_equal_random_states(self, form, precision):
        check_plain_loop(form, network(dropout=0.5), squares, [samples(seed=s) for s in range(3)], precision)

    @pytest.mark.parametrize("use_reentrant", [False, True])
    def test_activation_checkpoints_change_nothing(self, form, precision, use_reentrant):
        """Two blocks, one inside the other, with dropout: the second forward pass must be the first one's twin."""

        def train(wraps):
            model = nn.ModuleList([nn.Linear(4, 4), network(dropout=0.5), nn.Linear(3, 2)])

            def inner(x):
                return model[1](x) + x.mean()

            def outer(x):
                hidden = checkpoint(inner, x, use_reentrant=use_reentrant) if wraps else inner(x)
                return model[2](hidden)

            def loss_fn(_, x):
                x = model[0](x)
                return squares(lambda x: checkpoint(outer, x, use_reentrant=use_reentrant) if wraps else outer(x), x)

            step = form(model, loss_fn, precision=precision)
            torch.manual_seed(7)
            for seed in range(2):
                step(samples(seed=seed))
            return model.state_dict()

        torch.manual_seed(1)
        right = train(False)
        torch.manual_seed(1)
        assert_same(right, train(True))

    def test_tied_weights(self, form, precision):
        check_plain_loop(form, Tied(), tied_loss, [token_samples(seed) for seed in range(3)], precision)

    def test_weight_norm(self, form, precision):
        model = network()
        parametrizations.weight_norm(model[0])
        check_plain_loop(form, model, squares, [samples(seed=s) for s in range(3)], precision)

    def test_buffers_are_updated_once_a_micro_batch(self, form, precision):
        model = nn.Sequential(Statistics(), network())
        check_plain_loop(form, model, squares, [samples(seed=s) for s in range(3)], precision)
        assert int(model[0].count) == 3 * len(SIZES)

    @pytest.mark.parametrize("without", [torch.no_grad, torch.inference_mode])
    def test_evaluation_between_steps_and_between_micro_batches(self, form, precision, without):
        """It must neither find weights that were cast before the update, nor leave any cast without a gradient."""
        model, watched = network(), []

        def loss_fn(model, x):
            if model is watching:
                evaluate(model, x)
            return squares(model, x)

        def evaluate(model, x):
            model.eval()
            with without():
                watched.append(model(x).float().clone())
                fresh = copy.deepcopy(model)  # weights that no cache knows
                assert torch.equal(watched[-1], fresh(x).float())
            model.train()

        watching = model
        check_plain_loop(form, model, loss_fn, [samples(seed=s) for s in range(3)], precision)
        step = form(model, loss_fn, precision=precision)
        for seed in range(2):
            with torch.autocast("cpu", PRECISIONS[precision] or torch.bfloat16):
                evaluate(model, samples())
                step(samples(seed=seed))
                evaluate(model, samples())
        assert len(watched) == 3 * len(SIZES) + 2 * (len(SIZES) + 2)
        assert not torch.equal(watched[-1], watched[-2 - len(SIZES)])

    def test_a_target_made_without_gradients_by_the_same_weights(self, form, precision):
        """As in self-distillation: a forward pass under no_grad, then one that learns, in the same region."""

        def loss_fn(model, x):
            with torch.no_grad():
                target = model(x.flip(1)).float()
            return acc.Loss((model(x).float() - target - 1).square().sum(), len(x))

        check_plain_loop(form, network(), loss_fn, [samples(seed=s) for s in range(3)], precision)

    def test_a_gradient_penalty_sees_the_unscaled_gradient(self, form, precision):
        """Of the network with respect to its inputs, through a second backward pass."""
        slopes = []

        def loss_fn(model, x):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).float().sum(), x, create_graph=True)
            slopes.append(slope.detach())
            return acc.Loss((slope.norm(dim=1) - 1).square().sum() + model(x).float().sum(), len(x))

        check_plain_loop(form, network(), loss_fn, [samples(seed=s) for s in range(3)], precision)
        half = len(SIZES)
        for number in range(0, len(slopes), 2 * half):
            by_hand, ours = (
                torch.cat(slopes[number : number + half]),
                torch.cat(slopes[number + half : number + 2 * half]),
            )
            assert torch.equal(by_hand, ours)

    def test_several_groups_of_parameters(self, form, precision):
        def optimizer(parameters, lr):
            matrices, vectors = [], []
            for parameter in parameters:
                (matrices if parameter.ndim > 1 else vectors).append(parameter)
            groups = [{"params": matrices, "lr": lr, "weight_decay": 0.1}, {"params": vectors, "lr": lr / 2}]
            return torch.optim.AdamW(groups, weight_decay=0.0)

        check_plain_loop(form, network(), squares, [samples(seed=s) for s in range(3)], precision, optimizer=optimizer)

    def test_one_optimizer_for_several_models(self, form, precision):
        def loss_fn(models, x):
            return squares(lambda x: models[0](x) * models[1](-x), x)

        torch.manual_seed(1)
        models = nn.ModuleList([network(), nn.Sequential(nn.Linear(4, 3), nn.Tanh())])
        check_plain_loop(
            form, models, loss_fn, [samples(seed=s) for s in range(3)], precision, optimizer=torch.optim.Adam
        )

    def test_parameters_that_take_part_in_some_micro_batches(self, form, precision):
        """One branch per micro-batch; in each step one branch has no part at all, and decay leaves it alone too."""
        torch.manual_seed(1)
        model = nn.ModuleList([nn.Linear(4, 3) for _ in range(4)])

        def batch(step):
            return {
                "x": samples(seed=step),
                "branch": torch.tensor([0, 1, 2]).repeat_interleave(torch.tensor(SIZES)) + step,
            }

        def loss_fn(model, part):
            return squares(model[int(part["branch"][0]) % 4], part["x"])

        def optimizer(parameters, lr):
            return torch.optim.AdamW(parameters, lr=lr, weight_decay=0.5)

        check_plain_loop(form, model, loss_fn, [batch(step) for step in range(5)], precision, optimizer=optimizer)

    def test_layers_frozen_and_unfrozen_between_windows(self, form, precision):
        """The first layer first, so that the step is made with it frozen; what is frozen stays, bit for bit."""
        model = network()
        by_hand = copy.deepcopy(model)
        for each in (model, by_hand):
            each[0].requires_grad_(False)
        scale = SCALE if precision == "fp16" else 1.0
        options = {"loss_scale": acc.StaticScale(scale)} if precision == "fp16" else {}
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (model, by_hand)]
        step = form(model, squares, optimizer=optimizers[0], precision=precision, **options)
        for number, (first, last) in enumerate([(False, True), (True, True), (True, False), (False, True)]):
            for each in (model, by_hand):
                each[0].requires_grad_(first)
                each[4].requires_grad_(last)
            before = snapshot(model, optimizers[0])
            plain_loop(by_hand, optimizers[1], squares, samples(seed=number), precision=precision, scale=scale)
            assert step(samples(seed=number)).applied
            assert_same(by_hand.state_dict(), model.state_dict())
            for name, value in before[0].items():
                frozen = (name.startswith("0.") and not first) or (name.startswith("4.") and not last)
                assert torch.equal(value, model.state_dict()[name]) == frozen, name

    def test_parameters_used_by_two_steps(self, form, precision):
        """Two tasks on one trunk, each with its own head, optimizer and step, in turn."""
        torch.manual_seed(1)
        model = nn.ModuleDict({"trunk": nn.Linear(4, 4), "a": nn.Linear(4, 2), "b": nn.Linear(4, 1)})
        by_hand = copy.deepcopy(model)

        def task(owner, head):
            used = nn.ModuleDict({"trunk": owner["trunk"], "head": owner[head]})
            return used, torch.optim.Adam(used.parameters(), lr=0.1)

        def loss_fn(used, x):
            return squares(lambda x: used["head"](used["trunk"](x).relu()), x)

        scale = SCALE if precision == "fp16" else 1.0
        options = {"loss_scale": acc.StaticScale(scale)} if precision == "fp16" else {}
        ours = {head: task(model, head) for head in "ab"}
        steps = {
            head: form(used, loss_fn, optimizer=optimizer, precision=precision, **options)
            for head, (used, optimizer) in ours.items()
        }
        theirs = {head: task(by_hand, head) for head in "ab"}
        for number, head in enumerate("abbab"):
            plain_loop(*theirs[head], loss_fn, samples(seed=number), precision=precision, scale=scale)
            assert steps[head](samples(seed=number)).applied
            assert_same(by_hand.state_dict(), model.state_dict())


class Tied(nn.Module):
    """A language model whose embedding is its output matrix too."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(17, 8)
        self.body = nn.Linear(8, 8)
        self.out = nn.Linear(8, 17, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(self.body(self.embed(tokens)).tanh())


class Statistics(nn.Module):
    """Counts its calls and keeps a running mean of what it saw."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        if self.training:
            self.count += 1
            self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return x - self.mean


def token_samples(seed=0, count=8, length=5):
    return torch.randint(0, 17, (count, length), generator=torch.Generator().manual_seed(seed))


def tied_loss(model, tokens):
    logits = model(tokens[:, :-1]).flatten(0, 1).float()
    return acc.Loss(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), len(tokens))


class TestTheWholeBatch:
    """In float64, with sizes that are no power of two."""

    SIZES = (4, 1, 6, 2)

    def check(self, form, model, loss_fn=squares, **options):
        check_whole_batch(form, model, loss_fn, samples(13, dtype=torch.float64), sizes=self.SIZES, **options)

    def test_a_plain_network(self, form, where):
        self.check(form, network(torch.float64))

    @pytest.mark.parametrize("apply", [parametrizations.weight_norm, parametrizations.orthogonal])
    def test_parametrized_weights(self, form, where, apply):
        model = network(torch.float64)
        apply(model[0])
        apply(model[4])
        self.check(form, model)

    def test_tied_weights(self, form, where):
        model = Tied().double()
        batch = tokens_batch([100, 3, 50, 0, 1, 17, 9, 30])
        check_whole_batch(form, model, token_loss, batch, sizes=(3, 2, 3))

    def test_a_gradient_penalty_under_any_scale(self, form, where):
        def loss_fn(model, x):
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
            return acc.Loss((slope.norm(dim=1) - 1).square().sum(), len(x))

        for scale in (2.0**-7, 2.0**16):
            model = network(torch.float64)
            self.check(form, model, loss_fn, loss_scale=acc.StaticScale(scale))

    def test_auxiliary_losses_over_counts_of_their_own(self, form, where):
        """Tokens and samples: their shares differ between micro-batches, so their totals are given beforehand."""

        def loss_fn(model, batch):
            size = model(batch["tokens"]).square().mean((1, 2)).sum()
            return {"tokens": token_loss(model, batch), "size": acc.Loss(0.01 * size, len(batch["tokens"]))}

        def weigh(batch):
            return {"tokens": (batch["labels"] != -100).sum(), "size": len(batch["tokens"])}

        batch = tokens_batch([100, 3, 50, 0, 1, 17, 9, 30])
        check_whole_batch(form, Tied().double(), loss_fn, batch, sizes=(3, 2, 3), weigh=weigh)

    def test_several_backwards_in_one_micro_batch(self, where):
        """Each graph is freed before the next one is made, as memory may demand."""
        losses = [squares, lambda model, x: acc.Loss(model(-x).square().sum(), len(x))]
        x = samples(13, dtype=torch.float64)
        model = network(torch.float64)
        before = copy.deepcopy(model)
        right = whole_batch(model, lambda m, x: {str(i): loss(m, x) for i, loss in enumerate(losses)}, x)
        accumulator = acc.Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp32")
        for part, is_last in acc.windows(x.split(self.SIZES), size=4):
            with accumulator.microbatch(is_last):
                for loss in losses:
                    accumulator.backward(loss(model, part))
        result = accumulator.step()
        assert float(result.loss) == pytest.approx(right.loss, rel=1e-12)
        assert relative_error(updates(model, before), updates(right.model, before)) <= 1e-12


class TestSparse:
    """Sparse gradients of embeddings: rows that were met, some twice, in one micro-batch and over several."""

    @staticmethod
    def model(sparse):
        torch.manual_seed(0)
        return nn.Embedding(17, 8, sparse=sparse).double()

    @staticmethod
    def loss(model, tokens):
        return acc.Loss((model(tokens).sum(1) - 1).square().sum(), len(tokens))

    def batches(self):
        return [token_samples(seed, 7, 3) % limit for seed, limit in enumerate((5, 17, 11))]

    @pytest.mark.parametrize("max_grad_norm", [None, 0.5])
    def test_sgd_is_the_whole_dense_batch(self, form, where, max_grad_norm):
        model = self.model(True)
        step = form(model, self.loss, lr=0.5, sizes=(2, 1, 4), max_grad_norm=max_grad_norm)
        for tokens in self.batches():
            dense = self.model(False)
            dense.load_state_dict(model.state_dict())
            before = copy.deepcopy(dense)
            right = whole_batch(dense, self.loss, tokens, max_grad_norm=max_grad_norm, lr=0.5)
            result = step(tokens)
            assert float(result.grad_norm) == pytest.approx(right.grad_norm, rel=1e-12)
            assert relative_error(updates(model, before), updates(right.model, before)) <= 1e-12

    def test_sparse_adam_is_itself_on_the_whole_batch(self, form, where):
        model, whole = self.model(True), self.model(True)
        optimizers = [torch.optim.SparseAdam(list(each.parameters()), lr=0.1) for each in (model, whole)]
        before = copy.deepcopy(model)
        step = form(model, self.loss, optimizer=optimizers[0], sizes=(2, 1, 4))
        for tokens in self.batches():
            step(tokens)
            (self.loss(whole, tokens).sum / len(tokens)).backward()
            optimizers[1].step()
            whole.weight.grad = None
            assert relative_error(updates(model, before), updates(whole, before)) <= 1e-12
        never_met = sorted(set(range(17)) - {int(i) for tokens in self.batches() for i in tokens.flatten()})
        assert torch.equal(model.weight[never_met], before.weight[never_met])

    def test_a_row_that_overflows_skips_the_step(self, form, where):
        model = self.model(True)
        optimizer = torch.optim.SparseAdam(list(model.parameters()))
        step = form(
            model, lambda m, t: acc.Loss(m(t).sum() * (math.inf if 3 in t else 1.0), len(t)), optimizer=optimizer,
            sizes=(1, 1, 1),
        )  # fmt: skip
        before = snapshot(model, optimizer)
        assert not step(torch.tensor([1, 3, 1])).applied
        assert_same(before, snapshot(model, optimizer))
        assert step(torch.tensor([1, 2, 1])).applied


SCHEDULERS = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 6),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=8),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [
            torch.optim.lr_scheduler.LinearLR(o, 0.1, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
        ],
        milestones=[3],
    ),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=0),
}


class TestOncePerAppliedStep:
    """Every third batch holds a NaN: what follows the optimizer's steps must not follow that one."""

    BATCHES = [samples(seed=s) * (math.nan if s % 3 == 1 else 1.0) for s in range(7)]
    FINITE = [batch for batch in BATCHES if batch.isfinite().all()]

    @pytest.mark.parametrize("fused", [False, True])
    @pytest.mark.parametrize("name", SCHEDULERS)
    def test_schedulers(self, form, where, name, fused):
        """The run is the loop by hand on the finite batches only, scheduler state and momentum included."""
        model, by_hand = network(), network()
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9, fused=fused) for m in (model, by_hand)]
        schedulers = [SCHEDULERS[name](optimizer) for optimizer in optimizers]
        step = form(model, squares, optimizer=optimizers[0], scheduler=schedulers[0])
        applied = [step(batch).applied for batch in self.BATCHES]
        step.settle()
        for batch in self.FINITE:
            measure = [float(squares(by_hand, batch).sum.detach()) / 8] if name == "ReduceLROnPlateau" else []
            plain_loop(by_hand, optimizers[1], squares, batch)
            schedulers[1].step(*measure)
        assert [bool(flag) for flag in applied] == [bool(batch.isfinite().all()) for batch in self.BATCHES]
        assert [group["lr"] for group in optimizers[0].param_groups] == [g["lr"] for g in optimizers[1].param_groups]
        assert_same(by_hand.state_dict(), model.state_dict())

    @pytest.mark.parametrize("decay", [None, 0.9])
    def test_averaged_models(self, form, where, decay):
        average_of = torch.optim.swa_utils.AveragedModel
        multi = None if decay is None else torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
        model, by_hand = network(), network()
        averages = [average_of(each, multi_avg_fn=multi) for each in (model, by_hand)]

        def follow(result):
            if result.applied:
                averages[0].update_parameters(model)

        step = form(model, squares, lr=0.1, on_step=follow)
        for batch in self.BATCHES:
            step(batch)
        step.settle()
        optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1)
        for batch in self.FINITE:
            plain_loop(by_hand, optimizer, squares, batch)
            averages[1].update_parameters(by_hand)
        assert int(averages[0].n_averaged) == len(self.FINITE)
        assert_same(averages[1].state_dict(), averages[0].state_dict())


class TestTwoWindowsAtOnce:
    """Only the streaming form can have two of them open."""

    def test_over_disjoint_parameters_neither_knows_of_the_other(self, where):
        """Generator and discriminator, micro-batch by micro-batch in turn, each frozen while the other learns."""

        def train(interleaves):
            torch.manual_seed(0)
            makers, judges = nn.Linear(2, 4), nn.Linear(4, 1)
            pair = {
                each: acc.Accumulator(each, torch.optim.SGD(each.parameters(), lr=0.1), precision="bf16")
                for each in (makers, judges)
            }

            def learn(model, x, is_last):
                other = judges if model is makers else makers
                other.requires_grad_(False)
                with pair[model].microbatch(is_last):
                    score = judges(makers(x)).float()
                    pair[model].backward(acc.Loss(score.sum() * (1 if model is judges else -1), len(x)))
                other.requires_grad_(True)

            parts = list(acc.windows(samples(8, 2).split(SIZES), size=3))
            turns = [(model, *part) for part in parts for model in pair]
            if not interleaves:
                turns.sort(key=lambda turn: turn[0] is judges)
            for turn in turns:
                learn(*turn)
            for accumulator in pair.values():
                accumulator.step()
            return makers.state_dict(), judges.state_dict()

        assert_same(train(True), train(False))

    def test_over_shared_parameters_the_second_is_refused_and_the_first_goes_on(self):
        model = network()
        one, other = (
            acc.Accumulator(model, torch.optim.SGD(model.parameters(), lr=1.0), precision="fp32") for _ in range(2)
        )
        by_hand = copy.deepcopy(model)
        plain_loop(by_hand, torch.optim.SGD(by_hand.parameters(), lr=1.0), squares, samples())
        for x, is_last in acc.windows(samples().split(SIZES), size=3):
            with one.microbatch(is_last):
                one.backward(squares(model, x))
            with pytest.raises(acc.WindowError, match="already have a gradient"), other.microbatch(True):
                pass
        one.step()
        assert_same(by_hand.state_dict(), model.state_dict())


def test_resumes_in_mid_window_where_the_optimizer_holds_more_than_the_model():
    """Two models under one optimizer, and only the first is given as the model."""

    def fresh():
        torch.manual_seed(1)
        models = nn.ModuleList([network(), nn.Linear(3, 3)])
        return models, acc.Accumulator(models[0], torch.optim.SGD(models.parameters(), lr=1.0), precision="fp32")

    def learn(models, accumulator, x, is_last):
        with accumulator.microbatch(is_last):
            accumulator.backward(squares(lambda x: models[1](models[0](x)), x))

    first, last = samples().split((3, 5))
    models, accumulator = fresh()
    learn(models, accumulator, first, False)
    state = accumulator.state_dict()
    learn(models, accumulator, last, True)
    accumulator.step()
    resumed, accumulator = fresh()
    accumulator.load_state_dict(state)
    learn(resumed, accumulator, last, True)
    accumulator.step()
    assert_same(models.state_dict(), resumed.state_dict())
