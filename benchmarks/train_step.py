"""One training step (forward, backward, clip, AdamW) on random weights: Lockstep's engine compared with plain transformers.

    python benchmarks/train_step.py [--shape 0.5b|1.5b|7b] [--tokens 16384 --length 512] [--profile] [--json out.json]

Rows have `length` tokens, the second half of which is the response. lockstep: `FsdpEngine` with `PolicyModel` (packed, log-probs at
response tokens). transformers: sdpa attention on the same rows, log-softmax of the full logits, gather. Both compute in bfloat16 on
CUDA with the same loss, gradient clipping and AdamW. Lockstep's master weights are float32, transformers' have the compute dtype;
for shapes whose float32 optimizer does not fit on one device, both are bfloat16. MFU is relative to `--peak-tflops` and counts only
required work (the head at response tokens only, no recomputation).
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from shapes import BFLOAT16_MASTERS, SHAPES, shape_config
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.models.packed_weights import pack_weights
from lockstep.models.token_models import PolicyModel


@dataclass
class Result:
    """ms: median per step. peak_gb: peak allocated memory, including weights and optimizer. warmup_s: the first steps."""

    name: str
    tokens_per_s: float
    ms: float
    mfu: float
    peak_gb: float
    warmup_s: float


@dataclass(frozen=True)
class Task:
    """rows x length tokens on `device`; master: dtype of Lockstep's master weights."""

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

    def model(self, dtype: torch.dtype, attention: str) -> Any:
        torch.manual_seed(0)
        with self.device:
            return AutoModelForCausalLM.from_config(self.config, dtype=dtype, attn_implementation=attention)


def lockstep_engine(task: Task) -> FsdpEngine:
    model = task.model(task.master, ATTENTION_NAME)
    install_decoder_layers(model)
    pack_weights(model)
    return FsdpEngine(
        PolicyModel(model),
        FSDPEngineConfig(),
        FSDPOptimizerConfig(),
        device=task.device,
        compute_dtype=task.dtype,
        packed=True,
        gradient_checkpointing=task.checkpointing,
    )


def lockstep_step(
    task: Task, engine: FsdpEngine | None = None, micro: MicroBatching | None = None
) -> Callable[[], float]:
    engine = engine or lockstep_engine(task)
    micro = micro or MicroBatching()
    batch, total = task.batch(), task.num_tokens / 2

    def loss(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        value = -(outputs["log_probs"] * rows["advantages"]).sum() / total
        if task.entropy:
            value = value - 0.001 * outputs["entropy"].sum() / total
        return value, {"loss": value.detach()}

    def step() -> float:
        metrics = engine.forward_backward(batch, loss, micro, with_entropy=task.entropy)
        engine.optimizer_step()
        return metrics["loss"]

    return step


def transformers_step(task: Task) -> Callable[[], float]:
    model = task.model(task.dtype, "sdpa").train()
    if task.checkpointing:
        model.gradient_checkpointing_enable()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.01, fused=True)
    batch = task.batch().to(task.device)
    half, total = task.length // 2, task.num_tokens / 2

    def step() -> float:
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        log_p = torch.log_softmax(logits[:, :-1].float(), -1)
        chosen = log_p.gather(-1, batch["input_ids"][:, 1:, None])[:, half - 1 :, 0]
        loss = -(chosen * batch["advantages"]).sum() / total
        if task.entropy:
            loss = loss + 0.001 * (log_p.exp() * log_p).sum(-1)[:, half - 1 :].sum() / total
        del logits, log_p
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.detach())

    return step


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
        if on_gpu:
            torch.cuda.synchronize()
        started = time.perf_counter()
        step()
        if on_gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    seconds = statistics.median(times)
    memory = torch.cuda.max_memory_allocated() / 1e9 if on_gpu else float("nan")
    mfu = task.flops() / seconds / (peak * 1e12)
    return Result(name, task.num_tokens / seconds, seconds * 1e3, mfu, memory, warmup)


def print_kernels(console: Console, step: Callable[[], float], count: int) -> None:
    """Print the longest kernels of one step, and the device's busy time."""
    from torch.profiler import ProfilerActivity, profile

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


def main() -> None:
    on_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.5b" if on_gpu else "tiny")
    parser.add_argument("--tokens", type=int, default=16384 if on_gpu else 1024)
    parser.add_argument("--length", type=int, default=512 if on_gpu else 128, help="tokens per row")
    parser.add_argument("--steps", type=int, default=10, help="timed steps")
    parser.add_argument("--device", default="cuda" if on_gpu else "cpu")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in the backward pass")
    parser.add_argument("--entropy", action="store_true", help="with an entropy bonus in the loss")
    parser.add_argument("--only", choices=["lockstep", "transformers"], help="run only one side")
    parser.add_argument(
        "--peak-tflops", type=float, default=790.0, help="peak matmul throughput of the device, for MFU"
    )
    parser.add_argument("--profile", action="store_true", help="print Lockstep's longest kernels")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    args = parser.parse_args()

    device = torch.device(args.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    task = Task(
        config=shape_config(args.shape, rope_theta=1e6),
        rows=args.tokens // args.length,
        length=args.length,
        device=device,
        dtype=dtype,
        master=dtype if args.shape in BFLOAT16_MASTERS else torch.float32,
        checkpointing=args.checkpointing,
        entropy=args.entropy,
    )
    console = Console()
    console.width = max(console.width, 120)
    makers = {"lockstep": lockstep_step, "transformers": transformers_step}
    results = []
    for name, make in makers.items():
        if args.only in (None, name):
            results.append(measure(name, task, make, args.steps, args.peak_tflops))
            free()

    title = f"{args.shape}: {task.num_tokens} tokens in rows of {task.length}, half response, {dtype} on {device}"
    table = Table(title=title)
    for column in ("", "tokens/s", "ms", "MFU", "peak GB", "start + 3 steps s"):
        table.add_column(column, justify="right" if column else "left")
    for r in results:
        table.add_row(
            r.name, f"{r.tokens_per_s:,.0f}", f"{r.ms:.1f}", f"{r.mfu:.1%}", f"{r.peak_gb:.1f}", f"{r.warmup_s:.1f}"
        )
    console.print(table)
    summary: dict[str, Any] = {
        "shape": args.shape,
        "tokens": task.num_tokens,
        "length": task.length,
        "device": str(device),
        "dtype": str(dtype),
        "master": str(task.master),
        "checkpointing": task.checkpointing,
        "entropy": task.entropy,
        "torch": torch.__version__,
        "results": [asdict(r) for r in results],
    }
    if len(results) == len(makers):
        summary["ratio"] = results[0].tokens_per_s / results[1].tokens_per_s
        console.print(f"lockstep / transformers: {summary['ratio']:.2f}x")
    if args.profile and device.type == "cuda":
        print_kernels(console, lockstep_step(task), 12)
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
