"""Supervised warm-up on partly wrong examples, with the regular training engine.

problems ─► questions with correct or careless answers ─► batch of tokens ─► cross-entropy of the answer's tokens
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tensordict import TensorDict
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.demo.task import Problem, answer_text
from lockstep.engines.train.base import LossFn, MicroBatching
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.models.export import save_policy
from lockstep.models.loading import load_causal_lm
from lockstep.models.token_models import PolicyModel
from lockstep.models.tokenizer import hf_tokenizer

ANSWER_TOKENS = 5
"""An answer: equals sign, three digits, end token."""


@dataclass(frozen=True)
class WarmUp:
    """Warm-up settings.

    careless: fraction of the examples that forget every carry.
    """

    steps: int = 900
    batch_size: int = 128
    lr: float = 3e-3
    careless: float = 2 / 3


def warm_up(
    folder: Path, problems: list[Problem], recipe: WarmUp, seed: int, device: str, on_step: Callable[[int, float], None]
) -> None:
    """Train the model in `folder` on examples of `problems` and save it; calls `on_step(step, loss)` after each step."""
    tokenizer = hf_tokenizer(folder)
    model = load_causal_lm(HFModelConfig(path=str(folder)), "demo", torch.float32, torch.device(device))
    engine = FsdpEngine(
        PolicyModel(model),
        FSDPEngineConfig(dtype="fp32"),
        FSDPOptimizerConfig(
            lr=recipe.lr,
            lr_scheduler_type="cosine",
            lr_warmup_steps=min(20, recipe.steps // 2),
            total_training_steps=recipe.steps,
            min_lr_ratio=0.05,
        ),
        device=torch.device(device),
        compute_dtype=torch.float32,
        packed=False,
    )
    examples = WarmUpExamples(tokenizer, problems, recipe.careless, seed)
    for step in range(1, recipe.steps + 1):
        batch = examples.draw(recipe.batch_size)
        metrics = engine.forward_backward(batch, _cross_entropy(batch), MicroBatching())
        engine.optimizer_step()
        engine.schedule_step()
        on_step(step, metrics["loss"])
    save_policy(model, engine.saved_weights(), tokenizer, folder)


class WarmUpExamples:
    """Questions with answers as token rows; an answer forgets the carries with probability `careless`."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, problems: list[Problem], careless: float, seed: int) -> None:
        self.careless = careless
        self._random = random.Random(seed)
        self._prompts = [_prompt_ids(tokenizer, problem) for problem in problems]
        self._right = [_answer_ids(tokenizer, problem.right_answer) for problem in problems]
        self._careless = [_answer_ids(tokenizer, problem.careless_answer) for problem in problems]
        self._pad = tokenizer.pad_token_id

    def draw(self, num_rows: int) -> TensorDict:
        prompts, answers = [], []
        for _ in range(num_rows):
            i = self._random.randrange(len(self._prompts))
            answer = self._careless[i] if self._random.random() < self.careless else self._right[i]
            prompts.append(self._prompts[i])
            answers.append(answer)
        responses = torch.tensor(answers)
        input_ids = torch.cat([torch.tensor(prompts), responses], 1)
        attention_mask = (input_ids != self._pad).long()
        return TensorDict(
            {
                "input_ids": input_ids,
                "attention_mask": attention_mask,
                "position_ids": attention_mask.cumsum(1) - 1,
                "responses": responses,
                "response_mask": attention_mask[:, -ANSWER_TOKENS:],
            },
            batch_size=[num_rows],
        )


def _prompt_ids(tokenizer: PreTrainedTokenizerBase, problem: Problem) -> list[int]:
    messages = [{"role": "user", "content": problem.question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _answer_ids(tokenizer: PreTrainedTokenizerBase, number: int) -> list[int]:
    return [*tokenizer.encode(answer_text(number), add_special_tokens=False), tokenizer.eos_token_id]


def _cross_entropy(batch: TensorDict) -> LossFn:
    num_tokens = int(batch["response_mask"].sum())

    def loss_fn(outputs: dict[str, Tensor], rows: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
        loss = -(outputs["log_probs"] * rows["response_mask"]).sum() / num_tokens
        return loss, {"loss": loss}

    return loss_fn
