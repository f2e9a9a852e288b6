"""verl.workers.actor.dp_actor: PPO updates of a program's own module, on its rows of the batch.

    rows ─► mini-batches ─► micro-batches ─► module(input_ids, …).logits ─► log-probs ─► policy loss, entropy, KL ─► optimizer

The module may be sharded with FSDP2; ranks compute on their own rows. Lockstep's own workers have an engine for this, which packs
rows and never holds the logits (`lockstep.engines.train`); this class is for programs that bring module and optimizer.
"""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from lockstep.algorithms.losses import entropy_from_logits
from lockstep.config import actor_rollout_ref
from lockstep.protocol import DataProto
from lockstep.protocol.columns import tensors_of
from lockstep.utils.determinism import choose_attention, deterministic_kernels, prepare_cublas
from lockstep.verl._config import set_keys
from lockstep.verl._names import exports
from lockstep.verl.utils.fsdp_utils import fsdp2_clip_grad_norm_
from lockstep.verl.utils.py_functional import append_to_dict
from lockstep.verl.utils.seqlen_balancing import prepare_dynamic_batch, restore_dynamic_batch
from lockstep.verl.utils.torch_functional import calculate_sum_pi_squared_from_logits, logprobs_from_logits
from lockstep.verl.workers.actor.base import BasePPOActor
from lockstep.verl.workers.config.actor import ActorConfig
from lockstep.workers.losses import actor_loss_fn

__getattr__ = exports(__name__)

INPUTS = ("responses", "input_ids", "attention_mask", "position_ids")
UPDATE = (*INPUTS, "response_mask", "old_log_probs", "advantages")
OPTIONAL = ("ref_log_prob", "rollout_is_weights", "rollout_log_probs")


class DataParallelPPOActor(BasePPOActor):
    """
    config:          the actor's section: `ActorConfig`, or a mapping with its keys. Mini-batches count this rank's rows.
    actor_module:    called with input_ids, attention_mask and position_ids; its output has `logits`.
    actor_optimizer: None for a policy that is not trained.
    """

    def __init__(
        self, config: Any, actor_module: nn.Module, actor_optimizer: torch.optim.Optimizer | None = None
    ) -> None:
        own = isinstance(config, actor_rollout_ref.ActorConfig)
        super().__init__(config if own else ActorConfig(**set_keys(actor_rollout_ref.ActorConfig, config)))
        self.actor_module = actor_module
        self.actor_optimizer = actor_optimizer
        if actor_optimizer is not None and self.config.fsdp_config.full_determinism:
            prepare_cublas()
            choose_attention()

    @torch.no_grad()
    def compute_log_prob(self, data: DataProto, calculate_entropy: bool = False) -> dict[str, Any]:
        """`log_probs` (B, R), and `entropys`, `sum_pi_squared` if asked for.

        meta_info: `temperature`, `micro_batch_size`, or `use_dynamic_bsz` with `max_token_len`.
        """
        self.actor_module.eval()
        info = data.meta_info
        rows = data.select([*INPUTS], [])
        size = info.get("micro_batch_size") or len(rows)
        order: list[list[int]] | None = None
        if info.get("use_dynamic_bsz"):
            parts, order = prepare_dynamic_batch(rows, max_token_len=info["max_token_len"])
        else:
            parts = rows.split(size)
        outputs = [
            self._forward_micro_batch(tensors_of(part.batch), info["temperature"], calculate_entropy) for part in parts
        ]
        joined = {name: torch.cat([output[name] for output in outputs]) for name in outputs[0]}
        return joined if order is None else {name: restore_dynamic_batch(v, order) for name, v in joined.items()}

    def update_policy(self, data: DataProto) -> dict[str, Any]:
        """`ppo_epochs` passes over the rows, one optimizer step per mini-batch; lists of metrics, one per step."""
        if self.actor_optimizer is None:
            raise ValueError("update_policy needs an actor_optimizer")
        self.actor_module.train()
        missing = [name for name in UPDATE if name not in data.tensors.keys()]  # noqa: SIM118
        if missing:
            raise KeyError(f"update_policy: the batch has no {', '.join(missing)}")
        rows = data.select([*UPDATE, *(name for name in OPTIONAL if name in data.tensors.keys())], [])  # noqa: SIM118
        temperature = data.meta_info["temperature"]
        metrics: dict[str, Any] = {}
        for _ in range(self.config.ppo_epochs):
            for mini_batch in rows.split(self.config.ppo_mini_batch_size):
                found = self._accumulate(mini_batch, temperature)
                found["actor/grad_norm"] = float(self._optimizer_step())
                append_to_dict(metrics, found)
        self.actor_optimizer.zero_grad()
        return metrics

    def _accumulate(self, mini_batch: DataProto, temperature: float) -> dict[str, float]:
        """The gradient of one mini-batch; returns the sums of the micro-batches' metrics."""
        assert self.actor_optimizer is not None
        self.actor_optimizer.zero_grad()
        mask = mini_batch.tensors["response_mask"]
        # counts of this rank's rows alone: FSDP averages the gradients over ranks
        info = {"dp_size": 1, "batch_num_tokens": int(mask.sum()), "global_batch_size": int((mask.sum(-1) > 0).sum())}
        loss_fn = actor_loss_fn(self.config, info)
        needs_entropy = self.config.entropy_coeff != 0 or self.config.calculate_entropy
        total: dict[str, float] = {}
        for rows in self._micro_batches(mini_batch):
            output = self._forward_micro_batch(tensors_of(rows), temperature, needs_entropy)
            outputs = {"log_probs": output["log_probs"]}
            if needs_entropy:
                outputs["entropy"] = output["entropys"]
            loss, metrics = loss_fn(outputs, rows.to(output["log_probs"].device))
            with deterministic_kernels(self.config.fsdp_config.full_determinism):
                loss.backward()
            for name, value in metrics.items():
                total[name] = total.get(name, 0.0) + float(value.detach())
        return total

    def _micro_batches(self, mini_batch: DataProto) -> Iterator[TensorDict]:
        if self.config.use_dynamic_bsz:
            parts, _ = prepare_dynamic_batch(mini_batch, max_token_len=self.config.ppo_max_token_len_per_gpu)
        else:
            parts = mini_batch.split(self.config.ppo_micro_batch_size_per_gpu or len(mini_batch))
        return (TensorDict(tensors_of(part.batch), batch_size=[len(part)]) for part in parts)

    def _forward_micro_batch(
        self, micro_batch: dict[str, Tensor], temperature: float, calculate_entropy: bool = False
    ) -> dict[str, Tensor]:
        """`log_probs` (B, R) of the responses, and `entropys`, `sum_pi_squared` if asked for."""
        device = next(self.actor_module.parameters()).device
        inputs = {name: micro_batch[name].to(device) for name in ("input_ids", "attention_mask", "position_ids")}
        width = micro_batch["responses"].shape[-1]
        logits = self.actor_module(**inputs, use_cache=False).logits[:, -width - 1 : -1].float() / temperature
        output = {"log_probs": logprobs_from_logits(logits, micro_batch["responses"].to(device))}
        if calculate_entropy:
            output["entropys"] = entropy_from_logits(logits)
        if self.config.calculate_sum_pi_squared:
            output["sum_pi_squared"] = calculate_sum_pi_squared_from_logits(logits)
        return output

    def _optimizer_step(self) -> Tensor:
        """Clip and step; a gradient that is not finite is dropped. Returns its norm before clipping."""
        assert self.actor_optimizer is not None
        norm = fsdp2_clip_grad_norm_(self.actor_module.parameters(), self.config.grad_clip)
        if torch.isfinite(norm):
            self.actor_optimizer.step()
        self.actor_optimizer.zero_grad()
        return norm
