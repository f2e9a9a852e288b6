"""Preference pairs: a prompt with a chosen and a rejected answer, as two token sequences.

    row ─► prompt as messages, both answers as text ─► chat template + answer + EOS, twice ─► {"chosen": …, "rejected": …}

A sequence is what a rollout would contain: the prompt rendered for generation, then the answer and the EOS token. So a reward model
scores in PPO what it was trained on. Each of the two is a sample of `SupervisedRows`, with `loss_mask` 1 at the answer.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import Dataset

from lockstep.config.preference import PreferenceDataConfig, RMDataConfig
from lockstep.data.files import FileRow
from lockstep.data.image_prompts import num_pictures
from lockstep.data.rows import parse_dialogue
from lockstep.data.sft_dataset import Piece, SupervisedRows, create_dataset, plain_message
from lockstep.protocol.images import IMAGES
from lockstep.utils.dataset_files import Use

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

Message = dict[str, Any]


class PreferenceDataset(SupervisedRows):
    """A sample: `chosen`, `rejected`, and `margin` if the config names its column."""

    config: PreferenceDataConfig

    def __init__(
        self,
        parquet_files: str | Path | list[str],
        tokenizer: "PreTrainedTokenizerBase",
        config: PreferenceDataConfig | RMDataConfig,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        if tokenizer.eos_token is None:
            raise ValueError("the tokenizer has no eos token to end an answer with; set one in its config")
        self.keys = {"chosen": config.chosen_key, "rejected": config.rejected_key}
        self.margin_key = config.margin_key if isinstance(config, RMDataConfig) else None
        self.margins: list[float] = []
        super().__init__(parquet_files, tokenizer, config, processor, max_samples)
        for row, (_, mask), kept in zip(self.rows, self._tokens, self._positions):
            if not mask[kept].any():
                raise ValueError(
                    f"{row.location}: the prompt has {len(mask) - mask.sum()} tokens, so data.truncation={config.truncation} to "
                    f"data.max_length={config.max_length} leaves nothing of the {row.columns['side']} answer; raise data.max_length"
                )

    def __len__(self) -> int:
        return len(self.rows) // 2

    def __getitem__(self, item: int) -> dict[str, Any]:
        sample: dict[str, Any] = {"chosen": self.sequence(2 * item), "rejected": self.sequence(2 * item + 1)}
        if self.images is not None:
            inputs = self.image_inputs(2 * item)  # of both
            sample = {side: tokens | {IMAGES: inputs} for side, tokens in sample.items()}
        if self.margins:
            sample["margin"] = torch.tensor(self.margins[item])
        return sample

    def sequences(self, rows: list[FileRow]) -> list[FileRow]:
        """The two sequences of each pair, one after the other: columns prompt, answer, side."""
        found: list[FileRow] = []
        invalid: list[str] = []
        for row in rows:
            prompt, answers = self._pair(row)
            if problem := self._invalid(answers):
                invalid.append(f"{row.location}: {problem}")
                if not self.config.drop_invalid_pairs:
                    raise ValueError(
                        f"{invalid[0]}; correct it, or set data.drop_invalid_pairs=true to leave such rows out"
                    )
                continue
            if self.margin_key is not None:
                self.margins.append(self._margin(row, self.margin_key))
            for side, answer in answers.items():
                columns = {"prompt": prompt, "answer": answer, "side": side}
                if self.config.image_key in row.columns:
                    columns[self.config.image_key] = row.columns[self.config.image_key]
                found.append(FileRow(row.file, row.number, columns))
        if invalid:
            logger.warning("%d of %d pairs are left out; the first: %s", len(invalid), len(rows), invalid[0])
        if not found:
            raise ValueError(f"{', '.join(map(str, self.data_files))}: no pair is left (data.drop_invalid_pairs)")
        return found

    def complete(self, numbers: list[int]) -> list[int]:
        """Those of whole pairs: an image may be there for one side, and gone for the other."""
        usable = {*numbers}
        return [number for number in numbers if number ^ 1 in usable]

    def keep(self, numbers: list[int]) -> None:
        super().keep(numbers)
        self.margins = [self.margins[i // 2] for i in numbers[::2]] if self.margins else []

    def conversation(self, row: FileRow) -> list[Message]:
        return self.placed(row, row.columns["prompt"])

    def pieces(self, row: FileRow) -> list[Piece]:
        prompt = self.conversation(row)
        if self.images is not None:
            self.images.check_text(row, f"the {row.columns['side']} answer", row.columns["answer"])
        return [
            Piece(self.render(row, prompt, generate=True), False, num_pictures(prompt)),
            Piece(f"{row.columns['answer']}{self.tokenizer.eos_token}", True),
        ]

    def _pair(self, row: FileRow) -> tuple[list[Message], dict[str, str]]:
        """The prompt's messages, and the answer of each side."""
        own = row.columns.get(self.config.prompt_key)
        prompts: dict[str, list[Message]] = {}
        answers: dict[str, str] = {}
        for side in self.keys:
            conversation = self._conversation(row, side, own)
            answer = conversation[-1]
            if answer["role"] != "assistant" or not isinstance(answer["content"], str):
                raise ValueError(f"{row.location}: {self._name(side)} must end with an assistant message that has text")
            prompts[side], answers[side] = conversation[:-1], answer["content"]
        if prompts["chosen"] != prompts["rejected"]:
            raise ValueError(
                f"{row.location}: the conversations {self._name('chosen')} and {self._name('rejected')} must be the same up to "
                "their last message"
            )
        return prompts["chosen"], answers

    def _conversation(self, row: FileRow, side: str, prompt: Any) -> list[Message]:
        """Prompt and answer as messages."""
        name = self._name(side)
        value = row.columns.get(self.keys[side])
        if value is None:
            raise ValueError(
                f"{row.location} has no {name}; set data.{side}_key to the column with the {side} answer "
                f"(columns: {', '.join(row.columns)})"
            )
        if isinstance(value, str):
            if prompt is None and (dialogue := parse_dialogue(value)) is not None:
                return dialogue
            before, is_dialogue = self._prompt(row, prompt)
            return [*before, {"role": "assistant", "content": value.strip() if is_dialogue else value}]
        messages = self._messages(row, name, value)
        if messages[0]["role"] != "assistant":  # a whole conversation
            return messages
        return [*self._prompt(row, prompt)[0], *messages]

    def _prompt(self, row: FileRow, prompt: Any) -> tuple[list[Message], bool]:
        """Its messages, and whether it was a dialogue in one text."""
        key = self.config.prompt_key
        if prompt is None:
            raise ValueError(
                f"{row.location} has no {key!r}; set data.prompt_key to the column with the prompt "
                f"(columns: {', '.join(row.columns)})"
            )
        if not isinstance(prompt, str):
            return self._messages(row, repr(key), prompt), False
        dialogue = parse_dialogue(prompt)
        if dialogue is not None and not dialogue[-1]["content"]:
            return list(dialogue[:-1]), True
        return [{"role": "user", "content": prompt}], False

    def _messages(self, row: FileRow, name: str, value: Any) -> list[Message]:
        valid = isinstance(value, list) and all(isinstance(m, Mapping) and "role" in m for m in value)
        if not value or not valid:
            raise ValueError(
                f'{row.location}: {name} must be text or a list of messages [{{"role": "user", "content": "..."}}, ...], '
                f"not {value!r:.80}"
            )
        return [plain_message(message) for message in value]

    def _margin(self, row: FileRow, key: str) -> float:
        value = row.columns.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ValueError(
                f"{row.location}: the margin {key!r} must be a number, not {value!r:.80}; set data.margin_key to another column "
                f"or null (columns: {', '.join(row.columns)})"
            )
        return float(value)

    def _invalid(self, answers: dict[str, str]) -> str | None:
        """What makes a pair unusable."""
        for side, answer in answers.items():
            if not answer.strip():
                return f"the {side} answer (data.{side}_key) is empty"
        if answers["chosen"] == answers["rejected"]:
            return "the two answers (data.chosen_key, data.rejected_key) are equal"
        return None

    def _name(self, side: str) -> str:
        return repr(self.keys[side])


def create_preference_dataset(
    data_files: list[str],
    tokenizer: "PreTrainedTokenizerBase",
    config: PreferenceDataConfig,
    max_samples: int = -1,
    use: Use = "train",
    processor: Any = None,
) -> Dataset[dict[str, Any]]:
    """See `create_dataset`."""
    return create_dataset(lambda _: PreferenceDataset, data_files, tokenizer, config, max_samples, use, processor)
