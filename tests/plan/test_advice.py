"""What a plan that does not fit tells the user leads to one that does."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from lockstep.cli import main
from lockstep.config import checks
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.plan.advice import lowering
from lockstep.plan.estimate import plan_of
from lockstep.plan.hardware import DEVICES
from lockstep.plan.token_budgets import with_token_budgets
from tests.plan.test_plan import SHAPES, write_model

SHAPES["72b"] = (152064, 8192, 29568, 80, 64, 8, False)
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """(shape, device, words) -> exit code and output of `lockstep plan`."""
    monkeypatch.setattr(checks, "find_spec", lambda name: object())  # vLLM

    def run(shape: str, device: str, *words: str) -> tuple[int, str]:
        model = write_model(tmp_path / shape, shape)
        program = [] if words[:1] == ("sft",) else [f"actor_rollout_ref.model.path={model}"]
        words = (*words, *program) if program else (*words, f"model.path={model}")
        code = main(["plan", *words, "--device", device])
        return code, capsys.readouterr().out

    return run


def alternatives(shown: str) -> list[list[str]]:
    """The settings of the last line."""
    _, _, tried = shown.strip().splitlines()[-1].partition(" Try ")
    return [shlex.split(part) for part in tried.split(", or ")]


def test_warns_of_a_kv_cache_of_one_sequence(plan: Any) -> None:
    words = ("algorithm=grpo", "data.max_prompt_length=1024", "data.max_response_length=31744")
    code, shown = plan("1.5b", "H200", *words, f"{ROLLOUT}.gpu_memory_utilization=0.03")
    assert code == 0 and "The KV cache holds a single sequence of full length, so generation is slow. Try" in shown
    (better,) = alternatives(shown)
    assert better == [f"{ROLLOUT}.gpu_memory_utilization=0.85"]
    _, shown = plan("1.5b", "H200", *words, *better)
    assert "KV cache holds a single" not in shown


LARGE = ("algorithm=grpo", "data.train_batch_size=512", "data.max_prompt_length=1024", "data.max_response_length=2048")
CLUSTER = ("trainer.nnodes=8", "trainer.n_gpus_per_node=8")


@pytest.mark.parametrize(
    ("shape", "device", "words", "named"),
    [
        ("72b", "H100", (*LARGE, *CLUSTER), f"{ROLLOUT}.tensor_model_parallel_size=8"),
        ("72b", "H100", (*LARGE, "trainer.n_gpus_per_node=8"), "trainer.nnodes="),
        ("7b", "RTX4090", LARGE, "actor_rollout_ref.model.lora_rank=32"),
        ("7b", "H100", LARGE, f"{ACTOR}.fsdp_config.optimizer_offload=true"),
        ("7b", "H200", LARGE, f"{ACTOR}.fsdp_config.optimizer_offload=true"),
        ("1.5b", "H100", (*LARGE, f"{ACTOR}.use_dynamic_bsz=false"), f"{ACTOR}.ppo_micro_batch_size_per_gpu="),
        (
            "1.5b",
            "H100",
            (
                *LARGE,
                f"{ACTOR}.ppo_max_token_len_per_gpu=131072",
                "actor_rollout_ref.model.enable_gradient_checkpointing=false",
            ),
            f"{ACTOR}.ppo_max_token_len_per_gpu=",
        ),
        (
            "1.5b",
            "H100",
            (*LARGE, f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.gpu_memory_utilization=0.03"),
            f"{ROLLOUT}.gpu_memory_utilization=",
        ),
        ("7b", "H100", ("sft",), "model.fsdp_config.optimizer_offload=true"),
    ],
    ids=["72b-on-64", "72b-on-8", "lora", "together", "offload", "rows", "tokens", "cache", "sft"],
)
def test_every_hint_makes_it_fit(plan: Any, shape: str, device: str, words: tuple[str, ...], named: str) -> None:
    code, shown = plan(shape, device, *words)
    assert code == 1 and "does not fit" in shown and named in shown
    for settings in alternatives(shown):
        code, shown = plan(shape, device, *words, *settings)
        assert code == 0, f"{settings}: {shown.splitlines()[-1]}"


def test_nothing_helps(plan: Any) -> None:
    code, shown = plan("72b", "RTX4090", "algorithm=grpo", "resource_pool_spec={global_pool: [1]}")
    assert code == 1 and "No setting that was tried makes it fit" in shown and "Try" not in shown


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_search_divides_a_model_that_does_not_fit_on_a_gpu(plan: Any, engine: str) -> None:
    words = (*LARGE, *CLUSTER, f"{ROLLOUT}.name={engine}")
    code, shown = plan("72b", "H100", "--search", *words)
    assert code == 0 and "TP 8" in shown
    arguments = [
        shlex.split(line)[0] for line in shown.partition("add to the command:")[2].splitlines() if line.strip()
    ]
    assert plan("72b", "H100", *words, *arguments)[0] == 0


def test_search_does_not_consider_vllm_if_the_model_fits(plan: Any) -> None:
    code, shown = plan("7b", "H100", "--search", *LARGE, "trainer.n_gpus_per_node=8")
    assert code == 0 and "vllm" not in shown


def test_kept_activations_leave_room_for_gathered_layers(plan: Any) -> None:
    tensor_parallel = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.tensor_model_parallel_size=8")
    code, shown = plan("72b", "H100", *LARGE, *CLUSTER, *tensor_parallel, f"{ACTOR}.ppo_max_token_len_per_gpu=8192")
    assert code == 0, shown  # without offload: fewer layers keep their activations


def test_settings_that_lower_a_phase(tmp_path: Path) -> None:
    model = write_model(tmp_path / "1.5b", "1.5b")
    given = ["algorithm=grpo", f"actor_rollout_ref.model.path={model}", f"{ACTOR}.ppo_max_token_len_per_gpu=32768"]
    config = with_token_budgets(load_config(PPOConfig, given, run_checks=False), DEVICES["H100"])
    found = plan_of(config, DEVICES["H100"])
    phases = {phase.name: phase for phase in found.phases}
    assert f"{ACTOR}.ppo_max_token_len_per_gpu=" in lowering(found, phases["update actor"])
    assert "ppo_max_token_len_per_gpu" not in lowering(found, phases["generate"])
