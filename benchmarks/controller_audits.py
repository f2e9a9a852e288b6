"""What the audits of the controller cost in a step, each alone, on a made-up batch and without any model.

    python -m benchmarks.controller_audits [--prompts 64 --samples 8 --prompt 256 --response 512 --step-s 5.53] [--json out.json]

--step-s: seconds of a step to compare with; the default is that of 16 x 8 samples of 512 + 1024 tokens, 1.5B, on one GPU
(docs/performance.md). Times are CPU time of one thread, the median of several calls. The probe is four rows of a function that
takes no time, every 50 steps; the other audits run on every step.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.data.row_ledger import RowLedger
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.protocol.tokens import lengths_of, pack
from lockstep.rewards.managers import NaiveRewardManager
from lockstep.trainer.ppo.audit import check_finite, check_policy_version, check_spread, rollout_gap
from lockstep.trainer.ppo.data_order import DrawnPrompts
from lockstep.trainer.ppo.reward_probe import EVERY, RewardProbe
from lockstep.trainer.ppo.rollout_sources.synchronous import SynchronousSource
from lockstep.trainer.ppo.round_trip import RoundTrip
from lockstep.utils.audit import Audits
from lockstep.utils.rollout_gap import GapBound
from lockstep.workers.rollout_batch import batch_of
from tests.tiny import tiny_tokenizer

VOCABULARY = 259
COLUMNS = ("old_log_probs", "ref_log_prob", "token_level_rewards", "advantages", "returns")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--response", type=int, default=512)
    parser.add_argument("--step-s", type=float, default=5.53)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seconds = measured(args)
    seconds["together"] = sum(seconds.values())
    print(f"{args.prompts * args.samples} rows of {args.prompt} + {args.response} tokens; a step of {args.step_s} s")
    for name, value in seconds.items():
        print(f"{name:17} {1000 * value:7.2f} ms  {value / args.step_s:7.3%}")
    if args.json:
        args.json.write_text(json.dumps(seconds, indent=2))
    return 0


def measured(args: argparse.Namespace) -> dict[str, float]:
    """Seconds per step by audit."""
    tokenizer = tiny_tokenizer()
    settings = [f"actor_rollout_ref.rollout.n={args.samples}", f"data.max_prompt_length={args.prompt + 1}"]
    config = load_config(PPOConfig, settings, run_checks=False)
    batch = make_batch(args, tokenizer)
    audits = Audits({})
    prompts = DrawnPrompts(config, None)
    prompts.source = SynchronousSource(None, None)  # type: ignore[arg-type]
    drawn = batch.select_idxs(list(range(0, len(batch), args.samples)))
    ledger = RowLedger(100_000, "any")
    round_trip = RoundTrip(config, tokenizer, None, None)
    round_trip.renders_prompts = True
    probe = RewardProbe(config, NaiveRewardManager(tokenizer, 0, lambda **row: float(len(row["solution_str"]))))
    steps = iter(range(1, 10_000))

    def data_order() -> None:
        ledger.draw(range(args.prompts), 0)
        prompts._pending.update(map(str, drawn.non_tensor_batch["index"]))
        prompts.check(audits, batch)

    def reward_probe() -> None:
        probe.check(audits, batch, EVERY, args.step_s)

    calls: dict[str, Callable[[], object]] = {
        "finite": lambda: check_finite(audits, batch, *COLUMNS),
        "data_order": data_order,
        "policy_version": lambda: check_policy_version(audits, batch, 3),
        "token_round_trip": lambda: round_trip.check(audits, batch, next(steps)),
        "rollout_gap": lambda: rollout_gap(audits, batch, GapBound(torch.bfloat16)),
        "advantages": lambda: check_spread(audits, batch),
        "reward_probe": reward_probe,
    }
    seconds = {name: median_s(call, args.repeats) for name, call in calls.items()}
    seconds["reward_probe"] /= EVERY
    return seconds


def median_s(call: Callable[[], object], repeats: int) -> float:
    call()
    times = []
    for _ in range(repeats):
        began = time.process_time()
        call()
        times.append(time.process_time() - began)
    return statistics.median(times)


def make_batch(args: argparse.Namespace, tokenizer: PreTrainedTokenizerFast) -> DataProto:
    """A scored batch with log-probs and advantages, as the trainer keeps it: without padding."""
    rng = np.random.default_rng(0)
    text = "x" * (args.prompt - 32)
    messages = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False)["input_ids"]
    num_rows = args.prompts * args.samples
    lengths = rng.integers(args.response // 4, args.response + 1, num_rows).tolist()
    sampling = SamplingParams(max_tokens=args.response)
    requests = [GenerationRequest(ids, sampling, seed) for seed in range(num_rows)]
    completions = [
        Completion(
            rng.integers(3, VOCABULARY, length).tolist(),
            (-rng.random(length)).tolist(),
            "stop",
            [3] * length,
        )
        for length in lengths
    ]
    config = RolloutConfig(prompt_length=args.prompt, response_length=args.response)
    batch = pack(batch_of(requests, completions, config, tokenizer.pad_token_id))
    shape = batch.tensors["responses"].shape
    for name in COLUMNS:
        batch.tensors[name] = torch.randn(shape)
    batch.tensors["old_log_probs"] = batch.tensors["rollout_log_probs"] + 1e-3 * torch.randn(shape)
    rows = np.arange(args.prompts).repeat(args.samples)
    batch.non_tensor_batch |= {
        "index": object_array(rows.tolist()),
        "raw_prompt": object_array([messages] * num_rows),
        "raw_prompt_ids": object_array([ids] * num_rows),
        "data_source": object_array(["made up"] * num_rows),
        "reward_model": object_array([{"style": "rule", "ground_truth": "1"}] * num_rows),
    }
    batch = pack(batch)
    assert int(lengths_of(batch.tensors)[1].sum()) == sum(lengths)
    return batch


if __name__ == "__main__":
    sys.exit(main())
