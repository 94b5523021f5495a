"""Several models in one loop: two that learn against each other, and two that learn together.

A generator and a discriminator, each with its own optimizer, `Accumulator` and loss scale, in fp16. While one learns,
the other is frozen, so that no gradient of this loss waits in it for the next one. A discriminator whose loss overflows
skips its step and lowers its scale, and the generator's stays what it is.
Then an encoder and a decoder under one optimizer: put them into a `ModuleList`, and that is the model.

    python examples/several_models.py
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce

import accumulus as acc

MICROBATCH, PARTS = 32, 4
CENTER = torch.tensor([2.0, -1.0])


def real_points(count: int) -> Tensor:
    """Points around the center, which the generator is to imitate."""
    return CENTER + 0.5 * torch.randn(count, 2)


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, outputs))


class Player:
    """A model with the optimizer and the accumulator of its own."""

    def __init__(self, model: nn.Module, *, lr: float) -> None:
        self.model = model
        optimizer = torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.9))
        self.accumulator = acc.Accumulator(
            model, optimizer, precision="fp16", loss_scale=acc.DynamicScale(initial=2.0**10)
        )


class Game:
    """A generator of points and a discriminator that tells them from real ones."""

    def __init__(self) -> None:
        self.generator = Player(mlp(2, 2), lr=0.002)
        self.discriminator = Player(mlp(2, 1), lr=0.005)

    def generate(self, count: int) -> Tensor:
        """Points made of noise."""
        fake: Tensor = self.generator.model(torch.randn(count, 2))
        return fake

    def discriminator_loss(self, real: Tensor) -> Tensor:
        """Real points are to be called 1, generated ones 0."""
        score, fake_score = self.discriminator.model(real), self.discriminator.model(self.generate(len(real)))
        return (bce(score, torch.ones_like(score)) + bce(fake_score, torch.zeros_like(fake_score))) / 2

    def generator_loss(self, real: Tensor) -> Tensor:
        """Generated points are to be called 1."""
        score = self.discriminator.model(self.generate(len(real)))
        return bce(score, torch.ones_like(score))

    def learn(self, player: Player, batch: Tensor, factor: float = 1.0) -> acc.StepResult:
        """One window of one player, while the other is frozen."""
        is_generator = player is self.generator
        other = self.discriminator if is_generator else self.generator
        loss_fn = self.generator_loss if is_generator else self.discriminator_loss
        other.model.requires_grad_(False)
        for real, is_last in acc.windows(batch.split(MICROBATCH), size=PARTS):
            with player.accumulator.microbatch(is_last):
                player.accumulator.backward(loss_fn(real) * factor)
        other.model.requires_grad_(True)
        return player.accumulator.step()

    def distance(self) -> float:
        """From the mean of many generated points to the center."""
        with torch.no_grad():
            return float((self.generate(2048).mean(0) - CENTER).norm())


def play(num_rounds: int = 200) -> dict[str, float]:
    """Plays the game; in one round in the middle the discriminator's loss overflows.

    Returns:
        The distance of the generated points `before` and `after`, and each player's loss scale and skipped steps.
    """
    torch.manual_seed(0)
    game = Game()
    before = game.distance()
    skipped = {"generator": 0, "discriminator": 0}
    for number in range(num_rounds):
        batch = real_points(MICROBATCH * PARTS)
        factor = float("inf") if number == num_rounds // 2 else 1.0
        skipped["discriminator"] += not game.learn(game.discriminator, batch, factor).applied
        skipped["generator"] += not game.learn(game.generator, batch).applied
    return {
        "before": before,
        "after": game.distance(),
        "discriminator scale": float(game.discriminator.accumulator.loss_scale),
        "generator scale": float(game.generator.accumulator.loss_scale),
        "discriminator skipped": skipped["discriminator"],
        "generator skipped": skipped["generator"],
    }


def reconstruction(models: nn.ModuleList, x: Tensor) -> acc.Loss:
    """What the decoder makes of the encoder's code, against the original."""
    encoder, decoder = models
    return acc.Loss((decoder(encoder(x)) - x).square().sum(), x.numel())


def learn_together(pieces: tuple[int, ...] = (50, 13, 64, 1)) -> dict[str, float]:
    """Encoder and decoder under one optimizer: micro-batches against the whole batch.

    Returns:
        The loss of the first and of the `last` step, and how far `apart` parameters are from whole-batch training.
    """
    torch.manual_seed(0)
    parts = nn.ModuleList([mlp(8, 3), mlp(3, 8)]).double()
    whole = copy.deepcopy(parts)
    batch = torch.randn(sum(pieces), 3, dtype=torch.float64) @ torch.randn(3, 8, dtype=torch.float64)
    step = acc.Accumulator(parts, torch.optim.AdamW(parts.parameters(), lr=0.01), precision="fp32", max_grad_norm=1.0)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    losses = []
    for _ in range(100):
        for x, is_last in acc.windows(batch.split(pieces), size=len(pieces)):
            with step.microbatch(is_last):
                step.backward(reconstruction(parts, x))
        losses.append(float(step.step().loss))

        optimizer.zero_grad()
        loss = reconstruction(whole, batch)
        (loss.sum / loss.weight).backward()
        nn.utils.clip_grad_norm_(whole.parameters(), 1.0)
        optimizer.step()
    difference = nn.utils.parameters_to_vector(parts.parameters()) - nn.utils.parameters_to_vector(whole.parameters())
    return {"first": losses[0], "last": losses[-1], "apart": float(difference.detach().abs().max())}


def main() -> None:
    """Prints what became of both."""
    game = play()
    print(
        f"generator against discriminator, fp16: {game['before']:.2f} from the real points, {game['after']:.2f} after\n"
    )
    print(f"{'':<16}{'loss scale':>12}{'skipped':>10}")
    for name in ("discriminator", "generator"):
        print(f"{name:<16}{game[f'{name} scale']:>12.0f}{game[f'{name} skipped']:>10.0f}")
    pair = learn_together()
    print("\nencoder and decoder under one optimizer, in micro-batches of 50+13+64+1")
    print(f"loss {pair['first']:.3f} at first, {pair['last']:.3f} after 100 steps")
    print(f"largest difference from training on the whole batch: {pair['apart']:.0e}")
    assert game["after"] < 0.5 * game["before"]
    assert (game["discriminator scale"], game["generator scale"]) == (2.0**9, 2.0**10)
    assert (game["discriminator skipped"], game["generator skipped"]) == (1, 0)
    assert pair["last"] < 0.5 * pair["first"]
    assert pair["apart"] < 1e-4


if __name__ == "__main__":
    main()
