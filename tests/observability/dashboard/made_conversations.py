"""A run with conversations that are hard to show: tools, images, markup, invalid text, very long answers; and their tokens."""

from pathlib import Path
from typing import Any

import numpy as np

from lockstep.observability import token_file
from lockstep.observability.jsonl import json_line
from tests.observability.dashboard.made_runs import make_run

MARKUP = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'><b>bold</b>"
ODD = "right-to-left \u202eabc\u202c zero\u200bwidth \x1b[31mred\x1b[0m \x00 lone \ud800 end"
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
LONG_CHARS = 300_000
LONG_TOKENS = 12_000
TOOLS, HOSTILE, LONG, WITHOUT_TOKENS = range(4)
"""The rows of step 1; the first two have the same prompt."""


def make_conversations(folder: Path, old_log_probs: str = "pass", long_chars: int = LONG_CHARS) -> Path:
    run = make_run(folder, steps=2)
    call = {"type": "function", "function": {"name": "double", "arguments": '{"x": 2}'}}
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    elsewhere = {"type": "image", "image": "http://example.invalid/x.png"}
    messages = [
        {"role": "assistant", "content": "I double 2.", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": "4"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "double", "content": "Error: the tool failed"},
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, image, elsewhere]},
        {"role": "assistant", "content": "It is 4."},
    ]
    rows = [
        {"output": "I double 2.4It is 4.", "messages": messages, "turn_rewards": [0.5, -0.25, 1.0], "num_turns": 7},
        {"input": MARKUP, "output": MARKUP + ODD, "gts": MARKUP, MARKUP: ODD, "nested": {"a": [MARKUP]}},
        {"output": "x" * (long_chars - 3) + "END", "uid": "0:b"},
        {"output": "short", "uid": "0:b"},
    ]
    with open(run / "rollouts" / "1.jsonl", "wb") as lines:
        for row, values in enumerate(rows):
            lines.write(json_line(_row(row) | values))
    write_tokens(run / "rollouts" / "1.tokens.parquet", old_log_probs)
    return run


def _row(row: int) -> dict[str, Any]:
    length = [len(TURN_PIECES), len(ODD_PIECES), LONG_TOKENS, 1][row]
    head = {"input": "What is 2 + 2?", "output": "", "gts": "4", "score": row / 4, "step": 1, "uid": "0:a", "index": 3}
    return head | {"finish_reason": "stop", "length": length, "advantage": row - 1.5, "acc": True}


TURN_PIECES = [b"I", b" double", b" 2", b".", b"\n", b"4", b"\n", b"It", b" is", b" 4", b"."]
CONTEXT = range(4, 7)
"""Tokens of the first row that the policy did not write."""
ODD_PIECES = [MARKUP.encode(), b" \xe4", b"\xb8", b"\xad", b"\xff", "\u202eabc".encode(), "\u200b".encode()]
ODD_PIECES += [b"\x1b[31m", b"\x00", b"", b"\t ", "👩‍👧".encode()]


def write_tokens(path: Path, old_log_probs: str) -> None:
    pieces = [TURN_PIECES, ODD_PIECES, [b" word"] * LONG_TOKENS]
    noise = np.random.default_rng(0)
    lengths = list(map(len, pieces))
    sampled = [np.ones(length, bool) for length in lengths]
    sampled[0][list(CONTEXT)] = False
    log_probs = [-noise.exponential(1, length).astype(np.float32) for length in lengths]
    log_probs[TOOLS][[2, 3]] = -9, -0.01
    log_probs[LONG][11_000] = -30
    gaps = [noise.normal(0, 1e-3, length).astype(np.float32) for length in lengths]
    gaps[TOOLS][8] = 0.7
    columns = {
        "row": [TOOLS, HOSTILE, LONG],
        "uid": ["0:a", "0:a", "0:b"],
        "prompts": [np.array([1, 2], np.int32)] * 3,
        "prompt_pieces": [[b"<|im_start|>", b"What is 2 + 2?\n"]] * 3,
        "responses": [np.arange(length, dtype=np.int32) for length in lengths],
        "response_pieces": pieces,
        "response_mask": sampled,
        "policy_versions": [
            np.where(mask, np.linspace(3, 5, len(mask)).astype(int), -1).astype(np.int32) for mask in sampled
        ],
        "rollout_log_probs": log_probs,
        "advantages": [np.where(mask, np.linspace(-1, 2, len(mask)), 0).astype(np.float32) for mask in sampled],
        "token_level_rewards": [np.eye(1, length, length - 1, dtype=np.float32)[0] for length in lengths],
    }
    if old_log_probs == "pass":
        columns["old_log_probs"] = [one + gap for one, gap in zip(log_probs, gaps)]
        columns["entropys"] = [noise.exponential(1, length).astype(np.float32) for length in lengths]
    token_file.write(path, columns, {"step": 1, "old_log_probs": old_log_probs})
