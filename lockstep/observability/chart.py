"""Panels as a picture: laid out once as lines and texts, written as SVG, HTML or PNG."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from lockstep.observability.curves import Panel, axis_number

PANEL_WIDTH, PANEL_HEIGHT = 480, 240
LEFT, RIGHT, TOP, BOTTOM = 60, 16, 32, 34
"""Margins of a panel around its curves."""
HEADER, LEGEND_ROW, MARGIN = 30, 18, 12
TEXT, TITLE, GRID = "#444", "#000", "#e2e5e9"
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#666666")
"""Told apart also with colour-blind eyes; further runs repeat them."""
DOTS_UP_TO = 40
"""Curves with at most this many points are drawn with a dot at each."""
FORMATS = (".svg", ".html", ".png")


@dataclass(frozen=True)
class Line:
    points: list[tuple[float, float]]
    colour: str
    width: float = 1.0


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    colour: str


@dataclass(frozen=True)
class Label:
    """anchor: which end of the text is at x: start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    colour: str = TEXT


Shape = Line | Dot | Label


@dataclass(frozen=True)
class Picture:
    width: int
    height: int
    shapes: list[Shape]


def draw(title: str, panels: Sequence[Panel]) -> Picture:
    """A title (may be empty), a legend of the runs and a grid of panels."""
    runs = list(panels[0].curves)
    colours = {run: COLOURS[number % len(COLOURS)] for number, run in enumerate(runs)}
    columns = min(2, len(panels))
    header = HEADER if title else MARGIN
    top = header + LEGEND_ROW * len(runs)
    shapes: list[Shape] = [Label(MARGIN, 20, title, colour=TITLE)] if title else []
    for row, run in enumerate(runs):
        y = header + LEGEND_ROW * row
        shapes += [Line([(MARGIN, y + 4), (MARGIN + 20, y + 4)], colours[run], 3), Label(MARGIN + 28, y + 8, run)]
    for number, panel in enumerate(panels):
        corner = (number % columns * PANEL_WIDTH, top + number // columns * PANEL_HEIGHT)
        shapes += _panel(panel, colours, *corner)
    return Picture(columns * PANEL_WIDTH, top + math.ceil(len(panels) / columns) * PANEL_HEIGHT, shapes)


def _panel(panel: Panel, colours: dict[str, str], left: float, top: float) -> Iterator[Shape]:
    points = [point for curve in panel.curves.values() for point in curve]
    steps, levels = ticks([step for step, _ in points], whole=True), ticks([value for _, value in points])
    width, height = PANEL_WIDTH - LEFT - RIGHT, PANEL_HEIGHT - TOP - BOTTOM

    def x(step: float) -> float:
        return left + LEFT + width * (step - steps[0]) / (steps[-1] - steps[0])

    def y(value: float) -> float:
        return top + TOP + height * (levels[-1] - value) / (levels[-1] - levels[0])

    yield Label(left + LEFT, top + 20, panel.metric, colour=TITLE)
    for level in levels:
        yield Line([(x(steps[0]), y(level)), (x(steps[-1]), y(level))], GRID)
        yield Label(left + LEFT - 6, y(level) + 4, axis_number(level, levels[-1] - levels[0]), "end")
    for step in steps:
        yield Label(x(step), top + PANEL_HEIGHT - BOTTOM + 16, f"{step:g}", "middle")
    for run, curve in panel.curves.items():
        yield from _curve([(x(step), y(value)) for step, value in curve], colours[run])


def _curve(points: list[tuple[float, float]], colour: str) -> Iterator[Shape]:
    if len(points) > 1:
        yield Line(points, colour, 1.6)
    if len(points) <= DOTS_UP_TO:
        yield from (Dot(x, y, colour) for x, y in points)


def ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """Two to seven round numbers that enclose the values, in steps of 1, 2 or 5 times a power of ten."""
    low, high = min(values), max(values)
    span = high - low or abs(high) or 1.0
    unit = 10.0 ** math.floor(math.log10(span / 5))
    spacing = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor * 5 >= span)
    spacing = max(1.0, spacing) if whole else spacing
    first, last = math.floor(round(low / spacing, 9)), math.ceil(round(high / spacing, 9))
    return [number * spacing for number in range(first, max(last, first + 1) + 1)]


def save(picture: Picture, path: Path) -> None:
    """Write the picture in the format of the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".png":
        _save_png(picture, path)
    elif path.suffix == ".html":
        head = '<!doctype html>\n<html><head><meta charset="utf-8"><title>lockstep plot</title></head><body>\n'
        path.write_text(f"{head}{svg(picture)}</body></html>\n", encoding="utf-8")
    else:
        path.write_text(svg(picture), encoding="utf-8")


def svg(picture: Picture) -> str:
    size = f'width="{picture.width}" height="{picture.height}" viewBox="0 0 {picture.width} {picture.height}"'
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">']
    parts += ['<rect width="100%" height="100%" fill="white"/>', *map(_svg_shape, picture.shapes)]
    return "\n".join([*parts, "</svg>", ""])


def _svg_shape(shape: Shape) -> str:
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width}"/>'
    if isinstance(shape, Dot):
        return f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="2.5" fill="{shape.colour}"/>'
    place = f'x="{shape.x:.1f}" y="{shape.y:.1f}" text-anchor="{shape.anchor}" fill="{shape.colour}"'
    return f"<text {place}>{escape(shape.text)}</text>"


def _save_png(picture: Picture, path: Path, scale: int = 2) -> None:
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (picture.width * scale, picture.height * scale), "white")
    canvas = ImageDraw.Draw(image)
    font = ImageFont.load_default(12 * scale)
    for shape in picture.shapes:
        if isinstance(shape, Line):
            canvas.line([(x * scale, y * scale) for x, y in shape.points], shape.colour, round(shape.width * scale))
        elif isinstance(shape, Dot):
            canvas.circle((shape.x * scale, shape.y * scale), 2.5 * scale, shape.colour)
        else:
            anchor = {"start": "ls", "middle": "ms", "end": "rs"}[shape.anchor]
            canvas.text((shape.x * scale, shape.y * scale), shape.text, shape.colour, font, anchor)
    image.save(path)
