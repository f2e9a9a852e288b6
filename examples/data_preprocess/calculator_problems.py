r"""Convert word problems with formulas (SVAMP, ASDiv) to data for a run with a calculator and one without.

    python examples/data_preprocess/calculator_problems.py --input svamp.jsonl asdiv.jsonl --output data/calculator

Below --output, the problems that both runs share, and demonstrations for a supervised warm-up, made from the formulas:

    train.parquet, test.parquet   rows for RL: each problem as published (data_source word_problems) and, if its numbers can be
                                  replaced in the text, with larger ones (word_problems_large)
    sft_calculator.parquet        the problems of train.parquet, solved with one call of the calculator per operation
    sft_plain.parquet             the same operations as equations: "15 + 10 = 25\n25 + 10 = 35\n#### 35"

Larger numbers have one digit more and the same order; every intermediate result stays a positive whole number. Problems with
other formulas (fractions, remainders, ratios, equations) are skipped.
"""

import argparse
import ast
import json
import logging
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rows import make_row, read_examples, run, write_rows
from word_problems import split

from lockstep.agents.tools.calculator import calculate

OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
NUMBER = re.compile(r"(?<![\w.,/:-])\d+(?![\w/:%-]|[.,]\d)")
"""A whole number on its own in a question."""
FORMULA_NUMBER = re.compile(r"\d+(?:\.\d+)?")
MAX_DRAWS = 5000

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Step:
    """One operation: `expression` is "15 + 10", `result` is 25."""

    expression: str
    result: int


def steps_of(formula: str) -> list[Step] | None:
    """The operations of a formula, in the order of evaluation; None unless all numbers and results are positive whole numbers."""
    steps: list[Step] = []

    def value(node: ast.expr) -> int:
        if isinstance(node, ast.Constant) and float(node.value).is_integer():
            return int(node.value)
        if not isinstance(node, ast.BinOp) or type(node.op) not in OPERATORS:
            raise ValueError
        expression = f"{value(node.left)} {OPERATORS[type(node.op)]} {value(node.right)}"
        steps.append(Step(expression, int(calculate(expression))))
        if steps[-1].result < 1:
            raise ValueError
        return steps[-1].result

    try:
        value(ast.parse(formula.strip(), mode="eval").body)
    except (SyntaxError, ValueError, TypeError):  # other notations; a result with decimals; a name or a text
        return None
    return steps or None


def problem_of(example: dict[str, Any]) -> dict[str, Any] | None:
    """A problem as an RL row with its formula in `extra_info`; None if the formula is not arithmetic on whole numbers."""
    fields = {name.lower(): value for name, value in example.items()}  # SVAMP's names are capitalised
    formula, _, _ = str(fields.get("equation") or fields.get("formula")).partition("=")
    answer = FORMULA_NUMBER.match(str(fields["answer"]))
    steps = steps_of(formula)
    if steps is None or answer is None or float(answer[0]) != steps[-1].result:
        return None
    body = fields["body"].strip()
    text = f"{body}{'' if body[-1:] in ',.!?' else ','} {fields['question'].strip()}"
    return row_of("word_problems", text, formula, steps)


def row_of(data_source: str, question: str, formula: str, steps: list[Step]) -> dict[str, Any]:
    extra = {"question": question, "formula": formula.strip()}
    return make_row(data_source, question, "math", str(steps[-1].result), extra)


def with_larger_numbers(row: dict[str, Any], rng: random.Random) -> dict[str, Any] | None:
    """The row with other numbers in question and formula; None if the question has too few of the formula's numbers."""
    question, formula = row["extra_info"]["question"], row["extra_info"]["formula"]
    old = sorted({int(number) for number in NUMBER.findall(question)})
    used = {int(float(number)) for number in FORMULA_NUMBER.findall(formula)} & set(old)
    if len(used) < 2 or len(NUMBER.findall(question)) < len(re.findall(r"\d+", question)):
        return None
    for _ in range(MAX_DRAWS):
        new = [rng.randrange(10 ** len(str(number)), 10 ** (len(str(number)) + 1)) for number in old]
        number_of = dict(zip(old, new))
        drawn = replace_numbers(FORMULA_NUMBER, formula, number_of)
        steps = steps_of(drawn) if new == sorted(set(new)) else None
        if steps is not None:
            return row_of("word_problems_large", replace_numbers(NUMBER, question, number_of), drawn, steps)
    return None


def replace_numbers(pattern: re.Pattern[str], text: str, number_of: dict[int, int]) -> str:
    """`text` with other numbers; those that `number_of` lacks (constants of a formula, such as 7 for a week) stay."""
    return pattern.sub(lambda match: str(number_of.get(int(float(match[0])), match[0])), text)


def plain_solution(steps: list[Step]) -> Messages:
    equations = "".join(f"{step.expression} = {step.result}\n" for step in steps)
    return [{"role": "assistant", "content": f"{equations}#### {steps[-1].result}"}]


def calculator_solution(steps: list[Step]) -> Messages:
    messages = []
    for step in steps:
        call = json.dumps({"name": "calculator", "arguments": {"expression": step.expression}})
        messages.append({"role": "assistant", "content": f"<tool_call>\n{call}\n</tool_call>"})
        messages.append({"role": "tool", "content": str(step.result)})
    return [*messages, {"role": "assistant", "content": f"#### {steps[-1].result}"}]


SOLUTIONS = {"sft_plain": plain_solution, "sft_calculator": calculator_solution}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Convert word problems with formulas; hold some out.")
    parser.add_argument(
        "--input", nargs="+", required=True, help="SVAMP and ASDiv: files with body, question, formula, answer"
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for the four files")
    parser.add_argument("--held-out", type=int, default=400, help="problems in test.parquet; default: 400")
    parser.add_argument("--seed", type=int, default=0, help="seed of the split and the larger numbers; default: 0")
    arguments = parser.parse_args(argv)
    examples = [e for path in arguments.input for e in read_examples(path)]
    problems = [row for row in map(problem_of, examples) if row is not None]
    logging.info("%d of %d examples are arithmetic on whole numbers", len(problems), len(examples))
    rng = random.Random(arguments.seed)
    train, test = (
        [*rows, *(larger for row in rows if (larger := with_larger_numbers(row, rng)) is not None)]
        for rows in split(problems, arguments.held_out, arguments.seed)
    )
    write_rows(train, arguments.output / "train.parquet")
    write_rows(test, arguments.output / "test.parquet")
    for name, solution in SOLUTIONS.items():
        pairs = [{"messages": row["prompt"] + solution(_steps(row))} for row in train]
        write_rows(pairs, arguments.output / f"{name}.parquet")


def _steps(row: dict[str, Any]) -> list[Step]:
    steps = steps_of(row["extra_info"]["formula"])
    assert steps is not None
    return steps


if __name__ == "__main__":
    run(main)
