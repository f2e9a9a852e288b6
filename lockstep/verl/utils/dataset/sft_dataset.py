"""verl.utils.dataset.sft_dataset"""

from lockstep.data.sft_dataset import SFTDataset as SFTDataset
