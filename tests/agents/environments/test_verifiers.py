"""Environments of verifiers: their tasks as rows, their rollouts on the policy, their rewards."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lockstep.agents.agents import Agents
from lockstep.config.data import DataConfig
from lockstep.data.create_dataset import create_rl_dataset
from lockstep.rewards.default import default_compute_score
from tests.agents.scripted import END, TOKENIZER, Scripted, converse, make_agents, roles, sampled_texts

pytest.importorskip("verifiers.v1", reason="verifiers is not installed (make test-environments)")

TASKSET = """
import asyncio
import verifiers.v1 as vf
from openai import AsyncOpenAI


class SumData(vf.TaskData):
    answer: str = ""


class SumConfig(vf.TasksetConfig):
    count: int = 3


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=2.0)
    async def correct(self, trace) -> float:
        last = trace.branches[-1].messages[-1].content or ""
        if last == "raise":
            raise RuntimeError("no reward")
        return float(last.strip().endswith(self.data.answer))

    @vf.metric
    async def turns(self, trace) -> float:
        return trace.num_turns


class SumTaskset(vf.Taskset[SumTask, SumConfig]):
    def load(self):
        for number in range(self.config.count):
            data = SumData(prompt=f"{number}+{number}=", system_prompt="Add.", answer=str(2 * number))
            yield SumTask(data, self.config.task)
"""
HARNESS = '''

class AskTwice(vf.Harness[vf.HarnessConfig]):
    """A chat of two turns, in this process."""

    APPENDS_SYSTEM_PROMPT = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret, max_retries=0)
        messages = [{"role": "system", "content": data.system_prompt}, {"role": "user", "content": data.prompt}]
        for request in ("Are you sure?", None):
            answer = await client.chat.completions.create(model=ctx.model, messages=messages, temperature=0.1)
            text = answer.choices[0].message.content
            messages.append({"role": "assistant", "content": text})
            if text == "hang":
                await asyncio.sleep(60)
            if request:
                messages.append({"role": "user", "content": request})
        await client.close()
        return vf.ProgramResult(exit_code=0, stdout="", stderr="")


__all__ = ["SumTaskset", "AskTwice"]
'''


ENTRIES = ["verifiers:sums-v1", "verifiers:plain-sums-v1"]


@pytest.fixture(autouse=True)
def tasksets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums_v1.py").write_text(TASKSET + HARNESS)
    (tmp_path / "plain_sums_v1.py").write_text(TASKSET + '\n\n__all__ = ["SumTaskset"]\n')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))  # the package keeps a cache there
    for name in ("sums_v1", "plain_sums_v1"):
        monkeypatch.delitem(sys.modules, name, raising=False)


def rows_of(entry: str, **settings: Any) -> list[dict[str, Any]]:
    dataset: Any = create_rl_dataset([entry], TOKENIZER, DataConfig(**settings))
    return [dataset[number] for number in range(len(dataset))]


def agents_with(**program: Any) -> Agents:
    agents = make_agents()
    agent = replace(agents.config.agent, program=replace(agents.config.agent.program, **program))
    return Agents(replace(agents.config, agent=agent), TOKENIZER, [END], data_files=ENTRIES)


def test_tasks_are_rows() -> None:
    rows = rows_of("verifiers:sums-v1?count=5")
    assert len(rows) == 5 and rows[2]["agent_name"] == "verifiers_agent"
    assert rows[2]["raw_prompt"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2="}]
    assert rows[2]["data_source"] == "verifiers/sums-v1" and rows[2]["index"] == 2
    assert len(rows_of("verifiers:sums-v1?count=5&size=2")) == 2


def test_a_rollout_of_the_package_is_the_conversation() -> None:
    policy = Scripted("I think 3", "4")
    row = rows_of("verifiers:sums-v1")[2]
    done = converse(agents_with(), policy, **row)
    assert sampled_texts(done) == ["I think 3<|im_end|>", "4<|im_end|>"]
    assert roles(done.messages) == ["system", "user", "assistant", "user", "assistant"]
    assert done.reward_scores == {"reward": 2.0, "correct": 2.0, "turns": 2.0}
    assert (done.counts.program_errors, done.counts.breaks, done.finish_reason) == (0, 0, "stop")
    assert [request.sampling.temperature for request in policy.requests] == [1.0, 1.0]
    for request in policy.requests:
        assert request.prompt_ids == done.trajectory.ids[: len(request.prompt_ids)]
    score = default_compute_score(row["data_source"], "", None, {"rollout_reward_scores": done.reward_scores})
    assert score == {"score": 2.0, "correct": 2.0, "turns": 2.0}


def test_the_chat_program_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness `null`: a program in another process, which is run here by this interpreter instead of uv's."""
    from verifiers.v1.runtimes.subprocess import SubprocessRuntime

    async def prepare(self: Any, script: str, env: Any = None, *, activate: bool = True) -> list[str]:
        await self.write("program.py", script.encode())
        return [sys.executable, "program.py"]

    monkeypatch.setattr(SubprocessRuntime, "prepare_uv_script", prepare)
    done = converse(agents_with(), Scripted("it is 2"), **rows_of("verifiers:plain-sums-v1")[1])
    assert sampled_texts(done) == ["it is 2<|im_end|>"] and done.reward_scores["reward"] == 2.0


@pytest.mark.parametrize(
    "texts, problem", [(["hang"], "exceeded .*program.timeout_s=2"), (["1", "raise"], "no reward")]
)
def test_a_failure_costs_its_own_conversation(caplog: pytest.LogCaptureFixture, texts: list[str], problem: str) -> None:
    done = converse(agents_with(timeout_s=2), Scripted(*texts), **rows_of("verifiers:sums-v1")[0])
    assert done.counts.program_errors == 1 and done.reward_scores == {} and re.search(problem, caplog.text)
    assert len(sampled_texts(done)) == len(texts)


def test_wrong_entries_are_refused() -> None:
    for entry, problem in [
        ("verifiers:no-such", "data.train_files: verifiers:no-such: taskset 'no-such' not found"),
        ("verifiers:sums-v1?counts=5", "counts"),
        ("verifiers:sums-v1?agent.harness.id=nothing", "harness 'nothing' not found"),
        ("verifiers:sums-v1?id=other", "id is no option"),
    ]:
        with pytest.raises(ValueError, match=problem):
            rows_of(entry)
    with pytest.raises(ValueError, match=r"answers rows of data.train_files=verifiers:TASKSET only"):
        make_agents().check_row({"agent_name": "verifiers_agent"})
