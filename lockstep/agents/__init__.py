"""Agents: conversations of the policy with tools and users, as token-exact trajectories."""
