"""What the controller does with a batch in one GRPO step: seconds, peak memory and bytes sent, without any model.

    python benchmarks/controller.py [--rows 2048 --prompt 1024 --response 8192 --mean-response 1500 --ranks 64 --samples 8]
                                    [--json out.json]

Rows are those of a rollout, with log-normal response lengths; log-probs and scores are random. The stages are the trainer's own
functions: batch_of (completions to a batch), advantages, metrics, lay_out (mini-batches over the ranks), send (each rank's part in
the form in which it is stored for it). `real` is the size of the tokens and of the numbers per token that the step has, without
padding: 4 bytes each.
"""

import argparse
import json
import pickle
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from lockstep.algorithms.compute_advantage import compute_advantage
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.protocol import DataProto, Ragged, object_array
from lockstep.protocol.columns import stored_columns
from lockstep.protocol.generation import Completion, GenerationRequest, SamplingParams
from lockstep.protocol.tokens import column, pack
from lockstep.trainer.ppo.metrics import compute_data_metrics
from lockstep.trainer.ppo.mini_batches import MiniBatches, lay_out
from lockstep.workers.rollout_batch import batch_of

COLUMNS = 7
"""Numbers per response token: its id, mask, version, log-probs of rollout and trainer, reward and advantage."""


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=1024)
    parser.add_argument("--response", type=int, default=8192)
    parser.add_argument("--mean-response", type=int, default=1500)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args(arguments)
    times: dict[str, float] = {}
    at_start = peak_gb()
    batch, num_real = rollout(args, times)
    stored = size_of(batch)
    with timed("advantages", times):
        batch = compute_advantage(batch, "grpo")
    with timed("metrics", times):
        compute_data_metrics(batch, use_critic=False)
    with timed("lay_out", times):
        laid_out = lay_out(batch, MiniBatches(args.rows), args.ranks, balance=True)
    with timed("send", times):
        sent = sum(len(pickle.dumps(part, protocol=5)) for part in laid_out.chunk(args.ranks))
    peak = peak_gb() - at_start
    print(
        f"{args.rows} rows of up to {args.prompt} + {args.response} tokens for {args.ranks} ranks, real {num_real / 1e9:.2f} GB"
    )
    print(f"stored {stored / 1e9:.2f} GB, sent {sent / 1e9:.2f} GB, peak {peak:.2f} GB more than at the start")
    print(
        ", ".join(f"{name} {seconds:.2f} s" for name, seconds in times.items()) + f", total {sum(times.values()):.2f} s"
    )
    if args.json:
        seconds = {f"{name}_s": value for name, value in times.items()}
        sizes = {"real_gb": num_real / 1e9, "stored_gb": stored / 1e9, "sent_gb": sent / 1e9, "peak_gb": peak}
        args.json.write_text(json.dumps(seconds | sizes, indent=2))
    return 0


def rollout(args: argparse.Namespace, times: dict[str, float]) -> tuple[DataProto, int]:
    """A scored batch, joined from the outputs of rollout workers with 256 rows each, and the bytes of its real tokens."""
    rng = np.random.default_rng(0)
    lengths = (
        rng.lognormal(np.log(args.mean_response) - 0.32, 0.8, args.rows).clip(1, args.response).astype(int).tolist()
    )
    num_prompts = args.rows // args.samples
    prompts = [rng.integers(0, 150_000, n).tolist() for n in rng.integers(args.prompt // 8, args.prompt, num_prompts)]
    config = RolloutConfig(prompt_length=args.prompt, response_length=args.response)
    outputs = []
    for start in range(0, args.rows, 256):
        requests, completions = [], []
        for row in range(start, min(start + 256, args.rows)):
            requests.append(GenerationRequest(prompts[row // args.samples], SamplingParams(max_tokens=args.response)))
            tokens = rng.integers(0, 150_000, lengths[row]).tolist()
            completions.append(Completion(tokens, [-1.0] * lengths[row], "stop", [0] * lengths[row]))
        with timed("batch_of", times):
            output = batch_of(requests, completions, config, pad_token_id=0)
        scores = np.zeros(args.response, np.float32)
        output.tensors["token_level_scores"] = torch.from_numpy(scores).expand(len(output), -1).clone()
        for row, length in enumerate(lengths[start : start + 256]):
            output.tensors["token_level_scores"][row, length - 1] = float(rng.random())
        output.tensors["old_log_probs"] = -torch.rand(len(output), args.response)
        outputs.append(pack(output))
    with timed("join", times):
        batch = DataProto.concat(outputs)
    batch.non_tensor_batch["uid"] = object_array(str(row // args.samples) for row in range(args.rows))
    batch.tensors["token_level_rewards"] = column(batch.tensors, "token_level_scores")
    return batch, 4 * (COLUMNS * sum(lengths) + sum(map(len, prompts)))


@contextmanager
def timed(name: str, times: dict[str, float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    times[name] = times.get(name, 0.0) + time.perf_counter() - began


def size_of(batch: DataProto) -> int:
    """Bytes of the distinct columns."""
    columns, _ = stored_columns(batch.tensors)
    tensors = [column.values if isinstance(column, Ragged) else column for column in columns.values()]
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors}.values())


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == "__main__":
    sys.exit(main())
