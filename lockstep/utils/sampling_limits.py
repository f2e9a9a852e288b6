"""Limits of sampling parameters: samplers compute in 32 bits."""

MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-5, 1e6
"""Below the first, all probability is that of the likeliest token: sampling is greedy. Logits divided by much less overflow. At the
last, all tokens are as good as equally likely."""
MIN_TOP_P = 1e-9
"""Less than the probability of the likeliest token of any vocabulary."""
MAX_TOP_K = 2**31 - 1
"""More than any vocabulary has."""
