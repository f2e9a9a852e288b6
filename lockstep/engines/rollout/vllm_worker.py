"""Weight updates inside vLLM's worker: methods that vLLM adds to its worker class (`worker_extension_cls`), also of `vllm serve`.

begin   every layer gets its checkpoint format back (vLLM's layer-wise reload)
load    parameters by Hugging Face name; vLLM fuses q/k/v and gate/up, quantises and packs a layer when it is complete
finish  the others are completed, and a tied head gets the new embedding: on CPU it computes with a packed copy

Every tensor is checksummed as it arrives, and the model's parameters afterwards (vllm_readback.py).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor

from lockstep.engines.rollout.vllm_readback import Place, Received, compare, describe, find_place, is_quantized, read
from lockstep.utils.distributed import join_group


class WeightUpdates:
    """Mixed into vLLM's worker, so names begin with `lockstep_`."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: torch.device

    def lockstep_begin_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.lockstep_received: dict[str, Received] = {}
        if not hasattr(self, "lockstep_places"):
            self.lockstep_places: dict[str, Place | str] = {}
            self.lockstep_ordered: set[str] = set()
        with self.lockstep_context():
            initialize_layerwise_reload(self.lockstep_model())

    def lockstep_load(self, weights: list[tuple[str, Tensor]]) -> None:
        model = self.lockstep_model()
        for name, tensor in weights:
            if name not in self.lockstep_places:
                self.lockstep_places[name] = find_place(model, name, tensor.shape)
            place = self.lockstep_places[name]
            found = place if isinstance(place, Place) else None
            self.lockstep_received[name] = describe(tensor, found, name not in self.lockstep_ordered)
        with self.lockstep_context():
            model.load_weights(iter(weights))

    def lockstep_load_file(self, path: str) -> None:
        """Load the tensors of a safetensors file: for a server, which is handed nothing but text."""
        self.lockstep_load(list(load_file(path).items()))

    def lockstep_join_group(
        self, name: str, address: str, port: int, first_rank: int, size: int, backend: str, timeout_s: float
    ) -> None:
        """Join the process group in which rank 0 broadcasts weights to a server. first_rank: of this server's workers."""
        rank = first_rank + self.rank
        self.lockstep_group = join_group(name, address, port, rank, size, backend, timeout_s)

    def lockstep_load_broadcast(self, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Load the tensors that rank 0 broadcasts: name, dtype and shape of each."""
        received = []
        for name, dtype, shape in tensors:
            received.append((name, torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)))
            dist.broadcast(received[-1][1], src=0, group=self.lockstep_group)
        self.lockstep_load(received)

    def lockstep_finish_update(self) -> str:
        """What is wrong with the weights that the model computes with; empty if nothing is known to be."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        model = self.lockstep_model()
        with self.lockstep_context():
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            self.lockstep_tie_head(language_model(model))
        return head_problem(language_model(model))

    def lockstep_fingerprints(self, names: list[str]) -> dict[str, int]:
        """The fingerprints of received tensors, changed for those that the model does not hold; see `lockstep_unread`."""
        places = {name: place for name, place in self.lockstep_places.items() if isinstance(place, Place)}
        agreements = compare(self.lockstep_model(), places, self.lockstep_received)
        # Bits in order are that once and for all: another order later is no reordering by vLLM's loader.
        self.lockstep_ordered |= {name for name, agreement in agreements.items() if agreement == "bits"}
        unknown = [name for name, agreement in agreements.items() if agreement == "unknown"]
        self.lockstep_places |= dict.fromkeys(unknown, "the kernel stores experts in its own layout")
        whole = {name: received.whole for name, received in self.lockstep_received.items() if name in names}
        return {name: ~value if agreements.get(name) == "none" else value for name, value in whole.items()}

    def lockstep_unread(self) -> dict[str, str]:
        """Tensors that are not compared bit by bit with those of the model, and why. By structure, whatever was loaded."""
        reasons = {name: place for name, place in self.lockstep_places.items() if isinstance(place, str)}
        quantized = [name for name, p in self.lockstep_places.items() if isinstance(p, Place) and p.is_quantized]
        return reasons | dict.fromkeys(quantized, "quantised")

    def lockstep_model(self) -> Any:
        return self.model_runner.get_model()

    @contextmanager
    def lockstep_context(self) -> Iterator[None]:
        from vllm.config import set_current_vllm_config

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            yield

    def lockstep_tie_head(self, model: Any) -> None:
        """Give a tied head the new embedding; on CPU pack it again."""
        path = tied_embedding(model)
        if path is None:
            return
        model.lm_head.weight = model.get_submodule(path).weight
        if hasattr(model.lm_head, "cpu_linear"):
            from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

            dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")


def language_model(model: Any) -> Any:
    """The part with the head: of a model that reads images a module, otherwise the model."""
    return next((part for part in model.modules() if hasattr(part, "lm_head")), model)


def tied_embedding(model: Any) -> str | None:
    """Path of the embedding to which the head is tied; None if it is not."""
    if not getattr(model.config, "tie_word_embeddings", False) or not hasattr(model, "lm_head"):
        return None
    return next((path for path, _ in model.named_modules() if path.endswith(EMBEDDINGS)), None)


@torch.no_grad()
def head_problem(model: Any) -> str:
    """Whether a tied head computes with the embedding; a sentence if it does not."""
    path = tied_embedding(model)
    if path is None:
        return ""
    weight = model.get_submodule(path).weight
    head = model.lm_head
    if head.weight is not weight and not torch.equal(head.weight, weight):
        return f"lm_head.weight is not the new {path}.weight, to which it is tied"
    if not is_quantized(head) and not torch.equal(read(head, "weight"), weight):
        return f"lm_head.weight is an old copy of {path}.weight, to which it is tied"
    return ""
