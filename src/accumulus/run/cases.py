"""The rows of the benchmark. No torch in here: the process that only waits for the others stays small."""

from __future__ import annotations

from dataclasses import dataclass

from accumulus.run.bench_config import BenchConfig

PLAIN = "plain loop"


@dataclass(frozen=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    precision: str
    microbatch: int

    @property
    def is_plain(self) -> bool:
        """Whether the hand-written loop runs instead of `TrainStep`."""
        return self.name == PLAIN


def list_cases(config: BenchConfig) -> list[Case]:
    """The plain loop first, because the others are compared with it; then each precision in both cuts."""
    small, whole = config.microbatch_size(), config.batch_size
    cases = [Case(name=PLAIN, precision="fp32", microbatch=small)]
    for precision in dict.fromkeys(config.precisions):
        cases += [
            Case(name=name, precision=precision, microbatch=size)
            for name, size in (("accumulated", small), ("whole batch", whole))
        ]
    return cases
