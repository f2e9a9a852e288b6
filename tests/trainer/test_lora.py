"""Training commands with LoRA: GRPO learns and resumes bit for bit, one model in memory, SFT, separate workers, wrong settings."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout.rollout_engine import ModuleEngine
from lockstep.models.model_check import transformers_forward
from lockstep.protocol import DataProto
from lockstep.trainer.fsdp_sft_trainer import main as sft
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.ray_trainer import PPOTrainer
from lockstep.weight_sync import WeightSync, canary_bound
from lockstep.workers.actor_rollout_ref import ActorRolloutRefWorker
from tests.metrics import metrics_of, numbers_of
from tests.tiny import random_batch
from tests.weight_sync.copies import OneWorker

MODEL = "actor_rollout_ref.model"
GRPO = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8", "trainer.val_before_train=false"]


def test_grpo_learns_and_resumes_bit_for_bit_without_a_second_model(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 2 for c in solution_str) / max(1, len(solution_str))\n"
    )
    roles: list[list[str]] = []
    start = PPOTrainer.start
    monkeypatch.setattr(
        PPOTrainer, "start", lambda self, *a: (roles.append(sorted(self.workers.groups)), start(self, *a))[1]
    )
    command = [*overrides, *GRPO, f"{MODEL}.lora_rank=8", f"{MODEL}.lora_alpha=64", "trainer.save_freq=3"]
    command += [f"custom_reward_function.path={tmp_path}/reward.py", "actor_rollout_ref.actor.use_kl_loss=true"]
    command += ["actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.kl_loss_coef=0.001"]
    command += ["trainer.total_epochs=4", "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.train_batch_size=8"]
    assert main([*command, "trainer.total_training_steps=6", f"trainer.default_local_dir={tmp_path}/whole"]) == 0
    rows = metrics_of(tmp_path / "whole")
    assert roles == [["actor_rollout"]]
    assert 0 < rows[0]["actor/kl_loss"] < rows[-1]["actor/kl_loss"]
    rewards = [row["critic/rewards/mean"] for row in rows]
    assert sum(rewards[-2:]) / 2 > rewards[0] + 0.05, rewards

    parts = [*command, f"trainer.default_local_dir={tmp_path}/parts"]
    assert main([*parts, "trainer.total_training_steps=3"]) == 0
    assert main([*parts, "trainer.total_training_steps=6"]) == 0
    assert numbers_of(tmp_path / "parts") == numbers_of(tmp_path / "whole")
    adapters = [tmp_path / run / "global_step_6" / "actor" / "lora_adapter" for run in ("whole", "parts")]
    first, second = ((folder / "adapter_model.safetensors").read_bytes() for folder in adapters)
    assert first == second
    assert not (adapters[0].parent / "huggingface").exists()


def test_grpo_with_a_base_in_4_bits(overrides: list[str], tmp_path: Path) -> None:
    """The reference is the quantised base: before the first update KL is 0."""
    pytest.importorskip("bitsandbytes")
    command = [*overrides, *GRPO, f"{MODEL}.lora_rank=8", f"{MODEL}.load_in_4bit=true", "trainer.save_freq=1"]
    command += ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.actor.optim.lr=1e-2"]
    command += ["data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"]
    assert main([*command, "trainer.total_training_steps=1"]) == 0
    assert main([*command, "trainer.total_training_steps=2"]) == 0  # resumes
    first, second = metrics_of(tmp_path / "run")
    assert first["actor/kl_loss"] == 0 < second["actor/kl_loss"]
    assert first["actor/grad_norm"] > 0
    part = tmp_path / "run" / "global_step_2" / "actor"
    assert json.loads((part / "lora.json").read_text())["load_in_4bit"] is True
    assert not (part / "huggingface").exists() and (part / "lora_adapter" / "adapter_model.safetensors").is_file()


def test_the_reference_of_a_run_is_the_base(overrides: list[str]) -> None:
    """Adapters that are not zero: `ref` log-probs are those of a separate reference worker, bit for bit."""
    asked = [*overrides, *GRPO, "actor_rollout_ref.actor.use_kl_loss=true"]
    config = load_config(PPOConfig, [*asked, f"{MODEL}.lora_rank=4"]).actor_rollout_ref
    actor = ActorRolloutRefWorker(config, "actor_rollout_ref", "cpu")
    reference = ActorRolloutRefWorker(load_config(PPOConfig, asked).actor_rollout_ref, "ref", "cpu")
    for worker in (actor, reference):
        worker.init_model()
    assert actor.ref is actor.actor
    with torch.no_grad():
        for name, parameter in actor.actor.model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    data = DataProto.from_dict(tensors=dict(random_batch(8)))
    off, separate = (worker.compute_ref_log_prob(data).tensors["ref_log_prob"] for worker in (actor, reference))
    assert torch.equal(off, separate)
    assert not torch.equal(off, actor.compute_log_prob(data).tensors["old_log_probs"])


def test_only_adapters_are_sent_to_a_rollout_in_other_processes(overrides: list[str]) -> None:
    config = load_config(PPOConfig, [*overrides, *GRPO, f"{MODEL}.lora_rank=4"]).actor_rollout_ref
    engine = replace(config.rollout.checkpoint_engine, backend="naive")
    config = replace(config, rollout=replace(config.rollout, checkpoint_engine=engine))
    actor, rollout = (ActorRolloutRefWorker(config, role, "cpu") for role in ("actor", "rollout"))
    for worker in (actor, rollout):
        worker.init_model()
    with torch.no_grad():
        for parameter in actor.actor.model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.01)
    bound = canary_bound(torch.float32)
    WeightSync(OneWorker(actor), OneWorker(rollout), "naive", bound).run(1)  # type: ignore[arg-type]
    assert all("lora_" in entry.name for bucket in actor._layout for entry in bucket)
    assert isinstance(rollout.rollout, ModuleEngine)
    state = rollout.rollout.module.state_dict()
    weights = dict(actor.actor.weights())
    assert weights.keys() == state.keys()
    assert all(torch.equal(state[name], weight) for name, weight in weights.items())


def test_merged_weights_are_sent_to_an_engine_without_adapters(overrides: list[str], tiny_run_files: Path) -> None:
    config = load_config(PPOConfig, [*overrides, *GRPO, f"{MODEL}.lora_rank=4"]).actor_rollout_ref
    actor = ActorRolloutRefWorker(replace(config, rollout=replace(config.rollout, name="vllm")), "actor", "cpu")
    actor.init_model()
    with torch.no_grad():
        for name, parameter in actor.actor.model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)
    layout = actor.weight_layout()
    sent = {name: tensor for bucket in actor._buckets() for name, tensor in bucket}
    plain = AutoModelForCausalLM.from_pretrained(tiny_run_files / "model", dtype=torch.float32)
    assert (
        list(sent) == [entry.name for bucket in layout for entry in bucket] == [n for n, _ in plain.named_parameters()]
    )
    ids = torch.arange(12)[None]
    base = plain(ids).logits
    plain.load_state_dict(sent, strict=False)
    with transformers_forward(actor.actor.model.transformer):
        expected = actor.actor.model.transformer(input_ids=ids).logits
    torch.testing.assert_close(plain(ids).logits, expected, atol=1e-5, rtol=1e-4)
    assert (expected - base).abs().max() > 1e-2


def test_sft_with_adapters(tmp_path: Path, tiny_run_files: Path) -> None:
    rows = [{"question": f"{i}+1=", "answer": str(i + 1)} for i in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [f"data.train_files={tmp_path}/rows.jsonl", "data.train_batch_size=4", "data.max_length=64"]
    command += [f"model.path={tiny_run_files}/model", "model.lora_rank=4", "optim.lr=1e-2", "trainer.logger=[console]"]
    command += ["trainer.device=cpu", "trainer.total_epochs=4", f"trainer.default_local_dir={tmp_path}/run"]
    assert sft(command) == 0
    losses = [row["train/loss"] for row in metrics_of(tmp_path / "run")]
    assert losses[-1] < losses[0] - 0.3
    base = AutoModelForCausalLM.from_pretrained(tiny_run_files / "model", dtype=torch.float32)
    model = PeftModel.from_pretrained(base, tmp_path / "run" / "global_step_8" / "lora_adapter")
    assert any(p.abs().max() > 0 for name, p in model.named_parameters() if "lora_B" in name)
    # the checkpoint is a model for the next program, with its adapter merged
    more = ["trainer.total_epochs=1", f"trainer.default_local_dir={tmp_path}/next", "model.lora_rank=0"]
    assert sft([*command, *more, f"model.path={tmp_path}/run/global_step_8"]) == 0
    assert metrics_of(tmp_path / "next")[0]["train/loss"] < losses[0] - 0.3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{MODEL}.lora_rank=-1"], f"{MODEL}.lora_rank=-1: must be 0 or more"),
        ([f"{MODEL}.lora_adapter_path=MODEL"], f"needs {MODEL}.lora_rank; set it to the adapter's rank"),
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.lora_adapter_path=MODEL"],
            "not a peft adapter: the folder has no adapter_config.json",
        ),
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.target_modules=[foo]"],
            "its linear layers are down_proj, gate_proj, k_proj",
        ),
        (
            [f"{MODEL}.load_in_4bit=true"],
            f"{MODEL}.load_in_4bit=true: a model in 4 bits cannot be trained, only adapters on it; set {MODEL}.lora_rank",
        ),
        (
            [
                f"{MODEL}.load_in_4bit=true",
                f"{MODEL}.lora_rank=8",
                "actor_rollout_ref.actor.fsdp_config.offload_policy=true",
            ],
            "weights in 4 bits stay on the device; set false",
        ),
        (
            [f"{MODEL}.lora_rank=8", f"{MODEL}.path=ADAPTER"],
            f"is an adapter: to go on training it, set {MODEL}.path to its base model and {MODEL}.lora_adapter_path to it",
        ),
        ([f"{MODEL}.load_in_8bit=true"], "or in 4 bits with load_in_4bit; set false"),
    ],
)
def test_wrong_settings_are_one_message(
    settings: list[str],
    message: str,
    overrides: list[str],
    tiny_run_files: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    adapter = tmp_path / "earlier" / "global_step_3" / "actor" / "lora_adapter"
    adapter.mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (adapter / name).write_text("{}")
    places = {"=MODEL": f"={tiny_run_files}/model", "=ADAPTER": f"={adapter.parents[1]}"}
    for name, place in places.items():
        settings = [setting.replace(name, place) for setting in settings]
    try:
        code = main([*overrides, *GRPO, *settings])
    except SystemExit as end:
        code = int(str(end.code))
    shown = capsys.readouterr().err
    assert code == 2 and message in shown and "Traceback" not in shown
