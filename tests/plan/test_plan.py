"""`lockstep plan`: sizes against transformers, memory and time against measured runs, and what it tells the user."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.cli import main
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.plan.batch_units import Lengths, batch_units
from lockstep.plan.hardware import DEVICES
from lockstep.plan.job import Job, job_of
from lockstep.plan.memory import phases
from lockstep.plan.model_shape import ModelShape
from lockstep.plan.step_time import step_times

SHAPES = {  # Qwen2.5: vocabulary, width, inner, layers, heads, key heads, tied
    "0.5b": (151936, 896, 4864, 24, 14, 2, True),
    "1.5b": (151936, 1536, 8960, 28, 12, 2, True),
    "7b": (152064, 3584, 18944, 28, 28, 4, False),
}
ACTOR = "actor_rollout_ref.actor"
TINY = {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}


def write_model(folder: Path, shape: str) -> Path:
    vocabulary, width, inner, layers, heads, key_heads, tied = SHAPES[shape]
    config = {
        "model_type": "qwen2",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_heads,
        "tie_word_embeddings": tied,
    }
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def command(tmp_path: Path) -> Any:
    """(shape, prompts, prompt tokens, response tokens, more settings) -> the settings of a GRPO run."""
    (tmp_path / "train.parquet").touch()

    def settings(shape: str, prompts: int, prompt: int, response: int, *more: str) -> list[str]:
        return [
            "algorithm=grpo",
            f"data.train_files={tmp_path}/train.parquet",
            f"data.train_batch_size={prompts}",
            f"data.max_prompt_length={prompt}",
            f"data.max_response_length={response}",
            f"actor_rollout_ref.model.path={write_model(tmp_path / shape, shape)}",
            f"{ACTOR}.use_kl_loss=false",
            f"{ACTOR}.ppo_mini_batch_size={prompts}",
            "actor_rollout_ref.rollout.n=8",
            f"actor_rollout_ref.rollout.max_num_seqs={8 * prompts}",
            *more,
        ]

    return settings


def plan(settings: list[str], device: str = "H200") -> Job:
    config = load_config(PPOConfig, settings)
    lengths = Lengths(config.data.max_prompt_length, config.data.max_response_length)
    return job_of(config, DEVICES[device], lengths, lambda path, key: ModelShape.from_folder(Path(path)))


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("llama", {"num_key_value_heads": 2}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen2", {"num_key_value_heads": 2}),
        ("qwen3", {"num_key_value_heads": 2, "head_dim": 16}),
        ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}),
        ("qwen3_moe", {"num_experts": 4, "moe_intermediate_size": 16, "num_key_value_heads": 2, "head_dim": 16}),
    ],
)
def test_number_of_parameters(model_type: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **TINY, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config.to_dict()).parameters == expected


DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
NO_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=false"


@pytest.mark.parametrize(
    ("run", "more", "peak_gb", "generate_s", "update_s"),
    [  # measured on an H200: docs/plan.md
        (("0.5b", 32, 256, 256), (f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", NO_CHECKPOINTING), 30.4, 0.472, 0.570),
        (("1.5b", 16, 512, 1024), (*DYNAMIC, NO_CHECKPOINTING), 62.2, 2.69, 2.79),
        (
            ("1.5b", 16, 512, 1024),
            (DYNAMIC[0], f"{ACTOR}.ppo_max_token_len_per_gpu=32768", NO_CHECKPOINTING),
            95.5,
            2.707,
            2.691,
        ),
        (("7b", 16, 256, 512), (*DYNAMIC, f"{ACTOR}.fsdp_config.model_dtype=bfloat16"), 104.9, 2.97, 5.75),
        (("7b", 16, 256, 512), (*DYNAMIC, f"{ACTOR}.fsdp_config.optimizer_offload=true"), 90.2, 3.08, 8.03),
    ],
)
def test_agrees_with_measured_runs(
    command: Any, run: tuple[Any, ...], more: tuple[str, ...], peak_gb: float, generate_s: float, update_s: float
) -> None:
    job = plan(command(*run, *more))
    memory = phases(job)
    times = step_times(job, memory)
    assert max(phase.peak for phase in memory) / 1e9 == pytest.approx(peak_gb, rel=0.1)
    assert times["generate"] == pytest.approx(generate_s, rel=0.3)
    assert times["update actor"] == pytest.approx(update_s, rel=0.3)


def test_units_of_a_micro_batch() -> None:
    shared = {"samples": 8, "lengths": Lengths(512, 1024), "packed": True, "micro_rows": None}
    units = batch_units(128, ranks=1, sequence_parallel=1, max_tokens=16384, **shared)  # type: ignore[arg-type]
    assert (units.micro.rows, units.micro.tokens, units.micro.targets) == (15, 2 * 512 + 15 * 1024, 15 * 1024)
    assert units.num_micro == 9 and units.per_rank.rows == 128
    four = batch_units(128, ranks=8, sequence_parallel=4, max_tokens=16384, **shared)  # type: ignore[arg-type]
    assert four.per_rank.rows == 64 and four.tokens_per_device <= 16384 and four.micro.tokens > 16384
    one = batch_units(128, ranks=1, sequence_parallel=1, max_tokens=10, **shared)  # type: ignore[arg-type]
    assert one.micro.rows == 1 and one.num_micro == 128


def test_ranks_share_weights_and_moments(command: Any) -> None:
    one, eight = (plan(command("7b", 16, 256, 512, *DYNAMIC, f"trainer.n_gpus_per_node={n}")) for n in (1, 8))
    update, sharded = phases(one)[-1].parts, phases(eight)[-1].parts
    assert sharded["moments"] == update["moments"] / 8 and sharded["gradients"] == update["gradients"] / 8
    assert sharded["weights for decoding"] == 2 * eight.models[0].shape.parameters
    offloaded = plan(
        command("7b", 16, 256, 512, f"{ACTOR}.fsdp_config.param_offload=true", "trainer.n_gpus_per_node=8")
    )
    assert "weights for decoding" not in phases(offloaded)[-1].parts


def test_critic_and_reference_are_counted(command: Any) -> None:
    more = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "critic.ppo_micro_batch_size_per_gpu=8")
    memory = phases(plan(command("0.5b", 16, 256, 256, *more)))
    names = [phase.name for phase in memory]
    assert names == ["generate", "old log-probs", "reference log-probs", "values", "update critic", "update actor"]
    assert all(phase.parts["weights of other models"] > 0 for phase in memory)


def test_critic_has_its_own_number_of_updates(command: Any) -> None:
    more = ("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=2")
    job = plan(command("0.5b", 16, 256, 256, *more))
    assert (job.model("actor_rollout").updates, job.model("critic").updates) == (2, 8)


def test_program(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--device", "h200", *command("1.5b", 16, 512, 1024, *DYNAMIC)]) == 0
    shown = capsys.readouterr().out
    assert "16 prompts x 8 samples = 128 sequences" in shown and "1.54B parameters" in shown
    assert shown.splitlines()[-1].startswith("fits on H200: at most ")
    assert (
        main(["plan", "--device", "RTX4090", *command("7b", 16, 512, 1024, f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")])
        == 1
    )
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("does not fit on RTX4090") and f"{ACTOR}.fsdp_config.optimizer_offload=true" in last
    assert main(["plan", "--device", "abacus", *command("7b", 16, 512, 1024)]) == 2
    assert "known devices are H200" in capsys.readouterr().err
    assert main(["plan", "trainer.total_epoch=1"]) == 2
    assert "did you mean trainer.total_epochs" in capsys.readouterr().err.lower()


def test_no_torch_is_imported(command: Any) -> None:
    code = "import sys; from lockstep.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    settings = command("0.5b", 8, 64, 64)
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--device", "H200", *settings], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
