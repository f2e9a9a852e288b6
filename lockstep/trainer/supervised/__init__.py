"""Training on a fixed dataset: SFT (sft.py), reward models (reward_model.py) and DPO (dpo.py).

command line (command.py) ─► build and run from a config (runner.py)
rows ─► batches (batches.py) ─► engine, loss (trainer.py: the loop that all share) ─► checkpoints, HF folder
"""
