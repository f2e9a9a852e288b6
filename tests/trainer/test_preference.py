"""Reward models and DPO: the numbers are those of a plain transformers loop, however the batch is split; runs resume exactly; PPO
uses the reward model."""

import json
from collections.abc import Callable
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, relu
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    get_cosine_schedule_with_warmup,
)

from lockstep import cli
from lockstep.config.compose import load_config
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.observability.glossary import explain
from lockstep.trainer import main_dpo, main_ppo, main_rm
from lockstep.trainer.supervised.batches import collate_pairs, share_of_pairs
from lockstep.trainer.supervised.runner import build
from lockstep.trainer.supervised.trainer import SupervisedTrainer
from tests.engines.train.ranks import Ranks, run_program
from tests.metrics import metrics_of, numbers_of
from tests.tiny import save_tiny_model, small_run, write_rows

CONFIGS: dict[str, Any] = {"rm": RMConfig, "dpo": DPOConfig}
MAINS = {"rm": main_rm.main, "dpo": main_dpo.main}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """model/, and pairs of unequal length; some prompts occur twice."""
    folder = tmp_path_factory.mktemp("preference")
    save_tiny_model(folder / "model")
    rows = [
        {
            "prompt": f"{i % 9}+{i % 4}=",
            "chosen": str(i % 9 + i % 4) + "." * (i % 3),
            "rejected": str(7 * (i % 9) + 20) + " so" * (i % 5),
            "gap": i % 3 / 2,
        }
        for i in range(20)
    ]
    for name, part in (("train", rows), ("val", rows[:5])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
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
        "optim.lr_warmup_steps=0",
        "trainer.total_epochs=2",
        "trainer.test_freq=4",
        "trainer.device=cpu",
        f"trainer.default_local_dir={tmp_path}/run",
    ]


def trainer_of(program: str, *overrides: str) -> SupervisedTrainer:
    trainer = build(load_config(CONFIGS[program], overrides), rank=0, world_size=1)
    trainer.load_model()
    return trainer


def plain_loop(
    model: nn.Module, trainer: SupervisedTrainer, num_steps: int, loss_of: Callable[[TensorDict], Tensor]
) -> list[float]:
    """Losses of a torch loop on the trainer's batches."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = get_cosine_schedule_with_warmup(optimizer, 0, num_steps)
    losses: list[float] = []
    for batch in islice(chain(trainer.loader, trainer.loader), num_steps):
        loss = loss_of(batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def padded(batch: TensorDict) -> dict[str, Tensor]:
    return {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids")}


def last_scores(model: Any, batch: TensorDict) -> Tensor:
    """A sequence classifier's score at the last token of each row."""
    last = (batch["attention_mask"] * torch.arange(batch["attention_mask"].shape[1])).argmax(-1)
    hidden = model.model(**padded(batch)).last_hidden_state
    scores: Tensor = model.score(hidden[torch.arange(len(last)), last]).squeeze(-1)
    return scores


def test_reward_model_learns_as_in_a_plain_loop(overrides: list[str], tmp_path: Path) -> None:
    options = [*overrides, "data.margin_key=gap", "rm.center_rewards_coefficient=0.01"]
    assert cli.main(["rm", *options, "data.max_token_len_per_gpu=128"]) == 0  # one or two pairs per micro-batch
    trainer = trainer_of("rm", *options)
    model = AutoModelForSequenceClassification.from_pretrained(
        tmp_path / "run" / "global_step_8" / "huggingface", num_labels=1, dtype=torch.float32
    )
    start = AutoModelForCausalLM.from_pretrained(trainer.config.model.path).model.state_dict()
    model.model.load_state_dict(start)
    with torch.no_grad():
        model.score.weight.copy_(dict(trainer.engine.weights())["score.weight"])

    def loss_of(batch: TensorDict) -> Tensor:
        scores = last_scores(model, batch)
        chosen, rejected, gap = scores[0::2], scores[1::2], batch["margin"][0::2]
        return (-logsigmoid(chosen - rejected - gap) + 0.01 * (chosen + rejected) ** 2).mean()

    expected = plain_loop(model, trainer, 8, loss_of)
    steps = metrics_of(tmp_path / "run")
    assert [step["train/loss"] for step in steps] == pytest.approx(expected, abs=1e-5)
    assert expected[-1] < expected[0] - 0.1 and steps[-1]["train/accuracy"] == 1.0
    names = {name for step in steps for name in step} - {"step", "time"}
    assert {"train/margin", "train/score", "train/pairs", "val/accuracy", "val/loss", "val/margin"} <= names
    assert [name for name in names if explain(name) is None] == [], "add them to lockstep/observability/glossary.py"


DPO_LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda h: -0.9 * logsigmoid(0.2 * h) - 0.1 * logsigmoid(-0.2 * h),
    "hinge": lambda h: relu(1 - 0.2 * h),
    "ipo": lambda h: (h - 2.5) ** 2,
}


@pytest.mark.parametrize("loss_type", list(DPO_LOSSES))
def test_dpo_learns_as_in_a_plain_loop(overrides: list[str], tmp_path: Path, loss_type: str) -> None:
    num_steps = 8 if loss_type == "sigmoid" else 2
    options = [*overrides, f"dpo.loss_type={loss_type}", "dpo.beta=0.2", f"trainer.total_training_steps={num_steps}"]
    options += ["dpo.label_smoothing=0.1"] if loss_type == "sigmoid" else []
    assert cli.main(["dpo", *options, "data.max_token_len_per_gpu=128"]) == 0
    trainer = build(load_config(DPOConfig, options), rank=0, world_size=1)
    model, reference = (AutoModelForCausalLM.from_pretrained(trainer.config.model.path).float() for _ in range(2))
    rewards: list[list[float]] = []

    def log_probs(of: nn.Module, batch: TensorDict) -> Tensor:
        answers, mask = batch["responses"], batch["response_mask"]
        logits = of(**padded(batch)).logits[:, -answers.shape[1] - 1 : -1]
        tokens = logits.log_softmax(-1).gather(-1, answers[..., None]).squeeze(-1) * mask
        return tokens.sum(-1) / (mask.sum(-1) if loss_type == "ipo" else 1)

    def loss_of(batch: TensorDict) -> Tensor:
        with torch.no_grad():
            before = log_probs(reference, batch)
        moved = log_probs(model, batch) - before
        rewards.append([float(0.2 * side.detach().mean()) for side in (moved[0::2], moved[1::2])])
        return DPO_LOSSES[loss_type](moved[0::2] - moved[1::2]).mean()

    expected = plain_loop(model, trainer, num_steps, loss_of)
    steps = metrics_of(tmp_path / "run")
    assert [step["train/loss"] for step in steps] == pytest.approx(expected, abs=1e-5, rel=1e-5)
    for i, name in enumerate(("rewards/chosen", "rewards/rejected")):
        assert [step[name] for step in steps] == pytest.approx([pair[i] for pair in rewards], abs=1e-5)
    if loss_type == "sigmoid":
        assert expected[-1] < expected[0] - 0.05 and steps[-1]["rewards/accuracies"] > 0.5
        assert steps[-1]["rewards/margins"] == pytest.approx(
            steps[-1]["rewards/chosen"] - steps[-1]["rewards/rejected"], abs=1e-5
        )
        names = {name for step in steps for name in step} - {"step", "time"}
        assert {"logps/chosen", "logps/rejected", "val/loss", "val/rewards/accuracies"} <= names
        assert [name for name in names if explain(name) is None] == [], "add them to lockstep/observability/glossary.py"


@pytest.mark.parametrize("program", ["rm", "dpo"])
def test_split_and_layout_do_not_change_the_step(program: str, overrides: list[str], tmp_path: Path) -> None:
    def step(*changes: str) -> tuple[dict[str, Any], torch.Tensor]:
        folder = f"trainer.default_local_dir={tmp_path}/{len(changes)}{changes[0].rpartition('=')[2]}"
        trainer = trainer_of(program, *overrides, "data.train_batch_size=8", *changes, folder)
        trainer.start()
        metrics = trainer.train_batch(next(iter(trainer.loader))) | trainer.validate()
        metrics.pop("rewards/accuracies", None)  # rounding decides it before the first update
        trainer.close()
        return metrics, torch.cat([weight.flatten() for _, weight in trainer.engine.weights()])

    whole, weights = step("data.use_dynamic_bsz=false")
    for changes in (
        ["data.micro_batch_size_per_gpu=3"],
        ["data.max_token_len_per_gpu=130"],
        ["data.max_token_len_per_gpu=130", "model.use_remove_padding=false"],
    ):
        metrics, changed = step(*changes)
        assert metrics == pytest.approx(whole, rel=1e-4, abs=1e-5)
        torch.testing.assert_close(changed, weights, rtol=0, atol=1e-5)


def test_shares_hold_every_pair_once() -> None:
    def sample(ids: list[int]) -> dict[str, Tensor]:
        return {"input_ids": torch.tensor(ids), "loss_mask": torch.tensor([0] + [1] * (len(ids) - 1))}

    lengths = [9, 2, 3, 2, 8]
    batch = collate_pairs(
        [
            {"chosen": sample([i, *range(50, 50 + n)]), "rejected": sample([i, 60]), "margin": torch.tensor(float(i))}
            for i, n in enumerate(lengths, start=1)
        ]
    )
    shares = [share_of_pairs(batch, rank, 2, balance=True) for rank in range(2)]
    assert {count for _, count in shares} == {5} and {len(rows) for rows, _ in shares} == {6}
    seen = []
    for rows, _ in shares:
        assert rows["margin"][0::2].tolist() == rows["margin"][1::2].tolist()
        is_data = rows["is_data"].bool()
        seen += rows["margin"][is_data][0::2].tolist()
        assert not rows["response_mask"][~is_data].any() and (rows["attention_mask"][~is_data].sum(-1) == 1).all()
    assert sorted(seen) == [1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.slow
def test_two_ranks_train_as_one(overrides: list[str], tmp_path: Path) -> None:
    """5 pairs per step on 2 ranks, so one of them is padding; or the ranks share each sequence."""
    steps = [*overrides, "trainer.total_training_steps=3", "trainer.test_freq=3"]
    split = "model.fsdp_config.ulysses_sequence_parallel_size=2"
    runs = {f"{program}{i}": (program, more) for program in MAINS for i, more in enumerate(([], [split]))}
    for program, main in MAINS.items():
        assert main([*steps, f"trainer.default_local_dir={tmp_path}/{program}"]) == 0
    ranks = Ranks()
    try:
        for name, (program, more) in runs.items():
            arguments = [*steps, *more, f"trainer.default_local_dir={tmp_path}/{name}"]
            assert ranks.run(2, run_program, MAINS[program].__module__, arguments) == [0, 0]
    finally:
        ranks.close()
    for name, (program, _) in runs.items():
        one, two = numbers_of(tmp_path / program), numbers_of(tmp_path / name)
        for first in (one[0], two[0]):
            first.pop("rewards/accuracies", None)  # rounding decides it before the first update
        for ours, theirs in zip(two, one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5), name
        weights = [load_file(tmp_path / run / "global_step_3/huggingface/model.safetensors") for run in (program, name)]
        for key, value in weights[0].items():
            torch.testing.assert_close(weights[1][key], value, rtol=0, atol=1e-5)


CRASH = """
class Tracker:
    def __init__(self, run): pass
    def log(self, data, step):
        if step == 3:
            raise KeyboardInterrupt  # not a signal: nothing is saved
    def log_table(self, *args): pass
    def finish(self): pass
"""


@pytest.mark.parametrize("program", ["rm", "dpo"])
def test_runs_resume_bit_for_bit(
    program: str, overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "crash.py").write_text(CRASH)
    main, base = MAINS[program], [*overrides, "trainer.save_freq=2", "data.max_token_len_per_gpu=128"]
    base += ["trainer.total_training_steps=4"]
    assert main([*base, f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    assert main([*base, f"trainer.logger={tmp_path}/crash.py:Tracker"]) == 130
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "2"
    monkeypatch.setattr("lockstep.trainer.supervised.dpo.DPOTrainer.reference_log_probs", None)  # they are in a file
    assert main(base) == 0
    assert numbers_of(tmp_path / "run") == numbers_of(tmp_path / "whole")
    weights = [tmp_path / name / "global_step_4/huggingface/model.safetensors" for name in ("run", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_reference_is_the_starting_model(
    overrides: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also if its file is lost after training has begun, or was computed for other sequences."""
    assert main_dpo.main([*overrides, "trainer.total_training_steps=3", "optim.total_training_steps=8"]) == 0
    file = tmp_path / "run" / "reference_log_probs.safetensors"
    before = file.read_bytes()
    file.unlink()
    assert main_dpo.main([*overrides, "trainer.total_training_steps=4", "optim.total_training_steps=8"]) == 0
    assert file.read_bytes() == before
    template = "model.custom_chat_template=\"{% for m in messages %}{{ m['content'] }}: {% endfor %}\""
    assert main_dpo.main([*overrides, "trainer.total_training_steps=5", template]) == 0
    assert "is of other data or another model; computing it again" in caplog.text and file.read_bytes() != before


def test_reward_model_with_adapters_is_exported_merged(overrides: list[str], tmp_path: Path) -> None:
    assert main_rm.main([*overrides, "model.lora_rank=4", "optim.lr=0.01", "trainer.total_training_steps=2"]) == 0
    assert cli.main(["export", f"{tmp_path}/run", "-o", f"{tmp_path}/merged"]) == 0
    (head,) = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").score.weight
    trained = load_file(tmp_path / "run/global_step_2/lora_adapter/adapter_model.safetensors")
    assert torch.equal(head[None], trained["base_model.model.score.weight"])


def test_ppo_scores_with_the_trained_reward_model(
    overrides: list[str], files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main_rm.main([*overrides, "trainer.total_training_steps=4"]) == 0
    folder = tmp_path / "run" / "global_step_4"
    classifier = AutoModelForSequenceClassification.from_pretrained(folder / "huggingface")
    assert classifier.config.num_labels == 1

    trainer = trainer_of("rm", *overrides, f"model.path={folder}", f"trainer.default_local_dir={tmp_path}/again")
    batch = next(iter(trainer.loader))
    own = trainer.engine.forward(batch, trainer.micro, at_end=True)["score"]
    with torch.no_grad():
        theirs = last_scores(classifier, batch)
    torch.testing.assert_close(own, theirs, rtol=0, atol=1e-5)

    for name in ("train", "val"):
        write_rows(tmp_path / f"{name}.parquet", 4)
    (tmp_path / "model").symlink_to(files / "model")
    options = [*small_run(tmp_path)[:8], "algorithm=grpo", "actor_rollout_ref.rollout.n=2", "trainer.device=cpu"]
    options += ["reward_model.enable=true", f"reward_model.model.path={folder}", "trainer.total_training_steps=1"]
    options += [f"trainer.rollout_data_dir={tmp_path}/rollouts", f"trainer.default_local_dir={tmp_path}/ppo"]
    scored: list[tuple[TensorDict, Tensor]] = []
    forward = FsdpEngine.forward

    def recorded(self: FsdpEngine, batch: TensorDict, micro: MicroBatching, **how: object) -> dict[str, Tensor]:
        outputs = forward(self, batch, micro, **how)
        if how.get("at_end"):
            scored.append((batch, outputs["score"]))
        return outputs

    monkeypatch.setattr(FsdpEngine, "forward", recorded)
    assert main_ppo.main([*options, "trainer.test_freq=-1", "trainer.val_before_train=false"]) == 0
    ((rollouts, scores),) = scored
    with torch.no_grad():
        torch.testing.assert_close(scores, last_scores(classifier, rollouts), rtol=0, atol=1e-5)
    rows = [json.loads(line) for line in (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()]
    assert sorted(row["score"] for row in rows) == pytest.approx(sorted(scores.tolist()), abs=1e-6)
    (step,) = metrics_of(tmp_path / "ppo")
    assert step["critic/score/mean"] == pytest.approx(float(scores.mean()), abs=1e-6)


def test_custom_dataset_class(overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "from torch.utils.data import Dataset\n"
        "class Pairs(Dataset):\n"
        "    def __init__(self, parquet_files, tokenizer, config, max_samples=-1): pass\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i):\n"
        "        side = lambda *ids: {'input_ids': torch.tensor(ids), 'loss_mask': torch.tensor([0, 0, 1, 1])}\n"
        "        return {'chosen': side(5, 6, 7, 8 + i), 'rejected': side(5, 6, 9, 8 + i)}\n"
    )
    custom = [f"data.custom_cls.path={tmp_path}/mine.py", "data.custom_cls.name=Pairs", "data.val_files=[]"]
    assert main_dpo.main([*overrides, *custom, "trainer.total_training_steps=1"]) == 0
    (step,) = metrics_of(tmp_path / "run")
    assert (step["train/global_tokens"], step["train/pairs"]) == (40, 5)


@pytest.mark.parametrize(
    ("program", "changes", "message"),
    [
        ("rm", ["data.chosn_key=x"], "data.chosn_key=x: no such key. Did you mean data.chosen_key?"),
        (
            "rm",
            ["data.chosen_key=best"],
            "row 0 has no 'best'; set data.chosen_key to the column with the chosen answer",
        ),
        ("rm", ["data.margin_key=prompt"], "the margin 'prompt' must be a number"),
        ("rm", ["rm.center_rewards_coefficient=-1"], "rm.center_rewards_coefficient=-1.0: must be 0 or more"),
        ("rm", ["data.max_length=8"], "tokens, but at most 8 are allowed by data.max_length"),
        ("dpo", ["data.rejected_key=chosen"], "(data.chosen_key, data.rejected_key) are equal"),
        ("dpo", ["data.margin_key=gap"], "data.margin_key=gap: no such key"),
        ("dpo", ["dpo.beta=0"], "dpo.beta=0.0: must be greater than 0"),
        ("dpo", ["dpo.label_smoothing=0.5"], "dpo.label_smoothing=0.5: must be at least 0 and below 0.5"),
        (
            "dpo",
            ["dpo.label_smoothing=0.1", "dpo.loss_type=ipo"],
            "dpo.label_smoothing=0.1: dpo.loss_type=ipo has none",
        ),
        ("dpo", ["dpo.loss_type=kto"], "dpo.loss_type=kto: "),
        (
            "dpo",
            ["data.max_token_len_per_gpu=100"],
            "the two sequences of a pair can have 128 tokens (data.max_length)",
        ),
        ("dpo", ["data.train_batch_size=21"], "data.train_batch_size=21, but the dataset has only 20 rows"),
    ],
)
def test_bad_input_is_one_clear_message(
    program: str, changes: list[str], message: str, overrides: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    try:
        ended = MAINS[program]([*overrides, *changes])
    except SystemExit as stop:
        ended = stop.code
    shown = capfd.readouterr().err
    assert ended == 2 and message in shown and "Traceback" not in shown
