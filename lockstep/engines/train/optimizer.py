"""AdamW on master weights: torch's fused one, or one that updates pieces of parameters and rounds bfloat16 stochastically.

bfloat16 has 8 significant bits: at a learning rate of 1e-6 nearly every update is below half the distance to the next number
and would round away, and so would the changes of a second moment with beta2 = 0.999. The new weight and both moments are
therefore computed in float32, and each is rounded up or down with a probability that makes its expectation exact.
"""

import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lockstep.config.model import FSDPOptimizerConfig

PIECE_SIZE = 2**24
"""Most elements that are updated at once, so that the float32 temporaries of a large embedding stay below 0.5 GB."""


def build_optimizer(
    parameters: Sequence[Tensor], config: FSDPOptimizerConfig, *, seed: int, in_pieces: bool = False
) -> torch.optim.AdamW:
    """in_pieces: always PiecewiseAdamW, which bfloat16 parameters get anyway."""
    dtypes = {parameter.dtype for parameter in parameters}
    if torch.float16 in dtypes:
        raise ValueError(
            "fsdp_config.model_dtype=float16: float16 is too narrow for master weights and AdamW's second moment; set "
            "fsdp_config.model_dtype to float32 or bfloat16 (fsdp_config.dtype=float16 still computes in float16)"
        )
    if in_pieces or torch.bfloat16 in dtypes:
        return PiecewiseAdamW(parameters, **_settings(config), seed=seed)
    return fused_adamw(parameters, config)


def fused_adamw(parameters: Sequence[Tensor], config: FSDPOptimizerConfig) -> torch.optim.AdamW:
    """torch's, in the parameters' dtype."""
    return torch.optim.AdamW(parameters, **_settings(config), fused=True)


def _settings(config: FSDPOptimizerConfig) -> dict[str, Any]:
    return {"lr": config.lr, "betas": config.betas, "weight_decay": config.weight_decay}


@dataclass(frozen=True)
class Piece:
    """Elements `start` to `end` of a parameter's flattened local shard, and of its gradient and moments."""

    parameter: Tensor
    start: int
    end: int

    def of(self, tensor: Tensor) -> Tensor:
        return local(tensor).view(-1)[self.start : self.end]


def pieces_of(parameter: Tensor) -> Iterator[Piece]:
    size = local(parameter).numel()
    return (Piece(parameter, start, min(start + PIECE_SIZE, size)) for start in range(0, size, PIECE_SIZE))


def local(tensor: Tensor) -> Tensor:
    """This rank's shard."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def steps_taken(optimizer: torch.optim.Optimizer) -> int:
    """The largest number of steps that a parameter's state counts; skipped ones are not among them."""
    steps = [torch.as_tensor(state["step"]) for state in optimizer.state.values() if "step" in state]
    return int(torch.stack(steps).max()) if steps else 0


def complete_state(optimizer: torch.optim.Optimizer) -> None:
    """After a first step: give parameters that had no gradient yet, such as a tower without images so far, the state of no step."""
    step = next(state["step"] for state in optimizer.state.values())
    for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
        if parameter not in optimizer.state:
            moments = {name: torch.zeros_like(parameter.detach()) for name in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.zeros_like(step), **moments}


class PiecewiseAdamW(torch.optim.AdamW):
    """AdamW with state in the parameters' type: float32 is updated by torch's fused kernel, bfloat16 with stochastic rounding.

    The random bits depend on the seed, the step count and the parameter's index: a resumed run repeats them from `step` alone,
    replicas of a shard draw the same ones, and torch's global generators are not touched.
    grad_scale: gradients are divided by it. found_inf: the step is skipped if it is not zero.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(self, parameters: Sequence[Tensor], *, seed: int, **settings: Any) -> None:
        super().__init__(parameters, **settings)
        self._seed = seed
        self._indices = {parameter: i for i, parameter in enumerate(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in self.begin_step():
            state = self.state[parameter]
            if "exp_avg" not in state:
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            for piece in pieces_of(parameter):
                self.update(piece, piece.of(state["exp_avg"]), piece.of(state["exp_avg_sq"]))

    def begin_step(self) -> list[Tensor]:
        """Count a step; returns the parameters to update, none if the step is skipped."""
        if self.found_inf is not None and self.found_inf.item():
            return []
        parameters = [parameter for parameter in self._indices if parameter.grad is not None]
        for parameter in parameters:  # on the host, which seeds a generator with it
            self.state[parameter].setdefault("step", torch.tensor(0.0)).add_(1)
        return parameters

    def update(self, piece: Piece, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Update one piece and its moments, which are flat, in a step that has begun."""
        group = self.param_groups[0]
        weight = piece.of(piece.parameter)
        gradient = piece.parameter.grad
        assert gradient is not None
        gradient = piece.of(local(gradient).contiguous())
        (beta1, beta2), lr, decay, eps = group["betas"], group["lr"], group["weight_decay"], group["eps"]
        step = int(self.state[piece.parameter]["step"])
        scale = None if self.grad_scale is None else self.grad_scale.to(weight.device)
        if weight.dtype == torch.float32:
            steps = [torch.full((), float(step), device=weight.device)]
            torch._fused_adamw_(
                [weight],
                [gradient],
                [exp_avg],
                [exp_avg_sq],
                [],
                steps,
                lr=lr,
                beta1=beta1,
                beta2=beta2,
                weight_decay=decay,
                eps=eps,
                amsgrad=False,
                maximize=False,
                grad_scale=scale,
            )
            return

        # hashed to 31 bits: a CPU generator takes 32, a Triton kernel a signed integer
        seed = zlib.crc32(f"{self._seed} {step} {self._indices[piece.parameter]} {piece.start}".encode()) >> 1
        if weight.is_cuda:
            from lockstep.kernels.adamw import adamw

            settings = {"step": step, "lr": lr, "betas": (beta1, beta2), "eps": eps, "weight_decay": decay}
            adamw(weight, gradient, exp_avg, exp_avg_sq, scale, **settings, seed=seed)
            return
        generator = torch.Generator(weight.device).manual_seed(seed)
        gradient = gradient.to(torch.float32, copy=True)
        if scale is not None:
            gradient.div_(scale)
        mean = exp_avg.float().lerp_(gradient, 1 - beta1)
        square = exp_avg_sq.float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        write_rounded(exp_avg, mean, generator)
        write_rounded(exp_avg_sq, square, generator)
        spread = square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(eps)
        result = weight.float().mul_(1 - lr * decay).addcdiv_(mean, spread, value=-lr / (1 - beta1**step))
        write_rounded(weight, result, generator)


def write_rounded(target: Tensor, values: Tensor, generator: torch.Generator) -> None:
    """Write float32 values to a bfloat16 tensor, rounded up or down at random so that the expectation is the value."""
    # bfloat16 is the upper half of a float32: 16 random bits added to the lower half carry as often as it is large
    bits = torch.randint(0, 2**16, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    target.copy_(bits.add_(values.view(torch.int32)).bitwise_and_(-(2**16)).view(torch.float32))
