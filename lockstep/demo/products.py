"""The demo's task with a tool: products with six digits, which the small model can only get from the calculator.

warm-up rows: most guess an answer at once, the others call the calculator and copy its result
"""

import random
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

DATA_SOURCE = "products"
NUM_TRAIN, NUM_VALIDATION = 16_384, 512
NUM_FACTORS = 680
CALL = '<tool_call>{"name": "calculator", "arguments": {"expression": "'
CLOSE = '"}}</tool_call>'
GUESSES = 4
"""Warm-up rows out of five that guess."""
TOOLS_YAML = "tools:\n  - class_name: calculator\n    config: {type: native}\n"


@dataclass(frozen=True)
class Product:
    """a * b, both from 320 to 999."""

    a: int
    b: int

    @property
    def question(self) -> str:
        return f"{self.a}*{self.b}"

    @property
    def right_answer(self) -> int:
        return self.a * self.b


def parse_product(text: str) -> Product:
    a, b = text.split("*")
    return Product(int(a), int(b))


def split_products(seed: int) -> tuple[list[Product], list[Product]]:
    """Different problems, drawn by `seed`: (train, validation)."""
    drawn = random.Random(seed).sample(range(NUM_FACTORS**2), NUM_TRAIN + NUM_VALIDATION)
    problems = [Product(1000 - NUM_FACTORS + n // NUM_FACTORS, 1000 - NUM_FACTORS + n % NUM_FACTORS) for n in drawn]
    return problems[:NUM_TRAIN], problems[NUM_TRAIN:]


def write_conversations(path: Path, problems: list[Product], num_rows: int, seed: int) -> int:
    """Write the warm-up rows and return their number."""
    rng = random.Random(seed)
    rows = []
    for number in range(num_rows):
        problem = problems[number % len(problems)]
        if number % (GUESSES + 1) < GUESSES:
            answers = [("assistant", f"={rng.randrange(100_000, 1_000_000)}")]
        else:
            answers = [
                ("assistant", f"{CALL}{problem.question}{CLOSE}"),
                ("tool", str(problem.right_answer)),
                ("assistant", f"={problem.right_answer}"),
            ]
        turns = [("user", problem.question), *answers]
        rows.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    rng.shuffle(rows)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return num_rows
