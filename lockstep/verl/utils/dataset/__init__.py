"""verl.utils.dataset"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.utils.dataset.rl_dataset": ("RLHFDataset", "collate_fn"),
        "lockstep.data.rm_dataset": ("RMDataset",),
        "lockstep.verl.utils.dataset.sft_dataset": ("SFTDataset",),
    },
)
