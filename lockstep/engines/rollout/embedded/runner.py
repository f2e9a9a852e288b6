"""Runs the steps that the scheduler plans: the model, its KV cache, and the sampling of what comes out.

    plan ─► copy shared blocks ─► input ids, positions, slots, tables ─► decoder ─► head at the drawing places ─► sample

Without gradients, but not in inference mode: tensors made there (a rotary cache, say) could not take part in training
later.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample
from lockstep.engines.rollout.embedded.scheduler import Row, StepPlan
from lockstep.engines.rollout.embedded.sequence import Sequence
from lockstep.models.attention import ATTENTION_NAME, AttentionContext
from lockstep.models.paged_attention import CachedRows, LayerProbe, LayerShape, PagedAttention, PagedCache

_USE_HF = "use actor_rollout_ref.rollout.name=hf for this model"


class ModelRunner:
    def __init__(self, model: nn.Module, block_size: int) -> None:
        _refuse_unservable(model)
        self.model: Any = model
        self.block_size = block_size
        self.cache: PagedCache | None = None
        self.num_tokens_computed = 0
        self._layers: dict[int, LayerShape] | None = None

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.get_input_embeddings().weight.device
        return device

    @contextmanager
    def serving(self) -> Iterator[None]:
        """Dropout and gradient checkpointing off; every module's mode is put back afterwards."""
        training = [m for m in self.model.modules() if m.training]
        self.model.eval()
        try:
            yield
        finally:
            for module in training:
                module.training = True

    @torch.no_grad()
    def layers(self) -> dict[int, LayerShape]:
        """Shape of the attention layers, found by a forward of one token."""
        if self._layers is None:
            probe = LayerProbe()
            try:
                self._forward(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, dtype=torch.long), probe)
            except (TypeError, ValueError, RuntimeError) as error:
                raise ValueError(
                    f"the embedded rollout cannot serve {_name(self.model)}: {error}; {_USE_HF}"
                ) from error
            _check_layers(self.model, probe.layers)
            self._layers = probe.layers
        return self._layers

    def bytes_per_block(self) -> int:
        return self.block_size * sum(shape.bytes_per_token for shape in self.layers().values())

    def max_num_blocks(self, share: float) -> int:
        """Blocks that fill the given share of the free memory on CUDA, of the whole memory elsewhere."""
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            memory = free + torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        else:
            memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return int(memory * share) // self.bytes_per_block()

    def allocate(self, num_blocks: int) -> None:
        """Make the cache that large, or larger if it is there already."""
        if self.cache is None:
            self.cache = PagedCache(self.layers(), num_blocks, self.block_size, self.device)
        elif num_blocks > self.cache.num_blocks:
            self.cache.grow(num_blocks)

    def free(self) -> None:
        self.cache = None

    @torch.no_grad()
    def run(self, plan: StepPlan) -> list[tuple[Sequence, int, float]]:
        """(sequence, token, log-prob) for each sequence that draws in this step."""
        assert self.cache is not None
        if plan.copies:
            self.cache.copy_blocks(plan.copies)
        inputs = StepInputs(sorted(plan.rows, key=_attention_order), self.cache)
        self.num_tokens_computed += plan.num_tokens
        hidden_TE = self._forward(inputs.token_ids, inputs.position_ids, inputs.attention)
        if not inputs.samplers:
            return []
        logits_NV = self._logits(hidden_TE[inputs.sampled])
        tokens_N, log_probs_N = sample(logits_NV, inputs.sampling)
        return list(zip(inputs.samplers, tokens_N.tolist(), log_probs_N.tolist()))

    def _forward(self, token_ids: Tensor, position_ids: Tensor, context: AttentionContext) -> Tensor:
        """(1, T) tokens -> (T, E) hidden states."""
        output = self.model.get_decoder()(
            input_ids=token_ids.to(self.device),
            position_ids=position_ids.to(self.device),
            attention_mask=_no_mask(self.device),
            use_cache=False,
            lockstep_context=context,
        )
        hidden: Tensor = output.last_hidden_state
        return hidden[0]

    def _logits(self, hidden_NE: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden_NE)
        softcap = getattr(self.model.config.get_text_config(), "final_logit_softcapping", None)
        return logits if softcap is None else torch.tanh(logits / softcap) * softcap


class StepInputs:
    """A plan's rows as tensors.

    token_ids, position_ids: (1, T). sampled: (N,) index of the token after which each sampler draws.
    """

    def __init__(self, rows: list[Row], cache: PagedCache) -> None:
        device, size = cache.device, cache.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        sampled: list[int] = []
        self.samplers = [s for row in rows for s in row.samplers]
        for row in rows:
            blocks = row.sequence.blocks
            tokens += row.sequence.tokens[row.start : row.stop]
            positions += range(row.start, row.stop)
            slots += [blocks[p // size] * size + p % size for p in range(row.start, row.stop)]
            sampled += [len(tokens) - 1] * len(row.samplers)
        self.token_ids = torch.tensor([tokens])
        self.position_ids = torch.tensor([positions])
        self.sampled = torch.tensor(sampled, device=device)
        fresh = [row.stop - row.start for row in rows if row.start == 0]
        self.attention = PagedAttention(cache, torch.tensor(slots, device=device), cached_rows(rows, cache), fresh)
        if self.samplers:
            self.sampling = SamplingBatch.build(
                [s.request.sampling for s in self.samplers],
                [s.request.seed for s in self.samplers],
                [len(s.tokens) for s in self.samplers],
                device,
            )


def cached_rows(rows: list[Row], cache: PagedCache) -> list[CachedRows]:
    """The rows with cached tokens: those that decode gathered by length, each longer stretch alone."""
    groups: list[list[Row]] = []
    for row in rows:
        if row.start == 0:
            break
        decodes = row.stop - row.start == 1
        if groups and decodes and len(row.sequence.blocks) <= _longest_beside(len(groups[-1][0].sequence.blocks)):
            groups[-1].append(row)
        else:
            groups.append([row])
    result, first = [], 0
    for group in groups:
        width = max(len(row.sequence.blocks) for row in group)
        table = [row.sequence.blocks + [0] * (width - len(row.sequence.blocks)) for row in group]
        positions = [list(range(row.start, row.stop)) for row in group]
        result.append(
            CachedRows(first, torch.tensor(table, device=cache.device), torch.tensor(positions, device=cache.device))
        )
        first += sum(row.stop - row.start for row in group)
    return result


def _longest_beside(num_blocks: int) -> int:
    """Rows up to this many blocks are padded together with one of `num_blocks`: more calls cost more than padding."""
    return num_blocks + max(4, num_blocks // 2)


def _attention_order(row: Row) -> tuple[int, int]:
    if row.start == 0:
        return 2, 0
    return (0, len(row.sequence.blocks)) if row.stop - row.start == 1 else (1, 0)


def _no_mask(device: torch.device) -> Tensor:
    """A mask that our attention ignores: transformers hands four dimensions on, but for None looks at the positions."""
    return torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)


def _name(model: nn.Module) -> str:
    return type(model).__name__


def _refuse_unservable(model: nn.Module) -> None:
    config = getattr(model, "config", None)
    if config is None or not hasattr(model, "get_decoder"):
        raise ValueError(f"the embedded rollout cannot serve {_name(model)}: it is no transformers causal LM")
    text: Any = config.get_text_config()
    implementation = text._attn_implementation
    reason = None
    if config.is_encoder_decoder:
        reason = "it is an encoder-decoder"
    elif implementation != ATTENTION_NAME:
        reason = f"it was loaded with attn_implementation={implementation!r} instead of {ATTENTION_NAME!r}"
    elif others := set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}:
        reason = f"it has layers of {', '.join(sorted(others))}"
    for key in ("logit_scale", "logits_scaling"):
        if getattr(text, key, None) not in (None, 1, 1.0):
            reason = f"it scales its logits ({key}={getattr(text, key)})"
    if reason is not None:
        raise ValueError(f"the embedded rollout cannot serve {_name(model)}: {reason}; {_USE_HF}")


def _check_layers(model: Any, layers: dict[int, LayerShape]) -> None:
    """Every decoder layer must have attended: one that did not keeps a state that this cache does not hold."""
    text = model.config.get_text_config()
    count = text.num_hidden_layers
    if len(layers) != count:
        raise ValueError(
            f"the embedded rollout cannot serve {_name(model)}: only {len(layers)} of its {count} layers are attention over "
            f"keys and values; {_USE_HF}"
        )
    for index, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind == "sliding_attention" and layers[index].sliding_window is None:
            raise ValueError(
                f"the embedded rollout cannot serve {_name(model)}: layer {index} does not say its sliding window; "
                f"{_USE_HF}"
            )
