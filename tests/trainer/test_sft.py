"""SFT: the loss and its gradient are those of a plain transformers loop, however the batch is split; runs resume exactly."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.sft import SFTConfig
from lockstep.data.sft_dataset import MultiTurnSFTDataset, SFTDataset
from lockstep.observability.glossary import explain
from lockstep.trainer.fsdp_sft_trainer import main
from lockstep.trainer.run.errors import RunError
from lockstep.trainer.supervised.batches import collate, share_of
from lockstep.trainer.supervised.command import run_training
from lockstep.trainer.supervised.runner import build
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from tests.hub import use_hub, write_cache
from tests.metrics import metrics_of, numbers_of
from tests.programs import Program
from tests.tiny import save_tiny_model

pytestmark = pytest.mark.first

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and pairs of unequal length; some prompts occur twice."""
    folder = tmp_path_factory.mktemp("sft")
    save_tiny_model(folder / "model")
    pairs = [{"question": f"{i % 9}+{i % 4}=", "answer": str(i % 9 + i % 4) + " so" * (i % 5)} for i in range(20)]
    for name, rows in (("train", pairs), ("val", pairs[:5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def overrides(files: Path, tmp_path: Path) -> list[str]:
    return [
        f"model.path={files}/model",
        f"data.train_files={files}/train.jsonl",
        f"data.val_files={files}/val.jsonl",
        "data.train_batch_size=5",
        "data.max_length=64",
        "optim.lr=1e-3",
        "trainer.total_epochs=2",
        "trainer.test_freq=4",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
    ]


def trainer_of(*overrides: str) -> SupervisedTrainer:
    trainer = build(load_config(SFTConfig, overrides), rank=0, world_size=1)
    trainer.load_model()
    return trainer


def plain_loop(model_path: Path, trainer: SupervisedTrainer, num_steps: int) -> list[float]:
    """Losses of a transformers loop on the trainer's batches: one padded forward, labels of -100 outside the responses."""
    model = AutoModelForCausalLM.from_pretrained(model_path).float()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, 1, num_steps)
    losses = []
    for _ in range(2):
        for batch in trainer.loader:
            ids, width = batch["input_ids"], batch["responses"].shape[1]
            labels = torch.full_like(ids, -100)
            labels[:, -width:] = torch.where(batch["response_mask"].bool(), ids[:, -width:], -100)
            logits = model(ids, attention_mask=batch["attention_mask"], position_ids=batch["position_ids"]).logits
            loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
    return losses


@pytest.mark.parametrize("strategy", ["fsdp", f"{ROOT}/examples/plugins/training_engine.py:PlainEngine"])
def test_learning_curve_is_that_of_a_plain_transformers_loop(
    strategy: str, overrides: list[str], files: Path, tmp_path: Path
) -> None:
    budget = ["data.max_token_len_per_gpu=64", "optim.lr_warmup_steps=1"]  # one or two packed rows per micro-batch
    assert cli.main(["sft", *overrides, *budget, f"model.strategy={strategy}"]) == 0
    trainer = build(load_config(SFTConfig, overrides), rank=0, world_size=1)
    expected = plain_loop(files / "model", trainer, num_steps=8)
    steps = metrics_of(tmp_path / "run")
    assert [step["train/loss"] for step in steps] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.3
    assert [step["step"] for step in steps if "val/loss" in step] == [4, 8]
    assert [step["train/lr"] for step in steps[:3]] == pytest.approx([0.0, 1e-3, 1e-3 * 0.950484], rel=1e-4)
    assert {"train/grad_norm", "train/global_tokens", "train/total_tokens(B)", "perf/throughput"} <= set(steps[0])
    names = {name for step in steps for name in step} - {"step", "time"}
    assert [name for name in names if explain(name) is None] == [], "add them to lockstep/observability/glossary.py"

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "global_step_8" / "huggingface")
    val_rows = SFTDataset(str(files / "val.jsonl"), trainer.tokenizer, trainer.config.data)
    total = count = 0.0
    with torch.no_grad():
        for i in range(len(val_rows)):
            ids, mask = val_rows[i]["input_ids"], val_rows[i]["loss_mask"].bool()
            log_probs = saved(ids[None]).logits[0, :-1].log_softmax(-1)
            total -= float(log_probs.gather(-1, ids[1:, None])[mask[1:]].sum())
            count += int(mask.sum())
    assert steps[-1]["val/loss"] == pytest.approx(total / count, abs=1e-5)


def test_split_and_layout_do_not_change_the_step(overrides: list[str]) -> None:
    def step(*changes: str) -> tuple[dict[str, Any], torch.Tensor]:
        trainer = trainer_of(*overrides, "data.train_batch_size=8", *changes)
        metrics = trainer.train_batch(next(iter(trainer.loader)))
        return metrics, torch.cat([weight.flatten() for _, weight in trainer.engine.weights()])

    whole, weights = step("data.use_dynamic_bsz=false")
    for changes in (
        ["data.micro_batch_size_per_gpu=3"],
        ["data.max_token_len_per_gpu=70", "model.use_remove_padding=false"],
    ):
        metrics, changed = step(*changes)
        for name in ("train/loss", "train/grad_norm"):
            assert metrics[name] == pytest.approx(whole[name], rel=1e-5)
        assert metrics["train/loss_tokens"] == whole["train/loss_tokens"]
        torch.testing.assert_close(changed, weights, rtol=0, atol=1e-6)


@pytest.mark.slow
def test_two_ranks_of_torchrun_train_as_one(overrides: list[str], tmp_path: Path) -> None:
    """5 rows per step on 2 ranks: one row of padding."""
    steps = ["trainer.total_training_steps=4", "trainer.save_freq=2"]
    assert main([*overrides, *steps, f"trainer.default_local_dir={tmp_path}/one"]) == 0
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command += ["-m", "lockstep.trainer.fsdp_sft_trainer", *overrides, *steps]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    one, two = (metrics_of(tmp_path / name) for name in ("one", "run"))
    for name in ("train/loss", "train/grad_norm", "train/lr", "train/global_tokens"):
        assert [step[name] for step in two] == pytest.approx([step[name] for step in one], rel=1e-5), name
    assert two[-1]["val/loss"] == pytest.approx(one[-1]["val/loss"], rel=1e-5)
    weights = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name / "global_step_4" / "huggingface").state_dict()
        for name in ("one", "run")
    ]
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=0, atol=1e-6)
    assert done.stdout.count("step 1/4") == 1  # only rank 0 logs


KILLER = """
import os, signal
class Tracker:
    def __init__(self, run): pass
    def log(self, data, step):
        if step == int(os.environ["AT_STEP"]):
            os.kill(os.getpid(), int(os.environ["BY_SIGNAL"]))
    def log_table(self, *args): pass
    def finish(self): pass
"""


def test_killed_and_stopped_runs_resume_bit_for_bit(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "killer.py").write_text(KILLER)
    command = [*overrides, "trainer.save_freq=2", "data.max_token_len_per_gpu=64"]
    whole = [*command, f"trainer.default_local_dir={tmp_path}/whole"]
    assert main(whole) == 0

    signals = [*command, f"trainer.logger={tmp_path}/killer.py:Tracker"]
    variables = {"AT_STEP": "3", "BY_SIGNAL": str(signal.SIGKILL.value)}
    killed = Program("lockstep.trainer.fsdp_sft_trainer", signals, tmp_path, **variables)
    assert killed.wait() == -signal.SIGKILL
    monkeypatch.setenv("AT_STEP", "4")  # of the resumed run, which then finishes step 5 and saves it
    monkeypatch.setenv("BY_SIGNAL", str(signal.SIGINT.value))
    assert main(signals) == 130
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "5"
    assert main(command) == 0

    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    weights = [tmp_path / name / "global_step_8/huggingface/model.safetensors" for name in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    before = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert main(command) == 0  # nothing to do
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == before


TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yes."},
]


def test_conversations_are_found_by_their_column_and_train(
    overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    rows = [{"messages": TALK, "tools": tools if i % 2 else None} for i in range(6)]
    (tmp_path / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    template = (
        "{% if tools %}tools: {{ tools | tojson }} {% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }} "
        "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    config = [*overrides, f"data.train_files={tmp_path}/talk.jsonl", "data.val_files=[]", "data.train_batch_size=2"]
    config += [f'model.custom_chat_template="{template}"', "data.max_length=250", "trainer.total_training_steps=2"]
    trainer = build(load_config(SFTConfig, config), rank=0, world_size=1)
    assert isinstance(trainer.loader.dataset, MultiTurnSFTDataset)
    batch = collate([trainer.loader.dataset[1]])
    responses, mask = batch["responses"][0], batch["response_mask"][0].bool()
    assert trainer.tokenizer.decode(responses[mask]) == "4<|im_end|>Yes.<|im_end|>"
    assert '"add"' in trainer.tokenizer.decode(batch["input_ids"][0])
    assert main(config) == 0
    assert len(metrics_of(tmp_path / "run")) == 2
    assert main([*config, "data.multiturn.enable=false"]) == 2
    assert "row 0 has no 'question'; set data.prompt_key" in capsys.readouterr().err


def sample(ids: list[int], mask: list[int], **more: list[int]) -> dict[str, torch.Tensor]:
    columns = {"input_ids": ids, "loss_mask": mask, **more}
    return {name: torch.tensor(values) for name, values in columns.items()}


def test_rows_have_the_layout_of_the_engine() -> None:
    """Never-trained tokens: the first of a sequence, and padding of a custom dataset."""
    batch = collate(
        [
            sample([5, 6, 7, 8], [0, 0, 0, 1]),
            sample([5, 6, 7], [0, 1, 1], position_ids=[0, 3, 4]),
            sample([5, 6], [1, 1]),
            sample([4, 9, 0], [0, 0, 0], attention_mask=[1, 1, 0]),
        ]
    )
    assert batch["input_ids"].tolist() == [[5, 6, 7, 8, 0], [0, 0, 5, 6, 7], [0, 0, 5, 6, 0], [0, 0, 4, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 0, 1, 1, 0], [0, 0, 1, 1, 0]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 3, 0], [0, 0, 0, 3, 4], [0, 0, 0, 1, 0], [0, 0, 0, 1, 0]]
    assert batch["response_mask"].tolist() == [[1, 0], [1, 1], [1, 0], [0, 0]]
    assert batch["responses"].tolist() == [[8, 0], [6, 7], [6, 0], [9, 0]]


def test_shares_hold_every_row_once_and_balance_tokens() -> None:
    lengths = [9, 2, 2, 2, 2, 3, 8]
    batch = collate([sample(list(range(3, 3 + n)), [0] + [1] * (n - 1)) for n in lengths])
    shares = [share_of(batch, rank, 2, balance=True) for rank in range(2)]
    assert {count for _, count in shares} == {sum(lengths) - len(lengths)}
    tokens = [int(rows["response_mask"].sum()) for rows, _ in shares]
    assert sum(tokens) == sum(lengths) - len(lengths) and abs(tokens[0] - tokens[1]) <= 1
    assert {len(rows) for rows, _ in shares} == {4}


@pytest.mark.parametrize(
    ("changes", "code", "message"),
    [
        (["data.train_fils=x"], 2, "data.train_fils=x: no such key. Did you mean data.train_files?"),
        (["model.path=nowhere"], 2, "model.path=nowhere: no such folder"),
        (["model.lora_rank=-8"], 2, "model.lora_rank=-8: must be 0 or more"),
        (["data.max_length=4"], 2, "tokens, but at most 4 are allowed by data.max_length"),
        (["data.max_length=4", "data.truncation=right"], 1, "no token of the batch is trained"),
        (["data.train_batch_size=21"], 2, "data.train_batch_size=21, but the dataset has only 20 rows"),
        (["trainer.device=cuda"], 2, "no CUDA device is visible"),
    ],
)
def test_bad_input_is_one_clear_message(
    changes: list[str], code: int, message: str, overrides: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    if "cuda" in changes[0] and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    try:
        ended = main([*overrides, *changes])
    except SystemExit as stop:
        ended = stop.code
    shown = capfd.readouterr().err
    assert ended == code and message in shown and "Traceback" not in shown


def test_other_ranks_report_a_config_error_after_the_first(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        with pytest.raises(SystemExit) as stopped:
            main(["data.nope=1"])
        assert stopped.value.code == 2 and "data.nope=1: no such key" in capsys.readouterr().err
    assert waits == [3.0]


def test_values_of_environment_variables_are_in_no_file(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = ["trainer.project_name=${oc.env:PROJECT}", "trainer.logger=[console,tensorboard]"]
    for step, secret in enumerate(("s3cret-1", "s3cret-2"), start=1):
        monkeypatch.setenv("PROJECT", secret)
        assert main([*overrides, *own, f"trainer.total_training_steps={step}"]) == 0
    holding = [path for path in (tmp_path / "run").rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]
    assert holding == []
    assert "${oc.env:PROJECT}" in (tmp_path / "run/global_step_2/config.yaml").read_text()


def test_another_experiment_in_the_folder_is_refused(
    overrides: list[str], files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*overrides, "trainer.total_training_steps=1"]) == 0
    (tmp_path / "other.jsonl").write_bytes((files / "train.jsonl").read_bytes())
    assert main([*overrides, f"data.train_files={tmp_path}/other.jsonl"]) == 2
    shown = capsys.readouterr().err
    assert "has checkpoints of another experiment: data.train_files was" in shown
    assert "model.path set to one of its checkpoints (global_step_N)" in shown


def test_model_and_data_by_name(
    overrides: list[str], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Hub model with a folder of splits; the next run starts from the checkpoint's folder."""
    use_hub(monkeypatch, tmp_path / "cache", offline=True)
    write_cache(tmp_path / "cache", "org/model", files / "model")
    folder = tmp_path / "rows"
    folder.mkdir()
    for name in ("train", "val"):
        (folder / f"{name}.jsonl").write_bytes((files / f"{name}.jsonl").read_bytes())
    data = [f"data.train_files={folder}", f"data.val_files={folder}", "trainer.total_training_steps=1"]
    assert main([*overrides, *data, "model.path=org/model"]) == 0
    (step,) = metrics_of(tmp_path / "run")
    local = [*overrides, "trainer.total_training_steps=1", f"trainer.default_local_dir={tmp_path}/local"]
    assert main(local) == 0
    (expected,) = metrics_of(tmp_path / "local")
    assert (step["train/loss"], step["val/loss"]) == (expected["train/loss"], expected["val/loss"])
    again = [*overrides, *data, f"model.path={tmp_path}/run/global_step_1"]
    assert main([*again, f"trainer.default_local_dir={tmp_path}/again"]) == 0


def test_what_is_outside_the_config_is_checked_first(
    overrides: list[str], files: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_bytes((files / "model" / "config.json").read_bytes())
    (tmp_path / "mine.py").write_text("def rows(path): ...\n")
    (tmp_path / "file").write_text("")
    wrong = [f"model.path={tmp_path}/bare", f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=rows"]
    wrong += [f"trainer.default_local_dir={tmp_path}/file/run"]
    assert main([*overrides, *wrong]) == 2
    shown = capsys.readouterr().err
    assert f"error: model.path={tmp_path}/bare: no weights" in shown and "Traceback" not in shown
    assert "error: data.custom_cls.path: " in shown and "parquet_files" in shown
    assert "error: " in shown and "trainer.default_local_dir" in shown
    with pytest.raises(RunError, match="no weights") as caught:
        run_training(load_config(SFTConfig, [*overrides, *wrong]))
    assert caught.value.exit_code == 2


def test_custom_dataset_class(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import Dataset\n"
        "class Padded(Dataset):\n"
        "    def __init__(self, parquet_files, tokenizer, config, max_samples=-1): self.width = config.max_length\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n"
        "        ids = torch.zeros(self.width, dtype=torch.long); ids[:4] = torch.tensor([5, 6, 7, 8 + i])\n"
        "        mask = (ids > 0).long()\n"
        "        return {'input_ids': ids, 'attention_mask': mask, 'loss_mask': mask * (ids > 6)}\n"
    )
    custom = [f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=Padded", "data.val_files=[]"]
    assert main([*overrides, *custom, "trainer.total_training_steps=1"]) == 0
    (step,) = metrics_of(tmp_path / "run")
    assert (step["train/global_tokens"], step["train/loss_tokens"]) == (20, 10)
