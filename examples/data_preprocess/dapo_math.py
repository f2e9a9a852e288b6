"""Convert DAPO-Math-17k to training rows in parquet.

    python examples/data_preprocess/dapo_math.py --input DAPO-Math-17k --output data/dapo_math/train.parquet

BytedTsinghua-SIA/DAPO-Math-17k has every problem about a hundred times (1.8 million examples); each is kept once, with its
first answer. The prompts already ask for a last line `Answer: $Answer`, which the scorer `math_dapo` reads. In
open-r1/DAPO-Math-17k-Processed, `prompt` is the problem alone: the same request is added.
"""

import logging
from typing import Any

from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = (
    "Solve this problem step by step. The last line of your response must be `Answer:` followed by the answer."
)


def prompt_of(example: dict[str, Any], number: int) -> str:
    """The text of the only message, or the problem with the instruction."""
    prompt = example["prompt"]
    if isinstance(prompt, str):
        return f"{INSTRUCTION}\n\n{prompt}"
    if len(prompt) != 1:
        raise SystemExit(f"example {number}: the prompt has {len(prompt)} messages instead of one")
    return prompt[0]["content"]


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(
        "Convert DAPO-Math-17k to rows in parquet.", argv, split="train", data_source="math_dapo"
    )
    rows: dict[str, dict[str, Any]] = {}
    num_examples, contradictions = 0, set()
    for number, example in enumerate(read_examples(arguments.input, "prompt", "reward_model", split=arguments.split)):
        prompt, truth = prompt_of(example, number), str(example["reward_model"]["ground_truth"])
        if prompt not in rows:
            published = (example.get("extra_info") or {}).get("index")
            extra = {"split": arguments.split, "index": len(rows), "id": published}
            rows[prompt] = make_row(arguments.data_source, prompt, "math", truth, extra)
        elif rows[prompt]["reward_model"]["ground_truth"] != truth:
            contradictions.add(prompt)
        num_examples = number + 1
    logging.info("%d examples are %d problems", num_examples, len(rows))
    if contradictions:
        logging.warning("%d problems have several answers; the first one is used", len(contradictions))
    write_rows(rows.values(), arguments.output)


if __name__ == "__main__":
    run(main)
