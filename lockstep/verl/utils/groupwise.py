"""verl.utils.groupwise"""

from lockstep.utils.groupwise import as_torch_index as as_torch_index, group_mean_std as group_mean_std
