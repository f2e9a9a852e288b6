"""What our own decoder layers and the vocabulary head need to compute, which engines that use them have in common."""

from lockstep.kernels.activation_memory import HEAD_CHUNK, HEAD_KEEPS, STREAM_BYTES, kept_layers
from lockstep.plan.batch_units import BatchUnits
from lockstep.plan.hardware import Device
from lockstep.plan.model import Model

CPU_HEAD_CHUNK = 1 << 26


def forward_parts(device: Device, model: Model, units: BatchUnits, gathered: float) -> dict[str, float]:
    return {
        "gathered layers": gathered,
        "activations": model.layer_bytes(units.tokens_per_device),
        "logits": logits(device, model, units, free=0.0),
        "dequantised weight": dequantised(model),
    }


def update_parts(
    device: Device,
    model: Model,
    units: BatchUnits,
    others: float,
    *,
    gradients: float,
    gathered: float,
    saves_memory: bool,
) -> dict[str, float]:
    """others: bytes on the device besides these. saves_memory: with checkpointing, every layer is computed again."""
    shape, tokens = model.shape, units.tokens_per_device
    layer, stream = model.layer_bytes(tokens), tokens * shape.width * STREAM_BYTES
    kept = shape.layers
    if model.checkpointing:
        free = device.memory - others - gradients
        kept = 0 if saves_memory else kept_layers(device.memory, free, shape.layers, layer, stream, gathered)
    parts = {"gradients": gradients, "gathered layers": gathered}
    parts["activations"] = kept * layer + (shape.layers - kept) * stream
    parts["dequantised weight"] = dequantised(model)
    head = logits(device, model, units, device.memory - others - sum(parts.values()))
    # the head's backward is over, and its memory free, when that of the layers begins
    backward = model.gradient_bytes(tokens) + (layer if kept < shape.layers else 0)
    parts |= {"logits": head} if head > backward else {"backward of a layer": backward}
    return parts


def recomputed(model: Model, activations: float) -> float:
    """Share of the layers that the backward pass computes again, from the bytes of `update_parts`."""
    assert model.update is not None
    shape, tokens = model.shape, model.update.tokens_per_device
    layer, stream = model.layer_bytes(tokens), tokens * shape.width * STREAM_BYTES
    kept = round((activations - shape.layers * stream) / (layer - stream))
    return 1 - kept / shape.layers


def dequantised(model: Model) -> float:
    """The largest weight in 4 bits, in the compute dtype while its layer computes."""
    return 0.0 if model.four_bit is None else model.compute * model.four_bit.largest


def logits(device: Device, model: Model, units: BatchUnits, free: float, ranks: int = 1) -> float:
    """free: bytes on the device, of which the head's forward may keep a share for its backward. ranks: of a vocabulary."""
    if model.is_scalar:
        return units.tokens_per_device * model.shape.width * 4  # hidden states in float32
    entries = units.targets_per_device * model.shape.vocabulary // ranks
    if device.is_cpu:
        return 3 * 4 * min(entries, CPU_HEAD_CHUNK)
    return 4 * min(entries, HEAD_CHUNK) + min(2 * entries, HEAD_KEEPS * max(0.0, free))
