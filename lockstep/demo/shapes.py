"""Pictures of coloured shapes, and questions about how many there are of a kind.

seed ─► Question (what the picture shows, what is asked) ─► PNG ─► rows

An answer lists the cells row by row, then has the number: ` red square nothing red circle nothing: 1`. A careless one takes
every shape of the asked colour for one of the asked form.
"""

import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageDraw

DATA_SOURCE = "shapes"
NUM_TRAIN, NUM_VALIDATION = 4096, 512
CARELESS = 1 / 2
"""Share of careless answers in the warm-up."""
COLORS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220)}
FORMS = ("square", "circle", "triangle")
CELL = 16
"""Pixels per side of a cell, which has at most one shape."""
NUM_CELLS = 2
"""Cells per side of a picture."""
MOST_ASKED = 2
"""Largest answer."""
MOST_OTHERS = 2
"""Most shapes of the asked colour and another form."""
INSTRUCTION = "How many {color} {form}s?"
EMPTY = "nothing"


@dataclass(frozen=True)
class Shape:
    """A shape within the square of side `size` whose upper left corner is at (x, y), in pixels."""

    color: str
    form: str
    x: int
    y: int
    size: int

    @property
    def cell(self) -> int:
        return self.y // CELL * NUM_CELLS + self.x // CELL


@dataclass(frozen=True)
class Question:
    """How many shapes of this colour and form are in the picture?"""

    color: str
    form: str
    shapes: tuple[Shape, ...]

    @property
    def text(self) -> str:
        return INSTRUCTION.format(color=self.color, form=self.form)

    @property
    def right_answer(self) -> int:
        return sum(shape.color == self.color and shape.form == self.form for shape in self.shapes)

    @property
    def careless_answer(self) -> int:
        """The number of shapes of the colour, whatever their form."""
        return sum(shape.color == self.color for shape in self.shapes)

    def answer(self, *, careless: bool = False) -> str:
        cells = [EMPTY] * NUM_CELLS**2
        for shape in self.shapes:
            form = self.form if careless and shape.color == self.color else shape.form
            cells[shape.cell] = f"{shape.color} {form}"
        number = self.careless_answer if careless else self.right_answer
        return "".join(f" {cell}" for cell in cells) + f": {number}"

    def picture(self) -> Image.Image:
        image = Image.new("RGB", (NUM_CELLS * CELL, NUM_CELLS * CELL), "white")
        draw = ImageDraw.Draw(image)
        for shape in self.shapes:
            left, top, right, bottom = shape.x, shape.y, shape.x + shape.size - 1, shape.y + shape.size - 1
            color = COLORS[shape.color]
            if shape.form == "square":
                draw.rectangle((left, top, right, bottom), fill=color)
            elif shape.form == "circle":
                draw.ellipse((left, top, right, bottom), fill=color)
            else:
                draw.polygon(((left, bottom), ((left + right) / 2, top), (right, bottom)), fill=color)
        return image

    def png(self) -> bytes:
        file = io.BytesIO()
        self.picture().save(file, format="PNG")
        return file.getvalue()


def questions(seed: int) -> Iterator[Question]:
    """Endless questions; answers from 0 to MOST_ASKED are equally frequent."""
    rng = random.Random(seed)
    while True:
        color, form = rng.choice(list(COLORS)), rng.choice(FORMS)
        other_forms = [name for name in FORMS if name != form]
        other_colors = [name for name in COLORS if name != color]
        kinds = [(color, form)] * rng.randint(0, MOST_ASKED)
        kinds += [(color, rng.choice(other_forms)) for _ in range(rng.randint(0, MOST_OTHERS))]
        if len(kinds) < NUM_CELLS**2 and rng.random() < 0.5:
            kinds.append((rng.choice(other_colors), rng.choice(FORMS)))
        cells = rng.sample(range(NUM_CELLS**2), len(kinds))
        yield Question(color, form, tuple(_place(rng, *kind, cell) for kind, cell in zip(kinds, cells)))


def _place(rng: random.Random, color: str, form: str, cell: int) -> Shape:
    """A shape of random size, somewhere in its cell."""
    size = rng.randint(CELL - 4, CELL - 2)
    x, y = (rng.randint(1, CELL - 1 - size) for _ in range(2))
    return Shape(color, form, cell % NUM_CELLS * CELL + x, cell // NUM_CELLS * CELL + y, size)


def split_questions(seed: int) -> tuple[list[Question], list[Question]]:
    """Different questions, drawn by `seed`: (train, validation)."""
    drawn = list(islice(dict.fromkeys(islice(questions(seed), 2 * NUM_TRAIN)), NUM_TRAIN + NUM_VALIDATION))
    return drawn[NUM_VALIDATION:], drawn[:NUM_VALIDATION]


def prompt_and_picture(question: Question) -> dict[str, Any]:
    """The text, with a placeholder for the picture, and the picture."""
    return {"prompt": f"{question.text}<image>", "images": [{"bytes": question.png()}]}


def write_questions(path: Path, asked: Sequence[Question], split: str) -> None:
    """Write rows for `data.train_files` and `data.val_files`."""
    rows: list[dict[str, Any]] = []
    for index, question in enumerate(asked):
        row = prompt_and_picture(question)
        row["prompt"] = [{"role": "user", "content": row["prompt"]}]
        row |= {
            "data_source": DATA_SOURCE,
            "ability": "counting",
            "reward_model": {"style": "rule", "ground_truth": str(question.right_answer)},
            "extra_info": {"split": split, "index": index, "careless_answer": str(question.careless_answer)},
        }
        rows.append(row)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_answers(path: Path, asked: Sequence[Question], seed: int) -> None:
    """Write the warm-up rows."""
    rng = random.Random(seed)
    answers = [question.answer(careless=rng.random() < CARELESS) for question in asked]
    rows = [prompt_and_picture(question) | {"response": answer} for question, answer in zip(asked, answers)]
    pq.write_table(pa.Table.from_pylist(rows), path)


def read_pictures(path: Path) -> list[bytes]:
    """The pictures of a file of questions."""
    return [images[0]["bytes"] for images in pq.read_table(path, columns=["images"])["images"].to_pylist()]
