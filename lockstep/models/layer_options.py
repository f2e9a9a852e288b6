"""How one layer attends."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lockstep.models.key_index import KeyIndex


@dataclass(frozen=True)
class LayerOptions:
    """
    scaling:        factor of query · key.
    sliding_window: number of tokens that a query sees, itself included; None for all.
    softcap:        logits become softcap * tanh(logits / softcap) before the mask; None for no cap.
    sinks:          (H,) one more logit per query head, which takes probability but has no value; None for none.
    chunk:          a query sees the tokens of its own chunk of this many positions; None for all (Llama 4).
    index:          picks the keys that a query sees; its own are joined to those of the layer. None for all (DeepSeek-V3.2).
    """

    scaling: float
    sliding_window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    chunk: int | None = None
    index: KeyIndex | None = None

    @property
    def extent(self) -> tuple[int | None, int | None]:
        """What, besides its position, decides which keys a query may see."""
        return self.sliding_window, self.chunk

    def hides(self, position: Any, key: Any) -> Any:
        """Whether a query does not see a key, by their positions in the sequence: arrays or tensors that broadcast."""
        hidden = key > position
        if self.sliding_window is not None:
            hidden = hidden | (key <= position - self.sliding_window)
        if self.chunk is not None:
            hidden = hidden | (key < position // self.chunk * self.chunk)
        return hidden
