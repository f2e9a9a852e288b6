"""verl.utils.groupwise"""

from lockstep.utils.groupwise import as_torch_index, group_mean_std

__all__ = ["as_torch_index", "group_mean_std"]
