"""The demo's model folder: a Qwen2 model with random weights and a character-level tokenizer."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

PAD, USER, ASSISTANT, END, UNKNOWN, TOOL = "<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|unknown|>", "<|tool|>"
CHARACTERS = "0123456789+=*"
CHAT_TEMPLATE = (
    "{# tools are not described: the warm-up teaches their calls #}"
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{% if message['role'] == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(phrases: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """The user message 47+85 is `<|user|> 4 7 + 8 5 <|assistant|>`: seven tokens.

    phrases: texts that are one token each.
    """
    tokenizer = word_tokenizer(CHARACTERS, [TOOL], CHAT_TEMPLATE)
    tokenizer.add_tokens([AddedToken(phrase, normalized=False) for phrase in phrases])
    return tokenizer


def word_tokenizer(words: Sequence[str], special: Sequence[str], chat_template: str) -> PreTrainedTokenizerFast:
    """One token per word; any other character is unknown. special: further special tokens."""
    vocabulary = {token: i for i, token in enumerate([PAD, USER, ASSISTANT, END, UNKNOWN, *special, *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join([*map(re.escape, words), "."])), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        unk_token=UNKNOWN,
        additional_special_tokens=[USER, ASSISTANT, *special],
        clean_up_tokenization_spaces=False,
        chat_template=chat_template,
    )


def make_model_folder(folder: Path, seed: int, phrases: Sequence[str] = (), **changes: Any) -> int:
    """Write config, random weights and tokenizer to `folder`; return the number of parameters. changes: of the config."""
    tokenizer = make_tokenizer(phrases)
    sizes: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 64,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,  # the default 0.02 suits wide models; this narrow one learns faster with larger weights
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = Qwen2Config(**sizes | changes)
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model.num_parameters()
