"""Convert HotpotQA to training rows in parquet, and its paragraphs to passages for the search tool.

    python examples/data_preprocess/hotpotqa.py --input hotpotqa/hotpot_qa:distractor:train --output data/hotpotqa/train.parquet
    python examples/data_preprocess/hotpotqa.py --input hotpotqa/hotpot_qa:distractor:validation --split test \
        --output data/hotpotqa/test.parquet

Every question comes with ten paragraphs of Wikipedia, two of which have the answer. The row has the question alone; the
paragraphs are appended to `passages.jsonl` beside --output, each once.
"""

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rows import make_row, parse_arguments, read_examples, run, write_rows

INSTRUCTION = (
    "Answer the question. Search for what you do not know, as often as you need to. "
    "Then give the answer, a few words, between <answer> and </answer>."
)


def passages_of(example: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Title and text of the paragraphs."""
    context = example["context"]
    for title, sentences in zip(context["title"], context["sentences"], strict=True):
        yield title, "".join(sentences).strip()


def append_passages(passages: dict[tuple[str, str], None], file: Path) -> None:
    """Add those that the file does not have."""
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            known = json.loads(line)
            passages.pop((known["title"], known["text"]), None)
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("a", encoding="utf-8") as out:
        for title, text in passages:
            out.write(json.dumps({"title": title, "text": text}) + "\n")
    logging.info("added %d passages to %s", len(passages), file)


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments(
        "Convert HotpotQA to training rows and passages.", argv, split="train", data_source="searchR1_hotpotqa"
    )
    rows = []
    passages: dict[tuple[str, str], None] = {}
    examples = read_examples(arguments.input, "question", "answer", "context", split=arguments.split)
    for number, example in enumerate(examples):
        passages.update(dict.fromkeys(passages_of(example)))
        prompt = f"{INSTRUCTION}\n\nQuestion: {example['question']}"
        extra = {"split": arguments.split, "index": number}
        rows.append(make_row(arguments.data_source, prompt, "qa", example["answer"], extra))
    write_rows(rows, arguments.output)
    append_passages(passages, arguments.output.parent / "passages.jsonl")


if __name__ == "__main__":
    run(main)
