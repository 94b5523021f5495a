"""The stacked bars of a plan in the terminal: a texture for each part besides its colour, and the limit marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from accumulus.run.plan_result import Plan
from accumulus.run.plan_rows import Row, worth_drawing
from accumulus.units import format_bytes

LABEL_WIDTH = 14
VALUE_WIDTH = 10
BEYOND = 1.25
"""How far beyond the limit the bars are drawn, in limits: what is longer still ends in an arrow."""


@dataclass(frozen=True)
class Ink:
    """How a part is drawn.

    Args:
        style: the picture's colour, on a darker one of its kind.
        texture: what tells it from the others without colour.
        ascii_texture: the same where there are no block characters.
    """

    style: str
    texture: str
    ascii_texture: str


INKS = {
    "parameters": Ink("#0072B2 on #004468", "█", "P"),
    "gradients": Ink("#E69F00 on #7A5400", "▓", "G"),
    "optimizer state": Ink("#009E73 on #00543D", "▒", "O"),
    "cast weights": Ink("#56B4E9 on #1F5A7A", "░", "C"),
    "activations": Ink("#D55E00 on #7A3600", "▪", "A"),
    "temporary": Ink("#CC79A7 on #6E3A58", "·", "T"),
}
PLAIN = Ink("", "?", "?")
LEGEND_COLUMNS = 3


@dataclass(frozen=True, kw_only=True)
class Scale:
    """From bytes to columns.

    Args:
        full_bytes: what the whole width stands for.
        width: in columns.
        limit_bytes: the memory to fit into.
    """

    full_bytes: int
    width: int
    limit_bytes: int

    def column(self, num_bytes: float) -> int:
        """The column at which so many bytes end; at most the width."""
        return min(self.width, round(self.width * num_bytes / self.full_bytes))

    @property
    def limit_column(self) -> int | None:
        """Where the limit is marked; None where it lies beyond the scale."""
        return None if self.limit_bytes > self.full_bytes else min(self.width - 1, self.column(self.limit_bytes))


def make_scale(peaks: Sequence[int], limit_bytes: int, width: int) -> Scale:
    """The scale on which the bars and, where they come near it, the limit can be seen.

    Args:
        peaks: the bars' lengths.
        limit_bytes: the memory to fit into.
        width: in columns.

    Returns:
        Up to the longest bar, at most `BEYOND` limits where some bar ends before the limit; at least to the limit,
        unless the bars are less than a third of it.
    """
    some_fit = min(peaks) <= limit_bytes
    longest = min(max(peaks), int(BEYOND * limit_bytes)) if some_fit else max(peaks)
    full = longest if 3 * longest < limit_bytes else max(longest, limit_bytes)
    return Scale(full_bytes=max(1, full), width=width, limit_bytes=limit_bytes)


def show_bars(console: Console, plan: Plan) -> None:
    """Prints one bar a row: those of the precision to choose, and the other precisions at the same size.

    Where nothing fits: one sample in every precision.

    Args:
        console: where to.
        plan: with at least one row.
    """
    is_ascii = console.options.ascii_only
    rows = pick_rows(plan)
    width = max(20, min(console.width, 120) - LABEL_WIDTH - VALUE_WIDTH)
    scale = make_scale([row.peak_bytes for row in rows], plan.limit.limit_bytes, width)
    console.print(legend(plan.rows[0].parts, is_ascii=is_ascii))
    console.print(limit_line(scale, is_ascii=is_ascii))
    before = rows[0].precision
    for row in rows:
        if plan.choice is not None and row.precision != before == rows[0].precision:
            console.print()
        before = row.precision
        is_chosen = plan.choice is not None and plan.choice.row == row
        mark = ("<" if is_ascii else "◀") if is_chosen else ""
        line = Text(f"{row.precision:<8}{row.microbatch:>5} ", style="bold" if is_chosen else "", no_wrap=True)
        line.append_text(bar(row, scale, is_ascii=is_ascii))
        console.print(line.append(f" {format_bytes(row.peak_bytes)}{mark}", style="bold" if is_chosen else ""))


def pick_rows(plan: Plan) -> list[Row]:
    """The rows to draw: few enough to be seen at a glance. The table and the file have all of them."""
    if plan.choice is None:
        return [row for row in plan.rows if row.microbatch == 1]
    shown = plan.choice.row
    same = worth_drawing([row for row in plan.rows if row.precision == shown.precision])
    others = [row for row in plan.rows if row.precision != shown.precision and row.microbatch == shown.microbatch]
    return same + others


def legend(parts: Mapping[str, int], *, is_ascii: bool) -> Text:
    """Each part's texture, in its colour, and its name; in columns."""
    text = Text(no_wrap=True)
    width = 2 + max(map(len, parts))
    for number, part in enumerate(parts):
        ink = INKS.get(part, PLAIN)
        text.append("\n" if number and number % LEGEND_COLUMNS == 0 else "")
        text.append((ink.ascii_texture if is_ascii else ink.texture) * 2, style=ink.style).append(f" {part:<{width}}")
    return text


def limit_line(scale: Scale, *, is_ascii: bool) -> Text:
    """The line above the bars that says where the limit is."""
    limit = f"limit {format_bytes(scale.limit_bytes)}"
    column = scale.limit_column
    if column is None:
        times = scale.limit_bytes / scale.full_bytes
        shown = f"{times:,.0f}" if times >= 100 else f"{times:.3g}"
        return Text(f"{'':{LABEL_WIDTH}}{f'{limit}, {shown} x this width':>{scale.width}}", style="dim")
    mark = "v" if is_ascii else "▼"
    return Text(f"{'':{LABEL_WIDTH}}{f'{limit} ':>{column}}{mark}", style="bold")


def bar(row: Row, scale: Scale, *, is_ascii: bool) -> Text:
    """One stacked bar.

    Args:
        row: its parts.
        scale: from bytes to columns.
        is_ascii: letters in place of textures.

    Returns:
        `scale.width` characters; a part that rounds to no column is not drawn.
    """
    letters: list[tuple[str, str]] = []
    total = 0
    for part, num_bytes in row.parts.items():
        total += num_bytes
        ink = INKS.get(part, PLAIN)
        letter = ink.ascii_texture if is_ascii else ink.texture
        letters += [(letter, ink.style)] * (scale.column(total) - len(letters))
    letters += [(" ", "")] * (scale.width - len(letters))
    if row.peak_bytes > scale.full_bytes:
        letters[-1] = (">" if is_ascii else "▶", "bold")
    if scale.limit_column is not None:
        letters[scale.limit_column] = ("|" if is_ascii else "│", "bold")
    return Text.assemble(*letters)
