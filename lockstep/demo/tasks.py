"""The demo's tasks: what differs between `--task sums`, `--task tools` and `--task shapes`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from lockstep.demo import products, products_reward, reward, shapes, shapes_reward, task
from lockstep.demo.model import make_model_folder
from lockstep.demo.task import Problem, answer_text, parse_question
from lockstep.demo.vision_model import make_vision_model_folder
from lockstep.demo.warmup import WarmUp, write_examples

Algorithm = Literal["grpo", "ppo"]
Row = dict[str, Any]
"""One answer of a validation, as its file has it."""


@dataclass(frozen=True)
class DemoTask:
    """
    write:          writes the problems, the warm-up rows and the model; returns the number of rows and a description.
    settings:       those of training that depend on the task. files: folder with problems and reward function.
    outcomes:       rows of the table before and after: a name, and which answers count.
    is_sample:      which problems may be shown.
    pictures:       files of the held-out problems' pictures, in their order, by the file of the problems.
    """

    data_source: str
    reward: ModuleType
    steps: dict[Algorithm, int]
    recipe: WarmUp
    max_length: int
    warmup_note: str
    write: Callable[[Path, WarmUp, int], tuple[int, str]]
    settings: Callable[[Path], dict[str, object]]
    outcomes: dict[str, Callable[[Row], float]]
    samples_title: str
    is_sample: Callable[[Row], bool]
    right_answer: Callable[[Row], str]
    pictures: Callable[[Path], list[bytes]] | None = None


def _write_sums(folder: Path, recipe: WarmUp, seed: int) -> tuple[int, str]:
    data = folder / "data"
    train, validation = task.split_problems(seed)
    task.write_rows(data / "train.parquet", train, "train")
    task.write_rows(data / "val.parquet", validation, "validation")
    num_parameters = make_model_folder(folder / "model", seed)
    return write_examples(data / "warmup.parquet", train, recipe, seed), (
        f"{len(train)} sums of two two-digit numbers for training, {len(validation)} for validation. "
        f"A Qwen2 model of {num_parameters:,} parameters with random weights; one token per character."
    )


def _sums_settings(files: Path) -> dict[str, object]:
    return {"data.train_batch_size": 128, "data.max_prompt_length": 8, "data.max_response_length": 6}


def forgot_carry(row: Row) -> bool:
    problem = parse_question(row["input"])
    return needs_carry(problem) and row["output"] == answer_text(problem.careless_answer)


def needs_carry(problem: Problem) -> bool:
    return problem.careless_answer != problem.right_answer


SUMS = DemoTask(
    data_source=task.DATA_SOURCE,
    reward=reward,
    steps={"grpo": 60, "ppo": 40},
    recipe=WarmUp(),
    max_length=16,
    warmup_note=(
        "Two thirds of the examples forget every carry (47+85=022), the rest are correct (47+85=132). "
        "So the model learns the answer format and both ways to add, and prefers the wrong one."
    ),
    write=_write_sums,
    settings=_sums_settings,
    outcomes={
        "correct": lambda row: row["acc"],
        "wrong: carry forgotten": forgot_carry,
        "correct format": lambda row: row["form"],
    },
    samples_title="Three answers to problems with a carry",
    is_sample=lambda row: needs_carry(parse_question(row["input"])),
    right_answer=lambda row: answer_text(parse_question(row["input"]).right_answer),
)


def _write_products(folder: Path, recipe: WarmUp, seed: int) -> tuple[int, str]:
    data = folder / "data"
    train, validation = products.split_products(seed)
    for name, problems, split in (("train", train, "train"), ("val", validation, "validation")):
        task.write_rows(data / f"{name}.parquet", problems, split, products.DATA_SOURCE, agent_name="tool_agent")
    (folder / "tools.yaml").write_text(products.TOOLS_YAML)
    num_parameters = make_model_folder(folder / "model", seed, phrases=(products.CALL, products.CLOSE))
    num_rows = recipe.steps * recipe.batch_size
    return products.write_conversations(data / "warmup.parquet", train, num_rows, seed), (
        f"{len(train)} products of two three-digit numbers for training, {len(validation)} for validation: the model is too small "
        f"to multiply, but has a calculator. A Qwen2 model of {num_parameters:,} parameters with random weights; one token per "
        "character, and one each for the beginning and the end of a tool call."
    )


def _products_settings(files: Path) -> dict[str, object]:
    return {
        "data.train_batch_size": 64,
        "data.max_prompt_length": 12,
        "data.max_response_length": 32,
        "actor_rollout_ref.rollout.multi_turn.tool_config_path": files / "tools.yaml",
        "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 3,
    }


TOOLS = DemoTask(
    data_source=products.DATA_SOURCE,
    reward=products_reward,
    steps={"grpo": 20, "ppo": 40},
    recipe=WarmUp(steps=500, batch_size=64),
    max_length=40,
    warmup_note=(
        "Four of five examples guess an answer at once, the fifth calls the calculator and copies its result. "
        "So the model learns the format of a tool call, and prefers to guess."
    ),
    write=_write_products,
    settings=_products_settings,
    outcomes={"correct": lambda row: row["acc"], "called the calculator": lambda row: row["tool"]},
    samples_title="Three conversations: tool calls, results and answers",
    is_sample=lambda row: True,
    right_answer=lambda row: str(products.parse_product(row["input"]).right_answer),
)


def _write_shapes(folder: Path, recipe: WarmUp, seed: int) -> tuple[int, str]:
    data = folder / "data"
    train, validation = shapes.split_questions(seed)
    shapes.write_questions(data / "train.parquet", train, "train")
    shapes.write_questions(data / "val.parquet", validation, "validation")
    num_parameters = make_vision_model_folder(folder / "model", seed)
    examples = train[: recipe.steps * recipe.batch_size]
    shapes.write_answers(data / "warmup.parquet", examples, seed)
    return len(examples), (
        f"{len(train)} pictures with a question (How many red squares?) for training, {len(validation)} for validation. "
        f"A Qwen2.5-VL model of {num_parameters:,} parameters with random weights; one token per kind of shape, and one per "
        "quarter of a picture."
    )


def _shapes_settings(files: Path) -> dict[str, object]:
    return {
        "data.train_batch_size": 64,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "actor_rollout_ref.actor.optim.lr": 5e-4,
    }


SHAPES = DemoTask(
    data_source=shapes.DATA_SOURCE,
    reward=shapes_reward,
    steps={"grpo": 25, "ppo": 40},
    recipe=WarmUp(steps=400, batch_size=64),
    max_length=24,
    warmup_note=(
        "The answers list what is in the four quarters, then the number. Half of the examples take all shapes of the asked colour "
        "for the asked form, the others are correct. So the model learns to see and to count, but often sees what it is asked "
        "for."
    ),
    write=_write_shapes,
    settings=_shapes_settings,
    outcomes={
        "correct": lambda row: row["acc"],
        "wrong: all shapes of the colour counted": lambda row: row["careless"],
    },
    samples_title="Three pictures",
    is_sample=lambda row: True,
    right_answer=lambda row: str(row["gts"]),
    pictures=shapes.read_pictures,
)

TASKS = {"sums": SUMS, "tools": TOOLS, "shapes": SHAPES}
