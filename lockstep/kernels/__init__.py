"""Triton kernels of the rollout, each beside a plain-torch statement of what it computes in `tests/kernels`.

Only this package imports Triton; import its modules where a CUDA device is at hand.
"""
