"""`trainer.rollout_token_data`: the numbers of tokens are those of the batch, of the metrics and of the dumped texts."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from lockstep.agents.trajectory import Trajectory
from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.observability import token_file
from lockstep.observability.show_rollouts import main as show_rollouts
from lockstep.observability.token_file import NoTokens, RowTokens
from lockstep.protocol import DataProto, object_array
from lockstep.protocol.columns import names_of
from lockstep.protocol.tokens import read
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo import token_dump
from lockstep.trainer.ppo.token_dump import TokenDump, first_groups
from lockstep.workers.rollout_batch import trajectory_tensors
from tests.tiny import tiny_tokenizer
from tests.trainer.test_agents import LOOP

CONFIG = RolloutConfig(prompt_length=6, response_length=12)


def batch_of_turns(padded: bool = False) -> DataProto:
    """Four rows: two turns by two versions of the policy with context between them, one token, none, and 12 tokens."""
    turns = Trajectory([65, 66], [70, 71, 80, 72], [1, 1, 0, 1], [-1.0, -2.0, 0.0, -0.5], [3, 3, -1, 4])
    one = Trajectory([65], [90], [1], [-0.25], [4])
    none = Trajectory([65, 66, 67])
    long = Trajectory([65], list(range(70, 82)), [1] * 12, [-0.1 * i for i in range(12)], [4] * 12)
    tensors: dict[str, Any] = dict(trajectory_tensors([turns, one, none, long], CONFIG, pad_token_id=0))
    data = DataProto.from_dict(tensors=tensors, non_tensors={"uid": object_array(["a", "a", "b", "b"])})
    noise = torch.Generator().manual_seed(0)
    for name in ("old_log_probs", "entropys", "values", "advantages", "token_level_rewards"):
        data.tensors[name] = torch.randn(4, 12, generator=noise)
    if padded:
        tensors = {name: read(data.tensors, name) for name in names_of(data.batch)}
        data = DataProto.from_dict(tensors=tensors, non_tensors=dict(data.non_tensor_batch))
    return data


def dumped(folder: Path, batch: DataProto, max_rows: int = 256, source: Any = "pass") -> Path:
    tokens = TokenDump(tiny_tokenizer(), max_rows, source)
    tokens.add(batch, [f"0:{uid}" for uid in batch.non_tensor_batch["uid"]])
    tokens.write(str(folder), 5)
    return folder / "5.tokens.parquet"


@pytest.mark.parametrize("padded", [False, True])
def test_numbers_are_those_of_the_batch(tmp_path: Path, padded: bool) -> None:
    batch = batch_of_turns(padded)
    path = dumped(tmp_path, batch_of_turns(padded))
    assert pq.read_table(path)["row"].to_pylist() == [0, 1, 2, 3]
    lengths = [4, 1, 0, 12]
    for row, length in enumerate(lengths):
        found = token_file.read(path, row)
        assert found.ids == read(batch.tensors, "responses")[row, :length].tolist()
        assert found.mask.tolist() == read(batch.tensors, "response_mask")[row, :length].bool().tolist()
        assert found.policy_versions.tolist() == read(batch.tensors, "policy_versions")[row, :length].tolist()
        for name in ("rollout_log_probs", "old_log_probs", "entropys", "values", "advantages", "token_level_rewards"):
            assert np.array_equal(found.numbers[name], read(batch.tensors, name)[row, :length].numpy()), name
    turns = token_file.read(path, 0)
    assert turns.uid == "0:a" and turns.prompt_ids == [65, 66]
    assert turns.turns() == [(0, 2, True), (2, 3, False), (3, 4, True)]


def test_log_probs_that_are_not_the_trainers_are_not_written_as_such(tmp_path: Path) -> None:
    for source in ("rollout", "update", None):
        found = token_file.read(dumped(tmp_path, batch_of_turns(), source=source), 0)
        assert not {"old_log_probs", "entropys"} & found.numbers.keys() and "rollout_log_probs" in found.numbers


def test_whole_groups_come_first_and_the_bound_holds(tmp_path: Path) -> None:
    def first(uids: str, room: int, room_for_tokens: int = 100, may_split: bool = True) -> list[int]:
        return first_groups(uids, [10] * len(uids), room, room_for_tokens, may_split)

    assert first("ababc", 5) == [0, 1, 2, 3, 4]
    assert first("ababc", 3) == first("ababc", 5, 30) == [0, 2]
    assert first("aaa", 2) == first("aaa", 5, 29) == [0, 1], "not even one group fits"
    assert first("aaa", 2, may_split=False) == []
    assert first("a", 0) == first("a", 5, 9) == []
    path = dumped(tmp_path, batch_of_turns(), max_rows=3)
    assert pq.read_table(path)["row"].to_pylist() == [0, 1]
    with pytest.raises(NoTokens, match="tokens of 2 responses"):
        token_file.read(path, 3)


def test_rows_are_counted_over_the_batches_of_a_validation(tmp_path: Path) -> None:
    tokens = TokenDump(tiny_tokenizer(), 6)
    for number in range(2):
        tokens.add(batch_of_turns(), [f"{4 * number}:{uid}" for uid in "aabb"])
    tokens.write(str(tmp_path), 0)
    assert pq.read_table(tmp_path / "0.tokens.parquet")["row"].to_pylist() == [0, 1, 2, 3, 4, 5]
    assert token_file.read(tmp_path / "0.tokens.parquet", 4).uid == "4:a"


def test_tokens_are_bounded_over_the_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_file, "MOST_TOKENS", 40)
    tokens = TokenDump(tiny_tokenizer(), 256)
    for number in range(3):  # 24 tokens each, 8 of the first group
        tokens.add(batch_of_turns(), [f"{4 * number}:{uid}" for uid in "aabb"])
    tokens.write(str(tmp_path), 0)
    assert pq.read_table(tmp_path / "0.tokens.parquet")["row"].to_pylist() == [0, 1, 2, 3, 4, 5, 8, 9]


def test_only_the_first_group_of_a_validation_is_split(tmp_path: Path) -> None:
    tokens = TokenDump(tiny_tokenizer(), 5)
    for number in range(2):
        tokens.add(batch_of_turns(), [f"{4 * number}:{uid}" for uid in "aabb"])
    tokens.write(str(tmp_path), 0)
    assert pq.read_table(tmp_path / "0.tokens.parquet")["row"].to_pylist() == [0, 1, 2, 3]


def test_no_file_without_rows(tmp_path: Path) -> None:
    TokenDump(tiny_tokenizer(), 5).write(str(tmp_path), 0)
    assert list(tmp_path.iterdir()) == []


def test_a_step_that_is_run_again_replaces_or_removes_its_tokens(tmp_path: Path) -> None:
    dumped(tmp_path, batch_of_turns(), max_rows=4)
    path = dumped(tmp_path, batch_of_turns(), max_rows=2)
    assert pq.read_table(path)["row"].to_pylist() == [0, 1]
    dumped(tmp_path, batch_of_turns(), max_rows=0)
    assert list(tmp_path.iterdir()) == []


def test_no_tokenizer_is_read_if_no_token_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_dump, "TokenPieces", None)
    dumped(tmp_path, batch_of_turns(), max_rows=0)
    with pytest.raises(TypeError):
        dumped(tmp_path, batch_of_turns(), max_rows=1)


def run(arguments: list[str], folder: Path) -> list[dict[str, Any]]:
    """The metrics of the steps."""
    dumps = [f"trainer.rollout_data_dir={folder}/rollouts", f"trainer.validation_data_dir={folder}/validation"]
    settings = [f"trainer.default_local_dir={folder}", "trainer.save_freq=0", "trainer.rollout_token_data=true"]
    assert main([*arguments, *dumps, *settings]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def rows_of(dump: Path) -> list[tuple[dict[str, Any], RowTokens]]:
    rows = [json.loads(line) for line in dump.read_text().splitlines()]
    return [(row, token_file.read(token_file.token_path(dump), number)) for number, row in enumerate(rows)]


def text_of(tokens: RowTokens, specials: tuple[bytes, ...] = (b"<|endoftext|>", b"<|im_start|>", b"<|im_end|>")) -> str:
    kept = [piece for piece in tokens.pieces if piece not in specials]
    return b"".join(kept).decode("utf-8", "replace")


def test_tokens_of_a_run_agree_with_its_metrics_and_texts(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = ["actor_rollout_ref.actor.use_kl_loss=true", "trainer.total_training_steps=1", "trainer.test_freq=1"]
    metrics = run([*overrides, *settings], tmp_path / "run")[-1]
    rows = rows_of(tmp_path / "run/rollouts/1.jsonl")
    assert len(rows) == 4 and metrics["timing_s/dump_rollouts"] > 0
    every: dict[str, list[float]] = {}
    for row, tokens in rows:
        assert text_of(tokens) == row["output"] and len(tokens.ids) == row["length"] and tokens.uid == row["uid"]
        assert tokens.mask.all() and set(tokens.policy_versions.tolist()) == {0}
        assert tokens.numbers["token_level_rewards"].sum() == pytest.approx(row["score"], abs=1e-6)
        assert tokens.numbers["advantages"].mean() == pytest.approx(row["advantage"], abs=1e-5)
        assert np.allclose(tokens.numbers["ref_log_prob"], tokens.numbers["old_log_probs"], atol=1e-5)
        for name, values in tokens.shown().items():
            every.setdefault(name, []).extend(values.tolist())
    assert np.mean(every["entropys"]) == pytest.approx(metrics["actor/entropy"], rel=1e-5)
    assert np.mean(np.abs(every["gap"])) == pytest.approx(metrics["training/rollout_log_probs_gap"], abs=1e-7)
    assert np.mean(every["values"]) == pytest.approx(metrics["critic/values/mean"], rel=1e-5)
    assert np.mean(every["advantages"]) == pytest.approx(metrics["critic/advantages/mean"], abs=1e-5)
    for row, tokens in rows_of(tmp_path / "run/validation/1.jsonl"):
        assert text_of(tokens) == row["output"] and tokens.numbers.keys() == {"rollout_log_probs"}
        assert set(tokens.policy_versions.tolist()) == {1} and (tokens.numbers["rollout_log_probs"] < 0).all()
    capsys.readouterr()
    assert show_rollouts([str(tmp_path / "run"), "--group", "2", "--tokens"]) == 0
    shown = capsys.readouterr().out
    assert "log-prob    trainer        gap  reference    entropy  advantage      value     reward  version" in shown
    assert len([line for line in shown.splitlines() if line.endswith('"')]) == len(rows[1][1].ids)
    assert show_rollouts([str(tmp_path / "run"), "--tokens"]) == 2
    assert "add --group K" in capsys.readouterr().err


def test_token_data_without_a_folder_is_refused(overrides: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*overrides, "trainer.rollout_token_data=true"])
    assert "trainer.rollout_token_data=true: tokens are written beside" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
def test_what_the_policy_did_not_write_is_marked(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    loop = f"actor_rollout_ref.rollout.agent.default_agent_loop={tmp_path}/loop.py:OneToken"
    settings = ["data.max_response_length=60", "trainer.total_training_steps=1", "trainer.val_before_train=false", loop]
    run([*overrides, *settings], tmp_path / "run")
    for row, tokens in rows_of(tmp_path / "run/rollouts/1.jsonl"):
        assert row["turn_rewards"] == [0.5, 0.0]
        (first, *_), (begin, end, is_sampled), (_, last, _) = tokens.turns()
        assert (first, begin, last - end, is_sampled) == (0, 1, 1, False)
        assert tokens.mask.tolist() == tokens.is_sampled.tolist()
        assert b"again" in b"".join(tokens.pieces[begin:end])
        assert np.isnan(tokens.shown()["gap"][begin:end]).all() and np.isfinite(tokens.shown()["gap"][[0, -1]]).all()


@pytest.mark.slow
def test_policy_versions_of_an_asynchronous_run(overrides: list[str], tmp_path: Path) -> None:
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.async_mode=colocated"]
    settings += ["trainer.total_training_steps=3", "trainer.val_before_train=false"]
    run([*overrides, *settings], tmp_path / "run")
    for step in (1, 2, 3):
        for row, tokens in rows_of(tmp_path / f"run/rollouts/{step}.jsonl"):
            assert text_of(tokens) == row["output"]
            assert step - 2 <= tokens.policy_versions.min() <= tokens.policy_versions.max() <= step - 1


@pytest.mark.slow
def test_a_single_update_says_what_it_did_not_compute(overrides: list[str], tmp_path: Path) -> None:
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=2", "trainer.total_training_steps=1"]
    settings += ["actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.val_before_train=false"]
    run([*overrides, *settings], tmp_path / "run")
    ((_, tokens), *_) = rows_of(tmp_path / "run/rollouts/1.jsonl")
    assert "old_log_prob_pass=always" in tokens.missing()["gap"]
