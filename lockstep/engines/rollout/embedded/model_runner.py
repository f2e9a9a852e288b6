"""The model with its KV cache and states: checks that it can be served, sizes the cache, computes hidden states and logits.

It runs without gradients but not in inference mode: modules may keep tensors from a forward (a rotary cache, say) that training
uses later.
"""

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.engines.rollout.embedded.paged_attention import LayerProbe, LayerShape, PagedCache, RouteShape
from lockstep.engines.rollout.embedded.prompt_images import ImageChunk, ImagePrompts
from lockstep.engines.rollout.embedded.state_slots import LayerStates, bytes_per_slot
from lockstep.engines.rollout.rollout_engine import evaluation_mode, shortage_of
from lockstep.kernels import fp8
from lockstep.kernels.activation_memory import CACHE_SHARE_OF_FREE
from lockstep.kernels.exact import exact_mode
from lockstep.models.attention import ATTENTION_NAME, AttentionContext, no_mask
from lockstep.models.decoder import decoder_of
from lockstep.models.eight_bit import Fp8Weights
from lockstep.models.known_models import why_own_forward
from lockstep.models.log_probs import vocabulary_head
from lockstep.models.placeholders import placeholder_ids
from lockstep.models.router_replay import Routing
from lockstep.models.split_weights import split_of
from lockstep.models.tensor_group import TensorGroup
from lockstep.models.vision import embed_images
from lockstep.utils.device import free_memory
from lockstep.utils.host import prepare_cpu_for

_RECORD_KEY = "actor_rollout_ref.rollout.enable_rollout_routing_replay"
MLP_LAYERS = {"mlp", "moe"}
"""Entries of `config.layer_types` that neither attend nor have a state."""


class ModelRunner:
    """
    routes:        (T, layers, experts per token) the experts of the last forward's tokens, if they are recorded.
    tensor_group:  ranks that hold the model together, which take the same steps; None if this one has all of it.
    exact:         whether a row's result must not depend on other rows (`kernels/exact.py`).
    images:        prompts with images; placeholders: tokens that are never sampled, as a tensor; None if there are none.
    fp8:           the weights that decode instead of the model's own inside `quantized`, if they are in 8 bits.
    has_fp8_cache: whether keys and values are cached in 8 bits; see `quantize_cache`.
    num_moves:     on CUDA, how often parameters or buffers of a rank had moved when `serving` began, or states, or the cache's type
                   had changed: CUDA graphs are captured again then.
    """

    def __init__(
        self,
        model: nn.Module,
        block_size: int,
        tensor_group: TensorGroup | None = None,
        *,
        records_routes: bool = False,
        quantization: str | None = None,
        exact: bool = False,
    ) -> None:
        check_config(model)
        self.exact = exact
        self.model: Any = model
        self.tensor_group = tensor_group
        self.block_size = block_size
        self.cache: PagedCache | None = None
        self.fp8 = None if quantization is None else Fp8Weights(model)
        self._fp8_addresses: tuple[int, ...] = ()
        self.has_fp8_cache = False
        self._routing = Routing(model, _RECORD_KEY) if records_routes else None
        self.routes: Tensor | None = None
        self.num_moves = 0
        self._parameter_addresses: tuple[int, ...] = ()
        self._head = vocabulary_head(cast(PreTrainedModel, model))
        self._vocab_size = _vocabulary_size(model)
        self._state_addresses: tuple[int, ...] = ()
        self._probe: LayerProbe | None = None
        self._cache_addresses: Tensor | None = None
        self._mask: Tensor | None = None
        self._placeholders: Tensor | None = None
        self.images = ImagePrompts(model)

    @property
    def placeholders(self) -> Tensor | None:
        if self._placeholders is None or self._placeholders.device != self.device:
            self._placeholders = torch.tensor(placeholder_ids(self.model.config), device=self.device)
        return self._placeholders if len(self._placeholders) else None

    @property
    def records_routes(self) -> bool:
        """Whether the experts of tokens are recorded (`models/router_replay.py`)."""
        return self._routing is not None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @contextmanager
    def serving(self) -> Iterator[None]:
        """The model is in evaluation mode inside."""
        if self.device.type == "cuda":
            self._note_moves()
        else:
            prepare_cpu_for(sum(parameter.numel() for parameter in self.model.parameters()))
        with evaluation_mode(self.model):
            yield

    @contextmanager
    def quantized(self) -> Iterator[None]:
        """Inside `serving`: the present weights in 8 bits compute, if the run is quantised."""
        if self.fp8 is None:
            yield
            return
        with self.fp8.serving():
            addresses = self.fp8.addresses()
            self.num_moves += addresses != self._fp8_addresses  # the first time, graphs are of the model check
            self._fp8_addresses = addresses
            yield

    def check_fp8_cache(self) -> None:
        """ValueError if keys and values cannot be cached in 8 bits."""
        if reason := why_no_fp8_cache(self.layers().values(), self.device):
            key = "actor_rollout_ref.rollout.kv_cache_dtype=fp8"
            raise ValueError(f"{key} cannot serve {type(self.model).__name__}: {reason}; set null")

    def quantize_cache(self) -> None:
        """Cache keys and values in 8 bits from now on; the cache must have been dropped."""
        assert self.cache is None, "the cache is in use"
        self.has_fp8_cache = True
        self.num_moves += 1

    def _note_moves(self) -> None:
        tensors = chain(self.model.parameters(), self.model.buffers())
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        moved = addresses != self._parameter_addresses
        # capturing runs collectives: all ranks do it together
        self.num_moves += bool(moved if self.tensor_group is None else -self.tensor_group.least(-int(moved)))
        self._parameter_addresses = addresses

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states (N, E) -> float32 logits (N, V)."""
        with exact_mode(self.exact):
            own: Tensor = self._head(hidden)
        if self.tensor_group is None:
            return own
        return self.tensor_group.gather(own).transpose(0, 1).flatten(1)[:, : self._vocab_size].contiguous()

    def layers(self) -> dict[int, LayerShape]:
        """Shapes of the attention layers by `layer_idx`."""
        layers = self._probed().layers
        if not self.has_fp8_cache:
            return layers
        return {index: replace(shape, dtype=fp8.DTYPE) for index, shape in layers.items()}

    def layer_states(self) -> LayerStates:
        """Shapes of the states by `layer_idx`; empty for most models."""
        return self._probed().states

    @property
    def has_whole_prompts(self) -> bool:
        """Whether a layer computes the later chunks of a prompt token by token."""
        return not self._probed().continues

    @torch.no_grad()
    def _probed(self) -> LayerProbe:
        """What each layer keeps, found by a forward of one token in evaluation mode."""
        if self._probe is None:
            probe = LayerProbe()
            zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
            try:
                self.forward(zero, zero, probe)
            except torch.OutOfMemoryError:
                raise
            except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
                raise refusal(self.model, str(error)) from error
            check_layers(self.model, probe)
            self._probe = probe
        return self._probe

    def max_num_blocks(self, utilization: float, num_slots: int = 0) -> int:
        """Blocks of the largest KV cache that leaves room for `num_slots` states."""
        states = (num_slots + 1) * bytes_per_slot(self.layer_states())
        # no layer attends: blocks take no memory
        return max(0, self._cache_bytes(utilization) - states) // max(1, self._bytes_per_block)

    def max_num_slots(self, utilization: float, longest: int) -> int:
        """Most state slots that leave half of the memory, and the `longest` blocks of a sequence, to the KV cache; or more, if
        each has that many blocks too."""
        total = self._cache_bytes(utilization)
        blocks, state = longest * self._bytes_per_block, bytes_per_slot(self.layer_states())
        return max(min(total // 2, total - blocks) // state, total // (state + blocks)) - 1  # one is scratch

    @property
    def _bytes_per_block(self) -> int:
        """Of keys, values and recorded experts in all layers."""
        per_token = sum(shape.bytes_per_token for shape in self.layers().values())
        per_token += 0 if self._route_shape is None else self._route_shape.bytes_per_token
        return self.block_size * per_token

    def _cache_bytes(self, utilization: float) -> int:
        """Memory of the largest cache: see `kv_cache_bytes` for CUDA; on CPU this share of the machine's memory."""
        if self.device.type == "cuda":
            tensors = chain(self.model.parameters(), self.model.buffers())
            weights = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            free = free_memory(self.device)
            if self.fp8 is not None:
                weights += self.fp8.num_bytes
                free -= 0 if self.fp8.is_allocated else self.fp8.num_bytes
            total = self._least(torch.cuda.mem_get_info(self.device)[1])
            return kv_cache_bytes(utilization, total, self._least(free), weights)
        return self._least(int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * utilization))

    @property
    def _route_shape(self) -> RouteShape | None:
        routing = self._routing
        return None if routing is None else RouteShape(routing.num_layers, routing.top_k, routing.dtype)

    def _least(self, number: int) -> int:
        return number if self.tensor_group is None else self.tensor_group.least(number)

    def allocate(self, num_blocks: int, num_slots: int = 0) -> str | None:
        """Create the cache with this many blocks and state slots, or grow it to them; returns the reason if memory does not
        suffice on a rank."""
        is_new = self.cache is None
        shortage = shortage_of(lambda: self._allocate(num_blocks, num_slots))
        if not self._least(shortage is None):
            if is_new:
                self.cache = None
            return shortage or "out of memory on another rank"
        return None

    def _allocate(self, num_blocks: int, num_slots: int) -> None:
        if self.cache is None:
            shapes = self.layers(), num_blocks, self.block_size, self.device, self._route_shape
            self.cache = PagedCache(*shapes, self.layer_states(), num_slots)
        cache = self.cache
        try:
            if num_blocks > cache.num_blocks or (cache.states is not None and num_slots > cache.states.num_slots):
                cache.grow(num_blocks, num_slots)
        finally:  # layers that have grown have moved
            if self.device.type == "cuda":
                self.cache_addresses.copy_(cache.addresses())
                self._note_state_moves(cache)

    def _note_state_moves(self, cache: PagedCache) -> None:
        """CUDA graphs hold the addresses of the states and the number of the scratch slot."""
        if cache.states is not None:
            tensors = [tensor for layer in cache.states.tensors.values() for tensor in layer.values()]
            addresses = (cache.states.scratch, *(tensor.data_ptr() for tensor in tensors))
            self.num_moves += addresses != self._state_addresses
            self._state_addresses = addresses

    @property
    def cache_addresses(self) -> Tensor:
        """(layers, 2) addresses of each layer's keys and values. The tensor itself never moves, so CUDA graphs can read it."""
        if self._cache_addresses is None:
            num_layers = max(self.layers(), default=-1) + 1
            self._cache_addresses = torch.zeros(num_layers, 2, dtype=torch.int64, device=self.device)
        return self._cache_addresses

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        images: Sequence[ImageChunk] = (),
    ) -> Tensor:
        """(1, T) tokens -> (T, E) hidden states. images: those whose placeholders are among the tokens, in their order."""
        inputs: dict[str, Any] = {"input_ids": token_ids}
        if images:
            features = self.images.features(images)
            placeholders = {token for prompt, _, _ in images for token in prompt.images.placeholders}
            inputs = embed_images(self.model, token_ids, features, sorted(placeholders))
        if self._mask is None or self._mask.device != self.device:
            self._mask = no_mask(self.device)
        mask: Any = self._mask
        mask.lockstep_context = context
        if self._routing is not None:
            self._routing.begin()
        try:
            with exact_mode(self.exact):
                output = decoder_of(self.model)(
                    **inputs,
                    position_ids=position_ids,
                    attention_mask=mask,
                    use_cache=False,
                    lockstep_context=context,
                )
        finally:
            mask.lockstep_context = None  # it refers to the cache
        if self._routing is not None:
            self.routes = self._routing.end().routes().to(self._routing.dtype)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def keep_routes(self, slots: Tensor, routes: Tensor | None) -> None:
        """Store the experts of tokens by their cache slots; no-op if none were recorded."""
        if routes is not None:
            assert self.cache is not None
            self.cache.write_routes(slots, routes)


def kv_cache_bytes(utilization: float, total: int, free: int, weights: int) -> int:
    """Largest KV cache of an engine that may use the share `utilization` of a GPU's memory, as in vLLM.

    total, free: the GPU's memory and what is left of it, in bytes. weights: the rollout model's share of what is in use; the
    trainer's other tensors (optimizer state, critic) do not count towards `utilization`, but limit what is free.
    """
    key = f"actor_rollout_ref.rollout.gpu_memory_utilization={utilization:g}"
    allowed = int(total * utilization)
    if allowed <= weights:
        raise ValueError(
            f"{key}: no memory for the KV cache, because {_gb(allowed)} of the GPU's {_gb(total)} are less than the model's "
            f"weights ({_gb(weights)}); set more than {weights / total:.2f}"
        )
    wanted, most = allowed - weights, int(free * CACHE_SHARE_OF_FREE)
    if most <= 0:
        raise ValueError(
            f"{key}: no memory for the KV cache, because none of the GPU's {_gb(total)} are free; set "
            "actor_rollout_ref.actor.fsdp_config.optimizer_offload=true (and critic.model.fsdp_config.optimizer_offload=true)"
        )
    return min(wanted, most)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _vocabulary_size(model: nn.Module) -> int | None:
    """Rows of a head that is split: those beyond them pad it. None for a whole one."""
    split = split_of(model)
    if split is None:
        return None
    head = cast(PreTrainedModel, model).get_output_embeddings()
    names = (name for name, parameter in model.named_parameters(remove_duplicate=False) if parameter is head.weight)
    return split.parts[next(names)].shape[0]


def refusal(model: nn.Module, reason: str) -> ValueError:
    return ValueError(
        f"the embedded rollout cannot serve {type(model).__name__}: {reason}; "
        "use actor_rollout_ref.rollout.name=hf for this model"
    )


def why_no_fp8_cache(layers: Collection[LayerShape], device: torch.device) -> str | None:
    """None if keys and values of these layers can be cached in 8 bits."""
    if not layers:
        return "no layer of it caches keys and values"
    if any(shape.value_dim == 0 for shape in layers):
        return "it caches latents, which are cached in the model's precision only"
    if any(shape.is_indexed for shape in layers):
        return "its layers pick keys by an index, which 8 bits would change"
    if device.type == "cuda" and not fp8.has_fp8_products(device):
        return "the GPU does not have the type (compute capability 8.9 or later does)"
    return None


def check_config(model: nn.Module) -> None:
    config: Any = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise refusal(model, "it is not a transformers causal LM")
    if config.is_encoder_decoder:
        raise refusal(model, "it is an encoder-decoder model")
    if reason := why_own_forward(config):
        raise refusal(model, reason)
    attention = config.get_text_config()._attn_implementation
    if attention != ATTENTION_NAME:
        raise refusal(model, f"it was loaded with attn_implementation={attention!r} instead of {ATTENTION_NAME!r}")


def check_layers(model: Any, probe: LayerProbe) -> None:
    """Every layer must have called the attention function, with its sliding window if the config has one, or handed over its
    state; only those without tokens to look back at (MLP_LAYERS) do neither."""
    text = model.config.get_text_config()
    layers = probe.layers
    kinds = getattr(text, "layer_types", None)
    without = {index for index, kind in enumerate(kinds or ()) if kind in MLP_LAYERS}
    missing = set(range(text.num_hidden_layers)) - {*layers, *probe.states, *without}
    if missing:
        num_known = text.num_hidden_layers - len(missing)
        which = f"only {num_known} of its {text.num_hidden_layers} layers attend or have a state that is known"
        raise refusal(model, which)
    for index, kind in enumerate(kinds or ()):
        if kind == "sliding_attention" and (index not in layers or layers[index].sliding_window is None):
            raise refusal(model, f"layer {index} does not pass its sliding window to the attention function")
    if model.device.type == "cuda" and any(shape.is_indexed and shape.value_dim for shape in layers.values()):
        raise refusal(model, "its layers pick keys of each head by an index, which decodes on the CPU only")
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if layers and not kinds and window is not None and all(s.sliding_window is None for s in layers.values()):
        raise refusal(model, f"no layer passes sliding_window={window} of its config to the attention function")
