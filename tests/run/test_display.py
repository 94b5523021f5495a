import io
import math

import pytest
import torch
from rich.console import Console

import accumulus as acc
from accumulus.run.cut import Cut
from accumulus.run.display import BarDisplay, PlainDisplay, choose_display
from accumulus.run.schedule import Progress

from .tiny import line

RECORD = {
    "step": 7,
    "loss": 0.5,
    "bits_per_byte": 0.721,
    "tokens_per_second": 12_345.0,
    "loss_scale": 65536.0,
    "grad_norm": 1.25,
    "num_skipped": 2,
}


def make(kind, **console):
    output = io.StringIO()
    display = kind(Console(file=output, **console))
    task = line(derived={"bits_per_byte": lambda loss: loss / math.log(2)}, unit="bytes")
    precision = acc.Precision.parse("fp16")
    display.describe("runs/[bold]x", task, precision=precision, device=torch.device("cpu"))
    return display, output


def show(display, steps=1):
    progress = Progress(max_steps=100, max_seconds=None)
    progress.start_clock()
    with display:
        for step in range(1, steps + 1):
            progress.end_step(applied=True)
            display.show_step({**RECORD, "step": step}, progress)
        display.show_heldout({"step": steps, "seconds": 1.0, "loss": 1.0, "bits_per_byte": 1.4427})


@pytest.mark.parametrize("kind", [PlainDisplay, BarDisplay])
def test_what_is_shown(kind):
    display, output = make(kind, width=200, force_terminal=kind is BarDisplay)
    show(display)
    text = output.getvalue()
    for part in ("bits per byte", "12.3k bytes/s", "scale 65536", "grad 1.25", "skipped 2", "left", "1.4427"):
        assert part in text, part
    assert "runs/[bold]x" in text


def test_plain_lines_are_few_and_hold_no_control_characters():
    display, output = make(PlainDisplay, width=200)
    show(display, steps=50)
    lines = output.getvalue().splitlines()
    assert sum("skipped" in text for text in lines) == 1
    assert "\x1b" not in output.getvalue()


def test_a_task_without_derived_numbers_or_heldout_loss():
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=100))
    display.describe("x", line(), precision=acc.Precision.parse("fp32"), device=torch.device("cpu"))
    record = {"step": 1, "loss": 2.0, "tokens_per_second": 1.0, "loss_scale": 1.0, "grad_norm": None, "num_skipped": 0}
    display.show_step(record, Progress(max_steps=1, max_seconds=None))
    display.show_heldout({"step": 1, "seconds": 0.5, "accuracy": 0.25})
    assert "loss 2.0000" in output.getvalue()
    assert "accuracy 0.25" in output.getvalue()


def test_a_chosen_micro_batch_is_said_once_it_stays_and_when_it_changes():
    output = io.StringIO()
    display = PlainDisplay(Console(file=output, width=200))
    tried = [(size, f"trying sizes, step {step}", None) for step, size in enumerate((16, 8, 16, 32), 1)]
    kept, smaller = [(16, "the smallest of 3", 475.0)] * 3, [(8, "memory ran out", None)] * 2
    for step, (size, reason, speed) in enumerate([*tried, *kept, *smaller], 1):
        record = {"step": step, **Cut(size=None).to_record(choice(size, reason, speed))}
        display.show_choice(record)
    display.show_choice({"step": 1, **Cut(size=4).to_record(None)})
    assert output.getvalue().splitlines() == [
        "step     6  micro-batches of 16 samples: the smallest of 3 (475 samples/s)",
        "step     9  micro-batches of 8 samples: memory ran out",
    ]


def choice(size, reason, speed):
    return {"size": size, "unit": "samples", "reason": reason, "samples_per_second": speed}


def test_choice(monkeypatch):
    assert isinstance(choose_display(plain=True), PlainDisplay)
    assert isinstance(choose_display(plain=False), PlainDisplay), "the tests' output is no terminal"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert isinstance(choose_display(plain=False), BarDisplay)
