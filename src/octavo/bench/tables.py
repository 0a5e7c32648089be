"""Tables of Markdown that line up, and times with fitting units."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, text_columns: int) -> list[str]:
    """A Markdown table whose columns line up; those after the first `text_columns` are numbers, to the right."""
    lines = [columns, *(tuple(map(str, row)) for row in rows)]
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(columns))]

    def joined(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cells) + " |"

    def aligned(line: Sequence[str]) -> str:
        return joined(
            cell.ljust(width) if column < text_columns else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        )

    rule = joined(
        "-" * width if column < text_columns else "-" * (width - 1) + ":" for column, width in enumerate(widths)
    )
    return [aligned(lines[0]), rule, *(aligned(line) for line in lines[1:])]


def duration(seconds: float) -> str:
    """With three digits and a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
