"""How much of the gap between rollout and trainer of a mixture of experts comes from its routers, and what replay leaves of it.

    python benchmarks/router_replay.py --markdown

A random Qwen3-MoE generates with the embedded engine, which records the experts of every token. The trainer then computes the
log-probs of the same tokens with the experts that its own routers choose, and with the recorded ones. Three pairs of compute types;
each pair has its own samples. It simplifies: random weights, no update between rollout and trainer.
"""

import argparse
import copy
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import FSDPEngineConfig, HFModelConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.train import EngineModel, MicroBatching, TrainEngine, create_train_engine
from lockstep.models.router_replay import RouteUse
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import read
from lockstep.utils.rollout_gap import GAP_METRIC, RolloutGap
from lockstep.workers.rollout_batch import batch_of

PAIRS = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
"""Compute types of rollout and trainer."""
VOCABULARY = 2048


@dataclass(frozen=True)
class Row:
    """One pair. rerouted: share of tokens and layers with other experts; free, replayed: mean |log p(rollout) - log p(trainer)|."""

    rollout: str
    trainer: str
    rerouted: float
    free: float
    free_max: float
    replayed: float
    replayed_max: float


def save_model(folder: Path, layers: int, experts: int, top_k: int) -> None:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=experts,
        num_experts_per_tok=top_k,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=0.08,
        eos_token_id=None,
        pad_token_id=0,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(folder)


def measure(folder: Path, rollout_dtype: str, dtype: str, device: torch.device, num_prompts: int, length: int) -> Row:
    model = EngineModel(
        HFModelConfig(path=str(folder)),
        "model",
        "policy",
        FSDPEngineConfig(dtype=dtype),
        router_key="router_replay",
    )
    trainer = create_train_engine("fsdp", model, device)
    config = RolloutConfig(
        prompt_length=64, response_length=length, seed=0, ignore_eos=True, enable_rollout_routing_replay=True
    )
    generator = trainer.rollout_module()
    with trainer.lend_weights(generator):
        generator = copy.deepcopy(generator)  # the trainer keeps its own weights
        for parameter in generator.parameters():
            parameter.data = parameter.data.to(getattr(torch, rollout_dtype))
        engine = EmbeddedEngine(config, eos_token_ids=[], pad_token_id=0)
        engine.bind(generator)
        requests = _requests(num_prompts, length)
        batch = batch_of(requests, engine.generate(requests), config, pad_token_id=0)
    free, replayed = _gap(trainer, batch, "compare"), _gap(trainer, batch, "replay")
    most = "training/rollout_probs_diff_max"
    return Row(
        rollout_dtype,
        dtype,
        free["training/route_mismatch"],
        free[GAP_METRIC],
        free[most],
        replayed[GAP_METRIC],
        replayed[most],
    )


def _requests(num_prompts: int, length: int) -> list[GenerationRequest]:
    rng = random.Random(0)
    sampling = SamplingParams(max_tokens=length, ignore_eos=True)
    prompts = [[rng.randrange(1, VOCABULARY) for _ in range(rng.randint(8, 64))] for _ in range(num_prompts)]
    return [GenerationRequest(prompt, sampling, seed) for seed, prompt in enumerate(prompts)]


def _gap(trainer: TrainEngine, batch: DataProto, routes: RouteUse) -> dict[str, float]:
    out = trainer.forward(batch.tensors, MicroBatching(max_tokens=4096), routes=routes)
    gap = RolloutGap()
    rollout, mask = (read(batch.tensors, name) for name in ("rollout_log_probs", "response_mask"))
    gap.add(rollout, out["log_probs"], mask, out["route_mismatch"])
    return gap.metrics(gap.sums())


def table(rows: Sequence[Row]) -> str:
    lines = [
        "| rollout | trainer | other experts | gap without replay | largest | gap with replay | largest |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (row.free, row.free_max, row.replayed, row.replayed_max)
        cells = [row.rollout, row.trainer, f"{row.rerouted:.2%}", *(f"{number:.2g}" for number in numbers)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--top-k", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each response")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--markdown", action="store_true", help="print the table of docs/moe.md")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as name:
        save_model(Path(name), args.layers, args.experts, args.top_k)
        device = torch.device(args.device)
        rows = [measure(Path(name), *pair, device, args.prompts, args.tokens) for pair in PAIRS]
    if args.markdown:
        print(table(rows))
        return 0
    for row in rows:
        print(
            f"rollout {row.rollout} trainer {row.trainer} rerouted {row.rerouted:.5f} gap {row.free:.2e} "
            f"replayed {row.replayed:.2e}"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
