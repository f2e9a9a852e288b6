"""Rows that a package makes: entries such as `reasoning_gym:chain_sum` of `data.train_files` and `data.val_files`.

reasoning_gym:TASK ──► ReasoningGymDataset   row i of a seed is always the same, and made when it is needed
"""

import hashlib
from collections.abc import Sequence
from dataclasses import fields
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.data import DataConfig
from lockstep.data.files import FileRow, drawn
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.data.verifiers_tasks import fingerprint, verifiers_rows
from lockstep.registry import did_you_mean
from lockstep.utils.dataset_files import Use
from lockstep.utils.generated_data import GeneratedData, is_generated, parse_generated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TRAIN_SIZE, VAL_SIZE = 2**20, 500
"""Rows of a task that names no `size`."""
VAL_SEED = 2**31
"""Problem i of a seed is drawn from seed + i, so this keeps the problems of validation apart from those of training."""
CHECKED_ROWS = 64
"""Rows that are checked before training; the others are made later."""
MAX_DRAWS = 100
_DIFFERS = "its problems depend on the hash seed, so the process that scores an answer makes another problem"
UNUSABLE = {
    **dict.fromkeys(("isomorphic_strings", "list_functions", "polynomial_multiplication", "ransom_note"), _DIFFERS),
    "game_of_life_halting": "its scorer gives every answer the full score",
}
"""Tasks whose scores would be wrong, and why."""
SYSTEM_PROMPT = "system_prompt"
"""Option of ours: a system prompt of the package by name, or null."""


def create_generated_dataset(
    entries: Sequence[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    max_samples: int,
    use: Use,
) -> RLHFDataset:
    """The dataset of entries that are all of one source; ValueError with the key otherwise."""
    key = f"data.{use}_files"
    if not all(map(is_generated, entries)):
        raise ValueError(f"{key}={list(map(str, entries))}: generated data and files cannot be mixed in one list")
    parsed = [parse_generated(str(entry)) for entry in entries]
    if len({data.source for data in parsed}) > 1:
        raise ValueError(f"{key}={list(map(str, entries))}: all entries must be of the same source")
    cls: type[ReasoningGymDataset] | type[VerifiersDataset] = (
        ReasoningGymDataset if parsed[0].source == "reasoning_gym" else VerifiersDataset
    )
    try:
        return cls(parsed, tokenizer, config, max_samples, use)
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


class ReasoningGymTask:
    """One task with its options; row i is always the same."""

    def __init__(self, data: GeneratedData, config: DataConfig, use: Use) -> None:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
        from reasoning_gym.utils import SYSTEM_PROMPTS

        self.data, self.config = data, config
        if data.name not in DATASETS:
            raise ValueError(
                f"{data.entry}: reasoning-gym has no task {data.name}. {did_you_mean(data.name, DATASETS)}"
            )
        if data.name in UNUSABLE:
            raise ValueError(f"{data.entry}: task {data.name} cannot be used: {UNUSABLE[data.name]}")
        options = dict(data.options)
        prompt = options.pop(SYSTEM_PROMPT, "default")
        if prompt is not None and prompt not in SYSTEM_PROMPTS:
            raise ValueError(
                f"{data.entry}: {SYSTEM_PROMPT}={prompt} is not one of {', '.join(SYSTEM_PROMPTS)} or null"
            )
        self.system = [] if prompt is None else [{"role": "system", "content": SYSTEM_PROMPTS[prompt]}]
        known = [field.name for field in fields(DATASETS[data.name][1])]
        for name in options:
            if name not in known:
                raise ValueError(f"{data.entry}: task {data.name} has no option {name}. {did_you_mean(name, known)}")
        seed = (config.seed or 0) + (VAL_SEED if use == "val" else 0)
        self.options = {"seed": seed, "size": VAL_SIZE if use == "val" else TRAIN_SIZE} | options
        try:
            self.problems = reasoning_gym.create_dataset(data.name, **self.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"{data.entry}: {error or 'the task refuses these options'}") from error

    def __len__(self) -> int:
        return int(self.options["size"])

    def row(self, index: int) -> FileRow:
        problem = self.problems[index]
        made = {
            "task": self.data.name,
            "options": self.options,
            "index": index,
            "question": digest(problem["question"]),
        }
        columns = {
            self.config.reward_fn_key: f"reasoning_gym/{self.data.name}",
            self.config.prompt_key: [*self.system, {"role": "user", "content": problem["question"]}],
            "ability": self.problems.category,
            "reward_model": {"style": "rule", "ground_truth": str(problem["answer"])},
            "extra_info": {"reasoning_gym": made},
        }
        return FileRow(self.data.entry, index, columns)


def digest(question: str) -> str:
    """With this the scorer checks that it made the same problem again."""
    return hashlib.sha256(question.encode()).hexdigest()[:16]


class ReasoningGymDataset(RLHFDataset):
    """Problems of one or several tasks in turn, made when they are read; `rows` are the first ones, which are checked.

    With `data.filter_overlong_prompts` a problem that is too long is replaced by a later one of its task.
    """

    def __init__(
        self,
        entries: Sequence[GeneratedData],
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig,
        max_samples: int,
        use: Use,
    ) -> None:
        self.tasks = [ReasoningGymTask(data, config, use) for data in entries]
        self.size = sum(map(len, self.tasks))
        if max_samples >= 0:
            self.size = min(self.size, max_samples)
        super().__init__([], tokenizer, config)

    def _read(self, data_files: str | Path | Sequence[str | Path], max_samples: int) -> list[FileRow]:
        return [self._row(item) for item in range(min(len(self), max(CHECKED_ROWS, len(self.tasks))))]

    def _row(self, item: int) -> FileRow:
        task, index = self._place(item)
        return task.row(index)

    def _place(self, item: int) -> tuple[ReasoningGymTask, int]:
        """The task of a row and the number of its problem: the tasks take turns until the shorter ones end."""
        if not 0 <= item < self.size:
            raise IndexError(item)
        begin = round_ = 0
        for end, members in self._rounds:
            in_block = (end - round_) * len(members)
            if item < begin + in_block:
                turn, member = divmod(item - begin, len(members))
                return members[member], round_ + turn
            begin, round_ = begin + in_block, end
        raise IndexError(item)

    @cached_property
    def _rounds(self) -> list[tuple[int, list[ReasoningGymTask]]]:
        """(rounds, tasks that still have problems until then)."""
        ends = sorted({len(task) for task in self.tasks})
        return [(end, [task for task in self.tasks if len(task) >= end]) for end in ends]

    def __len__(self) -> int:
        return self.size

    @property
    def fingerprint(self) -> dict[str, str]:
        package = version("reasoning-gym")
        return {task.data.entry: f"reasoning-gym {package} {sorted(task.options.items())}" for task in self.tasks}

    def __getitem__(self, item: int) -> dict[str, Any]:
        task, index = self._place(item)
        row = task.row(index)
        ids = self._encode([row])[0]
        if self.config.filter_overlong_prompts:
            for draw in range(1, MAX_DRAWS):
                if len(ids) <= self.config.max_prompt_length:
                    break
                row = task.row(index + draw * len(task))
                ids = self._encode([row])[0]
        if len(ids) > self.config.max_prompt_length and self.config.truncation == "error":
            raise ValueError(
                f"{row.location}: the prompt has {len(ids)} tokens, more than data.max_prompt_length="
                f"{self.config.max_prompt_length}; raise it, or set data.filter_overlong_prompts=true to draw another problem"
            )
        return self._sample(item, row, ids)

    def _without_overlong(self, rows: list[tuple[int, FileRow]]) -> list[tuple[int, FileRow]]:
        """All rows: those that are too long are replaced when they are read. ValueError if all are."""
        super()._without_overlong(rows)
        return rows


class VerifiersDataset(RLHFDataset):
    """The tasks of one or several verifiers environments."""

    def __init__(
        self,
        entries: Sequence[GeneratedData],
        tokenizer: "PreTrainedTokenizerBase",
        config: DataConfig,
        max_samples: int,
        use: Use,
    ) -> None:
        self.entries = entries
        super().__init__([], tokenizer, config, max_samples=max_samples)

    def _read(self, data_files: str | Path | Sequence[str | Path], max_samples: int) -> list[FileRow]:
        rows = [row for data in self.entries for row in verifiers_rows(data, self.config)]
        if not rows:
            raise ValueError(f"{', '.join(data.entry for data in self.entries)} has no tasks")
        return drawn(rows, max_samples, self.config.seed if self.config.shuffle else None)

    @property
    def fingerprint(self) -> dict[str, str]:
        return {data.entry: fingerprint(data) for data in self.entries}
