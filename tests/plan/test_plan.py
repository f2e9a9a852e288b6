"""`lockstep plan`: sizes against transformers, memory and time against measured runs, and what it tells the user."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.cli import main
from lockstep.config import checks
from lockstep.config.compose import load_config
from lockstep.config.ppo import PPOConfig
from lockstep.engines.rollout.embedded.state_slots import bytes_per_slot
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.known_models import install_decoder_layers
from lockstep.plan import hardware
from lockstep.plan.batch_units import Lengths, batch_units
from lockstep.plan.hardware import DEVICES
from lockstep.plan.job import Job, job_of
from lockstep.plan.memory import cached_tokens, phases
from lockstep.plan.model_shape import ModelShape
from lockstep.plan.step_time import fitting_sequences, step_times, transfer_time
from tests.engines.rollout.rollout_cases import embedded
from tests.models import architectures

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
        (
            "qwen3_moe",
            {
                "num_experts": 4,
                "moe_intermediate_size": 16,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "mlp_only_layers": [1],
            },
        ),
    ],
)
def test_number_of_parameters(model_type: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **TINY, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert ModelShape.from_config(config.to_dict()).parameters == expected


EXACT = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next", "bamba", "falcon_h1", "jamba", "lfm2")
"""Hybrid models with counted parameters; those of the others differ by norms and by what their MLPs have besides."""


@pytest.mark.parametrize(
    "model_type", [*EXACT, "granitemoehybrid", "kimi_linear", "minimax", "nemotron_h", "olmo_hybrid", "zamba2"]
)
def test_states_and_cache_are_those_of_the_engine(model_type: str) -> None:
    policy = architectures.tiny_model(model_type)
    shape = ModelShape.from_config(policy.config.to_dict())
    if model_type in EXACT:
        assert shape.parameters == sum(parameter.numel() for parameter in policy.parameters())
    install_decoder_layers(policy)
    policy.set_attn_implementation(ATTENTION_NAME)
    for dtype in (torch.float32, torch.bfloat16):
        runner = embedded(policy.to(dtype)).runner
        assert runner is not None
        assert shape.state_bytes(dtype.itemsize) == bytes_per_slot(runner.layer_states()) > 0
        assert (shape.counts.state, shape.counts.attention) == (len(runner.layer_states()), len(runner.layers()))
        per_token = sum(layer.bytes_per_token for layer in runner.layers().values())
        assert shape.kv_bytes(dtype.itemsize) == per_token


@pytest.mark.parametrize(
    ("model_type", "more"),
    [
        ("zamba", {"num_hidden_layers": 16}),
        ("zamba2", {}),
        ("zamba2", {"num_mem_blocks": 2, "use_shared_attention_adapter": True}),
        ("ernie4_5_moe", {"num_hidden_layers": 6}),
        ("ernie4_5_moe", {"num_hidden_layers": 6, "moe_layer_interval": 2, "moe_layer_end_index": 4}),
        ("ernie4_5_moe", {"num_hidden_layers": 6, "moe_layer_end_index": 27}),  # layers were left out of a saved config
    ],
)
def test_parameters_of_shared_blocks_and_other_names_of_experts(model_type: str, more: dict[str, Any]) -> None:
    config = AutoConfig.for_model(model_type, **more)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    expected = sum(parameter.numel() for parameter in model.parameters())
    shape = ModelShape.from_config(config.to_dict())
    assert shape.parameters == pytest.approx(expected, rel=0.01)
    if model_type == "ernie4_5_moe":
        assert (shape.routed_experts, shape.active_experts) == (64, 6 + 2)


@pytest.mark.parametrize(
    ("keys", "inner", "dense"),
    [
        ({"block_auto_adjust_ff_dim": True, "intermediate_size": 12288, "conv_L_cache": 3}, 8192, 0),
        ({"n_routed_experts": 8, "moe_intermediate_size": 16, "first_k_dense_replace": 3}, 16, 3),
        ({"num_experts": 8, "num_experts_per_token": 2, "mlp_layer_types": ["dense", *["sparse"] * 7]}, 48, 1),
        ({"num_experts": 16, "expert_layer_period": 2, "expert_layer_offset": 1}, 48, 4),
        ({"num_experts": 16, "mlp_only_layers": [0, 1], "decoder_sparse_step": 2}, 48, 5),
        ({"n_routed_experts": 8, "first_k_dense_replace": 8}, 48, 0),  # no layer has them
    ],
)
def test_which_layers_have_experts(keys: dict[str, Any], inner: int, dense: int) -> None:
    kinds = {"layer_types": ["full_attention"] * 8}
    shape = ModelShape.from_config({"model_type": "unknown", **TINY, "num_hidden_layers": 8} | kinds | keys)
    assert (shape.inner, shape.dense_mlps) == (inner, dense)
    assert shape.active_experts == (2 if "num_experts_per_token" in keys else 1)
    assert (shape.routed_experts > 0) == (dense > 0)
    share = (8 - dense) / 8 * shape.routed_experts * shape.mlp_parameters
    assert shape.routed_parameters == share


@pytest.mark.parametrize("model_type", ["deepseek_v3", "deepseek_v32", "minicpm3"])
def test_cache_of_latents(model_type: str) -> None:
    """A latent and a rope key per token and layer, or the keys and values of all heads."""
    policy = architectures.tiny_model(model_type)
    config = policy.config
    shape = ModelShape.from_config(config.to_dict())
    install_decoder_layers(policy)
    policy.set_attn_implementation(ATTENTION_NAME)
    runner = embedded(policy).runner
    assert runner is not None
    assert shape.kv_bytes(4) == sum(layer.bytes_per_token for layer in runner.layers().values())
    per_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    assert shape.kv_bytes(2, expanded=True) == config.num_hidden_layers * config.num_attention_heads * per_head * 2


@pytest.mark.parametrize(
    ("keys", "counts"),
    [
        ({"full_attention_interval": 4}, (2, 6)),
        ({"attn_layer_period": 8, "attn_layer_offset": 4}, (1, 7)),
        ({"attn_layer_indices": [3]}, (1, 7)),
        ({"layer_types": ["linear_attention"] * 5 + ["full_attention"] * 3}, (3, 5)),
    ],
)
def test_which_layers_have_a_state(keys: dict[str, Any], counts: tuple[int, int]) -> None:
    """As the published config.json files tell it."""
    sizes = {
        "linear_num_value_heads": 4,
        "linear_value_head_dim": 8,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
    }
    config = {"model_type": "qwen3_next", **TINY, "num_hidden_layers": 8, **sizes}
    shape = ModelShape.from_config(config | keys)
    assert (shape.counts.attention, shape.counts.state, shape.counts.mlp) == (*counts, 8)
    with pytest.raises(ValueError, match=r"config\.json of qwen3_next has no layer_types"):
        ModelShape.from_config(config)


def test_layers_of_kimi_linear() -> None:
    """As its published config.json tells them, from 1 on."""
    section = {"num_heads": 4, "head_dim": 8, "short_conv_kernel_size": 4, "full_attn_layers": [4, 8]}
    config = {"model_type": "kimi_linear", **TINY, "num_hidden_layers": 8, "linear_attn_config": section}
    shape = ModelShape.from_config(config)
    assert (shape.counts.attention, shape.counts.state) == (2, 6)
    assert shape.state_bytes(4) == 6 * 4 * (3 * 32 * 4 + 4 * 8 * 8)


def test_states_take_memory_of_the_cache(command: Any, tmp_path: Path) -> None:
    settings = command("0.5b", 16, 256, 256)
    path = tmp_path / "0.5b" / "config.json"
    (plain,) = [phase for phase in phases(plan(settings)) if phase.name == "generate"]
    sizes = {"linear_num_value_heads": 16, "linear_value_head_dim": 128, "linear_num_key_heads": 16}
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | sizes | {"linear_key_head_dim": 128, "full_attention_interval": 4}))
    job = plan(settings)
    (hybrid,) = [phase for phase in phases(job) if phase.name == "generate"]
    slot = job.models[0].shape.state_bytes(2)
    num_layers = config["num_hidden_layers"]
    assert slot == num_layers * 3 // 4 * (2 * 4 * 3 * 2048 + 4 * 16 * 128 * 128)
    assert hybrid.parts["states"] == 129 * slot and "states" not in plain.parts
    assert hybrid.parts["KV cache"] == plain.parts["KV cache"] / 4
    assert fitting_sequences(job, hybrid) == 128
    small = replace(job, device=replace(job.device, memory=3 * 129 * slot))
    (narrow,) = [phase for phase in phases(small) if phase.name == "generate"]
    assert 1 <= fitting_sequences(small, narrow) < 128


DYNAMIC = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=16384")
NO_CHECKPOINTING = "actor_rollout_ref.model.enable_gradient_checkpointing=false"
LORA = (f"{ACTOR}.use_dynamic_bsz=true", "actor_rollout_ref.model.lora_rank=32")


def test_steps_with_drafts_need_memory_for_more_logits(command: Any) -> None:
    def logits(prompts: int, *more: str) -> float:
        job = plan(command("0.5b", prompts, 256, 256, "trainer.device=cuda", *more))
        (generate,) = [phase for phase in phases(job) if phase.name == "generate"]
        return generate.parts["logits"] / (2 * 4 * 151936)

    enable, few = "actor_rollout_ref.rollout.history_drafts.enable=true", "max_draft_tokens=3"
    assert logits(2) == 16 and logits(32) == 256
    assert logits(2, enable, f"actor_rollout_ref.rollout.history_drafts.{few}") == 16 * 4
    assert logits(32, enable) == 1024


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
        (("7b", 16, 256, 512), (*LORA, f"{ACTOR}.ppo_max_token_len_per_gpu=8192"), 51.9, 3.75, 3.97),
        (("7b", 16, 256, 512), (*LORA, f"{ACTOR}.ppo_max_token_len_per_gpu=4096"), 34.5, 3.74, 4.27),
        (
            ("7b", 16, 256, 512),
            (*LORA, f"{ACTOR}.ppo_max_token_len_per_gpu=8192", f"{ACTOR}.fsdp_config.optimizer_offload=true"),
            23.1,
            3.74,
            5.75,
        ),
        (
            ("0.5b", 32, 256, 256),
            (LORA[1], f"{ACTOR}.ppo_micro_batch_size_per_gpu=64", NO_CHECKPOINTING),
            23.0,
            0.733,
            0.596,
        ),
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


def test_a_response_of_32k_tokens(command: Any) -> None:
    """What an update keeps, by hand: every layer of 1.5B; 17 of 28 layers of 7B, and the logits that the head keeps.

    Without room for those, the backward of one layer is the peak instead.
    """
    tokens = 256 + 32768
    more = (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu={tokens}")
    more += ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.rollout.gpu_memory_utilization=0.8")
    full = plan(command("1.5b", 8, 256, 32768, *more))
    lora = plan(command("7b", 8, 256, 32768, *more, LORA[1]))
    (of_full, of_lora), heads = ([phases(job)[-1].parts for job in (full, lora)], 3 * 1536 + 3 * 256)
    assert of_full["activations"] == 28 * tokens * (2 * 1536 * 6 + 2 * heads + 4 * 8960)
    stream, layer = tokens * 4 * 3584, tokens * (2 * 3584 * 6 + 6 * (3584 + 512) + 4 * 18944 + 2 * 7 * 32)
    assert of_lora["activations"] == 17 * layer + 11 * stream
    assert of_lora["logits"] == 4 * 2**28 + 2 * 32768 * 152064
    assert phases(full)[0].parts["KV cache"] > 32 * tokens * 2 * 28 * 2 * 128 * 2  # all samples at once
    small = replace(lora, device=replace(lora.device, memory=40e9))
    tight = phases(small)[-1].parts
    assert tight["activations"] == 28 * stream and "logits" not in tight
    assert tight["backward of a layer"] == layer + tokens * (3584 * 6 + 6 * 18944)
    assert step_times(small, phases(small))["update actor"] > step_times(lora, phases(lora))["update actor"]


def test_agrees_with_a_measured_run_in_4_bits(command: Any) -> None:
    """docs/lora.md: 14.0 GB, 9.6 s and 7.5 s."""
    more = (*LORA, f"{ACTOR}.ppo_max_token_len_per_gpu=8192", "actor_rollout_ref.model.load_in_4bit=true")
    job = plan(command("7b", 16, 256, 512, *more))
    memory = phases(job)
    times = step_times(job, memory)
    assert 14.0 <= max(phase.peak for phase in memory) / 1e9 < 1.15 * 14.0
    assert times["generate"] == pytest.approx(9.6, rel=0.05)
    assert times["update actor"] == pytest.approx(7.5, rel=0.2)


def test_units_of_a_micro_batch() -> None:
    shared = {"samples": 8, "lengths": Lengths(512, 1024), "packed": True, "micro_rows": None}
    units = batch_units(128, ranks=1, row_ranks=1, sequence_parallel=1, max_tokens=16384, **shared)  # type: ignore[arg-type]
    assert (units.micro.rows, units.micro.tokens, units.micro.targets) == (15, 2 * 512 + 15 * 1024, 15 * 1024)
    assert units.num_micro == 9 and units.per_rank.rows == 128
    four = batch_units(128, ranks=8, row_ranks=4, sequence_parallel=4, max_tokens=16384, **shared)  # type: ignore[arg-type]
    assert four.per_rank.rows == 64 and four.tokens_per_device <= 16384 and four.micro.tokens > 16384
    one = batch_units(128, ranks=1, row_ranks=1, sequence_parallel=1, max_tokens=10, **shared)  # type: ignore[arg-type]
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


def test_weights_in_8_bits_are_counted(command: Any) -> None:
    plain, fp8 = (
        plan(command("7b", 16, 256, 512, *DYNAMIC, *more))
        for more in ((), ("actor_rollout_ref.rollout.quantization=fp8",))
    )
    copies = [phase.parts["weights in 8 bits"] for phase in phases(fp8)]
    shape = fp8.models[0].shape
    assert len(set(copies)) == 1 and 0.8 * shape.parameters < copies[0] < shape.parameters
    assert not any("weights in 8 bits" in phase.parts for phase in phases(plain))


def test_a_cache_in_8_bits_holds_twice_as_many_tokens(command: Any) -> None:
    shared = (*DYNAMIC, "actor_rollout_ref.rollout.max_num_seqs=4096")
    plain, fp8 = (
        plan(command("7b", 4096, 256, 512, *shared, *more))
        for more in ((), ("actor_rollout_ref.rollout.kv_cache_dtype=fp8",))
    )
    held = [cached_tokens(job, phases(job)) for job in (plain, fp8)]
    assert held[1] == pytest.approx(2 * held[0], rel=1e-3)
    assert not any("weights in 8 bits" in phase.parts for phase in phases(fp8))


def test_critic_and_reference_are_counted(command: Any) -> None:
    more = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "critic.ppo_micro_batch_size_per_gpu=8")
    memory = phases(plan(command("0.5b", 16, 256, 256, *more)))
    names = [phase.name for phase in memory]
    assert names == ["generate", "old log-probs", "reference log-probs", "values", "update critic", "update actor"]
    assert all(phase.parts["weights of other models"] > 0 for phase in memory)


@pytest.mark.parametrize(
    ("more", "has_pass"),
    [
        ((), False),
        ((f"{ACTOR}.ppo_epochs=2",), True),
        ((f"{ACTOR}.old_log_prob_pass=always",), True),
        (("algorithm.use_kl_in_reward=true",), True),
        (("algorithm.use_pf_ppo=true",), True),
        (("algorithm.rollout_correction.rollout_is=token",), True),
        (("algorithm.rollout_correction.rollout_rs=token_k1",), True),
        ((f"{ACTOR}.policy_loss.loss_mode=geo_mean",), True),
        (("algorithm.adv_estimator=egpo",), True),
        (("algorithm.adv_estimator=optimal_token_baseline",), True),
        (("algorithm.rollout_correction.bypass_mode=true",), False),
    ],
)
def test_old_log_probs_are_planned_as_they_are_trained(command: Any, more: tuple[str, ...], has_pass: bool) -> None:
    """The cases of tests/trainer/test_old_log_probs.py."""
    config = load_config(PPOConfig, command("0.5b", 8, 64, 64, *more), run_checks=False)
    job = job_of(config, DEVICES["H200"], Lengths(64, 64), lambda path, key: ModelShape.from_folder(Path(path)))
    assert ("old log-probs" in [phase.name for phase in phases(job)]) == has_pass


def test_critic_has_its_own_number_of_updates(command: Any) -> None:
    more = ("algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4", f"{ACTOR}.ppo_epochs=2")
    job = plan(command("0.5b", 16, 256, 256, *more))
    assert (job.model("actor_rollout").updates, job.model("critic").updates) == (2, 8)


def with_lora(settings: list[str], lora_rank: int = 32, **lora: Any) -> Job:
    keys = {"lora_rank": lora_rank, **lora}
    return plan([*settings, *(f"actor_rollout_ref.model.{name}={json.dumps(value)}" for name, value in keys.items())])


def test_lora_trains_adapters_alone(command: Any) -> None:
    settings = command("7b", 16, 256, 512, *DYNAMIC, f"{ACTOR}.use_kl_loss=true")
    full, lora = plan(settings), with_lora(settings)
    whole, adapters = full.models[0].shape.parameters, lora.models[0].num_trained
    per_layer = 2 * (3584 + 3584) + 2 * (3584 + 512) + 3 * (3584 + 18944)
    assert adapters == 28 * 32 * per_layer and lora.models[0].num_frozen == whole
    assert [model.role for model in lora.models] == ["actor_rollout"]  # the reference is the model without adapters
    names = [phase.name for phase in phases(lora)]
    assert names == [phase.name for phase in phases(full)] == ["generate", "reference log-probs", "update actor"]
    update = phases(lora)[-1].parts
    assert (
        update["weights"] == 2 * whole + (4 + 2) * adapters
    )  # one frozen copy; masters and compute copy of the adapters
    assert update["moments"] == 2 * 4 * adapters and update["gradients"] == 4 * adapters
    assert "weights of other models" in phases(full)[-1].parts and "weights of other models" not in update
    assert max(phase.fixed for phase in phases(lora)) < 0.15 * max(phase.fixed for phase in phases(full))


def test_lora_sends_the_adapters_alone(command: Any) -> None:
    settings = command("7b", 16, 256, 512, *DYNAMIC, "trainer.placement=split", "trainer.n_gpus_per_node=4")
    full, lora = plan(settings), with_lora(settings)
    sent = [transfer_time(job.device, job.models) for job in (full, lora)]
    assert sent[1] / sent[0] == pytest.approx(lora.model("actor").num_trained / full.model("actor").num_trained)
    decoding = [step_times(job, phases(job))["generate"] for job in (full, lora)]
    assert decoding[1] > decoding[0]  # the products of the adapters


def test_lora_is_faster_and_keeps_more(command: Any) -> None:
    settings = command("1.5b", 16, 512, 1024, *DYNAMIC, NO_CHECKPOINTING)
    full, lora = plan(settings), with_lora(settings)
    times = [step_times(job, phases(job))["update actor"] for job in (full, lora)]
    assert 0.6 < times[1] / times[0] < 0.95  # no gradients of the frozen weights
    kept = [phases(job)[-1].parts["activations"] for job in (full, lora)]
    assert 1.0 < kept[1] / kept[0] < 1.3


@pytest.mark.parametrize(
    ("lora", "modules"),
    [
        ({"target_modules": ["q_proj", "v_proj"]}, [(896, 896), (896, 128)]),
        ({"target_modules": r".*[.](gate|down)_proj"}, [(896, 4864), (4864, 896)]),
        ({"exclude_modules": r".*mlp.*"}, [(896, 896), (896, 128), (896, 128), (896, 896)]),
        (
            {"exclude_modules": ["o_proj", "gate_proj", "up_proj", "down_proj"], "lora_rank": 8},
            [(896, 896), (896, 128), (896, 128)],
        ),
    ],
)
def test_lora_modules(command: Any, lora: dict[str, Any], modules: list[tuple[int, int]]) -> None:
    job = with_lora(command("0.5b", 8, 64, 64), **lora)
    assert job.models[0].num_trained == 24 * lora.get("lora_rank", 32) * sum(map(sum, modules))


def test_lora_on_several_ranks(command: Any) -> None:
    job = with_lora(command("7b", 16, 256, 512, *DYNAMIC, "trainer.n_gpus_per_node=8"))
    model, update = job.models[0], phases(job)[-1].parts
    assert update["weights"] == (2 * model.num_frozen + 4 * model.num_trained) / 8
    assert update["weights for decoding"] == 2 * (model.num_frozen + model.num_trained)


SEED_RUN = """
algorithm.adv_estimator=grpo algorithm.use_kl_in_reward=False data.train_batch_size=64
data.train_files=['/data/BytedTsinghua-SIA/DAPO-Math-17k'] data.val_files=['/data/yentinglin/aime_2025']
data.max_prompt_length=2048 data.max_response_length=16384
actor_rollout_ref.model.use_remove_padding=True actor_rollout_ref.model.enable_gradient_checkpointing=True
actor_rollout_ref.actor.use_kl_loss=False actor_rollout_ref.actor.clip_ratio_low=0.2 actor_rollout_ref.actor.clip_ratio_high=0.28
actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_mini_batch_size=16
actor_rollout_ref.actor.ulysses_sequence_parallel_size=4
actor_rollout_ref.actor.fsdp_config.param_offload=True actor_rollout_ref.actor.fsdp_config.optimizer_offload=True
actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.mode=async
actor_rollout_ref.rollout.tensor_model_parallel_size=4 actor_rollout_ref.rollout.gpu_memory_utilization=0.9
actor_rollout_ref.rollout.multi_turn.enable=True actor_rollout_ref.rollout.multi_turn.max_user_turns=16
actor_rollout_ref.rollout.n=16 actor_rollout_ref.rollout.val_kwargs.n=30
trainer.n_gpus_per_node=8 trainer.nnodes=1
"""
"""verl's DAPO run of a 7B model on 8 A100, whose data is not on this machine."""


def test_dapo_run_of_8_gpus(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = write_model(tmp_path / "7b", "7b")
    start = time.process_time()
    code = main(["plan", "--device", "A100-80G", f"actor_rollout_ref.model.path={model}", *SEED_RUN.split()])
    assert time.process_time() - start < 2
    shown = capsys.readouterr().out
    assert code == 0 and "refuses" not in shown
    shown = " ".join(shown.split())
    assert "64 prompts x 16 samples = 1024 sequences" in shown
    assert "4 optimizer steps of 256 sequences, over 2 data-parallel ranks of 4 devices each, 128 on each" in shown
    assert (
        "43 micro-batches of at most 3 sequences, 12,800 tokens per device" in shown
    )  # a prompt is shared by its samples
    assert "512 sequences per engine of 4 devices, up to 256 at a time: the KV cache holds 5,076,882 tokens" in shown
    assert "fits on A100-80G: at most 78.8 of 85.1 GB in generate" in shown
    assert "with 2048 + 16384 tokens per sequence" in shown


@pytest.mark.parametrize("sleeps", [True, False])
@pytest.mark.parametrize("rank", [0, 8])
def test_vllm_has_a_copy_of_the_weights_while_it_is_awake(
    command: Any, rank: int, sleeps: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And reserves its share of the memory. LoRA adapters are merged into it."""
    monkeypatch.setattr(checks, "find_spec", lambda name: object())
    rollout = "actor_rollout_ref.rollout"
    more = [f"{rollout}.name=vllm", f"{rollout}.free_cache_engine={sleeps}", f"{rollout}.gpu_memory_utilization=0.5"]
    job = plan(command("7b", 16, 512, 1024, *DYNAMIC, *more, f"actor_rollout_ref.model.lora_rank={rank}"))
    found = {phase.name: phase.parts for phase in phases(job)}
    copy = 2 * job.models[0].shape.parameters
    assert found["generate"]["weights for decoding"] == copy
    assert found["generate"]["KV cache"] == pytest.approx(0.5 * job.device.memory - copy)
    assert found["generate"]["weights"] == found["update actor"]["weights"], "the trainer's stay in memory"
    assert found["update actor"].get("weights for decoding") == (None if sleeps else copy)


@pytest.mark.parametrize("name", ["server", "sglang", "tgi"])
def test_servers_are_not_part_of_the_plan(command: Any, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    rollout = "actor_rollout_ref.rollout"
    more = [f"{rollout}.name={name}", f"{rollout}.server.urls=[http://127.0.0.1:8000]"]
    more += [f"{rollout}.server.reload_command='restart {{folder}}'"] if name == "tgi" else []
    settings = command("1.5b", 16, 512, 1024, *DYNAMIC, *more)
    names = [phase.name for phase in phases(plan(settings))]
    assert "generate" not in names and "update actor" in names
    assert main(["plan", "--device", "H200", *settings]) == 0
    assert "their memory and time are not part of the plan" in " ".join(capsys.readouterr().out.split())


def test_only_unsupported_settings_are_left_out(command: Any, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = [f"{ACTOR}.ppo_mini_batch_size=7", "actor_rollout_ref.rollout.name=sglang"]
    assert main(["plan", "--device", "H200", *command("0.5b", 8, 64, 64), *wrong]) == 2
    assert "ppo_mini_batch_size=7" in capsys.readouterr().err


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
    for wrong in (["--prompt-tokens", "513"], ["--response-tokens", "2000"], ["--response-tokens", "0"]):
        assert main(["plan", "--device", "H200", *wrong, *command("7b", 16, 512, 1024)]) == 2
        assert wrong[0] in capsys.readouterr().err
    assert main(["plan", "trainer.total_epoch=1"]) == 2
    assert "did you mean trainer.total_epochs" in capsys.readouterr().err.lower()


def test_no_torch_is_imported(command: Any) -> None:
    code = "import sys; from lockstep.cli import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    settings = command("0.5b", 8, 64, 64)
    done = subprocess.run(
        [sys.executable, "-c", code, "plan", "--device", "H200", *settings], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_a_hidden_gpu_is_not_planned_for(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = MagicMock()
    for call in ("nvmlInit_v2", "nvmlDeviceGetHandleByIndex_v2", "nvmlDeviceGetName", "nvmlDeviceGetMemoryInfo"):
        getattr(driver, call).return_value = 0
    monkeypatch.setattr(hardware.ctypes, "CDLL", lambda name: driver)
    monkeypatch.setattr(hardware, "version", lambda name: "2.9.0")
    found = {}
    for visible in ("0", "-1", ""):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        found[visible] = hardware.this_gpu() is not None
    assert found == {"0": True, "-1": False, "": False}


def test_gpu_with_unknown_rates(
    command: Any, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "this_gpu", lambda: hardware.known_gpu("NVIDIA Quantum 9000", 90e9))
    assert main(["plan", *command("0.5b", 8, 64, 64)]) == 0
    shown = capsys.readouterr().out
    assert "fits on NVIDIA Quantum 9000" in shown and "s per step" not in shown
    assert main(["plan", "--search", *command("0.5b", 8, 64, 64)]) == 2
    assert "the rates of NVIDIA Quantum 9000 are not known" in capsys.readouterr().err


def test_a_base_in_4_bits(command: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """7.07 of the 7.62 billion parameters at 0.516 bytes; those are not sharded."""
    monkeypatch.setattr(checks, "find_spec", lambda name: None)  # it need not be installed
    model = "actor_rollout_ref.model"
    lora = [f"{model}.lora_rank=32", f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=12288"]
    settings = command("7b", 16, 256, 512, *lora, f"{model}.load_in_4bit=true")
    assert main(["plan", "--device", "RTX4090", *settings]) == 0
    shown = capsys.readouterr().out
    assert "linear layers in 4-bit and frozen; 80.7M of adapters are trained" in shown and "fits on RTX4090" in shown
    assert main(["plan", "--device", "RTX4090", *command("7b", 16, 256, 512, *lora)]) == 1
    monkeypatch.undo()
    if find_spec("bitsandbytes") is None:
        return
    linears, wide = 28 * (2 * 3584 * (3584 + 512) + 3 * 3584 * 18944), 2 * 152064 * 3584
    for ranks in (1, 2):
        job = plan([*settings, f"trainer.n_gpus_per_node={ranks}"])
        weights = phases(job)[0].parts["weights"]
        adapters = (4 + 2 * (ranks == 1)) * 80.7e6 / ranks
        assert weights == pytest.approx(linears * (0.5 + 1 / 64) + 2 * wide / ranks + adapters, rel=0.01)
