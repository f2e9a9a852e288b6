"""Reinforcement-learning algorithms as pure functions on tensors: advantages, losses, KL."""
