"""Mixers of transformers' hybrid models (Gated DeltaNet, Mamba, short convolutions, …) on packed tokens.

    decoder layer of transformers ─► StateMixer ─► context.mix ─► the mixer's own forward on rows with their states

`StateMixer` takes the place of a mixer in its layer and has the same children and parameters. The layer hands it the attention
context, which lays out the tokens (`models/state_rows.py`).
"""

from typing import Any

from torch import Tensor, nn

from lockstep.models.attention import AttentionContext
from lockstep.models.state_rows import RowStates

MIXERS: dict[str, str] = {}
"""Name of a mixer class in `transformers.models` -> the keyword argument of its forward that takes the cache."""


def install_state_mixers(model: nn.Module) -> bool:
    """Wrap the mixers of a transformers model; whether it has any."""
    decoder: Any = model if hasattr(model, "layers") else model.get_decoder()  # type: ignore[operator]
    found = False
    for layer in decoder.layers:
        mixers = [_wrap(parent, name) for parent in list(layer.modules()) for name in list(parent._modules)]
        own = [mixer for mixer in mixers if mixer is not None]
        if own:
            layer.register_forward_pre_hook(_ContextFor(own), with_kwargs=True)
            found = True
    return found


def _wrap(parent: nn.Module, name: str) -> "StateMixer | None":
    child = parent._modules[name]
    argument = MIXERS.get(type(child).__name__)
    if argument is None or not type(child).__module__.startswith("transformers.models."):
        return None
    mixer = StateMixer(child, argument)
    setattr(parent, name, mixer)
    return mixer


class _ContextFor:
    """Hook of a decoder layer: hands its mixers the context of the call, also when checkpointing computes it again."""

    def __init__(self, mixers: "list[StateMixer]") -> None:
        self.mixers = mixers

    def __call__(self, layer: nn.Module, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        for mixer in self.mixers:
            mixer.context = options.get("lockstep_context")


class StateMixer(nn.Module):
    """mixer: the module that this one replaces.

    context: of the forward in progress, set by the decoder layer; None runs transformers' own forward.
    """

    reference: Any

    def __init__(self, mixer: Any, cache_argument: str) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = mixer._modules, mixer._parameters, mixer._buffers
        self.__dict__["reference"] = mixer  # not a child
        self.layer_idx: int = mixer.layer_idx
        self.cache_argument = cache_argument
        self.context: AttentionContext | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **options: Any) -> Any:
        if self.context is None:
            return self.reference(hidden_states, *args, **options)
        return self.context.mix(self, self._rows, hidden_states)

    def _rows(self, rows: Tensor, states: RowStates) -> Tensor:
        out: Tensor = self.reference(rows, **{self.cache_argument: states})
        return out
