"""The dataset of a run: of files, of a generator, or of the user's class."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from lockstep.config.data import DataConfig
from lockstep.data.files import file_digests
from lockstep.data.generated import create_generated_dataset
from lockstep.data.rl_dataset import RLHFDataset
from lockstep.registry import load_plugin
from lockstep.utils.dataset_files import Use, local_data_files
from lockstep.utils.generated_data import is_generated

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def create_rl_dataset(
    data_files: str | Path | Sequence[str | Path],
    tokenizer: "PreTrainedTokenizerBase",
    config: DataConfig,
    max_samples: int = -1,
    use: Use = "train",
    processor: Any = None,
) -> Dataset[dict[str, Any]]:
    """Build `RLHFDataset`, or the class named by `data.custom_cls`, with the same arguments.

    A custom class that does not derive from `RLHFDataset` gets `data_files` as they are. use: selects the split of folders and
    of datasets on the Hub. processor: of a model that reads images; without one, classes do not get the argument.
    """
    custom = config.custom_cls
    if custom.path is None and any(map(is_generated, _as_list(data_files))):
        return create_generated_dataset(_as_list(data_files), tokenizer, config, max_samples, use)
    cls: Any = RLHFDataset
    if custom.path is not None:
        cls = load_plugin("data.custom_cls.path", custom.path, custom.name, base=Dataset)
    if issubclass(cls, RLHFDataset):
        data_files = [str(file) for file in local_data_files(data_files, use, f"data.{use}_files")]
    given = {} if processor is None else {"processor": processor}
    dataset = cls(data_files=data_files, tokenizer=tokenizer, config=config, max_samples=max_samples, **given)
    if not hasattr(dataset, "fingerprint"):
        paths = [Path(file).expanduser() for file in _as_list(data_files)]
        if all(path.is_file() for path in paths):
            dataset.fingerprint = file_digests(paths)
    return dataset


def _as_list(data_files: str | Path | Sequence[str | Path]) -> list[str | Path]:
    return [data_files] if isinstance(data_files, str | Path) else list(data_files)
