"""The Megatron engine in one process: what it refuses, and memory that leaves the device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

pytest.importorskip("megatron.core")

from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import HFModelConfig
from lockstep.engines.train import EngineModel, MicroBatching, TrainEngine, create_train_engine
from lockstep.engines.train.megatron import check, families, weights
from lockstep.engines.train.megatron.offload import Parked
from lockstep.engines.train.megatron.parallel import Layout
from tests.engines.train.cases import CPU, OPTIM
from tests.tiny import random_batch, save_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"))


def open_engine(folder: Path, *, trained: bool = True, **settings: Any) -> TrainEngine:
    spec = EngineModel(
        HFModelConfig(path=str(folder)),
        "actor_rollout_ref.model",
        "policy",
        McoreEngineConfig(**settings),
        optim=OPTIM if trained else None,
    )
    return create_train_engine("megatron", spec, CPU)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_model_parallel_size": 2}, r"actor\.megatron\.tensor_model_parallel_size=2 .* not divide the 1 ranks"),
        ({"expert_model_parallel_size": 2}, r"actor\.megatron\.expert_model_parallel_size=2: the model has no experts"),
        ({"context_parallel_size": 2}, r"actor\.megatron\.context_parallel_size=2 needs .*TransformerEngine"),
        ({"virtual_pipeline_model_parallel_size": 2}, r"virtual_pipeline_model_parallel_size=2: .* set it to null"),
        ({"dtype": "float16"}, r"actor\.megatron\.dtype=float16: .*set bfloat16"),
        ({"model_dtype": "bf16"}, r"actor\.megatron\.model_dtype=bf16: .*set fp32"),
        (
            {"override_transformer_config": {"recompute": 1}},
            r"override_transformer_config\.recompute: .* no such field",
        ),
        (
            {"override_transformer_config": {"num_layers": 3}},
            r"override_transformer_config\.num_layers=3: .* make it 2; remove it",
        ),
        ({"override_ddp_config": {"buckets": 1}}, r"override_ddp_config\.buckets: .* no such field"),
        ({"override_ddp_config": {"overlap_grad_reduce": True}}, r"overlap_grad_reduce=True: it must be False here"),
        ({"override_ddp_config": {"overlap_param_gather": True}}, r"overlap_param_gather=True: it must be False here"),
        (
            {"override_transformer_config": {"calculate_per_token_loss": True}},
            r"calculate_per_token_loss=True: .*remove it",
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ValueError, match=message):
        open_engine(folder, **settings)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("gemma2", {}, r"m\.path: strategy=megatron computes llama, mistral, .*, not gemma2; set strategy=fsdp"),
        ("llama", {"attention_bias": True}, "does not compute llama with attention_bias=True"),
        ("llama", {"mlp_bias": True}, "does not compute llama with mlp_bias=True"),
        ("qwen3", {"hidden_act": "gelu"}, "does not compute qwen3 with hidden_act='gelu'"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "does not compute qwen3_moe with decoder_sparse_step=2"),
        ("qwen2_moe", {"mlp_only_layers": [0]}, r"does not compute qwen2_moe with mlp_only_layers=\[0\]"),
    ],
)
def test_models_outside_the_table_are_refused_by_name(kind: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        families.family_of(AutoConfig.for_model(kind, **changes), "m")


@pytest.mark.parametrize(
    ("kind", "changes", "window"),
    [
        ("llama", {}, None),
        ("mistral", {"sliding_window": 8}, 8),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 8}, None),
        ("qwen2", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}, 8),
    ],
)
def test_a_window_counts_if_a_layer_uses_it(kind: str, changes: dict[str, Any], window: int | None) -> None:
    assert families.window_of(AutoConfig.for_model(kind, num_hidden_layers=2, **changes)) == window


def test_recomputation_may_be_selective(folder: Path) -> None:
    engine: Any = open_engine(folder, override_transformer_config={"recompute_granularity": "selective"})
    assert engine.stage.config.recompute_granularity == "selective" and engine.stage.config.recompute_num_layers is None


def test_groups_serve_models_with_and_without_experts_of_the_same_sizes() -> None:
    dense, experts = Layout(2, 1, 0, 0), Layout(2, 1, 1, 2)
    assert dense.serves(experts) and experts.serves(dense)
    assert not dense.serves(Layout(2, 1, 2, 1)) and Layout(2, 1, 2, 1).serves(dense)
    assert not dense.serves(Layout(1, 2, 0, 0))


def test_a_sequence_beyond_the_window_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config |= {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    engine = open_engine(tmp_path, trained=False)
    with pytest.raises(ValueError, match=r"a sequence has \d+ tokens, .* sliding window of 16"):
        engine.forward(random_batch(4, prompt=30), MicroBatching())


def test_weights_in_the_wrong_place_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "check_layout", lambda *args, **options: None)
    monkeypatch.setattr("lockstep.engines.train.megatron.engine.check_layout", lambda *args, **options: None)
    monkeypatch.setattr(weights, "GATE", weights.UP)
    with pytest.raises(ValueError, match="training with megatron computes Qwen2ForCausalLM differently"):
        open_engine(folder, trained=False)


def test_a_model_that_only_computes_has_nothing_to_train(folder: Path) -> None:
    engine = open_engine(folder, trained=False)
    assert engine.weight_shapes(merged=False) == []
    assert list(engine.weights(trained=True)) == []
    assert len(engine.weight_shapes(merged=True)) == len(list(engine.weights()))


def test_parked_memory_comes_back_to_the_same_tensors() -> None:
    buffer = torch.arange(8.0)
    view = buffer[2:5].view(3, 1)
    other = torch.ones(3)
    gradient = torch.ones(4)
    kept, dropped = Parked(lambda: [view, buffer, other]), Parked(lambda: [gradient], keeps=False)
    for _ in range(2):
        kept.to_host()
        dropped.to_host()
        assert buffer.untyped_storage().nbytes() == other.untyped_storage().nbytes() == 0
        assert gradient.untyped_storage().nbytes() == 0
        with kept.on_device():
            assert view.flatten().tolist() == [2.0, 3.0, 4.0]
        assert kept.is_away
        kept.to_device()
        dropped.to_device()
        assert buffer.tolist() == list(range(8))
        assert other.tolist() == [1.0] * 3
        assert gradient.tolist() == [0.0] * 4
