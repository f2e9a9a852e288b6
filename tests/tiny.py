"""Small models, tokenizers and batches for tests."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from tensordict import TensorDict
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, plus the chat template's special tokens."""
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


SIZES = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def tiny_config(kind: str = "qwen2", vocab_size: int = 259, **changes: Any) -> Any:
    cls = {"qwen2": Qwen2Config, "llama": LlamaConfig, "qwen3": Qwen3Config}[kind]
    sizes = (
        SIZES | {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0} | changes
    )
    return cls(vocab_size=vocab_size, **sizes)


def save_tiny_model(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save a model folder, with weights large enough for non-uniform predictions."""
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(tiny_config(**changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def save_tiny_moe(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """Save the folder of a Qwen3-MoE model with 8 experts, of which 2 compute each token."""
    sizes = SIZES | {"max_position_embeddings": 256, "bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}
    experts = {
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 16,
        "norm_topk_prob": True,
    }
    torch.manual_seed(seed)
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=259, **sizes | experts | changes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def write_rows(path: Path, num_rows: int = 16, data_source: str = "openai/gsm8k") -> Path:
    """Write sums in the row schema of training files."""
    rows = []
    for i in range(num_rows):
        question = f"{i % 7}+{i % 5}="
        rows.append(
            {
                "data_source": data_source,
                "prompt": [{"role": "user", "content": question}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(i % 7 + i % 5)},
                "extra_info": {"split": "train", "index": i},
            }
        )
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    else:
        pd.DataFrame(rows).to_parquet(path)
    return path


def random_batch(num_rows: int = 6, prompt: int = 10, response: int = 8, vocab: int = 259, seed: int = 0) -> TensorDict:
    """Rows of random lengths: left-padded prompts, right-padded responses, one masked tool token."""
    g = torch.Generator().manual_seed(seed)
    p_len = torch.randint(1, prompt + 1, (num_rows,), generator=g)
    r_len = torch.randint(1, response + 1, (num_rows,), generator=g)
    place = torch.arange(prompt)
    prompt_mask = (place >= (prompt - p_len)[:, None]).long()
    answer_mask = (torch.arange(response) < r_len[:, None]).long()
    mask = torch.cat([prompt_mask, answer_mask], 1)
    ids = torch.randint(3, vocab, (num_rows, prompt + response), generator=g) * mask
    response_mask = answer_mask.clone()
    response_mask[:, 2] = 0
    return TensorDict(
        {
            "prompts": ids[:, :prompt],
            "responses": ids[:, prompt:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "response_mask": response_mask,
            "old_log_probs": torch.randn(num_rows, response, generator=g) * 0.1 - 5.0,
            "ref_log_prob": torch.randn(num_rows, response, generator=g) * 0.1 - 5.0,
            "advantages": torch.randn(num_rows, response, generator=g),
            "returns": torch.randn(num_rows, response, generator=g),
            "values": torch.randn(num_rows, response, generator=g),
        },
        batch_size=[num_rows],
    )


def small_run(files: Path) -> list[str]:
    """Overrides of a small run on a folder with train.parquet, val.parquet, model and reward.py."""
    return [
        f"data.train_files={files}/train.parquet",
        f"data.val_files={files}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={files}/model",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        f"custom_reward_function.path={files}/reward.py",
        "trainer.logger=console",
        "trainer.device=cpu",
    ]
