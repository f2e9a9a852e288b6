"""Each audit of the controller finds the defect that is planted in a real run, in the step that has it, and nothing else."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import RandomSampler, Sampler

from lockstep import cli
from lockstep.agents.agents import Agents
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.data.loader import create_dataloader
from lockstep.observability.rollout_files import dump_file, read_groups
from lockstep.protocol import DataProto
from lockstep.protocol.tokens import read
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo import reward_probe
from lockstep.trainer.ppo.batch_dump import read_dump
from lockstep.trainer.ppo.data_order import DrawnPrompts
from lockstep.trainer.ppo.rollout_sources.synchronous import SynchronousSource
from lockstep.trainer.ppo.round_trip import RoundTrip
from lockstep.utils.audit import Audits
from lockstep.utils.rollout_gap import GapBound, RolloutGap
from tests.healthy_runs import LOOP, SAMPLER
from tests.tiny import tiny_tokenizer

GROUPS = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.val_before_train=false"]
WARN = [f"trainer.audit.{name}=warn" for name in ("data_order", "policy_version", "rollout_gap")]
Plant = Callable[[DataProto], None]


def write(batch: DataProto, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    batch.tensors[name] = change(read(batch.tensors, name).clone())


def older_policy_at_the_end(batch: DataProto) -> None:
    def fall(versions: torch.Tensor) -> torch.Tensor:
        versions[0, 1] = versions.max() - 1
        return versions

    write(batch, "policy_versions", fall)


def other_prompt(batch: DataProto) -> None:
    batch.non_tensor_batch["raw_prompt_ids"] = np.array([[7, 8, 9]] * len(batch) + [None], dtype=object)[:-1]


def same_row_again(batch: DataProto) -> None:
    batch.non_tensor_batch["index"][4:8] = batch.non_tensor_batch["index"][0]


def first_tokens_differ(batch: DataProto) -> None:
    write(batch, "rollout_log_probs", lambda values: values + 0.003 * (torch.arange(values.shape[1]) < 16))


def all_score_the_same(batch: DataProto) -> None:
    write(batch, "token_level_scores", torch.zeros_like)


PLANTS: dict[int, tuple[str, Plant]] = {
    2: ("policy_version", older_policy_at_the_end),
    3: ("token_round_trip", other_prompt),
    4: ("data_order", same_row_again),
    5: ("rollout_gap", first_tokens_differ),
    6: ("advantages", all_score_the_same),
}
DRIFT_STEP = 7


def plant(monkeypatch: pytest.MonkeyPatch, plants: dict[int, tuple[str, Plant]]) -> None:
    """Change the samples of these steps."""
    collect = SynchronousSource.collect

    def planted(self: SynchronousSource, prompts: Any, *, step: int, timing: Any) -> tuple[DataProto, dict[str, float]]:
        batch, metrics = collect(self, prompts, step=step, timing=timing)
        if step in plants:
            plants[step][1](batch)
        return batch, metrics

    monkeypatch.setattr(SynchronousSource, "collect", planted)


def test_each_defect_is_found_in_its_step(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first step is healthy, and each of the others has one defect."""
    plant(monkeypatch, PLANTS)
    monkeypatch.setattr(reward_probe, "EVERY", DRIFT_STEP)
    drifting = tmp_path / "drifting.py"
    drifting.write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    global calls\n"
        "    calls += 1\n"
        f"    return sum(map(ord, solution_str)) % 11 / 10 + (calls > {16 * DRIFT_STEP} + 8)\n"
    )
    command = [
        *overrides,
        *GROUPS,
        *WARN,
        "data.max_response_length=60",
        "trainer.save_freq=3",
        "reward_model.timeout_s=null",
    ]
    command += [f"custom_reward_function.path={drifting}", f"trainer.total_training_steps={DRIFT_STEP}"]
    assert main(command) == 0
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    found = PLANTS | {DRIFT_STEP: ("reward_probe", all_score_the_same)}
    for step in steps:
        fired = {name.removeprefix("audit/"): count for name, count in step.items() if name.startswith("audit/")}
        assert fired == {audit: 1.0 for at, (audit, _) in found.items() if at <= step["step"]}, step["step"]
    dumps = sorted((tmp_path / "run" / "audits").iterdir())
    kept = sorted(f"step_{step}_{audit}" for step, (audit, _) in found.items() if audit != "advantages")
    assert [dump.name for dump in dumps] == kept
    dump = read_dump(tmp_path / "run" / "audits" / "step_5_rollout_gap")
    assert (dump.info.step, dump.info.num_updates, dump.info.checkpoint) == (5, 4, "global_step_3")
    assert {"old_log_probs", "rollout_log_probs", "advantages"} <= set(dump.batch.tensors.keys())
    rows = [row for group in read_groups(dump_file(dump.folder, None, False)) for row in group.rows]
    assert len(rows) == len(dump.batch) and all("advantage" in row and row["step"] == 5 for row in rows)
    warnings = "\n".join(caplog.messages)
    for text in (
        "audit policy_version: rollouts carry policy versions [0, 1], the trainer is at 1",
        "audit token_round_trip: row",
        "the prompt has other tokens than its row",
        "time(s) more than it was drawn from the data",
        "log-probs of tokens 0-15 of each response differ from the trainer's by 0.0030, those of other tokens by 0.0000",
        "every advantage is zero: all samples",
        "now; scored twice at once, its scores differed by at most 0.",
        f". The step's batch is kept: `lockstep rollouts {tmp_path}/run/audits/step_5_rollout_gap` shows it",
    ):
        assert text in warnings, text


def test_a_stopped_run_names_the_kept_batch(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The gap of a step that is one update is found by the workers."""
    plant(monkeypatch, {2: ("rollout_gap", first_tokens_differ)})
    command = [*overrides, *GROUPS, "data.max_response_length=60", "actor_rollout_ref.actor.ppo_mini_batch_size=4"]
    assert cli.main(["ppo", *command, "trainer.save_freq=0"]) == 1
    kept = tmp_path / "run" / "audits" / "step_2_rollout_gap"
    message = capfd.readouterr().err
    assert "tokens 0-15 of each response differ from the trainer's by 0.0030" in message
    kept_in = f"The step's batch is kept: `lockstep rollouts {kept}` shows it"
    assert f"(audit rollout_gap; trainer.audit.rollout_gap=warn goes on). {kept_in}" in message
    dump = read_dump(kept)
    assert (dump.info.num_updates, dump.checkpoint) == (1, None)
    assert "advantages" in dump.batch.tensors


@pytest.mark.slow
def test_context_that_the_template_does_not_give(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Conversations of three turns: one token of a tool's answer is another one."""

    def swap(batch: DataProto) -> None:
        mask, responses = (read(batch.tensors, name).clone() for name in ("response_mask", "responses"))
        for row in range(len(batch)):
            context = (mask[row, : int(mask[row].nonzero().max())] == 0).nonzero().flatten()
            if len(context):
                responses[row, context[3]] += 1
        batch.tensors["responses"] = responses

    (tmp_path / "loop.py").write_text(LOOP)
    plant(monkeypatch, {2: ("token_round_trip", swap)})
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:ThreeTurns"
    command = [*overrides, *GROUPS, loop, "data.max_response_length=150", "trainer.audit.rollout_gap=off"]
    assert main([*command, "trainer.total_training_steps=2", "trainer.save_freq=0"]) == 0
    (message,) = [message for message in caplog.messages if message.startswith("audit ")]
    assert "the tokens after turn 1 are not those that the chat template gives for its messages" in message
    assert (tmp_path / "run" / "audits" / "step_2_token_round_trip").is_dir()


TALK = [
    {"role": "user", "content": "2+3="},
    {"role": "assistant", "content": "think 5"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def conversation(agents: Agents) -> DataProto:
    """TALK as its loop would have made it."""
    renderer, tokenizer = agents.renderer, agents.tokenizer
    prompt = renderer.ids(TALK[:1])
    turns = [[*tokenizer(TALK[place]["content"])["input_ids"], 2] for place in (1, 3)]
    bridge = renderer.bridge(TALK[:2], TALK[2:3], 2)
    assert bridge is not None
    response = [*turns[0], *bridge.ids, *turns[1]]
    mask = [1] * len(turns[0]) + [0] * len(bridge.ids) + [1] * len(turns[1])
    columns = {"raw_prompt": TALK[:1], "raw_prompt_ids": prompt, "messages": TALK[1:], "trajectory_breaks": 0}
    return DataProto.from_dict(
        tensors={
            "prompts": torch.tensor([prompt]),
            "responses": torch.tensor([response]),
            "response_mask": torch.tensor([mask]),
            "attention_mask": torch.ones(1, len(prompt) + len(response), dtype=torch.long),
        },
        non_tensors={name: np.array([value, None], dtype=object)[:1] for name, value in columns.items()},
    )


def test_a_template_that_rewrites_history(overrides: list[str]) -> None:
    config = load_config(PPOConfig, [*overrides, "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"])

    def finding(template: str | None = None, **change: Any) -> str | None:
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = template or tokenizer.chat_template
        agents = Agents(config.actor_rollout_ref.rollout, tokenizer, [2])
        round_trip = RoundTrip(config, tokenizer, agents, dataset=None)
        batch = conversation(agents)
        for name, value in change.items():
            batch.non_tensor_batch[name][0] = value
        audits = Audits({"token_round_trip": "warn"})
        round_trip.check(audits, batch, step=1)
        return audits.take_findings().get("token_round_trip")

    assert finding() is None
    forgets = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
        "{{ m['content'] if loop.last or m['role'] == 'user' else m['content'].split()[-1] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert "renders turn 1 or what is before it differently once a user message follows" in str(finding(forgets))
    other = [{**TALK[1], "content": "think 6"}, *TALK[2:]]
    assert "turn 1: its message is 'think 6', but its tokens decode to 'think 5'" in str(finding(messages=other))


def test_rows_that_the_loader_repeats_or_leaves_out() -> None:
    data: Any = [{"index": i} for i in range(10)]

    def problem_of(
        order: Callable[[int], list[int]], state: dict[str, Any] | None = None, **options: Any
    ) -> str | None:
        loader = create_dataloader(data, 4, False, 0, sampler=order, **options)
        if state is not None:
            loader.load_state_dict(state)
        for _ in loader:
            if (problem := loader.ledger.take_problem()) is not None:
                return problem
        return None

    rows = list(range(10))
    assert problem_of(lambda epoch: rows) is None and problem_of(lambda epoch: rows, drop_last=False) is None
    assert "row 3 of the dataset is 2 times in one batch of epoch 0" in str(problem_of(lambda epoch: [3, *rows[1:]]))
    again = problem_of(lambda epoch: [0, 1, 2, 3, 0, 5, 6, 7, 8, 9])
    assert again == "row 0 of the dataset is drawn again in epoch 0 (1 rows of the batch are)"
    loader = create_dataloader(data, 4, True, 5)
    next(iter(loader))
    state = loader.state_dict()
    resumed = create_dataloader(data, 4, True, 5)
    resumed.load_state_dict(state)
    assert resumed.ledger.take_problem() is None
    assert sorted([*loader.drawn, *(i for batch in resumed for i in batch["index"])])[:8] != []
    assert resumed.ledger.take_problem() is None
    broken = create_dataloader(data, 4, True, 5)
    broken.load_state_dict(state | {"position": 0})
    assert "the 4 rows drawn in epoch 0 before the checkpoint are not the 0 that" in str(broken.ledger.take_problem())
    for _ in create_dataloader(data, 4, False, 0, num_workers=1):
        pass


class Repeated(Sampler[int]):
    def __iter__(self) -> Iterator[int]:
        return iter([0, 0, 1, 1, 2, 2, 3, 3])

    def __len__(self) -> int:
        return 8


def test_a_sampler_may_repeat_rows_unless_it_says_otherwise(tmp_path: Path) -> None:
    space: dict[str, Any] = {}
    exec(SAMPLER, space)
    data: Any = [{"index": i} for i in range(4)]
    sampler = space["Weighted"](data, None)
    loader = create_dataloader(data, 4, False, 0, sampler=sampler)
    assert all(loader.ledger.take_problem() is None for _ in loader)
    type(sampler).replacement = False
    type(sampler).__len__ = lambda self: 4
    loader = create_dataloader(data, 4, False, 0, sampler=sampler)
    assert any("times in one batch" in str(loader.ledger.take_problem()) for _ in loader)
    for repeating in (RandomSampler(data, num_samples=9), Repeated()):
        loader = create_dataloader(data, 4, False, 0, sampler=repeating)
        assert all(loader.ledger.take_problem() is None for _ in loader)


def drawn(*rows: int) -> DataProto:
    return DataProto.from_dict(
        tensors={"x": torch.zeros(len(rows))}, non_tensors={"index": np.array(rows, dtype=object)}
    )


def test_prompts_that_an_asynchronous_source_loses(overrides: list[str]) -> None:
    prompts = DrawnPrompts(load_config(PPOConfig, [*overrides, "actor_rollout_ref.rollout.n=1"]), None)
    prompts.loader = SimpleNamespace(ledger=SimpleNamespace(take_problem=lambda: None))  # type: ignore[assignment]
    source: Any = SimpleNamespace(keeps_prompts=True, num_dropped=0, pending=list)
    source.live = [drawn(9)]
    source.pending = lambda: source.live
    prompts.start(source)
    audits = Audits({"data_order": "warn"})

    def step(trained: list[int], live: list[int], num_dropped: int) -> str | None:
        source.live, source.num_dropped = [drawn(*live)] if live else [], num_dropped
        prompts.check(audits, drawn(*trained))
        return audits.take_findings().get("data_order")

    prompts.draw(audits, drawn(0, 1, 2, 3))
    assert step([9, 0], [1, 2, 3], 0) is None
    assert step([1], [3], 1) is None  # 2 was dropped
    assert step([], [], 1) == (
        "2 prompts were drawn and neither trained on nor kept, but 1 were dropped on purpose; rows 3"
    )
    prompts.draw(audits, drawn(4))
    assert "trains on row 5 1 time(s) more than it was drawn" in str(step([5], [4], 2))


def test_gaps_by_turn_and_length() -> None:
    """Against a plain count, on padded rows of two turns; a gap in one bucket is named if its tokens are enough."""
    generator = torch.Generator().manual_seed(0)
    rows, width = 40, 90
    mask = torch.zeros(rows, width, dtype=torch.long)
    for row in range(rows):
        length = 40 if row % 2 else 90
        mask[row, :10] = 1
        mask[row, 15:length] = 1
    trainer = -torch.rand(rows, width, generator=generator)
    noise = 1e-5 * torch.rand(rows, width, generator=generator)

    def gap_of(plan: torch.Tensor) -> tuple[dict[str, float], str | None]:
        gap = RolloutGap()
        gap.add(trainer[:7] + plan[:7], trainer[:7], mask[:7])
        gap.add(trainer[7:] + plan[7:], trainer[7:], mask[7:])
        return gap.metrics(gap.sums()), GapBound(torch.float32).problem(gap.sums())

    metrics, problem = gap_of(noise)
    assert problem is None
    by_turn = {"1": noise[:, :10].mean(), "2": noise[:, 15:][mask[:, 15:].bool()].mean()}
    for turn, expected in by_turn.items():
        assert metrics[f"training/rollout_gap/turn/{turn}"] == pytest.approx(float(expected), rel=1e-3)
    short = noise[1::2][mask[1::2].bool()].mean()
    assert metrics["training/rollout_gap/length/to_64"] == pytest.approx(float(short), rel=1e-3)
    last = [float(noise[row, 39 if row % 2 else 89]) for row in range(rows)]
    assert metrics["training/rollout_gap/position/last"] == pytest.approx(sum(last) / rows, rel=1e-3)
    assert Counter(name.split("/")[2] for name in metrics if "rollout_gap/" in name) == {
        "position": 6,
        "length": 2,
        "turn": 2,
    }
    in_turn_1 = noise + 0.02 * (torch.arange(width) < 10)
    assert "tokens of turn 1 differ from the trainer's by 0.0200, those of other tokens by 0.0000" in str(
        gap_of(in_turn_1)[1]
    )
    long = noise + 0.006 * (mask.sum(1, keepdim=True) > 64)
    assert "tokens of responses of at most 256 tokens differ" in str(gap_of(long)[1])
    at_end = noise.clone()
    at_end[torch.arange(rows), mask.cumsum(1).argmax(1)] += 0.1
    assert "the last token of each response differ" in str(gap_of(at_end)[1])
