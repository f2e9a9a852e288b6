"""Mixers of transformers' hybrid models (Mamba, short convolutions, …) on packed tokens.

    decoder layer of transformers ─► StateMixer ─► context.mix ─► the mixer's own forward on rows with their states

`StateMixer` takes the place of a mixer in its layer and has the same children and parameters. The layer hands it the attention
context, which lays out the tokens (`models/state_rows.py`). What differs between mixers is a record, `MixerForm`.
Mixers for which `models/state_layer.py` has a layer are not wrapped.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self
from weakref import ref

import torch
from torch import Tensor, nn

from lockstep.models.attention import AttentionContext, require_context
from lockstep.models.decoder import decoder_of
from lockstep.models.state_rows import RowStates


@dataclass(frozen=True)
class MixerForm:
    """How a mixer's forward is called.

    cache:     keyword argument that takes the states; None if the mixer has none, so that it computes whole rows only.
    continues: whether it can compute several tokens at a time from a state on. Otherwise a row begins with its whole prompt.
    positions: keyword argument that takes the position of each token in its row; None for none.
    arguments: further keyword arguments.
    returns:   its result: a tensor, a tuple of which only the first counts, or a tuple of (N, L, …) tensors.
    """

    cache: str | None = "cache_params"
    continues: bool = True
    positions: str | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)
    returns: Literal["tensor", "first", "tuple"] = "tensor"


MIXERS: dict[str, MixerForm] = {
    # Relatives of Gated DeltaNet
    "OlmoHybridGatedDeltaNet": MixerForm(),
    "KimiLinearDeltaAttention": MixerForm(),
    # Mamba 2
    "Mamba2Mixer": MixerForm(),
    "BambaMixer": MixerForm(),
    "FalconH1Mixer": MixerForm(),
    "GraniteMoeHybridMambaLayer": MixerForm(),
    "NemotronHMamba2Mixer": MixerForm(),
    "Zamba2MambaMixer": MixerForm(),
    # Mamba 1: its scan takes no initial state
    "MambaMixer": MixerForm(continues=False),
    "FalconMambaMixer": MixerForm(continues=False),
    "JambaMambaMixer": MixerForm(continues=False),
    "ZambaMambaMixer": MixerForm(continues=False),
    # Lightning attention: from a state on it computes one token at a time
    "MiniMaxLightningAttention": MixerForm(
        "past_key_values",
        continues=False,
        arguments={"position_embeddings": None, "attention_mask": None},
        returns="first",
    ),
    # Convolutions alone
    "Lfm2ShortConv": MixerForm("past_key_values"),
    "Lfm2MoeShortConv": MixerForm("past_key_values"),
    "ZayaCCAProjection": MixerForm("past_key_values", returns="tuple"),
    # Keeps its state in the module
    "RecurrentGemmaRecurrentBlock": MixerForm(
        None,
        continues=False,
        positions="position_ids",
        arguments={"attention_mask": None, "use_cache": False},
        returns="first",
    ),
}
"""Name of a mixer class in `transformers.models` -> its form."""

DIRECT_WEIGHTS = {"dt_proj"}
"""Linear layers of Mamba 1 whose weight is multiplied directly: no adapter, and no other form of the weight, has a place there."""


def install_state_mixers(model: nn.Module) -> bool:
    """Wrap the mixers of a transformers model; whether it has any."""
    decoder: Any = model if hasattr(model, "layers") else decoder_of(model)
    found = False
    for layer_idx, layer in enumerate(decoder.layers):
        for module in layer.modules():
            # attention with tied weights has none (Zamba)
            if getattr(module, "layer_idx", layer_idx) in (None, -1):
                module.layer_idx = layer_idx
        places = [(parent, name) for parent in list(layer.modules()) for name in list(parent._modules)]
        mixers = [mixer for parent, name in places if (mixer := _wrap(parent, name, layer_idx, decoder.config))]
        if mixers:
            layer.register_forward_pre_hook(_ContextFor(mixers), with_kwargs=True)
            found = True
    if found:
        decoder.register_forward_pre_hook(_context_with_mask, with_kwargs=True)
    if found and not torch.cuda.is_available():
        logging.getLogger("transformers.integrations.hub_kernels").addFilter(_is_no_fallback)
    return found


def _is_no_fallback(record: logging.LogRecord) -> bool:
    """Drop the notices of missing kernels, one per function: there are none for a CPU."""
    return "is falling back to its reference" not in record.getMessage()


def _wrap(parent: nn.Module, name: str, layer_idx: int, config: Any) -> "StateMixer | None":
    child = parent._modules[name]
    form = MIXERS.get(type(child).__name__)
    if form is None or not type(child).__module__.startswith("transformers.models."):
        return None
    mixer = StateMixer(child, form, layer_idx, config)
    setattr(parent, name, mixer)
    return mixer


def _context_with_mask(decoder: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    """Hook of the decoder: the mask carries the context to the layers of a model that hands down nothing else (Mamba)."""
    mask: Any = options.get("attention_mask")
    if isinstance(mask, Tensor):
        mask.lockstep_context = options.get("lockstep_context")  # type: ignore[attr-defined]


class _ContextFor:
    """Hook of a decoder layer: hands its mixers the context of the call, also when checkpointing computes it again."""

    def __init__(self, mixers: "list[StateMixer]") -> None:
        self.mixers = mixers

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        carried = getattr(options.get("attention_mask"), "lockstep_context", None)
        context = options.get("lockstep_context", carried)
        for mixer in self.mixers:
            mixer.context = None if context is None else ref(context)


class StateMixer(nn.Module):
    """mixer: the module that this one replaces. config: of the decoder.

    context: of the forward in progress, set by the decoder layer. Without one transformers' own forward runs if the model attends
             by transformers' own functions; otherwise it is an error. A weak reference: a forward that fails before this module
             must not keep the cache.
    """

    reference: Any

    def __init__(self, mixer: Any, form: MixerForm, layer_idx: int, config: Any) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = mixer._modules, mixer._parameters, mixer._buffers
        self.__dict__["reference"] = mixer  # not a child
        self.layer_idx = layer_idx
        self.form = form
        self.config = config
        self.continues = form.continues
        self.context: ref[AttentionContext] | None = None

    def train(self, mode: bool = True) -> Self:
        self.reference.training = mode
        return super().train(mode)

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        reference, self.context = self.context, None
        context = None if reference is None else reference()
        require_context(self.reference, context, self.config)
        if context is None:
            return self._own_forward(hidden_states, *args, **options)
        if self.form.returns != "tuple":
            out = context.mix(self, self._rows, hidden_states)
            return out if self.form.returns == "tensor" else (out, None)
        shapes: list[torch.Size] = []

        def joined(rows: Tensor, states: RowStates) -> Tensor:
            results = self._call(rows, states)
            shapes[:] = [result.shape[2:] for result in results]
            return torch.cat([result.flatten(2) for result in results], -1)

        out = context.mix(self, joined, hidden_states)
        parts = out.split([shape.numel() for shape in shapes], -1)
        return tuple(part.unflatten(-1, shape) for part, shape in zip(parts, shapes))

    def _rows(self, rows: Tensor, states: RowStates) -> Tensor:
        """The mixer as a `StateCore`."""
        if states.tensors and not self.continues and rows.shape[1] > 1:
            return torch.cat([self._rows(token, states) for token in rows.split(1, 1)], 1)
        out = self._call(rows, states)
        return out[0] if self.form.returns == "first" else out

    def _call(self, rows: Tensor, states: RowStates) -> Any:
        options = dict(self.form.arguments)
        if self.form.cache is not None:
            options[self.form.cache] = states
        if self.form.positions is not None:
            options[self.form.positions] = torch.arange(rows.shape[1], device=rows.device).expand(rows.shape[:2])
        return self._own_forward(rows, **options)

    def _own_forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        """transformers' forward; buffers (decay factors of MiniMax) are in the dtype of the computation, as if loaded in it."""
        before = dict(self._buffers)
        self._buffers.update({name: _cast(buffer, hidden_states.dtype) for name, buffer in before.items()})
        try:
            return self.reference(hidden_states, *args, **options)
        finally:
            self._buffers.update(before)


def _cast(buffer: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return buffer if buffer is None or not buffer.is_floating_point() else buffer.to(dtype)
