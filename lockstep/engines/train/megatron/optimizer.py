"""megatron's optimizer: master weights and moments, whole or sharded over data-parallel ranks, and how to read and write them.

gradients in megatron's buffers ─► norm over all ranks ─► clip ─► AdamW on the masters ─► parameters that compute
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import optimizer as megatron_optimizer
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor, nn

from lockstep.config.model import FSDPOptimizerConfig
from lockstep.engines.train.optimizer import steps_taken

MOMENTS = ("exp_avg", "exp_avg_sq")

# The same step and the same state on every machine: where TransformerEngine or Apex is installed, Megatron would use theirs.
megatron_optimizer.Adam, megatron_optimizer.USING_PYTORCH_OPTIMIZER = torch.optim.AdamW, True


class Masters:
    """AdamW as `engines/train/optimizer.py` has it: the weight decay is on all parameters.

    clip_grad: gradients are clipped to this norm.
    steps:     optimizer steps so far; before the first there are no moments.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        config: FSDPOptimizerConfig,
        clip_grad: float,
        dtype: torch.dtype,
        *,
        sharded: bool,
    ) -> None:
        settings = OptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.betas[0],
            adam_beta2=config.betas[1],
            adam_eps=1e-8,
            clip_grad=clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=sharded,
        )
        self._clip_grad = clip_grad
        self.steps = 0
        self._chain = get_megatron_optimizer(settings, [model], config_overrides={}, use_gloo_process_groups=False)
        self._parts: list[Any] = [part for part in self._chain.chained_optimizers if not part.is_stub_optimizer]
        for group in self._chain.param_groups:
            group["fused"] = True

    def gradient_norm(self) -> float:
        """Over all ranks, of the gradients that are ready for `step`."""
        self._chain.prepare_grads()
        return float(self._chain.get_grad_norm())

    def step(self, norm: float, lr: float) -> None:
        """norm: of `gradient_norm`, which must have been called."""
        for part in self._parts:
            clip_grad_by_total_norm_fp32(part.get_parameters(), self._clip_grad, norm)
        for group in self._chain.param_groups:
            group["lr"] = lr
        self._chain.step_with_ready_grads()
        self.steps += 1

    def clear_gradients(self) -> None:
        """Drop the gradients that `gradient_norm` has prepared."""
        self._chain.zero_grad()

    def value(self, parameter: nn.Parameter, name: str = "param") -> Tensor:
        """The master weight of a parameter that computes, or one of its moments, whole and in its shape. Collective over dp."""
        part, master, (start, end) = self._place(parameter)
        own = None
        if master is not None:
            own = master.detach() if name == "param" else part.optimizer.state[master][name]
            if not isinstance(part, DistributedOptimizer) or part.data_parallel_group.size() == 1:
                return own.view(parameter.shape)
        whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        if own is not None:
            whole[start:end] = own
        dist.all_reduce(whole, group=part.data_parallel_group)
        return whole.view(parameter.shape)

    @torch.no_grad()
    def set_value(self, parameter: nn.Parameter, values: Tensor, name: str = "param") -> None:
        """Set what `value` reads; of "param" also the parameter that computes."""
        part, master, (start, end) = self._place(parameter)
        if name == "param":
            parameter.copy_(values)
        if master is None:
            return
        own = values.reshape(-1)[start:end].to(master.device, torch.float32).view(master.shape)
        if name == "param":
            master.copy_(own)
            return
        state = part.optimizer.state[master]
        if name in MOMENTS:
            state[name] = own.clone()

    def set_steps(self, steps: int) -> None:
        """Set the count of optimizer steps, after the moments."""
        self.steps = steps
        for part in self._parts:
            for group in part.optimizer.param_groups:
                for master in group["params"]:
                    part.optimizer.state[master]["step"] = torch.tensor(float(steps), device=master.device)

    def steps_taken(self) -> int:
        """Optimizer steps so far, as AdamW counts them."""
        return max((steps_taken(part.optimizer) for part in self._parts), default=0)

    def moments(self) -> Iterator[Tensor]:
        """Those of this rank."""
        for part in self._parts:
            for state in part.optimizer.state.values():
                yield from (state[name] for name in MOMENTS if name in state)

    def weights(self) -> Iterator[Tensor]:
        """This rank's master weights."""
        for group in self._chain.param_groups:
            yield from group["params"]

    def _place(self, parameter: nn.Parameter) -> tuple[Any, Tensor | None, tuple[int, int]]:
        """The optimizer that has a parameter; its master on this rank, if it has one, and which elements that is."""
        for part in self._parts:
            if isinstance(part, DistributedOptimizer):
                if all(parameter not in buffer.param_index_map for buffer in part.buffers):
                    continue
                if parameter not in part.model_param_group_index_map:
                    return part, None, (0, 0)
                group, order = part.model_param_group_index_map[parameter]
                span = part._get_model_param_range_map(parameter)["param"]
                return part, part.optimizer.param_groups[group]["params"][order], (span.start, span.end)
            master = getattr(parameter, "main_param", parameter)
            if any(master is other for group in part.param_groups for other in group["params"]):
                return part, master, (0, parameter.numel())
        raise KeyError("a parameter that no optimizer has")
