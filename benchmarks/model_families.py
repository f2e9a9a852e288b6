"""The model families that people train now: how each trains and decodes, and how fast a small shape of it does on a CPU.

    python -m benchmarks.model_families [--types llama mamba2] [--json out.json] [--table docs/models.md]

    small model ─► forward + backward of packed rows      | one row at a time by the model's own forward
                └► decoding by the embedded engine, or hf | transformers' `generate` on the left-padded batch

Four layers of width 128 in float32 on one thread. Both sides of a ratio take turns in one process; a time is the least CPU time of
several calls, of which the first is the warm-up. No prompt is shared: groups of samples gain more. --table replaces the rows of
the measured families between `<!-- families -->` and `<!-- end -->`.
"""

import argparse
import dataclasses
import json
import logging
import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tensordict import TensorDict
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.rollout import GenerationRequest, RolloutEngine, SamplingParams
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.loading import load_causal_lm
from tests.models.architectures import (
    CPU,
    LAYER_LISTS,
    first_engine,
    save_tiny_model,
    tiny_config,
    train_engine,
    training_path,
)

FAMILIES = {
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "kimi_linear": "Kimi-Linear",
    "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1",
    "granitemoehybrid": "Granite 4 hybrid",
    "bamba": "Bamba",
    "jamba": "Jamba",
    "lfm2": "LFM2",
    "minimax": "MiniMax",
    "mamba2": "Mamba 2",
    "llama4_text": "Llama 4",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe": "GLM-4.5",
    "glm_moe_dsa": "GLM with indexed attention",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
    "gpt_oss": "GPT-OSS",
    "gemma3_text": "Gemma 3",
    "qwen2": "Qwen2.5",
    "qwen3": "Qwen3",
    "llama": "Llama",
}
"""Model type -> family, in the order of the table."""

NUM_LAYERS, VOCAB = 4, 1024
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "intermediate_size_mlp": 256,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "shared_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 64,
    "num_hidden_layers": NUM_LAYERS,
    "head_dim": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "query_pre_attn_scalar": 32,
    "num_experts": 8,
    "num_local_experts": 8,
    "n_routed_experts": 8,
    "use_sliding_window": False,
    "sliding_window": 64,
    "attention_chunk_size": 64,
    "index_head_dim": 32,
    "index_topk": 32,
    "mamba_n_heads": 8,
    "mamba_num_heads": 8,
    "mamba_d_head": 32,
    "mamba_head_dim": 32,
    "mamba_d_ssm": 256,
    "mamba_d_state": 16,
    "mamba_chunk_size": 64,
    "mamba_dt_rank": 8,
    "ssm_state_size": 16,
    "state_size": 16,
    "chunk_size": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_head_dim": 32,
}
"""By field name; taken if the config has the field. The rest is as in `tests.models.architectures`."""

OF_TYPE: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8},
    "qwen2": {"layer_types": ["full_attention"] * NUM_LAYERS},
    "qwen3": {"layer_types": ["full_attention"] * NUM_LAYERS},
}
"""What a type needs in addition to `SIZES`."""


@dataclass
class Measured:
    """A row of the table; speeds in tokens per second of CPU time.

    training, rollout:  as in the table of all types.
    train_ratio:        training / one row at a time by the model's own forward.
    decode_ratio:       decoding / transformers' `generate`.
    """

    family: str
    model_type: str
    training: str
    rollout: str
    train_tokens_per_s: float
    train_ratio: float
    decode_tokens_per_s: float
    decode_ratio: float

    def row(self) -> str:
        train = [f"{self.train_tokens_per_s:,.0f}", f"{self.train_ratio:.1f}x"]
        decode = [f"{self.decode_tokens_per_s:,.0f}", f"{self.decode_ratio:.1f}x"]
        cells = [self.family, self.model_type, self.training, self.rollout, *train, *decode]
        return "| " + " | ".join(cells) + " |"


HEADER = [
    "| family | type | training | rollout | training, tokens/s | to own forward | decoding, tokens/s | to `generate` |",
    "|---|---|---|---|---|---|---|---|",
]


def sizes(model_type: str) -> dict[str, Any]:
    """Changes of the tiny config; its kinds of layers take turns."""
    names = {field.name for field in dataclasses.fields(CONFIG_MAPPING[model_type])}
    changes = {name: value for name, value in SIZES.items() if name in names}
    tiny = tiny_config(model_type)
    for name in LAYER_LISTS:
        if kinds := name in names and getattr(tiny, name, None):
            changes[name] = (kinds * NUM_LAYERS)[:NUM_LAYERS]
    if "kv_lora_rank" in names:
        changes.pop("head_dim", None)
    return changes | OF_TYPE.get(model_type, {})


def make_batch(num_rows: int) -> TensorDict:
    """Rows of 32 to 128 tokens, half prompt, half response."""
    halves = torch.linspace(16, 64, num_rows).long()[:, None]
    place = torch.arange(64)
    mask = torch.cat([place >= 64 - halves, place < halves], 1).long()
    ids = torch.randint(3, VOCAB, mask.shape, generator=torch.Generator().manual_seed(0)) * mask
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
        "responses": ids[:, 64:],
        "response_mask": mask[:, 64:],
    }
    return TensorDict(columns, batch_size=[num_rows])


def train_packed(model: PreTrainedModel, batch: TensorDict) -> Callable[[], object]:
    engine = train_engine(model, packed=True)

    def loss(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        return -(outputs["log_probs"] * rows["response_mask"]).sum(), {}

    def step() -> None:
        engine.model.zero_grad()
        engine.forward_backward(batch, loss, MicroBatching())

    return step


def train_rows(model: PreTrainedModel, batch: TensorDict) -> Callable[[], object]:
    def step() -> None:
        model.zero_grad()
        for row in batch:
            ids = row["input_ids"][row["attention_mask"].bool()]
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(ids) // 2 - 1 : -1]
            torch.nn.functional.cross_entropy(logits, ids[len(ids) // 2 :], reduction="sum").backward()

    return step


def decode_engine(engine: RolloutEngine, prompts: Sequence[list[int]], num_new: int) -> Callable[[], object]:
    sampling = SamplingParams(temperature=0, max_tokens=num_new, ignore_eos=True)
    requests = [GenerationRequest(prompt, sampling) for prompt in prompts]

    def decode() -> None:
        completions = engine.generate(requests)
        assert all(len(completion.token_ids) == num_new for completion in completions)

    return decode


def decode_generate(model: PreTrainedModel, batch: TensorDict, num_new: int) -> Callable[[], object]:
    lengths = {"max_new_tokens": num_new, "min_new_tokens": num_new, "do_sample": False}
    ids, mask = (batch[name][:, :64] for name in ("input_ids", "attention_mask"))

    def decode() -> None:
        generated: Any = model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, **lengths)
        assert generated.shape[1] == 64 + num_new

    return decode


def best_s(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Least CPU seconds of each call; the calls take turns."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, seconds in zip(calls, times, strict=True):
            began = time.process_time()
            call()
            seconds.append(time.process_time() - began)
    return [min(seconds) for seconds in times]


def measure(model_type: str, num_rows: int, num_new: int, repeats: int) -> Measured:
    batch = make_batch(num_rows)
    prompts = [row["input_ids"][:64][row["attention_mask"][:64].bool()].tolist() for row in batch]
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(model_type, Path(folder), **sizes(model_type))
        model = load_causal_lm(HFModelConfig(path=folder), "model", torch.float32, CPU)
        naive = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours, theirs = best_s([train_packed(model, batch), train_rows(naive, batch)], repeats)
    config = RolloutConfig(prompt_length=64, response_length=num_new, max_num_seqs=num_rows)
    rollout, engine, refusals = first_engine(model, config)
    assert engine is not None, f"no rollout engine serves {model_type}: {refusals}"
    calls = [decode_engine(engine, prompts, num_new), decode_generate(naive, batch, num_new)]
    our_decode, their_decode = best_s(calls, repeats)
    return Measured(
        FAMILIES[model_type],
        model_type,
        training_path(model),
        rollout,
        train_tokens_per_s=int(batch["attention_mask"].sum()) / ours,
        train_ratio=theirs / ours,
        decode_tokens_per_s=num_rows * num_new / our_decode,
        decode_ratio=their_decode / our_decode,
    )


def filled(page: str, measured: Sequence[Measured]) -> str:
    """The page with the rows of the measured families; rows of other families stay."""
    match = re.search(r"<!-- families -->\n(.*?)<!-- end -->", page, flags=re.S)
    if match is None:
        raise ValueError("the page has no <!-- families --> and <!-- end -->")
    rows = {line.split(" | ")[1]: line for line in match[1].splitlines() if line.count(" | ") > 1}
    rows |= {found.model_type: found.row() for found in measured}
    lines = [*HEADER, *(rows[model_type] for model_type in FAMILIES if model_type in rows)]
    return page[: match.start(1)] + "\n" + "\n".join(lines) + "\n\n" + page[match.end(1) :]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", nargs="+", choices=FAMILIES, default=list(FAMILIES), metavar="TYPE")
    parser.add_argument("--rows", type=int, default=16, help="rows to train on, and prompts")
    parser.add_argument("--new-tokens", type=int, default=32, help="per prompt")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    parser.add_argument("--table", type=Path, help="also write the rows into this page")
    args = parser.parse_args(arguments)
    print("\n".join(HEADER))
    results = []
    for model_type in args.types:
        results.append(measure(model_type, args.rows, args.new_tokens, args.repeats))
        print(results[-1].row(), flush=True)
    if args.json:
        args.json.write_text(json.dumps([asdict(found) for found in results], indent=2) + "\n")
    if args.table:
        args.table.write_text(filled(args.table.read_text(), results))
    return 0


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    sys.exit(main())
