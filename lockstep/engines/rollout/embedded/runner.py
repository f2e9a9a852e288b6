"""The model that serves, with its KV cache.

Without gradients, and in inference mode only where the decoder is flat (`turns.py`): tensors that a module's own forward
makes there (a rotary cache, say) could not take part in training later.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lockstep.engines.rollout.embedded.flat_decoder import FlatDecoder, FlatForm, flat_form, flat_head
from lockstep.engines.rollout.embedded.support import check_config, check_layers, refusal
from lockstep.models.attention import AttentionContext, no_mask
from lockstep.models.loading import logits_fn
from lockstep.models.paged_attention import LayerProbe, LayerShape, PagedCache
from lockstep.utils.device import free_memory
from lockstep.utils.host import settle_on_host, take_threads

if TYPE_CHECKING:
    from lockstep.engines.rollout.embedded.fused import FusedModules


class ModelRunner:
    def __init__(self, model: nn.Module, block_size: int) -> None:
        check_config(model)
        self.model: Any = model
        self._head = logits_fn(cast(PreTrainedModel, model))
        self.logits: Callable[[Tensor], Tensor] = self._head
        self.block_size = block_size
        self.cache: PagedCache | None = None
        self.num_tokens_computed = 0
        self.weights_version = 0
        self._layers: dict[int, LayerShape] | None = None
        self._addresses: Tensor | None = None
        self._fused: FusedModules | None = None
        self._flat: FlatDecoder | None = None
        self._flat_form: tuple[FlatForm | None] | None = None  # None until it has been looked for
        self._weights_at: tuple[int, ...] = ()

    @property
    def is_flat(self) -> bool:
        """Whether the decoder computes without its modules."""
        return self._flat is not None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Dropout and gradient checkpointing off, faster forwards on; all is put back afterwards."""
        with self._not_training(), self._faster_forwards():
            yield

    @contextmanager
    def _not_training(self) -> Iterator[None]:
        training = [m for m in self.model.modules() if m.training]
        for module in training:
            module.training = False
        try:
            yield
        finally:
            for module in training:
                module.training = True

    def _faster_forwards(self) -> AbstractContextManager[None]:
        return self._fused_modules() if self.device.type == "cuda" else self._flat_forward()

    @contextmanager
    def _flat_forward(self) -> Iterator[None]:
        decoder = self.model.get_decoder()
        if self._flat_form is None:
            self.layers()  # a model that cannot be served is refused first
            settle_on_host(sum(parameter.numel() for parameter in self.model.parameters()))
            self._flat_form = (flat_form(decoder, self.forward),)
        take_threads(decoding=True)
        [form] = self._flat_form
        if form is not None:
            self._flat, self.logits = FlatDecoder(decoder, form), flat_head(self._head)
        try:
            yield
        finally:
            self._flat, self.logits = None, self._head

    def _fused_modules(self) -> AbstractContextManager[None]:
        tensors = chain(self.model.parameters(), self.model.buffers())
        addresses = tuple(tensor.data_ptr() for tensor in tensors)
        if self._fused is None or addresses != self._weights_at:
            from lockstep.engines.rollout.embedded.fused import FusedModules

            self.layers()  # a model that cannot be served is refused first
            self._fused = FusedModules(self.model)
            self._weights_at = addresses
            self.weights_version += 1
        return self._fused.installed()

    @torch.no_grad()
    def layers(self) -> dict[int, LayerShape]:
        """Shape of the attention layers, found by a forward of one token."""
        if self._layers is None:
            probe = LayerProbe()
            try:
                zero = torch.zeros(1, 1, dtype=torch.long, device=self.device)
                with self._not_training():
                    self.forward(zero, zero, probe)
            except (TypeError, ValueError, RuntimeError) as error:
                raise refusal(self.model, str(error)) from error
            check_layers(self.model, probe.layers)
            self._layers = probe.layers
        return self._layers

    def bytes_per_block(self) -> int:
        return self.block_size * sum(shape.bytes_per_token for shape in self.layers().values())

    def max_num_blocks(self, share: float) -> int:
        """Blocks that fill the given share of the free memory on CUDA, of the whole memory elsewhere."""
        if self.device.type == "cuda":
            memory = free_memory(self.device)
        else:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(memory * share) // self.bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        """Make the cache that large, or larger if it is there already."""
        if self.cache is None:
            self.cache = PagedCache(self.layers(), num_blocks, self.block_size, self.device)
        elif num_blocks > self.cache.num_blocks:
            self.cache.grow(num_blocks)
        if self.device.type == "cuda":
            self.addresses.copy_(self.cache.addresses())

    @property
    def addresses(self) -> Tensor:
        """(layers, 2) where each layer's keys and values begin; it stays where it is when the cache is allocated anew."""
        if self._addresses is None:
            self._addresses = torch.zeros(max(self.layers()) + 1, 2, dtype=torch.int64, device=self.device)
        return self._addresses

    def free(self) -> None:
        self.cache = None

    def forward(
        self,
        token_ids: Tensor,
        position_ids: Tensor,
        context: AttentionContext,
        mask: Tensor | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """(1, T) tokens -> (T, E) hidden states, or (N, E) those at the places `wanted`."""
        if self._flat is not None:
            return self._flat(token_ids, position_ids, context, wanted)
        is_narrowed = self._fused is not None and self._fused.narrow(wanted)
        output = self.model.get_decoder()(
            input_ids=token_ids,
            position_ids=position_ids,
            attention_mask=no_mask(self.device) if mask is None else mask,
            use_cache=False,
            lockstep_context=context,
        )
        hidden: Tensor = output.last_hidden_state[0]
        return hidden if wanted is None or is_narrowed else hidden[wanted]
