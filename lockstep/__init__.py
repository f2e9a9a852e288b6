"""Lockstep: RL post-training of language models; trainer and rollout share one set of weights."""

__version__ = "0.1.0"
