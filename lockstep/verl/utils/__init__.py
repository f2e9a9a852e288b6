"""verl.utils"""

from lockstep.verl._names import exports

__getattr__ = exports(
    __name__,
    {
        "lockstep.verl.utils.tokenizer": ("hf_processor", "hf_tokenizer"),
        "lockstep.verl.utils.config": ("omega_conf_to_dataclass", "validate_config"),
        "lockstep.verl.utils.groupwise": ("as_torch_index", "group_mean_std"),
    },
)
