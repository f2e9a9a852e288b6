"""Supervised fine-tuning.

rows ─► batches (batches.py) ─► engine, loss on the assistant's tokens (trainer.py) ─► checkpoints, HF folder
build and run from a config, exit codes (program.py)
"""

OTHERS_WAIT_S = 3.0
"""Ranks other than the first wait this long before they report an error: torchrun ends them once rank 0 has reported it."""
