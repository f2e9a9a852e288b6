"""The training engine against plain transformers, and its results whatever the split, the padding and the sharding."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from lockstep.algorithms.losses.aggregate import count_batch
from lockstep.config.actor_rollout_ref import ActorConfig
from lockstep.config.compose import load_config
from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train import fsdp
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import MicroBatching
from lockstep.models.loading import load_causal_lm
from lockstep.models.shared_weights import rollout_module
from lockstep.models.token_models import PolicyModel, ScalarModel
from lockstep.workers.losses import actor_loss_fn, critic_loss_fn
from tests.models import architectures
from tests.tiny import random_batch, save_tiny_model, tiny_config
from tests.value_model import load_value_model

CPU = torch.device("cpu")
_SETTINGS = {"clip_ratio_high": 0.28, "entropy_coeff": 0.01, "use_kl_loss": "true", "kl_loss_coef": 0.1}
ACTOR = load_config(
    overrides=[f"actor_rollout_ref.actor.{key}={value}" for key, value in _SETTINGS.items()], run_checks=False
).actor_rollout_ref.actor
SPLITS = [MicroBatching(), MicroBatching(num_rows=1), MicroBatching(num_rows=4), MicroBatching(max_tokens=24)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def policy_engine(
    folder: Path,
    *,
    deterministic: bool = False,
    packed: bool = True,
    dtype: torch.dtype = torch.float32,
    **kw,
) -> FsdpEngine:
    model = PolicyModel(load_causal_lm(HFModelConfig(path=str(folder)), "m", torch.float32, CPU))
    optim = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
    config = FSDPEngineConfig(full_determinism=deterministic)
    return FsdpEngine(model, config, optim, device=CPU, compute_dtype=dtype, packed=packed, **kw)


def naive_log_probs(folder: Path, batch, temperature: float) -> tuple[Tensor, Tensor]:
    """Row by row through transformers' own attention, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    width = batch["responses"].shape[1]
    log_probs, entropy = torch.zeros(len(batch), width), torch.zeros(len(batch), width)
    for i in range(len(batch)):
        mask = batch["attention_mask"][i].bool()
        ids = batch["input_ids"][i][mask]
        with torch.no_grad():
            logits = model(input_ids=ids[None]).logits[0] / temperature
        logp = torch.log_softmax(logits, -1)
        start = int(mask[:-width].sum())
        for j in range(width):
            if batch["response_mask"][i, j]:
                log_probs[i, j] = logp[start + j - 1, ids[start + j]]
                entropy[i, j] = -(logp[start + j - 1].exp() * logp[start + j - 1]).sum()
    return log_probs, entropy


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("micro", SPLITS)
def test_log_probs_and_entropy_equal_transformers(folder: Path, packed: bool, micro: MicroBatching) -> None:
    batch = random_batch()
    out = policy_engine(folder, packed=packed).forward(batch, micro, temperature=0.7, with_entropy=True)
    log_probs, entropy = naive_log_probs(folder, batch, 0.7)
    torch.testing.assert_close(out["log_probs"], log_probs, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(out["entropy"], entropy, atol=2e-5, rtol=1e-5)


def step(engine: FsdpEngine, config: ActorConfig, micro: MicroBatching) -> tuple[dict[str, float], dict[str, Tensor]]:
    batch = random_batch()
    info = count_batch(batch["response_mask"], loss_scale_factor=config.loss_scale_factor)
    metrics = engine.forward_backward(batch, actor_loss_fn(config, info), micro, with_entropy=True)
    metrics["grad_norm"] = engine.optimizer_step()
    return metrics, dict(engine.saved_weights())


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_an_update_does_not_depend_on_the_micro_batch_split(folder: Path, mode: str) -> None:
    config = dataclasses.replace(ACTOR, loss_agg_mode=mode)
    metrics, weights = step(policy_engine(folder), config, SPLITS[0])
    assert metrics["grad_norm"] > 0.01
    for micro in SPLITS[1:]:
        other, other_weights = step(policy_engine(folder, packed=micro.num_rows != 4), config, micro)
        assert other == pytest.approx(metrics, rel=1e-4, abs=1e-6)
        for name, weight in weights.items():  # AdamW's first step is lr * sign(gradient): where that is ~0 it may flip
            assert (weight - other_weights[name]).abs().mean() < 1e-5, name


@pytest.mark.parametrize("enabled", [True, False])
def test_gradients_are_computed_with_deterministic_kernels(folder: Path, enabled: bool) -> None:
    engine = policy_engine(folder, deterministic=enabled)
    seen: list[bool] = []
    head = next(engine.model.parameters())
    head.register_hook(lambda grad: seen.append(torch.are_deterministic_algorithms_enabled()))
    metrics, _ = step(engine, ACTOR, SPLITS[0])
    assert set(seen) == {enabled} and not torch.are_deterministic_algorithms_enabled()
    assert metrics == step(policy_engine(folder), ACTOR, SPLITS[0])[0]


def test_recurrent_layers_have_no_deterministic_gradients_on_a_gpu() -> None:
    model = PolicyModel(architectures.tiny_model("qwen3_next"))
    fsdp._check_determinism(model, CPU)
    with pytest.raises(ValueError, match="full_determinism=true: layers with a state"):
        fsdp._check_determinism(model, torch.device("cuda"))


def test_only_checkpointed_layers_are_in_training_mode(folder: Path) -> None:
    """So that no dropout of a submodule is active."""
    engine = policy_engine(folder, gradient_checkpointing=True)
    training = {type(module).__name__ for module in engine.compute.modules() if module.training}
    assert training == {"DecoderLayer", "Qwen2Model"}
    assert not any(module.training for module in policy_engine(folder).compute.modules())


def test_gradient_checkpointing_and_chunked_head_change_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metrics, weights = step(policy_engine(folder), ACTOR, SPLITS[0])
    monkeypatch.setattr("lockstep.models.log_probs.CHUNK_ELEMENTS", 259 * 3)
    other, other_weights = step(policy_engine(folder, gradient_checkpointing=True), ACTOR, SPLITS[0])
    assert other == pytest.approx(metrics, rel=1e-5)
    for name, weight in weights.items():
        assert (weight - other_weights[name]).abs().mean() < 1e-5, name


def test_mixed_precision_keeps_fp32_masters_and_computes_in_bf16(folder: Path) -> None:
    engine = policy_engine(folder, dtype=torch.bfloat16)
    batch = random_batch()
    out = engine.forward(batch, SPLITS[0])
    exact = policy_engine(folder).forward(batch, SPLITS[0])
    gap = (out["log_probs"] - exact["log_probs"]).abs().max()
    assert 0 < gap < 0.5
    metrics, weights = step(engine, ACTOR, SPLITS[1])
    assert {w.dtype for w in weights.values()} == {torch.float32}
    assert metrics["grad_norm"] > 0.01
    module = rollout_module(engine.model.transformer)
    with engine.lend_weights(module):
        assert {p.dtype for p in module.parameters()} == {torch.bfloat16}


def test_critic_values_and_update(folder: Path) -> None:
    from lockstep.config.critic import CriticConfig

    def build() -> FsdpEngine:
        model = ScalarModel(*load_value_model(HFModelConfig(path=str(folder)), "m", torch.float32, CPU, seed=3))
        optim = FSDPOptimizerConfig(lr=1e-3, total_training_steps=10)
        return FsdpEngine(model, FSDPEngineConfig(), optim, device=CPU, compute_dtype=torch.float32, packed=True)

    batch, config = random_batch(), CriticConfig(loss_agg_mode="token-mean")
    results = []
    for micro in SPLITS:
        engine = build()
        values = engine.forward(batch, micro)["values"]
        assert (values[batch["response_mask"] == 0] == 0).all()
        info = count_batch(batch["response_mask"])
        metrics = engine.forward_backward(batch, critic_loss_fn(config, info), micro)
        results.append((values, metrics, engine.optimizer_step()))
    for values, metrics, norm in results[1:]:
        torch.testing.assert_close(values, results[0][0], atol=1e-5, rtol=1e-5)
        assert metrics == pytest.approx(results[0][1], rel=1e-4)
        assert norm == pytest.approx(results[0][2], rel=1e-4)


def test_values_are_not_rounded_to_the_compute_type(folder: Path) -> None:
    model = ScalarModel(*load_value_model(HFModelConfig(path=str(folder)), "m", torch.bfloat16, CPU, seed=3))
    engine = FsdpEngine(model, FSDPEngineConfig(), None, device=CPU, compute_dtype=torch.bfloat16, packed=True)
    values = engine.forward(random_batch(), SPLITS[0])["values"]
    assert values.dtype == torch.float32
    assert (values != values.bfloat16().float()).float().mean() > 0.3


@pytest.mark.parametrize("tied", [False, True])
def test_weights_bear_the_names_of_transformers_models(tmp_path: Path, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied, num_labels=1)
    folder = save_tiny_model(tmp_path, tie_word_embeddings=tied)
    scalar = ScalarModel(*load_value_model(HFModelConfig(path=str(folder)), "m", torch.float32, CPU, seed=3))
    critic = FsdpEngine(scalar, FSDPEngineConfig(), None, device=CPU, compute_dtype=torch.float32, packed=True)
    pairs = [(policy_engine(folder), AutoModelForCausalLM), (critic, AutoModelForSequenceClassification)]
    for engine, cls in pairs:
        expected = {name: p.shape for name, p in cls.from_config(config).named_parameters()}
        assert {name: weight.shape for name, weight in engine.weights()} == expected


def test_value_head_of_a_seed_is_reproducible_and_small(folder: Path) -> None:
    first, second, third = (
        load_value_model(HFModelConfig(path=str(folder)), "m", torch.float32, CPU, seed=s)[1].weight for s in (1, 1, 2)
    )
    assert torch.equal(first, second) and not torch.equal(first, third)


def test_checkpoint_restores_the_next_step_bit_for_bit(folder: Path, tmp_path: Path) -> None:
    engine = policy_engine(folder)
    step(engine, ACTOR, SPLITS[1])
    engine.schedule_step()
    engine.save(tmp_path)
    expected, weights = step(engine, ACTOR, SPLITS[1])
    resumed = policy_engine(folder)
    resumed.load(tmp_path)
    got, got_weights = step(resumed, ACTOR, SPLITS[1])
    assert got == expected
    assert all(torch.equal(weights[n], got_weights[n]) for n in weights)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lent_weights_are_the_same_tensors_after_a_step_and_a_load(
    folder: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    engine = policy_engine(folder, dtype=dtype)

    module = rollout_module(engine.model.transformer)

    def addresses() -> list[int]:
        with engine.lend_weights(module):
            return [tensor.data_ptr() for tensor in [*module.parameters(), *module.buffers()]]

    before = addresses()
    engine.save(tmp_path)
    step(engine, ACTOR, SPLITS[1])
    assert addresses() == before
    engine.load(tmp_path)
    assert addresses() == before


def test_a_gradient_that_is_not_finite_stops_the_run(folder: Path) -> None:
    engine, untouched = policy_engine(folder), policy_engine(folder)
    for one in (engine, untouched):
        step(one, ACTOR, SPLITS[0])
    engine.forward_backward(random_batch(), lambda out, rows: (out["log_probs"].sum() * float("nan"), {}), SPLITS[0])
    with pytest.raises(FloatingPointError, match="gradient norm is nan"):
        engine.optimizer_step()
    assert step(engine, ACTOR, SPLITS[0])[0] == step(untouched, ACTOR, SPLITS[0])[0]
    for a, b in zip(engine.model.parameters(), untouched.model.parameters()):
        assert torch.equal(a, b)


def test_a_model_that_differs_from_transformers_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.models.stream_layer.norm_eps", lambda module: 0.5)
    with pytest.raises(
        ValueError, match=r"training with packed rows computes Qwen2ForCausalLM differently .* in float32"
    ):
        policy_engine(folder)
