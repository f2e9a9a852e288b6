r"""Convert AIME and AMC problems to validation rows in parquet.

    python examples/data_preprocess/aime.py --input AIME_2024 --output data/aime24.parquet
    python examples/data_preprocess/aime.py --input aime_2025 --output data/aime25.parquet --data-source aime25

An example has a problem (`problem`, `Problem` or `question`) and a number as its answer (`answer` or `Answer`), as in
Maxwell-Jia/AIME_2024, HuggingFaceH4/aime_2024, yentinglin/aime_2025, math-ai/aime25 and opencompass/AIME2025. `27.0` and `027`
are written as `27`. AMC 2023: `--data-source math_dapo`.
"""

from typing import Any

from rows import BOXED, make_row, parse_arguments, read_examples, run, write_rows


def field_of(example: dict[str, Any], number: int, *names: str) -> Any:
    """The first of the fields `names`, in any case."""
    lower = {name.lower(): value for name, value in example.items()}
    for name in names:
        if name in lower:
            return lower[name]
    raise SystemExit(f"example {number} has no {' or '.join(map(repr, names))} (fields: {', '.join(example)})")


def whole_number(answer: object, number: int) -> str:
    try:
        value = float(str(answer))
    except ValueError:
        raise SystemExit(f"example {number}: the answer {answer!r} is not a number") from None
    return str(int(value)) if value == int(value) else str(value)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments("Convert AIME problems to rows in parquet.", argv, split="test", data_source="aime24")
    rows = []
    for number, example in enumerate(read_examples(arguments.input, split=arguments.split)):
        prompt = f"{field_of(example, number, 'problem', 'question')}\n{BOXED}"
        truth = whole_number(field_of(example, number, "answer"), number)
        rows.append(make_row(arguments.data_source, prompt, "math", truth, {"split": arguments.split, "index": number}))
    write_rows(rows, arguments.output)


if __name__ == "__main__":
    run(main)
