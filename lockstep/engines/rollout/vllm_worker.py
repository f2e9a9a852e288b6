"""Weight updates inside vLLM's worker: methods that vLLM adds to its worker class (`worker_extension_cls`), also of `vllm serve`.

begin   every layer gets its checkpoint format back (vLLM's layer-wise reload)
load    parameters by Hugging Face name; vLLM fuses q/k/v and gate/up, quantises and packs a layer when it is complete
finish  the others are completed, and a tied head gets the new embedding: on CPU it computes with a packed copy

What arrived is checksummed by name before it is loaded. Parameters that can be found again in the model are checksummed there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from lockstep.utils.distributed import join_group
from lockstep.utils.fingerprint import fingerprint


class WeightUpdates:
    """Mixed into vLLM's worker, so names begin with `lockstep_`."""

    vllm_config: Any
    model_runner: Any
    rank: int
    device: torch.device

    def lockstep_begin_update(self) -> None:
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        self.lockstep_received: dict[str, int] = {}
        self.lockstep_shapes: dict[str, torch.Size] = {}
        self.lockstep_constant: set[str] = set()
        with self.lockstep_context():
            initialize_layerwise_reload(self.lockstep_model())

    def lockstep_load(self, weights: list[tuple[str, Tensor]]) -> None:
        self.lockstep_received |= {name: fingerprint(tensor) for name, tensor in weights}
        self.lockstep_shapes |= {name: tensor.shape for name, tensor in weights}
        self.lockstep_constant |= {name for name, tensor in weights if is_constant(tensor)}
        with self.lockstep_context():
            self.lockstep_model().load_weights(iter(weights))

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
            self.lockstep_tie_head(model)
        return head_problem(model)

    def lockstep_fingerprints(self, names: list[str]) -> dict[str, int]:
        """Of the parameters as they are in the model; of those that cannot be found there, as they were received."""
        here, received = self.lockstep_read_back(self.lockstep_model()), self.lockstep_received
        # Some architectures transform parameters while loading: those that were equal once must always be equal. Constant tensors
        # are equal by chance.
        if not hasattr(self, "lockstep_readable"):
            self.lockstep_readable: dict[str, bool] = {}
        for name in here.keys() - self.lockstep_constant:
            self.lockstep_readable.setdefault(name, here[name] == received[name])
        readable = {name: value for name, value in here.items() if self.lockstep_readable.get(name)}
        return {name: value for name, value in (received | readable).items() if name in names}

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

    def lockstep_read_back(self, model: Any) -> dict[str, int]:
        """Fingerprints of the received parameters that the model holds whole: not those that are sharded or, on CPU, packed."""
        parameters = dict(model.named_parameters())
        found = {}
        for name, shape in self.lockstep_shapes.items():
            if name in parameters:
                tensor = parameters[name]
                if tensor.shape[1:] == shape[1:] and tensor.shape[0] >= shape[0]:  # the vocabulary is padded
                    found[name] = fingerprint(tensor[: shape[0]])
        for joint, parts in getattr(model, "packed_modules_mapping", {}).items():
            for path, tensor in parameters.items():
                owner, _, leaf = path.rpartition(".")
                if owner.rpartition(".")[2] != joint:
                    continue
                names = [f"{owner.removesuffix(joint)}{part}.{leaf}" for part in parts]
                shapes = [self.lockstep_shapes.get(name) for name in names]
                sizes = [shape[0] for shape in shapes if shape]
                if len(sizes) == len(parts) and tensor.dim() > 0 and tensor.shape[0] == sum(sizes):
                    found |= {name: fingerprint(rows) for name, rows in zip(names, tensor.split(sizes))}
        return found


def is_constant(tensor: Tensor) -> bool:
    """Judged by its first values."""
    return len(tensor.flatten()[:1024].unique()) == 1


EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")


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
    weight, head = model.get_submodule(path).weight, model.lm_head
    if head.weight is not weight and not torch.equal(head.weight, weight):
        return f"lm_head.weight is not the new {path}.weight, to which it is tied"
    probe = torch.linspace(-1, 1, weight.shape[1], dtype=weight.dtype, device=weight.device)[None]
    logits, expected = head.quant_method.apply(head, probe), nn.functional.linear(probe, weight)
    scale = expected.abs().max().clamp_min(1e-6)
    if (logits - expected).abs().max() > (1e-5 if weight.dtype == torch.float32 else 0.05) * scale:
        return f"lm_head.weight is an old copy of {path}.weight, to which it is tied"
    return ""
