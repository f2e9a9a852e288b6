"""`lockstep generate` and `lockstep eval`: the numbers of a training run's validation, resumable, with clear errors."""

import io
import json
import logging
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from peft import LoraConfig, get_peft_model
from rich.console import Console
from transformers import AutoModelForCausalLM

from lockstep import cli
from lockstep.observability.batch_progress import BatchProgress
from lockstep.trainer import main_eval, main_generation, main_ppo
from lockstep.trainer.generation.generated_rows import GeneratedRows
from tests.tiny import write_rows

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    number = sum(ord(c) % 7 for c in solution_str) % 3
    return {"score": number / 10, "acc": number == 0, "pred": str(number)}
"""


@pytest.fixture
def command(tiny_run_files: Path, tmp_path: Path) -> list[str]:
    """Arguments of a small generation to `tmp_path/out.parquet`."""
    return [
        f"model.path={tiny_run_files}/model",
        f"data.path={tiny_run_files}/val.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        "data.n_samples=2",
        "data.batch_size=3",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        "trainer.device=cpu",
    ]


def rows_of(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return rows


SAMPLING = {
    "greedy": ["do_sample=false"],
    "sampled": ["do_sample=true", "temperature=0.8", "top_p=0.9"],
}


@pytest.mark.parametrize(
    ("kind", "n", "lora_rank"),
    [
        pytest.param("greedy", 1, 0, marks=pytest.mark.slow),
        ("sampled", 2, 0),
        pytest.param("sampled", 2, 4, marks=pytest.mark.slow),
    ],
)
def test_generate_and_eval_give_the_numbers_of_the_last_validation(
    kind: str, n: int, lora_rank: int, overrides: list[str], tiny_run_files: Path, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text(REWARD)
    scored_by = [f"custom_reward_function.path={tmp_path}/reward.py"]
    sampling = [f"rollout.val_kwargs.{setting}" for setting in (*SAMPLING[kind], f"n={n}")]
    steps = ["trainer.total_training_steps=2", "trainer.test_freq=2", "trainer.val_before_train=false"]
    run = ["algorithm=grpo", *overrides, *scored_by, *sampling, *steps, "rollout.n=2", "data.val_batch_size=3"]
    run += [f"actor_rollout_ref.model.lora_rank={lora_rank}", "actor_rollout_ref.actor.optim.lr=1e-2"]
    assert main_ppo.main(run) == 0
    last = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    trained = {name: value for name, value in last.items() if name.startswith(("val-core/", "val-aux/"))}
    assert f"val-core/openai/gsm8k/acc/{'mean@1' if n == 1 else 'maj@2/mean'}" in trained

    generate = [
        f"model.path={tmp_path}/run",
        f"data.path={tiny_run_files}/val.parquet",
        f"data.output_path={tmp_path}/out.parquet",
        f"data.n_samples={n}",
        "data.batch_size=2",  # the lengths are the run's
        "rollout.top_k=-1",
        "rollout.top_p=1.0",
        *(f"rollout.{setting}" for setting in SAMPLING[kind]),
    ]
    assert main_generation.main(generate) == 0
    scores = [f"data.path={tmp_path}/out.parquet", f"data.output_path={tmp_path}/metrics.json"]
    assert main_eval.main([*scores, *scored_by]) == 0
    evaluated = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert {name: evaluated[name] for name in trained} == trained


def test_jsonl_of_simple_rows_to_jsonl_and_its_scores(
    tiny_run_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Text prompts and answers, in short names; a finished output is recognised."""
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i), "level": i} for i in range(3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert set(extra_info) == {'index', 'prompt', 'answer', 'level'}\n"
        "    return float(int(ground_truth) == 2 * extra_info['level']) / 2\n"
    )
    output = tmp_path / "out.jsonl"
    command = [f"model={tiny_run_files}/model", f"data={tmp_path}/rows.jsonl", "n=2", f"data.output_path={output}"]
    command += ["max_prompt_length=40", "max_response_length=8", "trainer.device=cpu"]
    assert cli.main(["generate", *command]) == 0
    written = [json.loads(line) for line in output.read_text().splitlines()]
    assert [{name: row[name] for name in rows[0]} for row in written] == rows
    assert all(len(row["responses"]) == len(row["finish_reasons"]) == 2 for row in written)
    before = output.stat().st_mtime_ns
    assert cli.main(["generate", *command]) == 0 and output.stat().st_mtime_ns == before
    assert cli.main(["generate", *command, "rollout.temperature=0.5"]) == 2
    assert "another command: rollout.temperature was 1.0 and is 0.5" in capsys.readouterr().err

    metrics = f"data.output_path={tmp_path}/metrics.json"
    assert cli.main(["eval", f"data={output}", f"reward={tmp_path}/reward.py", metrics, "data.correct_score=0.5"]) == 0
    assert "is 0.5 or more (data.correct_score)" in " ".join(capsys.readouterr().out.split())
    saved = json.loads((tmp_path / "metrics.json").read_text())
    assert saved["metrics"]["val-core/default/reward/mean@2"] == 0.5 and saved["correct_score"] == 0.5
    assert saved["metrics"]["val-core/default/reward/pass@1"] == 1.0


def test_an_interrupted_command_goes_on_and_gives_the_same_samples(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["generate", *command]) == 0
    whole = rows_of(tmp_path / "out.parquet")
    assert [len(row["responses"]) for row in whole] == [2] * 4
    assert len({text for row in whole for text in row["responses"]}) > 4, "samples differ"
    assert all(length <= 8 for row in whole for length in row["response_lengths"])

    def killed(self: GeneratedRows, *args: Any) -> None:
        add(self, *args)
        (self.folder / ".00000001.parquet.1-0000abcd.tmp").write_bytes(b"half")
        raise KeyboardInterrupt

    add = GeneratedRows.add
    other = [*command, f"data.output_path={tmp_path}/other.parquet"]
    with monkeypatch.context() as patch:
        patch.setattr(GeneratedRows, "add", killed)
        assert main_generation.main(other) == 130
    parts = tmp_path / "other.parquet.parts"
    assert [part.name for part in parts.glob("*.parquet")] == ["00000000-00000002.parquet"]
    assert "run the same command" in capsys.readouterr().err

    generated: list[int] = []
    monkeypatch.setattr(
        GeneratedRows, "add", lambda self, rows, *more: (generated.extend(rows), add(self, rows, *more))
    )
    assert main_generation.main([*other, "data.batch_size=1"]) == 0
    assert generated == [3]
    assert rows_of(tmp_path / "other.parquet") == whole
    assert not parts.exists()

    assert main_generation.main(other) == 0, "the same command again has nothing to do"
    assert generated == [3]
    assert main_generation.main([*other, "rollout.temperature=0.5"]) == 2
    assert "another command: rollout.temperature was 1.0 and is 0.5. Delete it" in capsys.readouterr().err


def test_another_command_over_the_same_parts_is_refused(
    command: list[str],
    tiny_run_files: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(BatchProgress, "advance", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main_generation.main(command) == 130
    write_rows(tmp_path / "other.parquet", 3)
    changes = {
        "rollout.seed=7": "rollout.seed was 1 and is 7",
        "data.n_samples=3": "data.n_samples was 2 and is 3",
        f"data.path={tmp_path}/other.parquet": "the content of the data changed",
    }
    for change, message in changes.items():
        assert main_generation.main([*command, change]) == 2
        assert message in (error := capsys.readouterr().err) and "Run that command to go on" in error
    weights = tiny_run_files / "model" / "model.safetensors"
    before = weights.stat()
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    try:
        assert main_generation.main(command) == 2
        assert "the files of the model changed" in capsys.readouterr().err
    finally:
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))


def test_a_model_with_an_adapter(
    command: list[str], tiny_run_files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, adapter = tmp_path / "base", tmp_path / "run" / "global_step_1" / "actor" / "lora_adapter"
    shutil.copytree(tiny_run_files / "model", base)
    config = LoraConfig(r=2, target_modules=["q_proj"], base_model_name_or_path=str(base), init_lora_weights=False)
    get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(adapter)
    of_adapter = [*command, f"model.path={tmp_path}/run/global_step_1"]
    assert main_generation.main(of_adapter) == 0
    beside = [f"model.path={base}", "model.lora_rank=2", f"model.lora_adapter_path={adapter}"]
    assert main_generation.main([*command, *beside, f"data.output_path={tmp_path}/2.parquet"]) == 0
    assert rows_of(tmp_path / "out.parquet") == rows_of(tmp_path / "2.parquet")
    capsys.readouterr()
    os.utime(base / "model.safetensors", ns=(1, 1))
    assert main_generation.main(of_adapter) == 2
    assert "the files of the model changed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.path=nowhere/x/y"], "model.path=nowhere/x/y"),
        (["data.max_prompt_length=4"], "more than data.max_prompt_length=4"),
        (["data.prompt_key=question"], "has no 'question'; set data.prompt_key"),
        (["data.max_response_length=4000"], "the model has 256 positions"),
        (["model.lora_adapter_path=somewhere"], "needs model.lora_rank"),
        (["model.lora_rank=4", "model.target_modules=[foo]"], "error: model.target_modules=['foo'] matches no linear"),
    ],
)
def test_bad_input_is_one_message(
    command: list[str], overrides: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        assert main_generation.main([*command, *overrides]) == 2
    except SystemExit as ended:  # of the configuration
        assert ended.code == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    assert not (tmp_path / "out.parquet").exists()


ASK_AGAIN = """
from lockstep.agents.loops import AgentLoop


class AskAgain(AgentLoop):
    async def run(self, conversation):
        await conversation.generate(stop_token_ids=range(259))
        conversation.add([{"role": "user", "content": "again"}])
        await conversation.generate()
"""


TURNS_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return {"score": extra_info["num_turns"] - 2, "turn_rewards": [1.0 for m in extra_info["messages"] if m["role"] == "assistant"]}
"""


@pytest.mark.usefixtures("no_registrations")
def test_rows_of_agents_get_conversations(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "loop.py").write_text(ASK_AGAIN)
    write_rows(tmp_path / "rows.parquet", 4)
    own = [f"data.path={tmp_path}/rows.parquet", "data.max_response_length=60"]
    assert main_generation.main([*command, *own, "rollout.agent.default_agent_loop=tool_agent"]) == 2
    assert "needs tools or an interaction: set rollout.multi_turn.tool_config_path" in capsys.readouterr().err
    assert main_generation.main([*command, *own, f"rollout.agent.default_agent_loop={tmp_path}/loop.py:AskAgain"]) == 0
    rows = rows_of(tmp_path / "out.parquet")
    responses = [text for row in rows for text in row["responses"]]
    assert len(responses) == 8 and all("again" in text for text in responses)
    conversations = [json.loads(text) for row in rows for text in row["rollout_infos"]]
    assert [c["messages"][1]["content"] for c in conversations] == ["again"] * 8
    assert {c["num_turns"] for c in conversations} == {4}
    evaluation = [f"data.path={tmp_path}/out.parquet", f"custom_reward_function.path={tmp_path}/reward.py"]
    (tmp_path / "reward.py").write_text(TURNS_REWARD)
    assert main_eval.main([*evaluation, f"data.output_path={tmp_path}/metrics.json"]) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())["metrics"]
    assert [value for name, value in metrics.items() if name.endswith("/reward/mean@2")] == [4.0]
    assert main_eval.main([*evaluation, f"data.scores_path={tmp_path}/scores.jsonl"]) == 0
    scored = [json.loads(line) for line in (tmp_path / "scores.jsonl").read_text().splitlines()]
    assert [row["messages"][1]["content"] for row in scored] == ["again"] * 8


@pytest.mark.slow
@pytest.mark.usefixtures("no_registrations")
def test_conversations_in_an_agent_worker_are_the_same(command: list[str], tmp_path: Path) -> None:
    write_pid = "import os\nfrom pathlib import Path\nPath(__file__).with_name(f'pid{os.getpid()}').touch()\n"
    (tmp_path / "loop.py").write_text(ASK_AGAIN + write_pid)
    write_rows(tmp_path / "rows.parquet", 4)
    own = [f"data.path={tmp_path}/rows.parquet", f"rollout.agent.default_agent_loop={tmp_path}/loop.py:AskAgain"]
    responses = []
    for num_workers in (0, 1):
        output = [f"data.output_path={tmp_path}/{num_workers}.parquet", f"rollout.agent.num_workers={num_workers}"]
        assert main_generation.main([*command, *own, "data.max_response_length=60", *output]) == 0
        responses.append([row["responses"] for row in rows_of(tmp_path / f"{num_workers}.parquet")])
    assert responses[0] == responses[1] and len(list(tmp_path.glob("pid*"))) == 2


def test_rows_keep_their_columns_and_overlong_ones_can_be_dropped(command: list[str], tmp_path: Path) -> None:
    contents = ["1+1=", "x" * 60, "2+2="]
    rows: list[dict[str, Any]] = [
        {"prompt": [{"role": "user", "content": c}], "note": {"n": i}, "agent_name": "single_turn_agent"}
        for i, c in enumerate(contents)
    ]
    rows[2]["later"] = "only here"
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = [f"data.path={data}", "data.filter_overlong_prompts=true", "rollout.name=hf"]
    assert main_generation.main([*command, *own]) == 0
    written = rows_of(tmp_path / "out.parquet")
    added = ("responses", "response_lengths", "finish_reasons")
    assert [{n: v for n, v in row.items() if n not in added} for row in written] == [rows[0] | {"later": None}, rows[2]]
    assert all(set(row["finish_reasons"]) <= {"stop", "length"} for row in written)

    assert (
        main_generation.main([*command, f"data.path={tmp_path}/out.parquet", f"data.output_path={tmp_path}/2.parquet"])
        == 2
    )


def test_values_of_environment_variables_are_in_no_file(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GENERATION_KEY", "s3cret")
    own = "+data.apply_chat_template_kwargs.key=${oc.env:GENERATION_KEY}"
    with monkeypatch.context() as patch:
        patch.setattr(BatchProgress, "advance", lambda *args: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main_generation.main([*command, own]) == 130
    assert "${oc.env:GENERATION_KEY}" in next(tmp_path.glob("*.parts/job.json")).read_text()
    assert next(tmp_path.glob("*.parts")).stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv("GENERATION_KEY", "an0ther-s3cret")
    assert main_generation.main([*command, own]) == 0
    assert b"s3cret" not in (tmp_path / "out.parquet").read_bytes()


def test_a_row_cannot_name_code(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "planted.py").write_text(f"open('{tmp_path}/marker', 'w')\n")
    row = {"prompt": [{"role": "user", "content": "1+1="}], "agent_name": f"{tmp_path}/planted.py:Loop"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    assert main_generation.main([*command, f"data.path={tmp_path}/rows.jsonl"]) == 2
    message = capsys.readouterr().err
    assert (
        f"{tmp_path}/rows.jsonl, row 0: agent_name=" in message and " rollout.agent.agent_loop_config_path" in message
    )
    assert not (tmp_path / "marker").exists()


def test_progress_on_a_terminal_and_in_a_log(caplog: pytest.LogCaptureFixture) -> None:
    screen = io.StringIO()
    with BatchProgress(8, done=2, console=Console(file=screen, force_terminal=True, width=100)) as progress:
        progress.advance(3, 3000)
    assert re.search(r"5/8 prompts, [\d,.e+]+ tok/s, \d+ s left", screen.getvalue())
    with caplog.at_level(logging.INFO), BatchProgress(2, console=Console(file=io.StringIO())) as progress:
        progress.advance(1, 10)  # too early for a line
        progress.advance(1, 10)
    assert [message.partition(",")[0] for message in caplog.messages] == ["2/2 prompts"]
