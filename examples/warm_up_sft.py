"""Supervised warm-up: train a model on pairs of a prompt and a response, and save it as a Hugging Face folder.

    python examples/warm_up_sft.py --model models/SmolLM2-135M-Instruct --data data/gsm8k/pairs.parquet --output models/warm

pairs ─► SFTDataset ─► batches of padded rows ─► FsdpEngine: cross-entropy of the response's tokens ─► folder
"""

import argparse
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.functional import pad

from lockstep.config.data import SFTDataConfig
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.data.sft_dataset import SFTDataset
from lockstep.engines.train.base import LossFn, MicroBatching
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.models.export import save_policy
from lockstep.models.loading import load_causal_lm, resolve_dtype
from lockstep.models.token_models import PolicyModel
from lockstep.models.tokenizer import hf_tokenizer
from lockstep.utils.device import resolve_device

logger = logging.getLogger("warm_up")


def warm_up(arguments: argparse.Namespace) -> None:
    device = torch.device(resolve_device(arguments.device))
    tokenizer = hf_tokenizer(arguments.model)
    settings = SFTDataConfig(max_length=arguments.max_length, truncation="right", pad_mode="no_padding")
    data = SFTDataset(arguments.data, tokenizer, settings)
    samples = [data[i] for i in range(len(data))]
    num_steps = arguments.epochs * (len(samples) // arguments.batch_size)
    if not num_steps:
        raise SystemExit(f"{arguments.data} has {len(samples)} pairs, fewer than --batch-size {arguments.batch_size}")
    model = load_causal_lm(HFModelConfig(path=str(arguments.model)), "--model", torch.float32, device)
    engine = FsdpEngine(
        PolicyModel(model),
        FSDPEngineConfig(),
        FSDPOptimizerConfig(
            lr=arguments.lr,
            lr_scheduler_type="cosine",
            lr_warmup_steps_ratio=0.05,
            total_training_steps=num_steps,
            min_lr_ratio=0.1,
        ),
        device=device,
        compute_dtype=resolve_dtype("auto", device),
        packed=True,
    )
    began = time.perf_counter()
    for step, batch in enumerate(batches(samples, arguments.epochs, arguments.batch_size, arguments.seed), start=1):
        metrics = engine.forward_backward(batch, cross_entropy(batch), MicroBatching(max_tokens=arguments.max_tokens))
        engine.optimizer_step()
        engine.schedule_step()
        if step % 20 == 0 or step == num_steps:
            elapsed = time.perf_counter() - began
            logger.info("step %d of %d, loss %.3f, %.1f s", step, num_steps, metrics["loss"], elapsed)
    save_policy(model, engine.saved_weights(), tokenizer, arguments.output)
    logger.info("wrote %s", arguments.output)


def batches(samples: list[dict[str, Tensor]], epochs: int, batch_size: int, seed: int) -> Iterator[TensorDict]:
    """Whole batches in a new random order every epoch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        order = torch.randperm(len(samples), generator=generator).tolist()
        for start in range(0, len(order) - batch_size + 1, batch_size):
            yield collated([samples[i] for i in order[start : start + batch_size]])


def collated(samples: list[dict[str, Tensor]]) -> TensorDict:
    """Collate samples to rows for the engine: left-padded prompts, right-padded responses."""
    prompt_lengths = [int((sample["loss_mask"] == 0).sum()) for sample in samples]
    before = max(prompt_lengths)
    width = max(len(sample["input_ids"]) - prompt for sample, prompt in zip(samples, prompt_lengths))

    def rows(values: list[Tensor]) -> Tensor:
        return torch.stack(
            [
                pad(value, (before - prompt, width - (len(value) - prompt)))
                for value, prompt in zip(values, prompt_lengths)
            ]
        )

    input_ids = rows([sample["input_ids"] for sample in samples])
    return TensorDict(
        {
            "input_ids": input_ids,
            "attention_mask": rows([torch.ones_like(sample["input_ids"]) for sample in samples]),
            "position_ids": rows([sample["position_ids"] for sample in samples]),
            "responses": input_ids[:, before:],
            "response_mask": rows([sample["loss_mask"] for sample in samples])[:, before:],
        },
        batch_size=[len(samples)],
    )


def cross_entropy(batch: TensorDict) -> LossFn:
    """Mean cross-entropy over the response tokens of the whole batch."""
    num_tokens = int(batch["response_mask"].sum())

    def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(outputs["log_probs"] * rows["response_mask"]).sum() / num_tokens
        return loss, {"loss": loss}

    return loss_fn


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Supervised warm-up on pairs of a prompt and a response.")
    parser.add_argument("--model", type=Path, required=True, help="folder of a Hugging Face causal language model")
    parser.add_argument("--data", type=Path, required=True, help="parquet or jsonl with prompt and response")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=64, help="pairs per optimizer step")
    parser.add_argument("--lr", type=float, default=3e-4, help="peak; decays to a tenth along a cosine")
    parser.add_argument("--max-length", type=int, default=512, help="longer sequences are truncated on the right")
    parser.add_argument("--max-tokens", type=int, default=32768, help="tokens per micro-batch")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda"])
    warm_up(parser.parse_args(argv))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    main()
