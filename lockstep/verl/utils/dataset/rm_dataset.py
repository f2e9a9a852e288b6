"""verl.utils.dataset.rm_dataset"""

from lockstep.data.rm_dataset import RMDataset as RMDataset
