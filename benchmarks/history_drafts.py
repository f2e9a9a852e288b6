"""Generation with drafts from history (`rollout.history_drafts`) by number of sequences and share of the history that is right.

    python benchmarks/history_drafts.py --model DIR [--sequences 1 4 16 64 --right 0.9 1.0 --new-tokens 256]    a real model
    python benchmarks/history_drafts.py --shape tiny 135m [--json out.json]                                     random weights

Every sequence has its own prompt, and as history its own answer in which all but the share `--right` of the tokens are replaced by
random ones. "none" is a history without the prompts: what the search for drafts costs. Plain generation and each history run in
turn; each figure is the best of `--repeats` runs. "same" is the share of sequences with the tokens of plain generation:
rounding may change one of a real model; random weights get `zero_logits`. `--cpu-time` measures seconds of the processor instead of
the clock's, for a machine that others use.
"""

import argparse
import gc
import json
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from shapes import SHAPES, install_layers, shape_config, zero_logits
from transformers import AutoModelForCausalLM

from lockstep.config.actor_rollout_ref import HistoryDraftsConfig, RolloutConfig
from lockstep.engines.rollout import GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded import step_loop
from lockstep.engines.rollout.embedded.engine import EmbeddedEngine
from lockstep.engines.rollout.embedded.history import prompt_key


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="a folder with a model")
    source.add_argument("--shape", nargs="+", choices=list(SHAPES), help="random weights of these sizes")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--right", type=float, nargs="+", default=[0.8, 0.9, 1.0])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--max-draft-tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json")
    args = parser.parse_args(argv)
    if args.cpu_time:
        step_loop.now = time.process_time
    found = []
    for name in [args.model] if args.model else args.shape:
        model = load_model(args, name)
        print(
            f"{name}, {args.new_tokens} new tokens: seconds without drafts; speed-up by the right share of the history"
        )
        for num_sequences in args.sequences:
            row = measure(model, num_sequences, args, time.process_time if args.cpu_time else time.perf_counter)
            gc.collect()  # the KV caches of its engines, which refer to themselves
            torch.cuda.empty_cache()
            found.append({"model": name, "sequences": num_sequences, **row})
            ratios = "  ".join(
                f"{key} {values['speedup']:.2f}x (accepted {values['acceptance']:.2f})"
                for key, values in row["histories"].items()
            )
            print(
                f"{num_sequences:4d} sequences  plain {row['plain_s']:.3f} s  {ratios}  same {row['same_sequences']:.2f}",
                flush=True,
            )
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"results": found}, file, indent=1)
    return 0


def load_model(args: argparse.Namespace, name: str) -> Any:
    dtype = torch.bfloat16 if args.device == "cuda" else torch.float32
    if args.model:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    else:
        torch.manual_seed(0)
        with torch.device(args.device):
            model = AutoModelForCausalLM.from_config(shape_config(name), dtype=dtype)
        zero_logits(model)
    model = model.to(args.device)
    install_layers(model)
    return model


def measure(model: Any, num_sequences: int, args: argparse.Namespace, now: Callable[[], float]) -> dict[str, Any]:
    """Best seconds of plain generation, and of each history."""
    rng = random.Random(num_sequences)
    vocabulary = model.config.vocab_size
    sampling = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    requests = [
        GenerationRequest([rng.randrange(vocabulary) for _ in range(args.prompt_tokens)], sampling, seed=i)
        for i in range(num_sequences)
    ]
    plain = engine_of(model, num_sequences, args, enable=False)
    answers = [c.token_ids for c in plain.generate(requests)]
    engines: dict[str, EmbeddedEngine] = {}
    shares: list[float | None] = [None, *args.right]
    for share in shares:
        engine = engine_of(model, num_sequences, args, enable=True)
        engine.generate(requests[:1])  # compares the model with transformers
        engines["none" if share is None else f"{share:g}"] = engine
    seconds: dict[str, list[float]] = {name: [] for name in ("plain", *engines)}
    acceptance = dict.fromkeys(engines, 0.0)
    same = 1.0
    for _ in range(args.repeats):
        seconds["plain"].append(timed(plain, requests, now)[0])
        for (name, engine), share in zip(engines.items(), shares):
            assert engine.drafter is not None
            engine.drafter.history.clear()
            for request, answer in zip(requests if share is not None else (), answers):
                seen = [t if rng.random() < (share or 0) else rng.randrange(vocabulary) for t in answer]
                engine.drafter.history.add(prompt_key(request), seen)
            engine.drafter.take_metrics()
            spent, tokens = timed(engine, requests, now)
            seconds[name].append(spent)
            acceptance[name] = engine.drafter.take_metrics().get("perf/drafts/acceptance", 0.0)
            same = min(same, sum(a == b for a, b in zip(tokens, answers)) / num_sequences)
    best = {name: min(values) for name, values in seconds.items()}
    histories = {
        name: {"seconds": best[name], "speedup": best["plain"] / best[name], "acceptance": acceptance[name]}
        for name in engines
    }
    return {"plain_s": best["plain"], "same_sequences": same, "histories": histories}


def engine_of(model: Any, num_sequences: int, args: argparse.Namespace, enable: bool) -> EmbeddedEngine:
    config = RolloutConfig(
        prompt_length=args.prompt_tokens,
        response_length=args.new_tokens,
        max_num_seqs=max(num_sequences, 256),
        seed=0,
        free_cache_engine=False,
        history_drafts=HistoryDraftsConfig(enable=enable, max_draft_tokens=args.max_draft_tokens),
    )
    engine = EmbeddedEngine(config, eos_token_ids=(), pad_token_id=0)
    engine.bind(model)
    return engine


def timed(
    engine: EmbeddedEngine, requests: list[GenerationRequest], now: Callable[[], float]
) -> tuple[float, list[list[int]]]:
    began = now()
    completions = engine.generate(requests)
    return now() - began, [c.token_ids for c in completions]


if __name__ == "__main__":
    sys.exit(main())
