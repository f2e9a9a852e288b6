"""Panels as text, for the terminal.

reward/mean
 0.8 ┤             ***
 0.4 ┤     ****++++
   0 ┤*****+++
     └────────────────
      1             50
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rich.text import Text

from lockstep.observability.curves import Panel, Points, axis_number
from lockstep.observability.step_line import format_number

MARKS = "*+ox#@%&"
COLOURS = ("blue", "red", "green", "magenta", "yellow", "cyan")
HEIGHT = 10
LABEL = 10
"""Characters of the numbers next to the axis."""


def legend(panels: Sequence[Panel]) -> Iterator[Text]:
    for number, run in enumerate(panels[0].curves):
        yield Text(f"{_mark(number)} {run}", style=_colour(number))


def lines(panel: Panel, width: int) -> Iterator[Text]:
    """One panel, at most `width` characters wide."""
    points = [point for curve in panel.curves.values() for point in curve]
    first, last = min(step for step, _ in points), max(step for step, _ in points)
    low, high = min(value for _, value in points), max(value for _, value in points)
    columns = max(10, min(width - LABEL - 3, 100))
    grid: list[list[int | None]] = [[None] * columns for _ in range(HEIGHT)]
    for number, curve in enumerate(panel.curves.values()):
        for column, value in enumerate(_by_column(curve, first, last, columns)):
            if value is not None:
                row = HEIGHT - 1 - round((value - low) / (high - low) * (HEIGHT - 1)) if high > low else HEIGHT // 2
                grid[row][column] = number
    latest = [f"{_mark(n)} {format_number(c[-1][1])}" for n, c in enumerate(panel.curves.values()) if c]
    yield Text.assemble((panel.metric, "bold"), f"  last: {', '.join(latest)}")
    for row, cells in enumerate(grid):
        value = high - (high - low) * row / (HEIGHT - 1)
        shown = row in (0, HEIGHT // 2, HEIGHT - 1) if high > low else row == HEIGHT // 2
        line = Text(f"{axis_number(value if high > low else high, high - low) if shown else '':>{LABEL}} |")
        for cell in cells:
            line.append(" ") if cell is None else line.append(_mark(cell), style=_colour(cell))
        line.rstrip()
        yield line
    yield Text(f"{'':{LABEL}} +{'-' * columns}")
    yield Text(f"{'step':>{LABEL}}  {first}{last:>{columns - len(str(first))}}")


def _by_column(points: Points, first: int, last: int, columns: int) -> list[float | None]:
    """The value of a curve in each column: the mean of its points there, or else on the line between its neighbours."""
    cells: list[list[float]] = [[] for _ in range(columns)]
    for step, value in points:
        cells[(step - first) * (columns - 1) // max(1, last - first)].append(value)
    found: list[float | None] = [sum(cell) / len(cell) if cell else None for cell in cells]
    filled = [column for column, value in enumerate(found) if value is not None]
    for left, right in pairwise(filled):
        start, end = found[left] or 0.0, found[right] or 0.0
        for column in range(left + 1, right):
            found[column] = start + (end - start) * (column - left) / (right - left)
    return found


def _mark(number: int) -> str:
    return MARKS[number % len(MARKS)]


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]
