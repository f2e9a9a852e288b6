"""Convert Geometry3K (`problem`, `answer`, `images`) to training rows in parquet.

    python examples/data_preprocess/geo3k.py --input hiyouga/geometry3k --split train --output data/geo3k/train.parquet

The images stay as they are (encoded bytes), in the column `images`; `<image>` in the prompt says where they belong.
"""

from typing import Any

from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = r"First reason between <think> and </think>, then give the final answer in \boxed{}."
PLACEHOLDER = "<image>"


def row_of(example: dict[str, Any], index: int, split: str, data_source: str) -> dict[str, Any]:
    """One published example as a training row."""
    problem, answer, images = example["problem"], str(example["answer"]), example["images"]
    if not isinstance(images, list) or not images:
        raise SystemExit(f"example {index} has no images: {images!r:.80}")
    missing = len(images) - problem.count(PLACEHOLDER)
    if missing < 0:
        raise SystemExit(
            f"example {index}: the problem has more {PLACEHOLDER} than its {len(images)} images: {problem!r}"
        )
    extra = {"split": split, "index": index, "answer": answer, "question": problem}
    prompt = f"{PLACEHOLDER * missing}{problem} {INSTRUCTION}"
    return make_row(data_source, prompt, "math", answer, extra) | {"images": images}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(
        "Convert Geometry3K to training rows in parquet.", argv, split="train", data_source="hiyouga/geometry3k"
    )
    examples = read_examples(arguments.input, "problem", "answer", "images", split=arguments.split)
    write_rows(
        [row_of(example, i, arguments.split, arguments.data_source) for i, example in enumerate(examples)],
        arguments.output,
    )


if __name__ == "__main__":
    run(main)
