"""verl.utils.dataset.multiturn_sft_dataset"""

from lockstep.data.sft_dataset import MultiTurnSFTDataset as MultiTurnSFTDataset
