"""The sandbox's attacks through conversations with the code tool: contained, answered, and the others are unharmed."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import lockstep
from lockstep.agents.conversation import Conversation
from lockstep.protocol.generation import SamplingParams
from tests.agents.scripted import Scripted, call, make_agents, sampled_texts
from tests.rewards.sandbox.test_attacks import EXHAUSTING, INSIDE, REACHING_OUT, SECRET, Outside, attack_with, outside

__all__ = ["outside"]

OF_THE_SCORER = ("kill the judge", "kill everything")
"""They print BROKEN if they survive, which is a verdict for programs that a scorer's own process judges."""
MODES = {"a sandbox per call": "false", "a sandbox per conversation": "true"}


@pytest.mark.parametrize("keep_state", MODES.values(), ids=MODES)
def test_the_sandbox_holds_in_conversations(
    keep_state: str, outside: Outside, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_TEST_VARIABLE", SECRET)
    config = f"{{keep_state: {keep_state}, timeout_s: 4, memory_mb: 256, processes: 8, file_mb: 4}}"
    (tmp_path / "tools").mkdir()
    path = tmp_path / "tools" / "tools.yaml"
    path.write_text(f"tools:\n  - {{class_name: python, config: {config}}}\n")
    names = outside.names() | {
        "HOME": str(Path.home()),
        "PREFIXES": [sys.prefix, sys.base_prefix, *filter(None, sys.path)],
    }
    names["PACKAGE"] = str(Path(lockstep.__file__).parent)
    attacks = {
        name: attack_with(names, code) for name, code in {**REACHING_OUT, **INSIDE}.items() if name not in OF_THE_SCORER
    }
    attacks |= {name: code for name, (code, _) in EXHAUSTING.items()}
    agents = make_agents(tool_config_path=str(path), response_length=8000)

    async def one(*codes: str) -> Conversation:
        row = {"raw_prompt": [{"role": "user", "content": "Q"}], "agent_name": "tool_agent"}
        policy = Scripted(*(call("python", code=code) for code in codes), "next")
        return await agents.converse(row, [1, 2], policy, SamplingParams(max_tokens=8000), 0)

    async def all_at_once() -> list[Conversation]:
        async with agents.running():
            others = [one(f"open('mine', 'w').write('{i}'); x = {i}", "open('mine').read(), x") for i in range(2)]
            return await asyncio.gather(*others, *(one(code) for code in attacks.values()))

    results = asyncio.run(all_at_once())
    own, attacked = results[:2], results[2:]
    answers = [conversation.new_messages[1]["content"] for conversation in attacked]
    broken = {name: answer for name, answer in zip(attacks, answers) if "BROKEN" in answer or SECRET in answer}
    assert broken == {}
    assert [name for name, c in zip(attacks, attacked) if sampled_texts(c)[-1] != "next<|im_end|>"] == []
    assert all(len(answer) < 300 for answer in answers)
    assert outside.data.read_text() == SECRET
    assert sorted(path.name for path in outside.data.parent.iterdir()) == ["tools", "train.jsonl"]
    for number, conversation in enumerate(own):  # files and variables are private, and kept if asked for
        kept: Any = conversation.new_messages[3]["content"]
        assert kept == f"('{number}', {number})\n" if keep_state == "true" else "FileNotFoundError" in kept
