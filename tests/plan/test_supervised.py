"""`lockstep plan sft | rm | dpo`: units, memory and time, against a measured run."""

from pathlib import Path

import pytest

from lockstep.cli import main
from lockstep.config.compose import load_config
from lockstep.config.preference import DPOConfig, RMConfig
from lockstep.config.sft import SFTConfig
from lockstep.plan.batch_units import Lengths
from lockstep.plan.estimate import plan_of
from lockstep.plan.hardware import DEVICES
from tests.plan.test_plan import write_model


@pytest.fixture
def settings(tmp_path: Path) -> list[str]:
    (tmp_path / "rows.jsonl").touch()
    return [
        f"model.path={write_model(tmp_path / 'model', '0.5b')}",
        f"data.train_files={tmp_path}/rows.jsonl",
        "data.max_length=2048",
        "data.train_batch_size=64",
        "data.max_token_len_per_gpu=16384",
    ]


def test_sft_as_measured_on_one_h200(settings: list[str]) -> None:
    """docs/performance.md: lengths are log-uniform from 64 to 2,032, 569 on average, a quarter of them the prompt."""
    config = load_config(SFTConfig, [*settings, "model.enable_gradient_checkpointing=false"])
    plan = plan_of(config, DEVICES["H200"], Lengths(142, 427))
    assert [phase.name for phase in plan.phases] == ["update"]
    assert plan.worst.peak == pytest.approx(27.2e9, rel=0.1)
    assert plan.step_s == pytest.approx(64 * 569 / 105_600, rel=0.25)  # 22 % low, also because lengths differ


def test_pairs_stay_together_and_a_reward_model_has_no_logits(settings: list[str]) -> None:
    """16,384 tokens hold eight sequences; of pairs with 3 x 2,048 tokens, two and not three."""
    budget = "data.max_token_len_per_gpu=6144"
    sft, dpo, rm = (
        plan_of(load_config(cls, [*settings, budget]), DEVICES["H200"]) for cls in (SFTConfig, DPOConfig, RMConfig)
    )
    found = [plan.job.models[0].update for plan in (sft, dpo, rm)]
    assert [units and units.sequences for units in found] == [64, 128, 128]
    assert [units and units.micro.rows for units in found] == [3, 2, 2]
    assert dpo.worst.parts["logits"] > 0 and "logits" not in rm.worst.parts
    rows = plan_of(
        load_config(RMConfig, [*settings, "data.use_dynamic_bsz=false", "data.micro_batch_size_per_gpu=3"]),
        DEVICES["H200"],
    )
    assert (units := rows.job.models[0].update) is not None and units.micro.rows == 6


def test_command(settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").unlink()  # data need not exist
    assert main(["plan", "dpo", "--device", "H200", *settings]) == 0
    shown = capsys.readouterr().out
    assert "64 pairs = 128 sequences" in shown and "up to 2048 tokens" in shown
    assert "fits on H200: at most" in shown.splitlines()[-1] and "with 2048 tokens per sequence" in shown
    assert main(["plan", "sft", "--device", "H200", "--nproc-per-node", "4", *settings]) == 0
    assert "over 4 data-parallel ranks, 16 on each" in capsys.readouterr().out
    large = [f"model.path={write_model(tmp_path / 'large', '7b')}", "model.fsdp_config.model_dtype=fp32"]
    assert main(["plan", "sft", "--device", "H100", *settings, *large]) == 1
    assert "Try model.fsdp_config.offload_policy=true" in capsys.readouterr().out
    more = ["model.lora_rank=32", "data.max_token_len_per_gpu=8192"]
    assert main(["plan", "sft", "--device", "H100", *settings, *large, *more]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sft", "--search"], "--search places the models of RL; sft has one"),
        (["sft", "model.fsdp_config.ulysses_sequence_parallel_size=2"], "does not divide the number of processes (1;"),
        (["ppo", "--nproc-per-node", "2"], "set trainer.nnodes, trainer.n_gpus_per_node"),
        (["sft", "--nproc-per-node", "0"], "must be 1 or more"),
        (["sft", "actor_rollout_ref.rollout.n=8"], "rollout"),
    ],
)
def test_wrong_settings(
    words: list[str], message: str, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--device", "H200", *words, *settings]) == 2
    assert message in capsys.readouterr().err
