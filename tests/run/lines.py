"""Curves that are straight lines, and plans made of them: what the tests of a plan need, without a model."""

from dataclasses import dataclass, field, replace

from accumulus.run.plan_result import Plan
from accumulus.run.plan_rows import Limit, choose, make_rows

PARTS = ("parameters", "gradients", "optimizer state", "cast weights", "activations", "temporary")


@dataclass(frozen=True)
class Line:
    """A peak of `fixed` bytes and `each` more a sample; what a real curve offers, without a model."""

    fixed: int
    each: int

    def at(self, microbatch):
        return LineEstimate(self.fixed, self.each * microbatch)

    def largest(self, limit_bytes, at_most):
        return max((size for size in range(1, at_most + 1) if self.fixed + self.each * size <= limit_bytes), default=0)


@dataclass(frozen=True)
class LineEstimate:
    fixed: int
    activations: int
    phase: str = "backward"
    method: str = "fake"
    note: str = ""
    parts: dict = field(init=False)

    def __post_init__(self):
        object.__setattr__(
            self, "parts", dict.fromkeys(PARTS, 0) | {"parameters": self.fixed, "activations": self.activations}
        )

    @property
    def peak_bytes(self):
        return self.fixed + self.activations


def make_plan(limit_bytes, curves=None, *, batch_size=16, shortfall=None):
    """A plan over lines, with a command as the real one has."""
    curves = curves or {"fp32": Line(100, 10), "bf16": Line(120, 5)}
    limit = Limit(limit_bytes=limit_bytes, source="given")
    rows = make_rows(curves, limit, batch_size=batch_size, asked=batch_size)
    choice = choose(rows, curves, limit, fast="bf16", fast_reason="it has units", batch_size=batch_size)
    if choice is not None:
        choice = replace(choice, command=f"accumulus train --microbatch {choice.row.microbatch}")
    return Plan(
        task="mine.py:job",
        batch_size=batch_size,
        device="cpu",
        kernels="Counted for the kernels of this CPU.",
        limit=limit,
        rows=rows,
        choice=choice,
        shortfall=shortfall,
        notes=("Estimated for the longest samples.",),
    )
