"""Rollout throughput on mixed lengths: the embedded engine beside transformers' generate, in one process.

    python benchmarks/rollout.py --model DIR [--requests 64 --seed 0 --json out.json]

Each request has a random prompt of 16-200 tokens and asks for exactly 8-128 tokens (end-of-sequence is ignored). Only requested
tokens count. transformers is told the lengths beforehand: its batches hold requests of similar length, and the best of several
batch sizes is reported. Both sides decode greedily with the same weights and must give the same tokens, up to ties.
"""

import argparse
import json
import random
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GenerationConfig

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.engines.rollout import EmbeddedEngine, GenerationRequest, SamplingParams
from lockstep.models.attention import ATTENTION_NAME

PROMPT_TOKENS = (16, 200)
NEW_TOKENS = (8, 128)


@dataclass
class Result:
    """startup_s: from a loaded model to the first token of one request. same_tokens: share of tokens equal to embedded's."""

    name: str
    seconds: float
    tokens_per_s: float
    startup_s: float
    same_tokens: float = 1.0


def make_requests(count: int, vocab_size: int, seed: int) -> list[GenerationRequest]:
    rng = random.Random(seed)
    return [
        GenerationRequest(
            prompt_ids=[rng.randrange(vocab_size) for _ in range(rng.randint(*PROMPT_TOKENS))],
            sampling=SamplingParams(temperature=0.0, max_tokens=rng.randint(*NEW_TOKENS), ignore_eos=True),
            seed=i,
        )
        for i in range(count)
    ]


def run_embedded(model: Any, requests: list[GenerationRequest]) -> tuple[Result, list[list[int]]]:
    started = time.perf_counter()
    config = RolloutConfig(
        name="embedded",
        prompt_length=PROMPT_TOKENS[1],
        response_length=NEW_TOKENS[1],
        max_num_seqs=len(requests),
        seed=0,
    )
    engine = EmbeddedEngine(config, eos_token_ids=(), pad_token_id=0)
    engine.bind(model)
    engine.generate([GenerationRequest(requests[0].prompt_ids, SamplingParams(0.0, max_tokens=1))])
    startup = time.perf_counter() - started
    seconds, completions = timed(model, lambda: engine.generate(requests))
    engine.sleep()
    outputs = [c.token_ids for c in completions]
    return Result("lockstep embedded", seconds, num_tokens(outputs) / seconds, startup), outputs


def run_transformers(model: Any, requests: list[GenerationRequest], batch_size: int) -> tuple[Result, list[list[int]]]:
    model.set_attn_implementation("sdpa")
    model.generation_config = GenerationConfig()
    started = time.perf_counter()
    generate_padded(model, [GenerationRequest(requests[0].prompt_ids, SamplingParams(0.0, max_tokens=1))])
    startup = time.perf_counter() - started

    def generate() -> list[list[int]]:
        outputs: list[list[int]] = [[] for _ in requests]
        order = sorted(
            range(len(requests)), key=lambda i: (requests[i].sampling.max_tokens, len(requests[i].prompt_ids))
        )
        for first in range(0, len(order), batch_size):
            members = order[first : first + batch_size]
            for i, tokens in zip(members, generate_padded(model, [requests[i] for i in members])):
                outputs[i] = tokens
        return outputs

    seconds, outputs = timed(model, generate)
    model.set_attn_implementation(ATTENTION_NAME)
    return Result(f"transformers generate x{batch_size}", seconds, num_tokens(outputs) / seconds, startup), outputs


@torch.no_grad()
def generate_padded(model: Any, requests: list[GenerationRequest]) -> list[list[int]]:
    width = max(len(r.prompt_ids) for r in requests)
    ids = torch.tensor([[0] * (width - len(r.prompt_ids)) + r.prompt_ids for r in requests], device=model.device)
    lengths = torch.tensor([len(r.prompt_ids) for r in requests], device=model.device)
    mask = (torch.arange(width, device=model.device) >= width - lengths[:, None]).long()
    config = GenerationConfig(
        do_sample=False, max_new_tokens=max(r.sampling.max_tokens for r in requests), pad_token_id=0
    )
    rows = model.generate(ids, attention_mask=mask, generation_config=config)[:, width:].tolist()
    return [row[: r.sampling.max_tokens] for row, r in zip(rows, requests)]


def timed(model: Any, work: Any) -> tuple[float, Any]:
    synchronize(model)
    started = time.perf_counter()
    result = work()
    synchronize(model)
    return time.perf_counter() - started, result


def synchronize(model: Any) -> None:
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def num_tokens(outputs: list[list[int]]) -> int:
    return sum(len(o) for o in outputs)


def share_equal(a: list[list[int]], b: list[list[int]]) -> float:
    return sum(x == y for p, q in zip(a, b) for x, y in zip(p, q)) / num_tokens(a)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="directory of a transformers causal LM")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-sizes", type=int, nargs="*", help="of transformers; default: all requests, and 16")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()

    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype), attn_implementation=ATTENTION_NAME
    )
    model = model.to(args.device).eval()
    requests = make_requests(args.requests, model.config.vocab_size, args.seed)
    embedded, reference = run_embedded(model, requests)
    results = [embedded]
    for batch_size in args.batch_sizes if args.batch_sizes is not None else sorted({args.requests, 16}, reverse=True):
        result, outputs = run_transformers(model, requests, batch_size)
        result.same_tokens = share_equal(reference, outputs)
        results.append(result)

    table = Table(title=f"{len(requests)} requests, {num_tokens(reference)} tokens, {args.dtype} on {args.device}")
    for column in ("engine", "tokens/s", "seconds", "start-up s", "embedded is", "same tokens"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for r in results:
        ratio = "" if r is embedded else f"{embedded.tokens_per_s / r.tokens_per_s:.2f}x faster"
        table.add_row(
            r.name, f"{r.tokens_per_s:.1f}", f"{r.seconds:.1f}", f"{r.startup_s:.2f}", ratio, f"{r.same_tokens:.1%}"
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    summary: dict[str, Any] = {
        "model": args.model,
        "requests": len(requests),
        "tokens": num_tokens(reference),
        "device": args.device,
        "dtype": args.dtype,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "results": [asdict(r) for r in results],
    }
    if results[1:]:
        summary["ratio"] = embedded.tokens_per_s / max(r.tokens_per_s for r in results[1:])
        console.print(f"embedded / best of transformers: {summary['ratio']:.2f}x")
    if args.json:
        args.json.write_text(json.dumps(summary, indent=2) + "\n")


if __name__ == "__main__":
    main()
