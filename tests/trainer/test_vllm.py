"""GRPO with rollout.name=vllm: in one process, and on Ray in hybrid and standalone placement. `make test-vllm` runs it."""

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
import yaml

from lockstep.config.commandline import config_from_command_line
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout.vllm import VllmEngine
from lockstep.trainer.main_generation import main as generate
from lockstep.trainer.main_ppo import main
from lockstep.trainer.ppo.rollout_sources.journal import trained_groups
from lockstep.trainer.ppo.task_runner import TaskRunner
from lockstep.weight_sync import CANARY_METRIC, canary_bound
from tests.tiny import save_tiny_model, small_run, write_rows
from tests.tiny_vision import save_tiny_vision_model
from tests.trainer.test_vision_agents import rows_with_images

pytestmark = [
    pytest.mark.first,
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM: make test-vllm"),
]
ROLLOUT = "actor_rollout_ref.rollout"
STEPS = 8
"""Two epochs."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of a tied model with two heads of a size that vLLM's CPU kernels know."""
    folder = tmp_path_factory.mktemp("vllm")
    save_tiny_model(
        folder / "model", hidden_size=64, num_attention_heads=2, num_key_value_heads=2, tie_word_embeddings=True
    )
    write_rows(folder / "train.parquet", 16)
    write_rows(folder / "val.parquet", 4)
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return sum(ord(c) % 7 for c in solution_str) % 11 / 10\n"
    )
    return [
        *small_run(folder),
        "algorithm.adv_estimator=grpo",
        f"{ROLLOUT}.n=3",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.max_num_seqs=16",
        f"{ROLLOUT}.temperature=0.8",
        "trainer.total_epochs=5",
        f"trainer.total_training_steps={STEPS}",
        "trainer.val_before_train=false",
        "actor_rollout_ref.nccl_timeout=300",
    ]


ASYNC_RUN = ["trainer.total_training_steps=4", "trainer.test_freq=2", "data.max_response_length=24"]
ASYNC = {
    mode: [f"trainer.async_mode={mode}", *ASYNC_RUN, *workers]
    for mode, workers in {
        "colocated": [],
        "one_step_off": ["trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2"],
        "fully_async": ["trainer.controller=local", "trainer.placement=split", "trainer.n_gpus_per_node=2"],
    }.items()
}


def check_async(run: Path, per_step: int = 4) -> None:
    rows = rows_of(run)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert all(row["async/staleness/max"] <= 1 and row["actor/grad_norm"] > 0 for row in rows)
    canaries = [row[CANARY_METRIC] for row in rows if CANARY_METRIC in row]
    assert len(canaries) >= 2 and max(canaries) < 1e-3
    ids = [group for groups in trained_groups(run).values() for group in groups]
    assert sorted(ids) == [(batch, row) for batch in range(1, 5) for row in range(per_step)]


def rows_of(run: Path) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] > 0]


def check_rows(rows: list[dict[str, Any]], steps: int = STEPS) -> None:
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    assert all(row[CANARY_METRIC] < 1e-3 for row in rows)
    assert all(row["training/rollout_log_probs_gap"] < 1e-3 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


@pytest.fixture(scope="module")
def in_one_process(base: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Stopped after step 2 and resumed."""
    run = tmp_path_factory.mktemp("one") / "run"
    for steps in (2, STEPS):
        settings = [f"trainer.default_local_dir={run}", "trainer.test_freq=4", f"trainer.total_training_steps={steps}"]
        assert main([*base, *settings]) == 0
    return rows_of(run)


def test_trains_in_one_process(in_one_process: list[dict[str, Any]]) -> None:
    check_rows(in_one_process)
    assert any(name.startswith("val-") for name in in_one_process[3])


def test_adapters_are_merged_in_training_and_in_generation(base: list[str], tmp_path: Path) -> None:
    """Greedy responses to a checkpoint of an adapter are those of the embedded engine, which adds it to the base in each layer."""
    model = "actor_rollout_ref.model"
    lora = [f"{model}.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.05", "actor_rollout_ref.actor.use_kl_loss=true"]
    steps = ["trainer.total_training_steps=3", "trainer.save_freq=3", f"trainer.default_local_dir={tmp_path}/run"]
    assert main([*base, *lora, *steps]) == 0
    check_rows(rows_of(tmp_path / "run"), steps=3)
    data = next(text for text in base if text.startswith("data.train_files=")).partition("=")[2]
    greedy = [f"data.path={data}", "data.n_samples=1", "rollout.do_sample=false", "data.max_prompt_length=40"]
    greedy += ["data.max_response_length=8", "rollout.max_num_seqs=16", "trainer.device=cpu"]
    responses = {}
    for engine in ("vllm", "embedded"):
        output = tmp_path / f"{engine}.parquet"
        command = [f"model.path={tmp_path}/run/global_step_3", f"rollout.name={engine}", f"data.output_path={output}"]
        assert generate([*greedy, *command]) == 0
        responses[engine] = pq.read_table(output)["responses"].to_pylist()
    assert responses["vllm"] == responses["embedded"]


def test_planted_defect_stops_the_run(
    base: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With filters at another temperature, whose log-probs are of the cut distribution: the canary holds in spite of them."""
    update = VllmEngine.update_weights

    def drop_a_norm_after_the_first_update(self: VllmEngine, weights: Iterator[Any]) -> None:
        kept = [(name, tensor) for name, tensor in weights if self.policy_version == 0 or name != "model.norm.weight"]
        update(self, iter(kept))

    monkeypatch.setattr(VllmEngine, "update_weights", drop_a_norm_after_the_first_update)
    assert main([*base, f"{ROLLOUT}.top_k=20", f"trainer.default_local_dir={tmp_path}/run"]) == 1
    assert "after update 2 on 1 of 1 ranks: on rank 0, model.norm.weight was not received" in capsys.readouterr().err
    (row,) = rows_of(tmp_path / "run")
    assert row["training/rollout_log_probs_gap"] > 0.1 and row[CANARY_METRIC] < 1e-3


def test_the_documented_command(base: list[str], tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "rollout.md").read_text()
    ((command,),) = [re.findall(r"^lockstep ppo (.*rollout\.name=vllm.*)$", b, re.M) for b in sh_blocks(page)]
    folder = next(text for text in base if text.startswith("actor_rollout_ref.model.path=")).split("=")[1][:-6]
    for name, value in {"$DATA": folder, "$MODEL": f"{folder}/model", "$RUN": str(tmp_path)}.items():
        command = command.replace(name, value)
    small = ["data.max_prompt_length=40", "data.max_response_length=6", "trainer.device=cpu"]
    assert main([*command.split(), *small]) == 0
    assert [row[CANARY_METRIC] < 1e-3 for row in rows_of(tmp_path / "vllm")] == [True, True]


def test_grpo_config_of_a_users_document(base: list[str], tmp_path: Path) -> None:
    """As printed, with small sizes, this machine's files and one worker."""
    blocks = yaml.safe_load((Path(__file__).parents[1] / "config" / "documented_blocks.yaml").read_text())
    (settings,) = [block["settings"] for block in blocks if block["from"] == "document 1, §A.1"]
    assert settings["actor_rollout_ref"]["rollout"]["name"] == "vllm"
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    folder = next(text for text in base if text.startswith("actor_rollout_ref.model.path=")).split("=")[1][:-6]
    changes = [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/val.parquet",
        "data.train_batch_size=8",
        "data.max_prompt_length=40",
        "data.max_response_length=8",
        f"actor_rollout_ref.model.path={folder}/model",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.gpu_memory_utilization=0.1",
        f"{ROLLOUT}.max_num_seqs=16",
        f"custom_reward_function.path={folder}/reward.py",
        "trainer.n_gpus_per_node=1",
        "trainer.logger=console",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert main(["--config-name", str(tmp_path / "run.yaml"), *changes]) == 0
    rows = rows_of(tmp_path / "run")
    bound = canary_bound(torch.bfloat16 if torch.cuda.is_available() else torch.float32)
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row[CANARY_METRIC] <= bound and row["actor/grad_norm"] > 0 for row in rows)
    assert any(name.startswith("val-") for name in rows[-1])


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="needs torchvision: make test-vllm")
def test_trains_with_images(base: list[str], tmp_path: Path) -> None:
    """A tied model whose tower is trained; rows with and without images."""
    heads = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "tie_word_embeddings": True}
    save_tiny_vision_model(tmp_path / "model", "qwen2_5_vl", **heads)
    rows_with_images(tmp_path / "train.parquet")
    settings = [
        f"actor_rollout_ref.model.path={tmp_path}/model",
        f"data.train_files={tmp_path}/train.parquet",
        "data.val_files=null",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "trainer.total_training_steps=3",
        f"trainer.default_local_dir={tmp_path}/run",
    ]
    assert main([*base, *settings]) == 0
    check_rows(rows_of(tmp_path / "run"), steps=3)


@pytest.mark.parametrize("mode", ASYNC)
def test_asynchronous_training(base: list[str], tmp_path: Path, mode: str) -> None:
    """Actor and vLLM in one thread, or in two."""
    assert main([*base, *ASYNC[mode], f"trainer.default_local_dir={tmp_path}/run"]) == 0
    check_async(tmp_path / "run")


def sh_blocks(page: str) -> list[str]:
    return [block.replace("\\\n", " ") for block in re.findall(r"```sh\n(.*?)```", page, flags=re.S)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    pytest.importorskip("ray", reason='needs Ray: pip install "lockstep-rl[ray]"')
    from lockstep.single_controller.ray_backend import connect, disconnect

    with pytest.MonkeyPatch.context() as environment:
        for name, value in {
            "RAY_AUTH_MODE": "disabled",
            "RAY_ADDRESS": "local",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
            "GLOO_SOCKET_IFNAME": "lo",
        }.items():
            environment.setenv(name, value)
        connect(num_cpus=2, log_to_driver=False, logging_level="ERROR", object_store_memory=256 << 20)
        yield
        disconnect()


STANDALONE = "trainer.placement=standalone"
BROADCAST = f"{ROLLOUT}.checkpoint_engine.backend=nccl"
LORA = ["actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=0.05"]


def run_on_ray(base: list[str], run: Path, *settings: str) -> list[dict[str, Any]]:
    workers = ["trainer.controller=ray", "trainer.n_gpus_per_node=2", f"trainer.default_local_dir={run}"]
    config = config_from_command_line([*base, *workers, *settings], PPOConfig)
    assert config is not None
    assert TaskRunner().run(config) == 0
    return rows_of(run)


@pytest.mark.parametrize(
    ("steps", "placement"),
    [
        pytest.param(STEPS, [], id="hybrid"),
        pytest.param(STEPS, [STANDALONE], id="standalone-store"),
        pytest.param(4, [f"{ROLLOUT}.tensor_model_parallel_size=2"], id="tensor-parallel"),
    ],
)
def test_trains_on_ray(
    steps: int,
    placement: list[str],
    cluster: None,
    base: list[str],
    in_one_process: list[dict[str, Any]],
    tmp_path: Path,
) -> None:
    """As in one process, whose third step is the first after a resume."""
    rows = run_on_ray(base, tmp_path / "run", *placement, f"trainer.total_training_steps={steps}")
    check_rows(rows, steps)
    for row, expected in zip(rows[:4], in_one_process):
        for name in ("critic/score/mean", "actor/grad_norm", "response_length/mean"):
            assert row[name] == pytest.approx(expected[name], rel=1e-3), name


def test_sharded_adapters_are_merged_and_broadcast(cluster: None, base: list[str], tmp_path: Path) -> None:
    steps = "trainer.total_training_steps=3"
    check_rows(run_on_ray(base, tmp_path / "run", STANDALONE, BROADCAST, *LORA, steps), steps=3)


def test_colocated_training_on_two_workers(cluster: None, base: list[str], tmp_path: Path) -> None:
    """With adapters."""
    run_on_ray(base, tmp_path / "run", *ASYNC["colocated"], *LORA)
    check_async(tmp_path / "run")
