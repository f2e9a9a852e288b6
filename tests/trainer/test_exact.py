"""Exact mode in training runs: the rollout's log-probs are the trainer's, bit for bit, and responses do not depend on the batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.kernels import exact
from lockstep.trainer.main_ppo import main
from tests.engines.rollout.exact_machine import skip_unless_exact
from tests.trainer.test_states import LOOP

pytestmark = pytest.mark.usefixtures("no_registrations")


@pytest.fixture(scope="module", autouse=True)
def exact_machine() -> None:
    skip_unless_exact()


ROLLOUT = "actor_rollout_ref.rollout"
GRPO = [
    "algorithm.adv_estimator=grpo",
    f"{ROLLOUT}.name=embedded",
    f"{ROLLOUT}.exact=true",
    f"{ROLLOUT}.n=3",
    "data.max_response_length=60",
    "trainer.val_before_train=false",
]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "actor/pg_loss" in row]


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(
            [f"{ROLLOUT}.max_num_seqs=5", f"{ROLLOUT}.max_num_batched_tokens=48", f"{ROLLOUT}.kv_block_size=8"],
            id="chunked prompts, few at once",
        ),
        pytest.param(["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.ppo_epochs=2"], id="LoRA"),
        pytest.param(["actor_rollout_ref.model.use_remove_padding=false"], id="padded"),
        pytest.param(["trainer.n_gpus_per_node=2"], marks=pytest.mark.slow, id="two processes"),
    ],
)
def test_no_bit_differs(settings: list[str], overrides: list[str], tmp_path: Path) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    loop = f"{ROLLOUT}.agent.default_agent_loop={tmp_path}/loop.py:Tool"
    assert main([*overrides, *GRPO, loop, "trainer.total_training_steps=3", *settings]) == 0
    steps = steps_of(tmp_path / "run")
    assert len(steps) == 3
    for step in steps:
        assert step["training/rollout_log_probs_gap"] == 0 and step["training/rollout_probs_diff_max"] == 0
        assert step["actor/grad_norm"] > 0 and step["num_turns/max"] > 2
        assert "timing_s/old_log_prob" not in step


def test_the_reference_of_an_unchanged_policy(overrides: list[str], tmp_path: Path) -> None:
    """It has the policy's log-probs, in other micro-batches too."""
    micro = [
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz=false",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
    ]
    actor = "actor_rollout_ref.actor"
    one_update = [f"{actor}.use_kl_loss=true", f"{actor}.kl_loss_type=abs", f"{actor}.ppo_mini_batch_size=4"]
    assert main([*overrides, *GRPO, *micro, *one_update, "trainer.total_training_steps=1"]) == 0
    (step,) = steps_of(tmp_path / "run")
    assert step["actor/kl_loss"] == 0 and step["actor/grad_norm"] > 0


def responses(folder: Path) -> dict[int, list[str]]:
    """The responses of each step, in an order that does not depend on the workers."""
    return {
        int(file.stem): sorted(json.loads(line)["output"] for line in file.read_text().splitlines())
        for file in sorted(folder.glob("*.jsonl"))
    }


@pytest.mark.slow
def test_responses_do_not_depend_on_the_batch(overrides: list[str], tmp_path: Path) -> None:
    found = []
    for name, settings in (("many", []), ("few", [f"{ROLLOUT}.max_num_seqs=2", f"{ROLLOUT}.kv_block_size=4"])):
        places = [f"trainer.rollout_data_dir={tmp_path}/{name}", f"trainer.default_local_dir={tmp_path}/run_{name}"]
        assert main([*overrides, *GRPO, "trainer.total_training_steps=2", *places, *settings]) == 0
        found.append(
            (responses(tmp_path / name), [step["actor/grad_norm"] for step in steps_of(tmp_path / f"run_{name}")])
        )
    assert len(found[0][0]) == 2 and found[0] == found[1]


def test_a_difference_ends_the_run(
    overrides: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A product whose last bits depend on the number of rows: the audit names it."""
    usual = exact.exact_product

    def inexact(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype | None = None, **more: Any) -> torch.Tensor:
        out = usual(x, weight, dtype, **more)
        return out * (1 + 1e-6) if len(x) > 60 and len(x) != exact.NUM_TRIED else out

    monkeypatch.setattr("lockstep.kernels.linear.exact_product", inexact)
    assert main([*overrides, *GRPO, "trainer.total_training_steps=3"]) != 0
    message = " ".join(capsys.readouterr().err.split())
    assert "rollout.exact=true: the rollout's log-probs of" in message and "differ from the trainer's" in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([f"{ROLLOUT}.name=hf"], "only the embedded engine computes with the trainer's own layers"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=2"], "attention split over ranks is not exact"),
        ([f"{ROLLOUT}.calculate_log_probs=false"], "it is about the rollout's log-probs"),
        (["algorithm.rollout_correction.rollout_is=token"], "there is no gap to correct"),
    ],
)
def test_what_does_not_fit_is_refused(
    settings: list[str], message: str, overrides: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main([*overrides, *GRPO, *settings])
    error = " ".join(capsys.readouterr().err.split())
    assert f"{ROLLOUT}.exact" in error and message in error
