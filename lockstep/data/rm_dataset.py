"""Preference pairs for reward models: a prompt with a chosen and a rejected answer, as two padded sequences.

A row: `prompt`, `chosen`, `rejected`, all text. A sample: `input_ids` and `attention_mask`, (2, max_length) int64, the
chosen answer first; right-padded with id 0, overlong sequences are truncated on the right.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Dataset

from lockstep.data.files import FileRow, read_rows

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RMDataset(Dataset[dict[str, torch.Tensor]]):
    def __init__(
        self,
        parquet_files: str | Path | list[str],
        tokenizer: "PreTrainedTokenizerBase",
        prompt_key: str = "prompt",
        chosen_key: str = "chosen",
        rejected_key: str = "rejected",
        max_length: int = 1024,
        add_eos: bool = True,
        max_samples: int = -1,
    ) -> None:
        if add_eos and tokenizer.eos_token is None:
            raise ValueError("the tokenizer has no eos token; set one in its config or add_eos=False")
        self.tokenizer = tokenizer
        self.keys = (prompt_key, chosen_key, rejected_key)
        self.max_length = max_length
        self.ending = tokenizer.eos_token if add_eos else ""
        self.rows = read_rows(parquet_files, max_samples)
        for row in self.rows:
            self._check(row)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, item: int) -> dict[str, torch.Tensor]:
        prompt, *answers = (self.rows[item].columns[key] for key in self.keys)
        input_ids = torch.zeros(2, self.max_length, dtype=torch.int64)
        attention_mask = torch.zeros_like(input_ids)
        for side, answer in enumerate(answers):
            # Encoded separately, so that an answer's tokens do not depend on how the prompt ends.
            tail = self.tokenizer(f"{answer}{self.ending}", add_special_tokens=False)["input_ids"]
            ids = [*self.tokenizer(prompt)["input_ids"], *tail][: self.max_length]
            input_ids[side, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            attention_mask[side, : len(ids)] = 1
        return {"input_ids": input_ids, "attention_mask": attention_mask}

    def _check(self, row: FileRow) -> None:
        for name, key in zip(("prompt", "chosen", "rejected"), self.keys):
            if row.columns.get(key) is None:
                raise ValueError(
                    f"{row.location} has no {key!r}; set {name}_key to the column (columns: {', '.join(row.columns)})"
                )
            if not isinstance(row.columns[key], str):
                raise ValueError(f"{row.location}: {key!r} must be text, not {type(row.columns[key]).__name__}")
