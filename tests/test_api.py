"""lockstep.train: objects in place of files, the same run as the command, callbacks, errors, several runs in one process."""

import asyncio
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lockstep
from lockstep import api
from lockstep.agents.conversation import Conversation
from lockstep.agents.tool_parser import FunctionCall, HermesToolParser
from lockstep.algorithms.losses import agg_loss
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.observability.jsonl import read_metrics
from lockstep.observability.step_line import format_number
from lockstep.trainer.main_ppo import main
from lockstep.trainer.run.checkpoint import CheckpointStore, RunLock
from tests.tiny import save_tiny_model, small_run, write_rows

ROWS = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i % 2} for i in range(8)]
SMALL: dict[str, Any] = {
    "batch_size": 4,
    "n": 2,
    "lr": 1e-3,
    "max_prompt_length": 40,
    "max_response_length": 6,
    "trainer.device": "cpu",
    "reward_model.timeout_s": None,  # call functions here, without worker processes
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    save_tiny_model(folder / "model")
    write_rows(folder / "train.parquet", 8)
    write_rows(folder / "val.parquet", 4)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return len(solution_str) % 3\n"
    )
    return folder


def untimed(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in r.items() if not k.startswith(("time", "timing", "perf/"))} for r in rows]


def test_import_is_light() -> None:
    program = "import sys, lockstep; lockstep.train; assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        lockstep.trian  # noqa: B018


def test_objects_train_and_the_policy_generates(files: Path, tmp_path: Path) -> None:
    """A loaded model and tokenizer, rows, two reward functions of different form, and a function as estimator."""
    seen: dict[str, Any] = {}

    def longer(completions: list[str], prompts: list[str], level: list[int], **columns: Any) -> list[float]:
        seen.update(columns, prompts=prompts, level=level)
        return [sum(map(ord, text)) % 7 / 10 for text in completions]

    def ends_right(solution_str: str, answer: str) -> float:
        return float(solution_str.endswith(answer))

    def centred(token_level_rewards: torch.Tensor, response_mask: torch.Tensor, index: Any) -> Any:
        scores = token_level_rewards.sum(-1)
        advantages = (scores - scores.mean())[:, None] * response_mask
        return advantages, advantages

    model = AutoModelForCausalLM.from_pretrained(files / "model")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    steps: list[int] = []
    result = lockstep.train(
        model,
        ROWS,
        [longer, (ends_right, 0.5)],
        centred,
        tokenizer=AutoTokenizer.from_pretrained(files / "model"),
        val_data=ROWS[:2],
        callbacks=[lambda step, metrics: steps.append(step)],
        run_dir=tmp_path / "run",
        steps=2,
        **SMALL,
    )
    assert result.finished and result.run_dir == tmp_path / "run" and steps == [0, 1, 2]
    assert set(seen["prompts"]) <= {row["prompt"] for row in ROWS} and set(seen["answer"]) <= {
        r["answer"] for r in ROWS
    }
    table = result.history.to_pandas()
    expected = table["reward/longer/mean"] + 0.5 * table["reward/ends_right/mean"]
    assert table["critic/score/mean"][1:].tolist() == pytest.approx(expected[1:].tolist())
    assert (table["actor/grad_norm"][1:] > 0).all()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    saved = result.policy.save(tmp_path / "saved")
    trained = AutoModelForCausalLM.from_pretrained(saved)
    assert not torch.equal(trained.lm_head.weight, before["lm_head.weight"])
    check_greedy(lockstep.Policy(result.run_dir), trained, AutoTokenizer.from_pretrained(saved))


class Cell:
    """An environment: one number, which the row gives."""

    seen: ClassVar[list[str]] = []

    def reset(self, answer: str, level: int) -> None:
        self.answer = answer
        self.seen.append(answer)

    def read(self) -> str:
        """Read the cell."""
        return self.answer

    def get_reward(self) -> float:
        return 0.25 + int(self.answer) / 100


def test_tools_are_functions_and_classes(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy calls both in every conversation, so that the environment's reward is the score."""
    calls: list[int] = []

    def double(number: int) -> int:
        """Double a number.

        Args:
            number: The number.
        """
        calls.append(number)
        return 2 * number

    async def always(self: Any, turn: Any, *schemas: Any) -> Any:
        return "", [
            FunctionCall(name="read", arguments="{}"),
            FunctionCall(name="double", arguments='{"number": 4}'),
        ]

    monkeypatch.setattr(HermesToolParser, "extract_tool_calls", always)
    monkeypatch.setattr(Conversation, "add", lambda self, messages: False)
    # the tiny model rarely ends its turn by itself
    generate = Conversation.generate
    monkeypatch.setattr(Conversation, "generate", lambda *a: _ended(generate(*a)))
    limits = {"actor_rollout_ref.rollout.multi_turn.max_parallel_calls": 2}
    run = tmp_path / "run"
    result = lockstep.train(files / "model", ROWS[1:], tools=[double, Cell], run_dir=run, steps=1, **SMALL, **limits)
    assert result.finished and calls == [4] * 8 and len(Cell.seen) == 8
    (metrics,) = [row for row in result.history if row["step"] == 1]
    expected = [0.25 + int(answer) / 100 for answer in Cell.seen]
    assert metrics["critic/score/mean"] == pytest.approx(sum(expected) / 8)
    assert metrics["tool_call_counts/mean"] == 2

    with pytest.raises(ValueError, match=r"^tools: .*lambda.* cannot be a tool"):
        lockstep.train(files / "model", ROWS, tools=lambda x: x, run_dir=tmp_path / "other", **SMALL)
    with pytest.raises(ValueError, match=r"^tools: two tools are named 'double'"):
        lockstep.train(files / "model", ROWS, tools=[double, double], run_dir=tmp_path / "other", **SMALL)


async def _ended(generated: Any) -> Any:
    return dataclasses.replace(await generated, ended=True)


def check_greedy(policy: Any, model: Any, tokenizer: Any) -> None:
    """The policy's answers are those of transformers, for one prompt, for several, and for messages."""
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "1+1="}], add_generation_prompt=True, tokenize=False
    )
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
    new = model.generate(ids, max_new_tokens=5, do_sample=False)[0, ids.shape[1] :]
    answer = tokenizer.decode(new, skip_special_tokens=True)
    greedy = {"temperature": 0, "max_tokens": 5}
    assert policy.generate("1+1=", **greedy) == answer
    assert policy.generate([{"role": "user", "content": "1+1="}], **greedy) == answer
    assert policy.generate(["1+1=", "2+2="], **greedy)[0] == answer
    pairs = policy.generate(["1+1=", "2+2="], n=2, max_tokens=6, seed=3)
    assert [len(pair) for pair in pairs] == [2, 2] and pairs[0][0] != pairs[0][1]
    assert policy.generate(["1+1=", "2+2="], n=2, max_tokens=6, seed=3) == pairs
    policy.unload()


def test_same_run_as_the_command(files: Path, tmp_path: Path) -> None:
    names = {"trainer.total_training_steps": 2, "actor_rollout_ref.rollout.n": 2, "reward_model.timeout_s": None}
    overrides = [*small_run(files), "algorithm=grpo", "trainer.total_training_steps=2", "actor_rollout_ref.rollout.n=2"]
    overrides += ["reward_model.timeout_s=null"]
    assert main([*overrides, f"trainer.default_local_dir={tmp_path}/command"]) == 0
    result = lockstep.train(
        files / "model",
        [str(files / "train.parquet")],
        files / "reward.py",
        val_data=files / "val.parquet",
        lr=1e-3,
        config={
            "trainer.default_local_dir": tmp_path / "python",
            "data": {"train_batch_size": 4, "max_prompt_length": 40, "max_response_length": 8},
            "trainer.device": "cpu",
        },
        **{"actor_rollout_ref.actor.ppo_mini_batch_size": 2, **names},
    )
    assert untimed(result.history) == untimed(read_metrics(tmp_path / "command" / "metrics.jsonl"))


def test_callback_stops_resumes_and_raises(files: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One folder, four calls in one process; the last in a thread beside a running event loop, as in a notebook."""

    def run(callback: Any, **changes: Any) -> lockstep.TrainResult:
        return lockstep.train(
            files / "model", ROWS, files / "reward.py", callbacks=callback, run_dir=tmp_path / "run", **SMALL | changes
        )

    stopped = run(lambda step, metrics: np.int64(step) == 1, steps=3)
    assert not stopped.finished and [row["step"] for row in stopped.history] == [1]
    assert "stopped by a callback after step 1" in caplog.text and "by the user" not in caplog.text
    score = format_number(stopped.history[0]["critic/score/mean"])
    assert repr(stopped) == (
        f"TrainResult: stopped after step 1, run_dir='{tmp_path}/run'\n"
        f"  reward {score} at step 1; see .history.to_pandas() and .policy"
    )
    assert stopped.policy.path.is_dir()

    def fail(step: int, metrics: dict[str, Any]) -> None:
        raise LookupError(f"at step {step}")

    epochs = {"trainer.total_epochs": 5}
    with pytest.raises(LookupError, match="at step 2"):
        run(fail, steps=4, **epochs)
    interrupted = run(lambda step, metrics: signal.raise_signal(signal.SIGINT), steps=4, **epochs)  # Ctrl-C
    assert not interrupted.finished and interrupted.history[-1]["step"] == 3
    assert "stopped by the user after step 3" in caplog.text

    async def notebook() -> lockstep.TrainResult:
        return await asyncio.to_thread(run, (), steps=4, **epochs)

    finished = asyncio.run(notebook())
    assert finished.finished and [row["step"] for row in finished.history] == [1, 2, 3, 4]
    first, second = repr(finished).splitlines()
    assert first.startswith("TrainResult: finished after step 4, ")
    assert f"{score} at step 1, " in second and " at step 4;" in second


def scaled(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, values: torch.Tensor, *, scale: float = 1.0
) -> Any:
    """An estimator that needs a critic."""


@pytest.mark.parametrize(
    ("algorithm", "preset", "n"), [("rloo", "grpo", 5), ("reinforce_plus_plus", "grpo", 5), ("gae", "ppo", 1)]
)
def test_an_estimator_keeps_the_rest_of_its_preset(
    algorithm: str, preset: str, n: int, files: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`lockstep.train(algorithm="rloo")` is `lockstep grpo algorithm.adv_estimator=rloo`, and says so."""
    configs: list[PPOConfig] = []
    monkeypatch.setattr(api, "run_ppo", lambda config, on_step: configs.append(config) or 0)
    data = {"run_dir": "run", "batch_size": 4, "trainer.project_name": "p", "trainer.experiment_name": "e"}
    with caplog.at_level("INFO"):
        lockstep.train(files / "model", files / "train.parquet", algorithm=algorithm, **data)
    assert f"algorithm={algorithm}: the other settings are those of the preset {preset}" in caplog.text
    command = load_config(PPOConfig, [f"algorithm={preset}", f"algorithm.adv_estimator={algorithm}"], run_checks=False)
    actor, expected = configs[0].actor_rollout_ref.actor, command.actor_rollout_ref.actor
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (expected.use_kl_loss, expected.kl_loss_coef)
    assert actor.use_kl_loss == (preset == "grpo") and configs[0].actor_rollout_ref.rollout.n == n
    assert api._algorithm_settings(scaled, has_file=False) == (["algorithm=ppo"], {"algorithm.adv_estimator": scaled})
    assert api._algorithm_settings("rloo", has_file=True) == ([], {"algorithm.adv_estimator": "rloo"})


def test_a_loss_and_an_estimator_have_settings(files: Path, tmp_path: Path) -> None:
    seen: list[float] = []

    def loss(
        log_prob: torch.Tensor, advantages: Any, response_mask: Any, loss_agg_mode: str, *, beta: float, **others: Any
    ) -> Any:
        seen.append(beta)
        return agg_loss(-beta * advantages * log_prob, response_mask, loss_agg_mode), {}

    def estimator(token_level_rewards: Any, response_mask: Any, index: Any, *, scale: float = 1.0) -> Any:
        seen.append(scale)
        return scale * token_level_rewards * response_mask, token_level_rewards

    def run(**settings: Any) -> lockstep.TrainResult:
        both = {"algorithm": estimator, "loss": loss, "steps": 1, "run_dir": tmp_path / "run"}
        return lockstep.train(files / "model", ROWS, files / "reward.py", **both, **settings, **SMALL)

    with pytest.raises(
        lockstep.ConfigError, match=r"(?s)2 problems.*loss_kwargs\.beta: must be set.*adv_kwargs\.scal=2"
    ):
        run(adv_kwargs={"scal": 2})
    run(loss_kwargs={"beta": 1}, adv_kwargs={"scale": "0.5"})
    assert seen[0] == 0.5 and set(seen[1:]) == {1.0}


def test_errors_are_exceptions_of_one_line(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def needs_level(solution_str: str, difficulty: int) -> float:
        return 0.0

    async def later(completions: list[str]) -> list[float]:
        return []

    model, reward = files / "model", files / "reward.py"
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: lockstep.train(model, ROWS, reward, stepz=3), lockstep.ConfigError, "stepz=3: "),
        (lambda: lockstep.train(model, ROWS, reward, stepz=None), lockstep.ConfigError, "stepz=null: "),
        (
            lambda: lockstep.train(model, ROWS, reward, config={"trainer.total_epoch": 3}),
            lockstep.ConfigError,
            "trainer.total_epoch=3: .*total_epochs",
        ),
        (
            lambda: lockstep.train(model, ROWS, reward, **{"actor_rollout_ref.model.external_lib": "nowhere.py"}),
            lockstep.ConfigError,
            r"external_lib=nowhere\.py: no file",
        ),
        (lambda: lockstep.train(model, [], reward), ValueError, "data has no rows"),
        (
            lambda: lockstep.train(model, [{"question": "?"}], reward),
            ValueError,
            r"row 0 has no 'prompt' \(columns: question",
        ),
        (lambda: lockstep.train(model, 3, reward), ValueError, "data must be rows .* not int"),
        (
            lambda: lockstep.train(model, [{"prompt": "a", "answer": object()}], reward),
            ValueError,
            "row 0: .*type object",
        ),
        (
            lambda: lockstep.train(model, ROWS, needs_level),
            ValueError,
            r"needs_level .*needs difficulty, which the rows",
        ),
        (lambda: lockstep.train(model, ROWS, [later]), ValueError, "later .* is a coroutine function"),
        (lambda: lockstep.train(model, ROWS, [reward]), ValueError, "reward must be a function"),
        (
            lambda: lockstep.train(model, ROWS, files / "rewrad.py", **SMALL),
            lockstep.ConfigError,
            r"- reward=\S+rewrad\.py: no such file \(did you mean \S+/reward\.py\?\)",
        ),
        (
            lambda: lockstep.train(files / "modle", ROWS, reward, **SMALL),
            lockstep.ConfigError,
            r"- model=\S+modle: no such folder .*\(did you mean \S+/model\?\)",
        ),
        (
            lambda: lockstep.train(model, files / "trian.parquet", reward, **SMALL),
            lockstep.ConfigError,
            r"- data=\S+trian.parquet: no such file or folder \(did you mean \S+/train.parquet\?\)",
        ),
        (
            lambda: lockstep.train(model, ROWS, reward, **SMALL | {"batch_size": 0, "n": 1}),
            lockstep.ConfigError,
            r"2 problems.*- batch_size=0: must be .*- n=1: grpo compares",
        ),
        (
            lambda: lockstep.train(model, ROWS, reward, **SMALL | {"max_prompt_length": 2}),
            lockstep.RunError,
            r"more than max_prompt_length=2 .* Raise max_prompt_length",
        ),
        (
            lambda: lockstep.train(model, ROWS, reward, steps=2, **{"trainer.total_training_steps": 3}),
            lockstep.ConfigError,
            r"trainer\.total_training_steps=3: contradicts steps=2",
        ),
        (
            lambda: lockstep.train(
                model, ROWS, reward, learning_rate=1, num_generations=2, max_steps=3, output_dir="x"
            ),
            lockstep.ConfigError,
            r"mean lr \(.*mean n \(.*mean steps \(.*mean run_dir \(",
        ),
        (lambda: lockstep.train(model, ROWS, **SMALL), lockstep.RunError, "no scorer for data_source 'default'"),
        (lambda: lockstep.train(tmp_path / "no", ROWS, reward, **SMALL), lockstep.ConfigError, "model=/"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=f"(?s){message}"):
            call()
    assert lockstep.RunError("x", 2).exit_code == 2


def test_inputs_of_a_live_or_another_run_are_kept(files: Path, tmp_path: Path) -> None:
    """Objects are written under the run's lock, and not over those that checkpoints were trained from."""
    model, tokenizer = (kind.from_pretrained(files / "model") for kind in (AutoModelForCausalLM, AutoTokenizer))
    run_dir, config = tmp_path / "run", PPOConfig()
    api._Inputs(model, tokenizer, {"train": ROWS}).write(run_dir, config)
    weights, rows = run_dir / "inputs" / "model" / "model.safetensors", run_dir / "inputs" / "train.jsonl"
    before = weights.read_bytes(), rows.read_bytes()
    other = api._Inputs(model, tokenizer, {"train": ROWS[:3]})
    with RunLock(run_dir), pytest.raises(ValueError, match="is in use by a live run"):
        other.write(run_dir, config)
    CheckpointStore(run_dir).save(1, lambda folder: (folder / "state").touch())
    api._Inputs(model, tokenizer, {"train": ROWS}).write(run_dir, config)
    with torch.no_grad():
        model.lm_head.weight += 1
    with pytest.raises(
        ValueError, match=rf"run_dir={run_dir} has checkpoints of a run with other inputs \(model, train\.jsonl\)"
    ):
        other.write(run_dir, config)
    assert (weights.read_bytes(), rows.read_bytes()) == before
    assert sorted(path.name for path in run_dir.glob(".inputs_*")) == []
    config = dataclasses.replace(config, trainer=dataclasses.replace(config.trainer, resume_mode="disable"))
    other.write(run_dir, config)
    assert weights.read_bytes() != before[0] and len(rows.read_text().splitlines()) == 3
    assert api._Inputs("model", None, {"train": "rows.jsonl"}).write(tmp_path / "none", config) is None
    assert not (tmp_path / "none").exists()


def test_route_of_a_reward_function() -> None:
    """A function that names a column gets it, also if it has a default and **kwargs."""

    def of_column(solution_str: str, answer: str = "", **kwargs: Any) -> float:
        return 0.0

    def of_verl(data_source: str, solution_str: str, ground_truth: str, extra_info: Any = None) -> float:
        return 0.0

    def of_batch(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any, scale: int = 1) -> Any:
        return []

    routes = {of_column: "functions", of_verl: None, of_batch: "batch"}
    for function, manager in routes.items():
        settings, functions = api._reward_settings(function)
        assert settings.get("reward_model.reward_manager") == manager
        assert (functions is not None) == (manager == "functions")


def test_batch_sizes(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    configs: list[PPOConfig] = []
    monkeypatch.setattr(api, "run_ppo", lambda config, on_step=None: configs.append(config) or 0)
    yaml_file = tmp_path / "mine.yaml"
    yaml_file.write_text("actor_rollout_ref: {rollout: {n: 2}}")

    def sizes(**more: Any) -> tuple[int, int]:
        data = str(files / "train.parquet")
        lockstep.train(files / "model", data, lambda completion: 1.0, run_dir=tmp_path / "run", **more)
        config = configs[-1]
        return config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size

    assert sizes() == (64, 64) and configs[-1].unset_sizes  # a small dataset may have fewer
    assert sizes(batch_size=512) == (512, 512)
    assert sizes(config={"data.train_batch_size": 32}) == (32, 32)
    assert sizes(**{"actor_rollout_ref.actor.ppo_mini_batch_size": 16}) == (64, 16)
    assert sizes(config=yaml_file) == (1024, 256)


def test_policy_of_a_run_without_checkpoint(tmp_path: Path) -> None:
    result = lockstep.TrainResult(tmp_path, lockstep.History([{"step": 2}]), finished=True)
    with pytest.raises(ValueError, match=r"global_step_2.*trainer\.save_freq"):
        result.policy  # noqa: B018
    assert lockstep.History().to_pandas().empty
