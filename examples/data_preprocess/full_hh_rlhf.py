r"""Convert Dahoas/full-hh-rlhf (`prompt`, `response`, `chosen`, `rejected`) to data for RLHF in parquet.

    python examples/data_preprocess/full_hh_rlhf.py --input full-hh-rlhf --output data/full_hh_rlhf

Below --output, all from the examples of the training split:

    sft/train.parquet            prompt, response: two rows per example, the chosen and the rejected answer
    rm/{train,test}.parquet      prompt, chosen, rejected: the first 75 % of the examples, and the others
    rl/train.parquet             rows for RL, scored by a reward model: train with reward_model.enable=true

`--split sft`, `rm` or `rl` writes only one of them. A prompt is a conversation as text, "\n\nHuman: …\n\nAssistant:": `sft` and
`rm` keep the text, `rl` has its turns as chat messages; prompts that are not of this form are skipped and listed.
"""

import logging
from pathlib import Path
from typing import Any

from rows import parse_arguments, read_examples, run, write_rows

from lockstep.data.rows import parse_dialogue

RM_SHARE = 0.75
DATA_SOURCE = "Dahoas/full-hh-rlhf"

Example = dict[str, Any]


def messages(prompt: str) -> list[dict[str, str]] | None:
    """The turns of a conversation that the assistant has to continue; None if the text is none."""
    dialogue = parse_dialogue(prompt)
    return dialogue[:-1] if dialogue is not None and not dialogue[-1]["content"] else None


def write_sft(examples: list[Example], folder: Path) -> None:
    pairs = [{"prompt": e["prompt"], "response": e[side]} for e in examples for side in ("chosen", "rejected")]
    write_rows(pairs, folder / "train.parquet")


def write_rm(examples: list[Example], folder: Path) -> None:
    rows = [{name: example[name] for name in ("prompt", "chosen", "rejected")} for example in examples]
    num_train = int(len(rows) * RM_SHARE)
    write_rows(rows[:num_train], folder / "train.parquet")
    write_rows(rows[num_train:], folder / "test.parquet")


def write_rl(examples: list[Example], folder: Path) -> None:
    rows, left_out = [], []
    for number, example in enumerate(examples):
        prompt = messages(example["prompt"])
        if prompt is None:
            left_out.append(str(number))
            continue
        reward_model = {"style": "model", "ground_truth": example["response"]}
        extra = {"split": "train", "index": number}
        row = {"data_source": DATA_SOURCE, "prompt": prompt, "ability": "alignment"}
        rows.append(row | {"reward_model": reward_model, "extra_info": extra})
    if left_out:
        logging.warning("skipped %d prompts that are not conversations: %s", len(left_out), ", ".join(left_out))
    write_rows(rows, folder / "train.parquet")


PARTS = {"sft": write_sft, "rm": write_rm, "rl": write_rl}


def main(argv: list[str] | None = None) -> None:
    arguments = parse_arguments("Convert full-hh-rlhf to data for SFT, reward models and RL.", argv, split="all")
    parts = list(PARTS) if arguments.split == "all" else [arguments.split]
    if not set(parts) <= set(PARTS):
        raise SystemExit(f"--split {arguments.split}: must be all, {', '.join(PARTS)}")
    examples = list(read_examples(arguments.input, "prompt", "response", "chosen", "rejected", split="train"))
    for part in parts:
        PARTS[part](examples, arguments.output / part)


if __name__ == "__main__":
    run(main)
