"""A dataset: the rows of the training files with an instruction added to every prompt.

data.custom_cls.path=examples/plugins/dataset.py:WithInstruction
"""

from lockstep.data.rl_dataset import RLHFDataset


class WithInstruction(RLHFDataset):
    """Called with data_files, tokenizer, config and max_samples; any torch Dataset works that yields the same columns."""

    def _messages(self, row):
        *earlier, last = super()._messages(row)
        return [*earlier, last | {"content": f"{last['content']} Be brief."}]
