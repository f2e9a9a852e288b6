"""Text of a policy for another model's endpoint, which may read some of it as tokens of its chat template."""

import re

CHAT_TOKEN = re.compile(
    r"<[|｜](?=[^|｜\s<>]{1,40}[|｜]>)|</?s>|<</?SYS>>|</?(?:start|end)_of_turn>|\[/?(?:INST|TOOL_\w+|AVAILABLE_TOOLS)\]"
)
"""Of ChatML, Llama, Mistral, Gemma, DeepSeek and GPT-OSS; the endpoint's own tokenizer is not known."""


def as_plain_text(text: str) -> str:
    """`text` with a space in each such token, so that it cannot end its turn and begin another."""
    return CHAT_TOKEN.sub(lambda token: f"{token[0][0]} {token[0][1:]}", text)
