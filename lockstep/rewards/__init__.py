"""Rewards: scorers give one response a score, a manager gives a batch its reward tensor."""
