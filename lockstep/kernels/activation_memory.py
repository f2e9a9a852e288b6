"""Memory that the backward pass and the KV cache may take. Read by the engines, which decide by it, and by `lockstep plan`."""

ACTIVATIONS_LEAVE_FREE = 0.35
"""Share of the device's memory that activations leave to the head's logits, buffers of collectives and fragmentation."""

HEAD_KEEPS = 1 / 4
"""Share of the device's free memory that the vocabulary head's forward may keep for its backward."""

HEAD_CHUNK = 1 << 28
"""Logits that the head holds at once: 256 Mi entries are 1 GiB in float32, and half of that again for their gradient."""

STREAM_BYTES = 4
"""Bytes per entry of the residual stream, which is in float32."""

CACHE_SHARE_OF_FREE = 0.9
"""Most of the free memory that the KV cache takes; the rollout's activations need the rest."""


def layer_bytes(num_tokens: int, width: int, heads: int, inner: int, itemsize: int) -> int:
    """What the forward of one decoder layer keeps on CUDA without checkpointing.

    heads: entries of a token's queries and keys, (H + HK) * D. inner: entries of its gate or up projection.
    """
    # the stream and its norm, twice; q, k, v before and after their norms, and the attention's output; gate and up
    return num_tokens * (2 * width * (STREAM_BYTES + itemsize) + (3 * heads + 2 * inner) * itemsize)
