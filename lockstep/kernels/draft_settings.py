"""What the search for drafts on the host and the one on CUDA have in common; without Triton."""

MAX_MATCH = 16
"""Most tokens that are compared."""
START = -1
"""Stands for what precedes an answer."""
MAX_ACCEPTANCE = 0.98
"""Highest chance of a draft token to be right."""
ROW_WEIGHT = 4.0
"""What is known before a row has drafts counts as this many of its tokens."""
ROW_DECAY = 0.9
"""Decay of a row's acceptance per step."""
