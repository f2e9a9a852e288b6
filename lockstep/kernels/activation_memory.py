"""Memory that the backward pass and the KV cache may take. Read by the engines, which decide by it, and by `lockstep plan`."""

ACTIVATIONS_LEAVE_FREE = 0.35
"""Share of the device's memory that activations leave to the head's logits, buffers of collectives and fragmentation."""

UPDATE_LEAVES_FREE = 0.1
"""Share that a whole update leaves free: activations, gradients and gathered layers."""

HEAD_KEEPS = 1 / 4
"""Share of the device's free memory that the vocabulary head's forward may keep for its backward."""

HEAD_CHUNK = 1 << 28
"""Logits that the head holds at once: 256 Mi entries are 1 GiB in float32, and half of that again for their gradient."""

STREAM_BYTES = 4
"""Bytes per entry of the residual stream, which is in float32."""

DELTA_CHUNK = 64
"""Tokens of a chunk of the gated delta rule, each of which has an entry for the others."""

TOKENS_PER_STATE = 128
"""Fewest tokens per packed sequence, on average, for which the states with which sequences begin are counted."""

GRADIENT_BYTES = 4
"""Gradients are summed in float32."""

CACHE_SHARE_OF_FREE = 0.9
"""Most of the free memory that the KV cache takes; the rollout's activations need the rest."""


def layer_bytes(num_tokens: int, width: int, heads: int, inner: int, itemsize: int) -> int:
    """What the forward of one decoder layer keeps on CUDA without checkpointing.

    heads: entries of a token's queries and keys, (H + HK) * D. inner: entries of its gate or up projection.
    """
    # the stream and its norm, twice; q, k, v before and after their norms, and the attention's output; gate and up
    return num_tokens * (2 * width * (STREAM_BYTES + itemsize) + (3 * heads + 2 * inner) * itemsize)


def state_layer_bytes(
    num_tokens: int, width: int, keys: int, value_heads: int, values: int, convolved: int, inner: int, itemsize: int
) -> int:
    """What the forward of one layer with a gated delta rule keeps on CUDA without checkpointing, with the kernels of
    flash-linear-attention.

    keys, values: entries of a token's keys and values, with a key per value head. convolved: channels of the convolution.
    """
    # q, k, v, b, a, z; q and k normalised, v, and the delta rule's triangle; its output before and after the norm; z
    mixer = (convolved + 2 * value_heads + values) + (2 * keys + values + DELTA_CHUNK * value_heads) + 3 * values
    gates = 8 * value_heads * STREAM_BYTES  # decay, its logarithm's parts, and the norms of q and k
    state = keys * values // value_heads * STREAM_BYTES  # with which a sequence begins after a shared prompt
    stream = 2 * width * (STREAM_BYTES + itemsize)
    return num_tokens * (stream + (mixer + 2 * inner) * itemsize + gates) + num_tokens * state // TOKENS_PER_STATE


def kept_layers(total: float, free: float, num_layers: int, layer: float, stream: float, gathered: float) -> int:
    """Layers that keep their activations, of `layer` bytes each; the others keep their input (`stream`), and one is recomputed.

    total, free: bytes of the device, and of it without the gradients that the backward pass adds. gathered: see `gathered_bytes`.
    """
    within_share = (free - ACTIVATIONS_LEAVE_FREE * total) // layer
    room = free - gathered - UPDATE_LEAVES_FREE * total
    fitting = num_layers if room >= num_layers * layer else (room - num_layers * stream - layer) // (layer - stream)
    return int(min(num_layers, max(0.0, min(within_share, fitting))))


def gathered_bytes(layer: float, outside: float, sent: float, itemsize: int) -> float:
    """What a sharded model has on the device besides its shards: two layers, one computing and one arriving, the parameters outside
    of layers, and float32 gradients on their way out.

    layer, outside: parameters of a layer, and outside of layers. sent: those of the gradients.
    """
    return itemsize * (2 * layer + outside) + GRADIENT_BYTES * sent
