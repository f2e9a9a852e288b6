"""What users write: a reward function, tools, an agent loop, an interaction, a dataset, programs."""
