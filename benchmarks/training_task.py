"""One training step on random weights, which several benchmarks measure: forward, backward, clip, AdamW.

add_task_arguments, task_of ─► Task ─► fsdp_engine ─► engine_step ─► measure
"""

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from shapes import BFLOAT16_MASTERS, SHAPES, install_layers, shape_config
from tensordict import TensorDict
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching, TrainEngine
from lockstep.models.token_models import PolicyModel


@dataclass(frozen=True)
class Task:
    """rows x length tokens on `device`, the second half of each row the response.

    master: dtype of Lockstep's master weights. entropy: with an entropy bonus in the loss.
    """

    config: PreTrainedConfig
    rows: int
    length: int
    device: torch.device
    dtype: torch.dtype
    master: torch.dtype
    checkpointing: bool
    entropy: bool

    @property
    def num_tokens(self) -> int:
        return self.rows * self.length

    @cached_property
    def layers(self) -> Any:
        """The model's layers, without memory."""
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config).model.layers

    @property
    def layer_weights(self) -> float:
        """Weights of all layers that a token is multiplied with."""
        c = self.config
        experts = c.num_experts_per_tok / c.num_experts if hasattr(c, "num_experts_per_tok") else 1.0
        parameters = ((name, p) for name, p in self.layers.named_parameters() if p.ndim > 1)
        return sum(p.numel() * (experts if ".experts." in name else 1.0) for name, p in parameters)

    @property
    def scores(self) -> float:
        """Products of a token's attention in all layers: QK and PV over the causal half."""
        c = self.config
        width = c.num_attention_heads * (getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)
        return sum(hasattr(layer, "self_attn") for layer in self.layers) * 2 * width * self.length / 2

    def flops(self) -> float:
        """Forward and backward pass: 6 per weight and token (of experts, those that a token uses), plus causal attention."""
        head = self.config.vocab_size * self.config.hidden_size * self.num_tokens / 2
        return 6 * ((self.layer_weights + self.scores) * self.num_tokens + head)

    def batch(self) -> TensorDict:
        generator = torch.Generator().manual_seed(0)
        shape, half = (self.rows, self.length), self.length // 2
        ids = torch.randint(0, self.config.vocab_size, shape, generator=generator)
        mask = torch.ones(shape, dtype=torch.long)
        return TensorDict(
            {
                "input_ids": ids,
                "attention_mask": mask,
                "position_ids": torch.arange(self.length).expand(shape),
                "responses": ids[:, half:],
                "response_mask": mask[:, half:],
                "advantages": torch.randn(self.rows, half, generator=generator),
            },
            batch_size=[self.rows],
        )

    def model(self, dtype: torch.dtype) -> Any:
        torch.manual_seed(0)
        with self.device:
            return AutoModelForCausalLM.from_config(self.config, dtype=dtype)

    def loss(self, outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        num_response = self.num_tokens / 2
        value = -(outputs["log_probs"] * rows["advantages"]).sum() / num_response
        if self.entropy:
            value = value - 0.001 * outputs["entropy"].sum() / num_response
        return value, {"loss": value.detach()}


def add_task_arguments(parser: argparse.ArgumentParser, shape: str, cpu_tokens: int = 1024) -> None:
    """shape: the default on a GPU."""
    on_gpu = torch.cuda.is_available()
    parser.add_argument("--shape", choices=sorted(SHAPES), default=shape if on_gpu else "tiny")
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else cpu_tokens)
    parser.add_argument("--length", type=int, default=512 if on_gpu else 128, help="tokens per row")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument(
        "--peak-tflops", type=float, default=790.0, help="peak matmul throughput of the device, for MFU"
    )
    parser.add_argument("--json", type=Path, help="also write the results to this file")


def task_of(args: argparse.Namespace, device: torch.device, *, entropy: bool = False) -> Task:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return Task(
        config=shape_config(args.shape, rope_theta=1e6),
        rows=args.tokens // args.length,
        length=args.length,
        device=device,
        dtype=dtype,
        master=dtype if args.shape in BFLOAT16_MASTERS else torch.float32,
        checkpointing=args.checkpointing,
        entropy=entropy,
    )


def fsdp_engine(task: Task, *, trained: bool = True) -> FsdpEngine:
    """trained: with master weights and an optimizer."""
    model = task.model(task.master if trained else task.dtype)
    install_layers(model)
    return FsdpEngine(
        PolicyModel(model),
        FSDPEngineConfig(),
        FSDPOptimizerConfig() if trained else None,
        device=task.device,
        compute_dtype=task.dtype,
        packed=True,
        gradient_checkpointing=task.checkpointing,
    )


def engine_step(
    task: Task, engine: TrainEngine, micro: MicroBatching | None = None, **options: bool
) -> Callable[[], float]:
    """A function that takes one step and returns the loss. options: of the engine's forward."""
    batch = task.batch()
    micro = micro or MicroBatching()

    def step() -> float:
        metrics = engine.forward_backward(batch, task.loss, micro, with_entropy=task.entropy, **options)
        engine.optimizer_step()
        return metrics["loss"]

    return step


def fsdp_step(task: Task) -> Callable[[], float]:
    return engine_step(task, fsdp_engine(task))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass
class Result:
    """ms: median per step. peak_gb: peak allocated memory, including weights and optimizer. warmup_s: the first steps."""

    name: str
    tokens_per_s: float
    ms: float
    mfu: float
    peak_gb: float
    warmup_s: float


def measure(name: str, task: Task, make: Callable[[Task], Callable[[], float]], steps: int, peak: float) -> Result:
    on_gpu = task.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    step = make(task)
    for _ in range(3):
        step()
    warmup = time.perf_counter() - started
    times = []
    for _ in range(steps):
        synchronize(task.device)
        started = time.perf_counter()
        step()
        synchronize(task.device)
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    memory = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else float("nan")
    mfu = task.flops() / seconds / (peak * 1e12)
    return Result(name, task.num_tokens / seconds, seconds * 1e3, mfu, memory, warmup)


def print_kernels(console: Console, step: Callable[[], float], count: int) -> None:
    """Print the longest kernels of one step, and the device's busy time."""
    step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
        wall = time.perf_counter() - started
    rows = sorted(profiler.key_averages(), key=lambda row: -row.device_time_total)
    busy = sum(row.device_time_total for row in rows) / 1e3
    console.print(f"kernels {busy:.1f} ms of {wall * 1e3:.1f} ms")
    for row in rows[:count]:
        console.print(f"{row.device_time_total / 1e3:8.2f} ms x{row.count:5d}  {row.key[:110]}", markup=False)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
