"""Supervised fine-tuning.

rows ─► batches (batches.py) ─► engine, loss on the assistant's tokens (trainer.py) ─► checkpoints, HF folder
build and run from a config (program.py)
"""
