"""Small modules that programs on verl import: metrics, FLOPs, traces, dumped rollouts, profiles, event loops, models."""

import asyncio
import json
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from lockstep.algorithms.advantages import ADVANTAGE_ESTIMATORS
from lockstep.single_controller import ClassWithInitArgs, LocalWorkerGroup, ResourcePool
from lockstep.verl import DataProto
from lockstep.verl.experimental.agent_loop import agent_loop
from lockstep.verl.models.transformers.qwen2_vl import get_rope_index
from lockstep.verl.single_controller.base import Worker
from lockstep.verl.single_controller.base.decorator import (
    Dispatch,
    make_nd_compute_dataproto_dispatch_fn,
    register,
)
from lockstep.verl.trainer.ppo.core_algos import (
    ADV_ESTIMATOR_REGISTRY,
    POLICY_LOSS_REGISTRY,
    compute_grpo_outcome_advantage,
    compute_grpo_vectorized_outcome_advantage,
    get_adv_estimator_fn,
    register_adv_est,
)
from lockstep.verl.trainer.ppo.metric_utils import bootstrap_metric, calc_maj_val, process_validation_metrics
from lockstep.verl.trainer.ppo.rollout_corr_helper import SUPPORTED_ROLLOUT_RS_OPTIONS
from lockstep.verl.utils import as_torch_index, group_mean_std
from lockstep.verl.utils.checkpoint.checkpoint_manager import should_save_ckpt_esi
from lockstep.verl.utils.debug.metrics import calculate_debug_metrics
from lockstep.verl.utils.device import set_expandable_segments
from lockstep.verl.utils.flops_counter import FlopsCounter, get_device_flops
from lockstep.verl.utils.import_utils import is_nvtx_available, load_extern_object, load_extern_type
from lockstep.verl.utils.metric import AggregationType, Metric, reduce_metrics
from lockstep.verl.utils.model import convert_weight_keys, create_random_mask, get_model_size
from lockstep.verl.utils.net_utils import is_ipv4, is_valid_ipv6_address
from lockstep.verl.utils.profiler import DistProfiler, DistProfilerExtension, ProfilerConfig
from lockstep.verl.utils.py_functional import timeout_limit
from lockstep.verl.utils.ray_utils import auto_await, get_event_loop
from lockstep.verl.utils.reward_score import default_compute_score
from lockstep.verl.utils.reward_score.sandbox_fusion.utils import check_correctness
from lockstep.verl.utils.rollout_skip import RolloutSkip, read_dumped_data
from lockstep.verl.utils.rollout_trace import RolloutTraceConfig, rollout_trace_attr, rollout_trace_op
from lockstep.verl.utils.tokenizer import normalize_token_ids
from lockstep.verl.utils.torch_functional import calculate_sum_pi_squared_from_logits
from lockstep.verl.workers.reward_manager.registry import REWARD_MANAGER_REGISTRY

pytestmark = pytest.mark.usefixtures("no_registrations")


def test_registries_are_dictionaries_of_the_registered() -> None:
    saved = ADV_ESTIMATOR_REGISTRY.copy()
    assert saved["grpo"] is get_adv_estimator_fn("grpo") and "grpo" in ADV_ESTIMATOR_REGISTRY and len(saved) > 5
    try:
        ADV_ESTIMATOR_REGISTRY.clear()
        assert not ADV_ESTIMATOR_REGISTRY and "grpo" not in ADVANTAGE_ESTIMATORS
        with pytest.raises(ValueError, match="no such advantage estimator"):
            get_adv_estimator_fn("grpo")
        register_adv_est("mine")(saved["grpo"])
        assert list(ADV_ESTIMATOR_REGISTRY) == ["mine"] and ADV_ESTIMATOR_REGISTRY["mine"] is saved["grpo"]
    finally:
        ADV_ESTIMATOR_REGISTRY.clear()
        ADV_ESTIMATOR_REGISTRY.update(saved)
    assert get_adv_estimator_fn("grpo") is saved["grpo"]
    POLICY_LOSS_REGISTRY["mine"] = POLICY_LOSS_REGISTRY["vanilla"]
    POLICY_LOSS_REGISTRY["mine"] = POLICY_LOSS_REGISTRY["gspo"]  # assignment replaces
    assert POLICY_LOSS_REGISTRY.pop("mine") is POLICY_LOSS_REGISTRY["gspo"] and "mine" not in POLICY_LOSS_REGISTRY
    with pytest.raises(KeyError):
        POLICY_LOSS_REGISTRY["none"]
    assert POLICY_LOSS_REGISTRY.get("none") is None and "naive" in REWARD_MANAGER_REGISTRY
    assert "tool_agent" in agent_loop._agent_loop_registry


def test_names_of_algorithms() -> None:
    rewards, mask = torch.tensor([[1.0], [0.0], [3.0]]), torch.ones(3, 1)
    index = np.array(["a", "a", "b"], dtype=object)
    one, _ = compute_grpo_vectorized_outcome_advantage(rewards, mask, index=index)
    two, _ = compute_grpo_outcome_advantage(rewards, mask, index=index)
    assert torch.equal(one, two) and {"token_k1", "seq_max_k3"} <= SUPPORTED_ROLLOUT_RS_OPTIONS
    groups = as_torch_index(index)
    assert groups.tolist() == [0, 0, 1] and group_mean_std(rewards[:, 0], groups)[0].tolist() == [0.5, 0.0]
    probabilities = torch.tensor([[0.5, 0.25, 0.25], [1.0, 0.0, 0.0]])
    squares = calculate_sum_pi_squared_from_logits(probabilities.log())
    torch.testing.assert_close(squares, torch.tensor([0.375, 1.0]))


def test_metrics_say_how_they_are_aggregated() -> None:
    metric = Metric("mean", 1.0)
    metric.append(torch.tensor(2.0, requires_grad=True))
    metric.extend([3, np.float32(4)])
    assert metric.aggregate() == 2.5 and metric.init_list().values == []
    kinds = {kind: Metric(kind, [1.0, 3.0]) for kind in AggregationType}
    found = {kind.value: metric.aggregate() for kind, metric in kinds.items()}
    assert found == {"mean": 2.0, "sum": 4.0, "min": 1.0, "max": 3.0}
    ranks = [Metric("sum", [1.0, 2.0]), Metric("sum", [3.0, 4.0])]
    assert (
        Metric.aggregate_dp(ranks) == 5.0 and Metric.aggregate_dp([Metric("max", [1.0]), Metric("max", [7.0])]) == 7.0
    )
    reduced = reduce_metrics({"loss_max": Metric("sum", [1, 2]), "x_max": [1, 2], **Metric.from_dict({"a": 2}, "min")})
    assert reduced == {"loss_max": 3.0, "x_max": 2.0, "a": 2.0}
    for wrong in (torch.ones(2), "text"):
        with pytest.raises(ValueError, match="a metric is a number"):
            metric.append(wrong)
    with pytest.raises(ValueError, match="a sum cannot be added to a mean"):
        metric.append(ranks[0])
    with pytest.raises(ValueError, match="different numbers of values"):
        Metric.aggregate_dp([ranks[0], Metric("sum", 1.0)])


def test_bootstraps_of_validation() -> None:
    values = [0.0, 1.0, 2.0, 4.0]
    ((best, spread), (worst, _)) = bootstrap_metric(values, 2, [np.max, np.min])
    whole = process_validation_metrics(["d"] * 4, ["a"] * 4, {"reward": values})["d"]["reward"]
    assert (best, spread, worst) == (whole["best@2/mean"], whole["best@2/std"], whole["worst@2/mean"])
    votes = [{"pred": "b", "val": 3.0}, {"pred": "a", "val": 1.0}, {"pred": "a", "val": 2.0}]
    assert calc_maj_val(votes, "pred", "val") == 1.0 and calc_maj_val(votes[:2], "pred", "val") == 3.0


DENSE = {"hidden_size": 8, "vocab_size": 10, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ATTENTION = 8 * 2 * (4 + 2 + 2 + 4)
SQUARES = 2 * 4 * 2 * (3 * 3 + 5 * 5)
"""Layers * heads * width of a head * squares of the lengths."""


@pytest.mark.parametrize(
    ("config", "parameters", "pairs"),
    [
        ({"model_type": "llama", "intermediate_size": 6}, 2 * (ATTENTION + 3 * 8 * 6), SQUARES),
        ({"model_type": "qwen3", "intermediate_size": 6, "head_dim": 4}, 2 * (2 * ATTENTION + 3 * 8 * 6), 2 * SQUARES),
        (
            {"model_type": "qwen3_moe", "moe_intermediate_size": 3, "num_experts_per_tok": 2, "num_experts": 5},
            2 * (ATTENTION + 2 * 3 * 8 * 3 + 8 * 5),
            SQUARES,
        ),
        (
            {
                **{"model_type": "gpt_oss", "intermediate_size": 3, "num_experts_per_tok": 2, "num_local_experts": 5},
                **{"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
            },
            2 * (ATTENTION + 2 * 3 * 8 * 3 + 8 * 5),
            8 * (3 * 3 + 5 * 4) + 8 * (3 * 3 + 5 * 5),
        ),
        (
            {"model_type": "gemma3_text", "intermediate_size": 6, "sliding_window": 4, "sliding_window_pattern": 2},
            2 * (ATTENTION + 3 * 8 * 6),
            8 * (3 * 3 + 5 * 4) + 8 * (3 * 3 + 5 * 5),
        ),
        ({"model_type": "apertus", "intermediate_size": 6}, 2 * (ATTENTION + 2 * 8 * 6 + 8 + 2 * 2), SQUARES),
        (
            {
                **{"model_type": "deepseek_v3", "intermediate_size": 6, "moe_intermediate_size": 3},
                **{"first_k_dense_replace": 1, "n_routed_experts": 5, "num_experts_per_tok": 2, "n_shared_experts": 1},
                **{"q_lora_rank": 3, "kv_lora_rank": 5, "qk_nope_head_dim": 2, "qk_rope_head_dim": 1, "v_head_dim": 7},
            },
            2 * (3 * (8 + 4 * 3) + 8 * (5 + 1) + 4 * (2 + 7) * 5 + 4 * 7 * 8) + 3 * 8 * 6 + (3 * 8 * 3 * 3 + 8 * 5),
            2 * 4 * (3 + 7) / 2 * (3 * 3 + 5 * 5),
        ),
    ],
)
def test_flops_by_model_type(config: dict[str, Any], parameters: int, pairs: float) -> None:
    counter = FlopsCounter(SimpleNamespace(**DENSE | config))
    achieved, _ = counter.estimate_flops([3, 5], delta_time=2.0)
    expected = 6 * (parameters + 2 * 10 * 8) * (3 + 5) + 6 * pairs
    assert achieved == pytest.approx(expected / 2.0 / 1e12)


def test_flops_of_a_known_model_and_of_others(caplog: pytest.LogCaptureFixture) -> None:
    """Llama-2-7B: 6 * 6.74e9 parameters and the embedding, 3,584 tokens, and 6 * 4096 * 32 * the squares of the lengths."""
    sizes = {"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32}
    text = SimpleNamespace(model_type="llama", **sizes, **heads)
    achieved, peak = FlopsCounter(text).estimate_flops([512, 1024, 2048], 1.0)
    assert achieved == pytest.approx(149226491215872 / 1e12) and peak > 0
    vision = SimpleNamespace(model_type="qwen2_5_vl", text_config=text)
    assert FlopsCounter(vision).estimate_flops([512, 1024, 2048], 1.0)[0] == achieved
    assert FlopsCounter(SimpleNamespace(model_type="unheard_of")).estimate_flops([1], 1.0)[0] == 0
    assert "FLOPs of unheard_of are not known" in caplog.text
    assert get_device_flops("T", "NVIDIA H20") == 148 and get_device_flops("P", "NVIDIA H200") == pytest.approx(0.989)
    assert get_device_flops(device_name="NVIDIA GB200") == 2500 and get_device_flops(device_name="new") == float("inf")


def test_debug_metrics_take_a_loss_mask() -> None:
    log_probs = torch.log(torch.tensor([[0.5, 0.25]]))
    tensors = {"old_log_probs": log_probs, "rollout_log_probs": log_probs, "responses": torch.zeros(1, 2)}
    metrics = calculate_debug_metrics(DataProto.from_dict(tensors | {"loss_mask": torch.ones(1, 2)}))
    assert metrics["training/rollout_actor_probs_pearson_corr"] == pytest.approx(1.0)
    empty = calculate_debug_metrics(DataProto.from_dict(tensors | {"loss_mask": torch.zeros(1, 2)}))
    assert empty["training/rollout_probs_diff_valid"] == 0
    assert np.isnan(empty["training/rollout_actor_probs_pearson_corr"])
    whole = calculate_debug_metrics(DataProto.from_dict(tensors | {"attention_mask": torch.ones(1, 4)}))
    assert whole["training/rollout_probs_diff_max"] == 0
    with pytest.raises(KeyError, match="loss_mask"):
        calculate_debug_metrics(DataProto.from_dict(tensors))


@pytest.mark.parametrize(
    ("stamp", "step_s", "expected"),
    [(100, 60, True), (100, 10, False), (-5, 60, False), (100, 0, False), ("soon", 60, False)],
)
def test_saving_before_an_instance_ends(
    monkeypatch: pytest.MonkeyPatch, stamp: int | str, step_s: float, expected: bool
) -> None:
    value = str(time.time() + stamp) if isinstance(stamp, int) else stamp
    for name in ("MLP", "SAGEMAKER"):
        monkeypatch.setenv(f"{name}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP", value)
        assert should_save_ckpt_esi(max_steps_duration=step_s, save_ckpt_duration=60) is expected
        monkeypatch.delenv(f"{name}_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP")


def test_matrices_of_prime_math() -> None:
    rows = "\n -7 & 6 & -8 \\\\\n 11 & -9 & 12 \n "
    answer, truth = (f"\\begin{{{kind}}}{rows}\\end{{{kind}}}" for kind in ("bmatrix", "pmatrix"))
    assert float(default_compute_score("numina_aops_forum", answer, truth.replace("12 \n ", "12\n"))) == 1.0
    assert float(default_compute_score("numina_aops_forum", answer.replace("12", "13"), truth)) == 0.0


def test_objects_of_files(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("class Mine:\n    value = 3\n")
    assert load_extern_object(str(tmp_path / "mine.py"), "Mine").value == 3
    assert load_extern_object("pkg://json", "dumps") is json.dumps and load_extern_type(None, "Mine") is None
    for missing in ("none.py", "none"):
        with pytest.raises(FileNotFoundError):
            load_extern_object(str(tmp_path / missing), "Mine")
    with pytest.raises(AttributeError, match="has no attribute 'Other'"):
        load_extern_object(str(tmp_path / "mine.py"), "Other")
    assert isinstance(is_nvtx_available(), bool)


class Meshes(Worker):
    def __init__(self) -> None:
        super().__init__()
        inner = Worker()
        inner._register_dispatch_collect_info("train", dp_rank=self.rank // 2, is_collect=self.rank % 2 == 0)
        self.set_dispatch_collect("actor", **inner.get_dispatch_collect())

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="actor"))
    def add_rank(self, data: DataProto) -> DataProto:
        return DataProto.from_dict({"y": data.batch["x"] + 100 * self.rank})


def test_a_worker_takes_over_the_mesh_of_another() -> None:
    group: Any = LocalWorkerGroup(ResourcePool([4]), ClassWithInitArgs(Meshes))
    assert group.add_rank(DataProto.from_dict({"x": torch.arange(4)})).batch["y"].tolist() == [0, 1, 202, 203]
    worker = Meshes()
    assert worker.get_dispatch_collect() == {"dispatch_dp_rank": {"actor": 0}, "collect_dp_rank": {"actor": True}}
    assert worker.query_collect_info("actor")
    with pytest.raises(AssertionError, match="no mesh 'critic'"):
        worker.set_dispatch_collect("critic", {"a": 0, "b": 1}, {"a": True, "b": True})


def test_a_group_sets_ranks_itself() -> None:
    pytest.importorskip("ray")
    from lockstep.verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    with pytest.raises(ValueError, match="worker_env may not set WORLD_SIZE: the worker group does"):
        RayWorkerGroup(
            RayResourcePool([1], use_gpu=False), RayClassWithInitArgs(Worker), worker_env={"WORLD_SIZE": "2", "A": "b"}
        )


def test_pools_are_split_and_merged() -> None:
    pytest.importorskip("ray")
    from lockstep.verl.single_controller.ray import RayResourcePool, merge_resource_pool, split_resource_pool

    pool = RayResourcePool([4, 4], use_gpu=False, name_prefix="all", max_colocate_count=3)
    parts = split_resource_pool(pool, split_size=2)
    assert [part.store for part in parts] == [[2]] * 4 and len({part.name_prefix for part in parts}) == 4
    assert [part.store for part in split_resource_pool(pool, [6, 2])] == [[4, 2], [2]]
    merged = merge_resource_pool(parts[0], parts[3])
    assert merged.store == [2, 2] and merged.max_colocate_count == 3 and not merged.use_gpu
    with pytest.raises(AssertionError, match="3 does not divide a pool of 8"):
        split_resource_pool(pool, 3)
    with pytest.raises(AssertionError, match="the pools differ"):
        merge_resource_pool(pool, RayResourcePool([1]))


class Generator:
    """Counts what it generates."""

    def __init__(self) -> None:
        self.calls = 0

    def generate_sequences(self, batch: DataProto) -> DataProto:
        self.calls += 1
        return DataProto.from_dict({"responses": batch.batch["x"] + 100 * self.calls})


def skip_of(folder: Path, group: Generator, **skip: Any) -> RolloutSkip:
    config = {
        "actor_rollout_ref": {"rollout": {"n": 1, "skip": {"enable": True, "dump_dir": str(folder), **skip}}},
        "trainer": {"experiment_name": "e", "project_name": "p"},
        "data": {"train_batch_size": 2, "max_prompt_length": 4, "max_response_length": 8},
    }
    made = RolloutSkip(OmegaConf.create(config), group)
    made.wrap_generate_sequences()
    return made


def rollouts(group: Any, skip: RolloutSkip, steps: int) -> list[list[int]]:
    """The rows of each step's batch and of its responses."""
    found = []
    for step in range(1, steps + 1):
        batch = DataProto.from_dict({"x": torch.arange(2) + 10 * step})
        skip.record(batch, step)
        responses = group.generate_sequences(batch).batch["responses"].tolist()
        found.append([*batch.batch["x"].tolist(), *responses])
    return found


@pytest.mark.parametrize(
    ("action", "later", "num_calls"),
    [("cache", [40, 41, 240, 241], 2), ("repeat", [20, 21, 220, 221], 0), ("repeat_last", [20, 21, 220, 221], 0)],
)
def test_rollouts_are_reused(tmp_path: Path, action: str, later: list[int], num_calls: int) -> None:
    first = Generator()
    made = rollouts(first, skip_of(tmp_path, first, max_dump_step=2, action=action), 2)
    assert made == [[10, 11, 110, 111], [20, 21, 220, 221]] and first.calls == 2
    second = Generator()
    again = rollouts(second, skip_of(tmp_path, second, max_dump_step=2, action=action), 4)
    assert again[:2] == made and again[3] == later and second.calls == num_calls
    (folder,) = tmp_path.glob("*/*")
    assert folder.name == "GBS2_N1_in4_out8"
    dumped = read_dumped_data(folder / "genstep_000001")
    assert dumped["new_batch"].batch["x"].tolist() == [10, 11]
    off = Generator()
    skip = RolloutSkip(OmegaConf.create({"actor_rollout_ref": {"rollout": {"n": 1}}, "trainer": {}, "data": {}}), off)
    skip.wrap_generate_sequences()
    assert not skip.is_activate and "generate_sequences" not in vars(off)


class FakeMlflow:
    """The calls of mlflow that traces make."""

    def __init__(self) -> None:
        self.spans: list[dict[str, Any]] = []
        self._open: list[dict[str, Any]] = []

    def start_span(self, name: str) -> "FakeMlflow":
        self.spans.append({"name": name})
        self._open.append(self.spans[-1])
        return self

    trace_id = "t"

    def __enter__(self) -> "FakeMlflow":
        return self

    def __exit__(self, *exc: object) -> None:
        self._open.pop()

    def set_trace_tag(self, trace_id: str, key: str, value: str) -> None:
        self._open[-1].setdefault("tags", {})[key] = value

    def set_inputs(self, inputs: dict[str, Any]) -> None:
        self._open[-1]["inputs"] = inputs

    def set_outputs(self, outputs: Any) -> None:
        self._open[-1]["outputs"] = outputs


class Traced:
    tokenizer = SimpleNamespace(decode=lambda ids: "".join(map(chr, ids)))

    @rollout_trace_op
    async def run(self, a: int, b: int = 2) -> Any:
        return SimpleNamespace(prompt_ids=[65], response_ids=[66, 67], total=self.add(a, b))

    @rollout_trace_op
    def add(self, a: int, b: int) -> int:
        return a + b


def test_calls_are_traced() -> None:
    assert asyncio.run(Traced().run(1)).total == 3  # no backend
    fake = FakeMlflow()
    config = RolloutTraceConfig.get_instance()
    try:
        config.backend, config.client, config.token2text, config.experiment_name = "mlflow", fake, True, "mine"
        with rollout_trace_attr(sample_index=4, step=1, validate=True):
            asyncio.run(Traced().run(1))
        names = [span["name"] for span in fake.spans]
        assert names == ["rollout_trace", "Traced.run", "Traced.add"]
        expected = {"sample_index": "4", "step": "1", "validate": "True", "experiment_name": "mine"}
        assert fake.spans[0]["tags"] == expected
        assert fake.spans[1]["inputs"] == {"a": 1, "b": 2} and fake.spans[1]["outputs"]["response_text"] == "BC"
        assert fake.spans[2]["outputs"] == 3
        with rollout_trace_attr(trace=False):
            asyncio.run(Traced().run(1))
        assert len(fake.spans) == 3
    finally:
        RolloutTraceConfig.reset()
    assert RolloutTraceConfig.get_backend() is None
    with pytest.raises(ValueError, match=r"rollout\.trace\.backend=paper: must be one of weave, mlflow"):
        RolloutTraceConfig.init("p", "e", backend="paper")
    RolloutTraceConfig.reset()


class Profiled(Worker, DistProfilerExtension):
    def __init__(self, folder: str) -> None:
        Worker.__init__(self)
        profiler = DistProfiler(rank=self.rank, config=ProfilerConfig(ranks=[0]), save_path=folder)
        DistProfilerExtension.__init__(self, profiler)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    @DistProfiler.annotate(color="red", role="my_update")
    def update(self) -> int:
        return int(torch.ones(3).sum())


def test_a_programs_worker_is_profiled(tmp_path: Path) -> None:
    import gzip

    group: Any = LocalWorkerGroup(ResourcePool([1]), ClassWithInitArgs(Profiled, str(tmp_path)))
    group.start_profile()
    assert group.update() == [3]
    ((file,),) = group.stop_profile()
    with gzip.open(file, "rt") as trace:
        assert "my_update" in trace.read()
    assert group.update() == [3] and group.stop_profile() == [[]]  # nothing is recorded now


def test_functions_of_event_loops() -> None:
    @auto_await
    async def double(x: int) -> int:
        await asyncio.sleep(0)
        return 2 * x

    async def awaits() -> int:
        return int(await double(2)) + (lambda: double(3))()

    assert double(1) == 2 and asyncio.run(awaits()) == 10
    loop = get_event_loop()
    assert loop.run_until_complete(asyncio.sleep(0, 7)) == 7
    loop.close()
    asyncio.set_event_loop(None)


@pytest.mark.parametrize("use_signals", [True, False])
def test_calls_that_take_too_long(use_signals: bool) -> None:
    @timeout_limit(seconds=0.1, use_signals=use_signals)
    def wait(seconds: float, fails: bool = False) -> str:
        time.sleep(seconds)
        if fails:
            raise LookupError("nothing")
        return "done"

    assert wait(0) == "done"
    with pytest.raises(TimeoutError, match=r"wait took longer than 0\.1 s"):
        wait(1)
    with pytest.raises(LookupError):
        wait(0, fails=True)


def test_addresses_and_tokens() -> None:
    assert is_valid_ipv6_address("::1") and not is_valid_ipv6_address("127.0.0.1") and is_ipv4("127.0.0.1")
    assert not is_ipv4("host")
    for given in ([1, 2], [[1, 2]], torch.tensor([[1, 2]]), np.array([1, 2]), {"input_ids": [[1, 2]]}):
        assert normalize_token_ids(given) == [1, 2]
    with pytest.raises(TypeError, match="token ids of one text"):
        normalize_token_ids([[1], [2]])
    set_expandable_segments(False)  # no-op without a GPU


def test_masks_names_and_sizes_of_models() -> None:
    np.random.seed(0)
    mask = create_random_mask(torch.zeros(50, 20), 0.6, 0.4, min_ratio_of_valid_token=0.2)
    lengths = mask.sum(1)
    assert lengths.min() >= 4 and lengths.max() <= 12 and mask.dtype == torch.int64
    assert (mask.diff(dim=1) == 1).sum(1).max() <= 1  # one run of tokens in each row
    with pytest.raises(AssertionError, match="exceed 20"):
        create_random_mask(torch.zeros(1, 20), 0.9, 0.5)
    model = SimpleNamespace(
        _checkpoint_conversion_mapping={"^visual": "model.visual", r"^model(?!\.visual)": "model.lm"}
    )
    named = dict.fromkeys(("model.visual.a", "model.lm.b", "head"), torch.zeros(1))
    assert list(convert_weight_keys(named, model)) == ["visual.a", "model.b", "head"]  # type: ignore[arg-type]
    assert list(convert_weight_keys(named, torch.nn.Linear(1, 1))) == list(named)
    assert get_model_size(torch.nn.Linear(100, 50, bias=False)) == (5.0, "K")


def test_positions_of_text_images_and_videos() -> None:
    """Two tokens of text, an image of 1x2x2 merged patches, one token of text, a video of 2x1x2."""
    tokens = {"<|image_pad|>": 7, "<|video_pad|>": 8}
    processor = SimpleNamespace(
        image_processor=SimpleNamespace(merge_size=2), tokenizer=SimpleNamespace(convert_tokens_to_ids=tokens.get)
    )
    ids = torch.tensor([0, 1, 1, 7, 7, 7, 7, 1, 8, 8, 8, 8])
    mask = (torch.arange(12) > 0).long()
    positions = get_rope_index(
        processor, ids, torch.tensor([[1, 4, 4]]), torch.tensor([[2, 2, 4]]), attention_mask=mask
    )
    assert positions[:, 1:].tolist() == [
        [0, 1, 2, 2, 2, 2, 4, 5, 5, 6, 6],
        [0, 1, 2, 2, 3, 3, 4, 5, 5, 5, 5],
        [0, 1, 2, 3, 2, 3, 4, 5, 6, 5, 6],
    ]
    text = get_rope_index(processor, torch.tensor([1, 1, 1]))
    assert text.tolist() == [[0, 1, 2]] * 3


def test_programs_are_checked_case_by_case() -> None:
    tests = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "5\n", "6\n"]}
    passed, details = check_correctness(None, tests, "print(2 * int(input()))", timeout=5)
    assert passed == [True, False, True] and [entry["status"] for entry in details] == ["success", "failed", "success"]
    assert "expected" in details[1]["error"] and "LOCKSTEP_SANDBOX_FUSION" not in os.environ
    with pytest.raises(ValueError, match="only python programs"):
        check_correctness(None, tests, "x", language="cpp")
