"""Results do not depend on the number of workers or on the placement of roles."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

from lockstep.config.commandline import config_from_command_line
from lockstep.config.compose import load_config
from lockstep.config.generation import GenerationConfig, as_validation
from lockstep.config.model import HFModelConfig
from lockstep.config.ppo import PPOConfig
from lockstep.models.export import save_scalar_model
from lockstep.trainer.generation.generate import GenerationRunner, device_and_backend
from lockstep.trainer.main_generation import prepare
from tests.tiny import tiny_tokenizer
from tests.trainer.test_forks import LOOP, TEMPLATE

pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')

from tests.shared_processes import OnSharedProcesses, SharedProcesses, group_class
from tests.value_model import load_value_model

pytestmark = pytest.mark.first

TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 3e-5
"""3 % of one optimizer step: Adam scales gradients that are nearly zero, and their rounding with them."""
DEPENDS_ON_WORKERS = ("time", "timing", "perf/", "global_seqlen/", "weight_sync/")

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DYNAMIC = [f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=80"]
SP = [f"{ACTOR}.ulysses_sequence_parallel_size=2"]
SP_CRITIC = ["critic.ulysses_sequence_parallel_size=2"]
SP_REF_ALONE = ["actor_rollout_ref.ref.ulysses_sequence_parallel_size=1"]
NAIVE, BROADCAST = ([f"{ROLLOUT}.checkpoint_engine.backend={name}"] for name in ("naive", "nccl"))


STEPS = 3
"""Of a run; an epoch has two."""
ON_RAY = ["trainer.controller=ray", f"trainer.save_freq={STEPS}"]
SAVE_STEP_2 = ["trainer.save_freq=2"]


def workers(count: int, placement: str = "colocate") -> list[str]:
    return [*ON_RAY, f"trainer.n_gpus_per_node={count}", f"trainer.placement={placement}"]


@dataclass(frozen=True)
class Run:
    """The outputs of a run."""

    folder: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        rows = [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(DEPENDS_ON_WORKERS)} for row in rows]

    @property
    def answers(self) -> dict[str, list[str]]:
        """Step to the texts of its samples."""
        files = sorted((self.folder / "rollouts").glob("*.jsonl"))
        return {f.stem: [json.loads(line)["output"] for line in f.read_text().splitlines()] for f in files}

    def weights(self) -> dict[str, Any]:
        (last,) = self.folder.glob(f"global_step_{self.metrics[-1]['step']}")
        return {
            f"{model.name}.{name}": tensor
            for model in sorted(last.iterdir())
            if (model / "huggingface").is_dir()
            for name, tensor in load_file(model / "huggingface" / "model.safetensors").items()
        }


class Runs:
    """Runs commands on the shared processes, each command once."""

    def __init__(self, folder: Path, base: list[str], shared: SharedProcesses) -> None:
        self.folder, self.base, self.shared = folder, base, shared
        self.done: dict[tuple[str, ...], Run] = {}

    def __call__(self, *settings: str) -> Run:
        if settings not in self.done:
            folder = self.folder / str(len(self.done))
            places = [f"trainer.default_local_dir={folder}", f"trainer.rollout_data_dir={folder}/rollouts"]
            config = config_from_command_line([*self.base, *settings, *places], PPOConfig)
            assert config is not None
            assert OnSharedProcesses(self.shared).run(config) == 0
            assert not self.shared.lent
            self.done[settings] = Run(folder)
        return self.done[settings]


@pytest.fixture(scope="module")
def runs(tiny_run_files: Path, tmp_path_factory: pytest.TempPathFactory, shared_processes: SharedProcesses) -> Runs:
    """PPO with critic and reference, on prompts and responses of many lengths."""
    files, folder = tiny_run_files, tmp_path_factory.mktemp("scale")
    rows = pd.read_parquet(files / "train.parquet")[:8]
    rows["prompt"] = [[{"role": "user", "content": "1+" * (i * 5 % 9) + "2"}] for i in range(len(rows))]
    rows.to_parquet(folder / "train.parquet")
    base = [
        f"data.train_files={folder}/train.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={files}/model",
        f"{ACTOR}.optim.lr=1e-3",
        f"{ACTOR}.ppo_mini_batch_size=2",
        f"{ACTOR}.optim.lr_scheduler_type=cosine",
        f"{ACTOR}.entropy_coeff=0.01",
        "critic.optim.lr=1e-3",
        f"{ROLLOUT}.n=2",
        f"{ROLLOUT}.stop_token_ids={list(range(3, 40))}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.type=adaptive",
        "algorithm.kl_ctrl.horizon=10",
        "algorithm.kl_ctrl.kl_coef=0.01",
        f"custom_reward_function.path={files}/reward.py",
        "actor_rollout_ref.nccl_timeout=120",
        "trainer.device=cpu",
        "trainer.total_epochs=2",
        f"trainer.total_training_steps={STEPS}",
        *SAVE_STEP_2,
    ]
    return Runs(folder, base, shared_processes)


def save_reward_model(files: Path) -> Path:
    """The policy's body with a head whose scores differ."""
    cpu = torch.device("cpu")
    body, score = load_value_model(HFModelConfig(path=str(files / "model")), "model", torch.float32, cpu, seed=5)
    weights = [(f"model.{name}", tensor) for name, tensor in body.named_parameters()]
    save_scalar_model(body, [*weights, ("score.weight", 100 * score.weight)], tiny_tokenizer(), files / "scorer")
    return files / "scorer"


def assert_equal(run: Run, expected: Run, steps: int = STEPS) -> None:
    """The last `steps` steps have the same samples, metrics and weights."""
    pairs = list(zip(run.metrics[-steps:], expected.metrics[-steps:], strict=True))
    numbers = [(a[name], b[name]) for a, b in pairs for name in b if isinstance(b[name], (int, float))]
    difference = max(
        abs(a - b) / max(1.0, abs(b)) for a, b in numbers
    )  # perplexities of the tiny model are in the hundreds
    mine, theirs = run.weights(), expected.weights()
    assert mine.keys() == theirs.keys()
    apart, where = max((float((mine[name] - theirs[name]).abs().max()), name) for name in theirs)
    print(f"largest difference: metrics {difference:.1e}, weights {apart:.1e} ({where})")
    assert [a.keys() for a, _ in pairs] == [b.keys() for _, b in pairs]
    assert difference < TOLERANCE and apart < WEIGHT_TOLERANCE
    samples = expected.answers
    assert run.answers == {step: samples[step] for step in run.answers} and len(run.answers) == steps


SIZES = {"colocate": (4, 4), "hybrid": (3, 4), "split": (3, 6), "standalone": (4, 6)}
"""Number of workers per placement, without and with sequence parallelism: pools of one and of several workers, and a remainder."""


def placed(placement: str, shared: bool, dynamic: bool) -> list[str]:
    """shared: two ranks per sequence, in pools of two or more."""
    settings = workers(SIZES[placement][shared], placement)
    settings += [*SP, *(SP_CRITIC if placement != "standalone" else SP_REF_ALONE)] if shared else []
    return [*settings, *(DYNAMIC if dynamic else []), *(NAIVE if dynamic else BROADCAST)]


PPO_RUNS = {
    "1": workers(1),
    "2": workers(2),
    "2-sp": [*workers(2), *SP, *SP_CRITIC],
    "2-tensor-parallel": [*workers(2), f"{ROLLOUT}.tensor_model_parallel_size=2"],
    "4-tensor-parallel": [*workers(4), f"{ROLLOUT}.tensor_model_parallel_size=4", *SP, *SP_CRITIC],
    "4-first-pair": [*workers(4), f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.n_gpus=2", *SP, *SP_CRITIC],
    "2-first": [*workers(2), f"{ROLLOUT}.n_gpus=1"],
    "2-first-async": [*workers(2), f"{ROLLOUT}.n_gpus=1", f"{ROLLOUT}.mode=async"],
    "4-pairs": [*workers(4), f"{ROLLOUT}.tensor_model_parallel_size=2"],
    "standalone-pairs": [*workers(6, "standalone"), f"{ROLLOUT}.tensor_model_parallel_size=2", *BROADCAST],
    "4-replicas": [*workers(4), f"{ACTOR}.fsdp_config.fsdp_size=2", "critic.model.fsdp_config.fsdp_size=1"],
    "4-other-engine-keys": [
        *workers(4),
        *(f"{ACTOR}.fsdp_config.{key}=true" for key in ("offload_policy", "forward_prefetch")),
    ],
    "map": [
        *ON_RAY,
        "resource_pool_spec={big: [2], small: [1]}",
        "resource_pool_mapping={actor_rollout: big, critic: small, ref: small}",
    ],
} | {
    f"{placement}{'-sp' * shared}{'-dynamic' * dynamic}": placed(placement, shared, dynamic)
    for placement, shared, dynamic in (
        *(("colocate", False, False), ("colocate", True, True), ("hybrid", False, True), ("hybrid", True, False)),
        *(("split", False, True), ("split", True, False), ("standalone", False, False), ("standalone", True, True)),
    )
}
"""Every pair of placement, sequence parallelism and dynamic micro-batches."""
PPO_RUNS["colocate"] += SAVE_STEP_2


QUICK_RUNS = ("1", "2", "colocate")
"""In `make test`; the others are slow."""


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(settings, id=name, marks=[] if name in QUICK_RUNS else pytest.mark.slow)
        for name, settings in PPO_RUNS.items()
    ],
)
def test_ppo_with_critic_and_reference(runs: Runs, settings: list[str]) -> None:
    assert_equal(runs(*settings), runs())


def test_lengths_differ(runs: Runs) -> None:
    for row in runs().metrics:
        assert row["prompt_length/max"] > row["prompt_length/min"]
        assert row["response_length/max"] > row["response_length/min"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 4])
def test_fewer_rows_than_workers_with_a_prepared_loss(runs: Runs, tiny_run_files: Path, count: int) -> None:
    """Three rows, which are three mini-batches of the critic; four rows of validation."""
    settings = ["data.train_batch_size=3", f"{ACTOR}.ppo_mini_batch_size=3", "critic.ppo_mini_batch_size=1"]
    settings += [f"{ROLLOUT}.n=1", f"{ACTOR}.policy_loss.loss_mode=clip_cov", f"{ACTOR}.policy_loss.clip_cov_ratio=0.2"]
    settings += [f"{ACTOR}.ppo_epochs=2", f"{ACTOR}.shuffle=true", "critic.ppo_epochs=2", "critic.shuffle=true"]
    settings += [f"data.val_files={tiny_run_files}/val.parquet", f"trainer.test_freq={STEPS}", "data.val_batch_size=3"]
    assert_equal(runs(*settings, *workers(count)), runs(*settings))


@pytest.mark.slow
def test_rank_with_only_padding_in_bypass_mode(runs: Runs) -> None:
    """Its loss has fewer metrics than the others'."""
    settings = [f"{ROLLOUT}.n=1", f"{ACTOR}.ppo_mini_batch_size=1", "algorithm.rollout_correction.bypass_mode=true"]
    assert_equal(runs(*settings, *workers(2)), runs(*settings))


@pytest.mark.slow
def test_grpo_with_kl_loss_and_a_separate_reward_model_pool(runs: Runs, tiny_run_files: Path) -> None:
    settings = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=3", "algorithm.use_kl_in_reward=false"]
    settings += [
        f"{ACTOR}.optim.lr=3e-4",
        f"{ACTOR}.use_kl_loss=true",
        f"{ACTOR}.kl_loss_coef=0.1",
        f"{ACTOR}.loss_agg_mode=seq-mean-token-mean",
    ]
    settings += ["reward_model.enable=true", f"reward_model.model.path={save_reward_model(tiny_run_files)}"]
    own_pool = ["reward_model.enable_resource_pool=true", "reward_model.n_gpus_per_node=2", "reward_model.nnodes=1"]
    assert_equal(runs(*settings, *workers(2), *own_pool), runs(*settings))


TP = {size: f"{ROLLOUT}.tensor_model_parallel_size={size}" for size in (2, 4)}
LORA = ["actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=0.01", "algorithm.use_kl_in_reward=false"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "over_ranks",
    [
        [*workers(2), TP[2]],
        [*workers(4), TP[4]],
        [*workers(4), TP[2], f"{ROLLOUT}.mode=async"],
        [*workers(4, "split"), TP[2], *NAIVE],
    ],
    ids=["2", "4", "pairs-of-single-requests", "split"],
)
def test_grpo_with_a_rollout_over_ranks(runs: Runs, over_ranks: list[str]) -> None:
    settings = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=3", "algorithm.use_kl_in_reward=false"]
    settings += ["trainer.total_epochs=3", "trainer.total_training_steps=5"]
    alone, divided = runs(*settings, "trainer.save_freq=5"), runs(*settings, *over_ranks, "trainer.save_freq=5")
    assert_equal(divided, alone, steps=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "over_ranks",
    [[*workers(2), TP[2]], [*workers(4, "standalone"), TP[2]], [*workers(2), f"{ROLLOUT}.n_gpus=1"]],
    ids=["colocate", "standalone", "first"],
)
def test_adapters_of_a_rollout_over_ranks(runs: Runs, over_ranks: list[str]) -> None:
    settings = [*LORA, "algorithm.adv_estimator=grpo", "trainer.save_freq=-1"]
    divided, alone = runs(*settings, *over_ranks, "trainer.save_freq=-1"), runs(*settings)
    assert divided.answers == alone.answers and len(alone.answers) == STEPS
    for row, expected in zip(divided.metrics, alone.metrics, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
            assert row[name] == pytest.approx(expected[name], abs=TOLERANCE), (row["step"], name)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(PPO_RUNS["colocate"], [], id="4-1"),
        pytest.param(PPO_RUNS["colocate"], workers(2), id="4-2", marks=pytest.mark.slow),
        pytest.param([], workers(2), id="1-2", marks=pytest.mark.slow),
    ],
)
def test_checkpoint_resumes_on_another_number_of_workers(runs: Runs, before: list[str], after: list[str]) -> None:
    saved = runs(*before).folder / "global_step_2"
    resumed = runs(*after, "trainer.resume_mode=resume_path", f"trainer.resume_from_path={saved}")
    assert_equal(resumed, runs(), steps=STEPS - 2)


def test_generated_responses(runs: Runs, tiny_run_files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_shared_processes(config: PPOConfig, **options: Any) -> Any:
        device, backend = device_and_backend(config, **options)
        return device, replace(backend, group_class=group_class(runs.shared)) if backend.name == "ray" else backend

    monkeypatch.setattr("lockstep.trainer.generation.generate.device_and_backend", on_shared_processes)
    base = [f"model.path={tiny_run_files}/model", f"data.path={tiny_run_files}/train.parquet", "data.n_samples=3"]
    base += ["data.batch_size=5", "data.max_prompt_length=40", "data.max_response_length=8", "trainer.device=cpu"]
    tables = []
    for count, together in ((1, 1), (2, 1), (2, 2)):
        file = tmp_path / f"{count}-{together}.parquet"
        own = [f"data.output_path={file}", f"trainer.n_gpus_per_node={count}"]
        config = load_config(GenerationConfig, [*base, *own, f"rollout.tensor_model_parallel_size={together}"])
        assert GenerationRunner(config, prepare(config)).run(as_validation(config)) == 0
        tables.append(pd.read_parquet(file))
    assert not runs.shared.lent
    for table in tables[1:]:
        pd.testing.assert_frame_equal(table, tables[0])
    assert len(tables[0]) == 16 and all(len(responses) == 3 for responses in tables[0]["responses"])


@pytest.mark.slow
@pytest.mark.parametrize("together", [[], [f"{ROLLOUT}.tensor_model_parallel_size=2"]], ids=["each", "over-ranks"])
def test_conversations_with_several_trajectories(runs: Runs, together: list[str]) -> None:
    """Rows of a conversation stay in its mini-batch, and the number of rows divides by nothing."""
    (runs.folder / "loop.py").write_text(LOOP)
    settings = [
        f'actor_rollout_ref.model.custom_chat_template="{TEMPLATE}"',
        f"{ROLLOUT}.multi_turn.use_inference_chat_template=true",
        f"{ROLLOUT}.agent.default_agent_loop={runs.folder}/loop.py:ThreeTurns",
        "data.max_response_length=100",
    ]
    run = runs(*settings, *workers(2), *together)
    assert all(row["trajectory_breaks/mean"] > 0 for row in run.metrics)
    assert_equal(run, runs(*settings))
