"""The demo with pictures: its questions, and a very short full run."""

import io
import json
from itertools import islice
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from PIL import Image

from lockstep import cli
from lockstep.demo.report import on_terminal
from lockstep.demo.shapes import CELL, NUM_CELLS, Question, Shape, questions, split_questions, write_answers
from lockstep.demo.shapes_reward import compute_score
from lockstep.demo.vision_model import make_tokenizer

pytestmark = pytest.mark.first

SCENE = Question(
    "red",
    "square",
    (
        Shape("red", "square", 1, 1, 14),
        Shape("red", "circle", CELL + 1, 1, 14),
        Shape("blue", "square", 1, CELL + 1, 14),
    ),
)


def test_answers_and_picture() -> None:
    assert SCENE.text == "How many red squares?"
    assert (SCENE.right_answer, SCENE.careless_answer) == (1, 2)
    assert SCENE.answer() == " red square red circle blue square nothing: 1"
    assert SCENE.answer(careless=True) == " red square red square blue square nothing: 2"
    picture = Image.open(io.BytesIO(SCENE.png()))
    assert picture.size == (NUM_CELLS * CELL, NUM_CELLS * CELL)
    assert picture.getpixel((2, 2)) == (220, 40, 40)  # the square's corner
    assert picture.getpixel((CELL + 2, 2)) == (255, 255, 255)  # the circle has none
    assert picture.getpixel((CELL + 8, 8)) == (220, 40, 40)
    assert picture.getpixel((CELL + 8, CELL + 8)) == (255, 255, 255)
    assert len(on_terminal(picture, 16).plain.splitlines()) == 8


def test_questions_are_split_and_drawn_by_the_seed() -> None:
    train, validation = split_questions(3)
    assert not {*train} & {*validation} and len(validation) == 512
    assert split_questions(3) == (train, validation)
    assert {question.right_answer for question in train} == {0, 1, 2}
    assert 0.2 < sum(q.right_answer == q.careless_answer for q in train) / len(train) < 0.5


def test_half_of_the_warm_up_rows_are_careless(tmp_path: Path) -> None:
    asked = [question for question in islice(questions(0), 300) if question.right_answer != question.careless_answer]
    write_answers(tmp_path / "rows.parquet", asked, seed=0)
    rows = pq.read_table(tmp_path / "rows.parquet").to_pylist()
    right = [row["response"] == question.answer() for row, question in zip(rows, asked, strict=True)]
    careless = [row["response"] == question.answer(careless=True) for row, question in zip(rows, asked)]
    assert all(a != b for a, b in zip(right, careless)) and 0.4 < sum(right) / len(asked) < 0.6


@pytest.mark.parametrize(
    "answer, score, careless",
    [(" nothing: 1", 1.0, 0.0), (": 2", 0.0, 1.0), (": 1: 0", 0.0, 0.0), (": 1s?", 0.0, 0.0), (" nothing", 0.0, 0.0)],
)
def test_only_the_correct_number_is_rewarded(answer: str, score: float, careless: float) -> None:
    found = compute_score("shapes", answer, "1", {"careless_answer": "2"})
    assert found == {"score": score, "acc": score, "careless": careless}


def test_one_token_per_kind() -> None:
    tokenizer = make_tokenizer()
    assert [tokenizer.decode([i]) for i in tokenizer.encode(SCENE.text)] == ["How many", " red square", "s?"]
    assert len(tokenizer.encode(SCENE.answer())) == NUM_CELLS**2 + 1
    for text in (SCENE.text, SCENE.answer()):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
def test_short_demo_with_pictures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    options = ["--task", "shapes", "--out", str(out), "--device", "cpu", "--steps", "1", "--warmup-steps", "3"]
    assert cli.main(["demo", *options]) == 0
    shown = capsys.readouterr().out
    for text in ("How many red squares?", "Half of the", "Three pictures", "samples.png", "How many"):
        assert text in shown
    assert json.loads((out / "summary.json").read_text())["steps"] == 1
    assert Image.open(out / "samples.png").size[0] > 3 * 192
    assert list((out / "rollouts").rglob("*.png"))
