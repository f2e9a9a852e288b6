"""Rewards: a scorer scores one response, a manager turns a batch into its reward tensor."""
