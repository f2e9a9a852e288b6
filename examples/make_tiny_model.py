"""Make a folder to try training in: a tiny model with random weights, prompts and a reward function. Needs no download.

    python examples/make_tiny_model.py --output runs/tiny

Writes model/ (a Qwen2 of 0.16 million parameters, one token per byte), train.jsonl, val.jsonl, reward.py, and sft.jsonl
with answers that are half digits. docs/tiny_model.md and examples/pipeline.sh train it. --tokens adds tokens to its
vocabulary, such as the parts of a tool call (docs/tutorials/tools.md).
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
REWARD = '''"""The share of digits in the response."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return sum(c.isdigit() for c in solution_str) / max(1, len(solution_str))
'''


def byte_tokenizer(tokens: list[str]) -> PreTrainedTokenizerFast:
    special = ["<|pad|>", "<|end|>", "<|user|>", "<|assistant|>"]
    vocabulary = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    names = {"pad_token": "<|pad|>", "eos_token": "<|end|>", "additional_special_tokens": special[2:]}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    fast.chat_template = TEMPLATE
    fast.add_tokens(tokens)
    return fast


def tiny_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=512, **sizes, **ids)
    )


def rows(count: int) -> str:
    prompts = [f"Write {i % 9 + 1} digits." for i in range(count)]
    lines = [
        {
            "data_source": "digits",
            "prompt": [{"role": "user", "content": prompt}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i, prompt in enumerate(prompts)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def pairs(count: int) -> str:
    lines = [
        {"question": f"Write {i % 9 + 1} digits.", "answer": "".join(f"x{i % 10}" for _ in range(i % 9 + 1))}
        for i in range(count)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make a tiny model, prompts and a reward function.")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", nargs="*", default=[], help="texts that become one token each")
    arguments = parser.parse_args(argv)
    tokenizer = byte_tokenizer(arguments.tokens)
    tiny_model(tokenizer, arguments.seed).save_pretrained(arguments.output / "model")
    tokenizer.save_pretrained(arguments.output / "model")
    for name, count in (("train", 256), ("val", 16)):
        (arguments.output / f"{name}.jsonl").write_text(rows(count))
    (arguments.output / "sft.jsonl").write_text(pairs(256))
    (arguments.output / "reward.py").write_text(REWARD)


if __name__ == "__main__":
    main()
