"""Lockstep: reinforcement-learning post-training for language models, trainer and rollout on one set of weights."""

__version__ = "0.1.0"
