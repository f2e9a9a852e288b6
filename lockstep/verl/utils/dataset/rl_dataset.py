"""verl.utils.dataset.rl_dataset"""

from typing import Any

from lockstep.config.data import DataConfig
from lockstep.data import rl_dataset
from lockstep.data.rl_dataset import collate_fn as collate_fn
from lockstep.data.tensors import compute_position_id_with_mask, pad_prompts
from lockstep.verl._config import set_keys

PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")


class RLHFDataset(rl_dataset.RLHFDataset):
    """Rows with the prompt also as left-padded tensors, which programs on verl take from the batch:
    `input_ids`, `attention_mask` and `position_ids`, each (data.max_prompt_length,)."""

    def __init__(
        self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1
    ) -> None:
        super().__init__(data_files, tokenizer, set_keys(DataConfig, config), processor, max_samples)

    def __getitem__(self, item: int) -> dict[str, Any]:
        row = super().__getitem__(item)
        ids, mask = pad_prompts([row["raw_prompt_ids"]], self.config.max_prompt_length, self._pad_token_id)
        return row | {
            "input_ids": ids[0],
            "attention_mask": mask[0],
            "position_ids": compute_position_id_with_mask(mask)[0],
        }

    @property
    def _pad_token_id(self) -> int:
        pad = self.tokenizer.pad_token_id
        assert isinstance(pad, int), "the tokenizer has no pad token"
        return pad


def without_prompt_tensors(batch: Any) -> Any:
    """The batch without these columns, whose names the rollout's output has too."""
    if batch.batch is not None:
        present = [name for name in PROMPT_TENSORS if name in batch.batch.keys()]  # noqa: SIM118
        batch.pop(batch_keys=present)
        if not len(list(batch.batch.keys())):
            batch.batch = None
    return batch
