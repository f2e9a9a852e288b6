"""The functions of verl.trainer.main_ppo that build a dataset and its sampler; `RayPPOTrainer` uses them too."""

from typing import TYPE_CHECKING, Any, cast

from lockstep.config.data import DataConfig
from lockstep.verl._config import set_keys

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from lockstep.utils.dataset_files import Use


def create_rl_dataset(
    data_paths: Any,
    data_config: Any,
    tokenizer: Any,
    processor: Any = None,
    is_train: bool = True,
    max_samples: int | None = None,
) -> "Dataset[Any]":
    """The dataset of the files, of the class that `data.custom_cls` names or `RLHFDataset`.

    is_train: selects the split of folders and of datasets on the Hub. A custom class that does not derive from `RLHFDataset`
    gets `data_paths` as they are.
    max_samples: None is `data.train_max_samples` or, without `is_train`, `data.val_max_samples`.
    """
    from lockstep.data import rl_dataset
    from lockstep.registry import load_object
    from lockstep.utils.dataset_files import local_data_files
    from lockstep.verl.utils.dataset.rl_dataset import RLHFDataset

    custom = data_config.get("custom_cls") or {}
    cls = load_object(custom["path"], custom["name"]) if custom.get("path") else RLHFDataset
    if max_samples is None:
        max_samples = data_config.get("train_max_samples" if is_train else "val_max_samples", -1)
    files = data_paths if isinstance(data_paths, str) else list(data_paths)
    if isinstance(cls, type) and issubclass(cls, rl_dataset.RLHFDataset):
        use: Use = "train" if is_train else "val"
        files = [str(file) for file in local_data_files(files, use, f"data.{use}_files")]
    options = {"data_files": files, "tokenizer": tokenizer, "config": data_config, "processor": processor}
    return cast("Dataset[Any]", cls(**options, max_samples=max_samples))


def create_rl_sampler(data_config: Any, dataset: Any) -> Any:
    """The sampler that `data.sampler` names; None leaves the order to the data loader (`data.shuffle`)."""
    from lockstep.data import sampler
    from lockstep.data.settings import from_mapping

    return sampler.create_rl_sampler(from_mapping(DataConfig, set_keys(DataConfig, data_config)), dataset)
