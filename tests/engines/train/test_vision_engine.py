"""The training engine on vision-language models: rows with images, on one and two ranks, frozen towers, adapters, export."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tensordict import TensorDict
from torch import Tensor
from transformers import AutoModelForImageTextToText

from lockstep.config.model import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from lockstep.engines.train.fsdp import FsdpEngine
from lockstep.engines.train.train_engine import EngineModel, MicroBatching
from lockstep.models import token_models, vision
from lockstep.models.lora import adapter_layers
from lockstep.models.vision import ImageFeatures
from lockstep.protocol.tokens import image_column
from lockstep.utils.distributed import current_rank
from tests.engines.train.ranks import Ranks
from tests.models.architectures import torch_forms
from tests.models.vision_families import FAMILIES, reference_log_probs, rows_with_images, save_tiny_vision
from tests.tiny import save_tiny_model

CPU = torch.device("cpu")
ALL = MicroBatching()
ALL_LINEAR = {*("q_proj", "k_proj", "v_proj", "o_proj"), *("gate_proj", "up_proj", "down_proj")}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def open_engine(
    folder: Path, *, kind: Any = "policy", sp: int = 1, master: str = "float32", **model: Any
) -> FsdpEngine:
    spec = EngineModel(
        HFModelConfig(path=str(folder), **model),
        "actor_rollout_ref.model",
        kind,
        FSDPEngineConfig(dtype="float32", model_dtype=master),
        optim=FSDPOptimizerConfig(lr=1e-3),
        sequence_parallel_size=sp,
    )
    return FsdpEngine.open(spec, CPU)


def reference(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").eval()


def weights_of(batch: TensorDict) -> Tensor:
    shape = batch["responses"].shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)) * batch["response_mask"]


def weighted(outputs: dict[str, Tensor], columns: TensorDict) -> tuple[Tensor, dict[str, Tensor]]:
    loss = (outputs["log_probs"] * columns["weight"]).sum()
    return loss, {"loss": loss}


def gradients(engine: FsdpEngine) -> dict[str, np.ndarray]:
    found = {}
    for name, parameter in engine.compute.named_parameters():
        if parameter.grad is not None:
            grad: Any = parameter.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            found[engine.model.hf_name(name)] = whole.float().cpu().numpy().copy()
    return found


def trained_on_ranks(folder: Path, batch: TensorDict, sp: int, parts: list[list[int]]) -> Any:
    """On each rank: gradients of its rows."""
    engine = open_engine(folder, sp=sp, enable_gradient_checkpointing=True)
    engine.forward_backward(batch[parts[current_rank() // sp]], weighted, MicroBatching(num_rows=2))
    return gradients(engine)


def expected_gradients(folder: Path, batch: TensorDict) -> tuple[Tensor, dict[str, np.ndarray]]:
    model = reference(folder)
    with torch_forms(model):
        log_probs = reference_log_probs(model, batch)
    (log_probs * batch["weight"]).sum().backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return log_probs.detach(), {name: grad.numpy() for name, grad in grads.items()}


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray], atol: float = 1e-5) -> None:
    assert got.keys() <= expected.keys()
    for name, grad in expected.items():
        if name not in got:
            assert not grad.any()
            continue
        np.testing.assert_allclose(got[name], grad, atol=atol * max(1.0, np.abs(grad).max()), rtol=0, err_msg=name)


def batch_for(folder: Path, name: str = "qwen2_5_vl") -> TensorDict:
    batch = rows_with_images(reference(folder), name)
    batch["weight"] = weights_of(batch)
    return batch


IN_EVERY_RUN = ("qwen2_5_vl", "qwen3_vl", "gemma3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in FAMILIES]
)
def test_every_family_computes_as_transformers_row_by_row(name: str, tmp_path: Path) -> None:
    """Log-probs and every gradient of packed rows with several images, none, or the same text with another image; in one
    micro-batch and in several; exported again with the same names and values."""
    folder = save_tiny_vision(name, tmp_path / "model")
    batch = batch_for(folder, name)
    log_probs, expected = expected_gradients(folder, batch)
    engine = open_engine(folder)
    mask = batch["response_mask"].bool()
    for micro in (ALL, MicroBatching(num_rows=2), MicroBatching(max_tokens=48)):
        got = engine.forward(batch, micro)["log_probs"]
        torch.testing.assert_close(got[mask], log_probs[mask], atol=1e-5, rtol=0)
    assert not torch.allclose(log_probs[1], log_probs[2], atol=1e-3)  # same tokens, other image
    engine.forward_backward(batch, weighted, MicroBatching(num_rows=2))
    assert_same(gradients(engine), expected, atol=2e-5)
    engine.export(tmp_path / "out", _NoTokenizer())
    before, after = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out" / "huggingface"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


class _NoTokenizer:
    pad_token_id = 0

    def save_pretrained(self, folder: Path) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("name", "sp"), [("qwen2_5_vl", 1), ("qwen2_5_vl", 2), ("llava", 1), ("gemma3", 1)])
def test_ranks_of_which_one_has_images(name: str, sp: int, ranks: Ranks, tmp_path: Path) -> None:
    """Two ranks with their own rows, the second without images; or two that share the tokens of all rows."""
    folder = save_tiny_vision(name, tmp_path)
    batch = batch_for(folder, name)
    parts = [[0, 1, 2, 3], [4, 5, 4, 5]] if sp == 1 else [[0, 1, 2, 3, 4, 5]]
    _, expected = expected_gradients(folder, batch[[row for part in parts for row in part]])
    for found in ranks.run(2, trained_on_ranks, folder, batch, sp, parts):
        assert_same(found, expected)


def test_a_frozen_tower_and_its_projector(tmp_path: Path) -> None:
    folder = save_tiny_vision("llava", tmp_path / "llava")
    batch = batch_for(folder, "llava")
    engine = open_engine(folder, freeze_vision_tower=True)
    engine.forward_backward(batch, weighted, ALL)
    trained = gradients(engine)
    frozen = {name for name in engine.frozen_tensors() if "vision_tower" in name}
    assert frozen and not any("vision_tower" in name for name in trained)
    assert "model.multi_modal_projector.linear_1.weight" in trained
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    engine.optimizer_step()
    changed = {name for name, tensor in engine.weights() if not torch.equal(before[name], tensor)}
    assert "model.multi_modal_projector.linear_1.weight" in changed and not any("vision_tower" in n for n in changed)


@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_a_tower_that_has_seen_no_image_is_resumed(folder: Path, tmp_path: Path, master: str) -> None:
    """Batches of text alone leave it without a gradient; later ones have images."""
    batch = batch_for(folder)
    engine, again = (open_engine(folder, master=master) for _ in range(2))
    engine.forward_backward(batch[[4, 5]].exclude("multi_modal_inputs"), weighted, ALL)
    before = dict(engine.model.named_parameters())["model.model.visual.merger.ln_q.weight"].clone()
    engine.optimizer_step()
    engine.save(tmp_path)
    again.load(tmp_path)
    for one in (engine, again):
        assert torch.equal(dict(one.model.named_parameters())["model.model.visual.merger.ln_q.weight"], before)
        one.forward_backward(batch, weighted, ALL)
        one.optimizer_step()
    expected = dict(engine.weights())
    assert all(torch.equal(expected[name], weight) for name, weight in again.weights())
    assert not torch.equal(expected["model.visual.merger.ln_q.weight"], before)


def test_freezing_the_tower_of_a_text_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"actor_rollout_ref\.model\.freeze_vision_tower=true, but Qwen2ForCausalLM has no"
    ):
        open_engine(save_tiny_model(tmp_path), freeze_vision_tower=True)


def test_images_for_a_text_model_are_refused(folder: Path, tmp_path: Path) -> None:
    engine = open_engine(save_tiny_model(tmp_path))
    with pytest.raises(ValueError, match="the batch has images, but qwen2 cannot read them"):
        engine.forward(batch_for(folder), ALL)


@pytest.mark.parametrize("targets", ["all-linear", ["q_proj", "v_proj"]])
def test_adapters_are_on_the_language_model_alone(tmp_path: Path, targets: str | list[str]) -> None:
    pytest.importorskip("peft")
    folder = save_tiny_vision("llava", tmp_path / "llava")
    engine = open_engine(folder, lora_rank=2, target_modules=targets)
    paths = adapter_layers(engine.model.transformer)
    kinds = {path.rpartition(".")[2] for path in paths}
    assert all(path.startswith("model.language_model.layers.") for path in paths)
    assert kinds == ({"q_proj", "v_proj"} if isinstance(targets, list) else ALL_LINEAR)
    engine.forward_backward(batch_for(folder, "llava"), weighted, ALL)
    assert all("lora_" in name for name in gradients(engine))


def test_adapters_on_names_of_the_tower_are_refused(folder: Path) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match="target_modules: qkv is no linear layer of the language model"):
        open_engine(folder, lora_rank=2, target_modules=["qkv"])


def test_adapters_on_a_frozen_tower_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    folder = save_tiny_vision("llava", tmp_path / "llava")
    both = {"lora_rank": 2, "target_modules": r".*\.(q_proj|v_proj)"}
    message = (
        r"model\.freeze_vision_tower=true, but .*model\.target_modules puts adapters on \d+ layers of the tower, such as "
        r"model\.vision_tower\..*[qv]_proj; leave it out \(actor_rollout_ref\.model\.exclude_modules\), or set"
    )
    with pytest.raises(ValueError, match=message):
        open_engine(folder, freeze_vision_tower=True, **both)
    engine = open_engine(folder, freeze_vision_tower=True, exclude_modules=r".*vision_tower.*", **both)
    assert all("language_model" in path for path in adapter_layers(engine.model.transformer))
    engine = open_engine(folder, **both)
    assert any("vision_tower" in path for path in adapter_layers(engine.model.transformer))


def test_a_critic_reads_images_and_is_saved_with_its_tower(folder: Path, tmp_path: Path) -> None:
    critic = open_engine(folder, kind="value")
    batch = batch_for(folder)
    values = critic.forward(batch, MicroBatching(num_rows=2))["values"]
    assert not torch.allclose(values[1], values[2])  # same tokens, other image
    torch.testing.assert_close(values, critic.forward(batch, ALL)["values"], atol=1e-6, rtol=0)
    critic.forward_backward(batch, lambda out, columns: (out["values"].sum(), {}), ALL)
    assert all(gradients(critic)[name].any() for name in ("model.visual.patch_embed.proj.weight", "score.weight"))
    critic.export(tmp_path, _NoTokenizer())
    again = open_engine(tmp_path / "huggingface", kind="value")
    torch.testing.assert_close(values, again.forward(batch, ALL)["values"], atol=1e-6, rtol=0)


def test_a_tower_that_is_computed_wrongly_is_found_at_load_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check has an image: features at the wrong places are refused."""

    def reversed_features(model: Any, images: Any) -> ImageFeatures:
        features = vision.image_features(model, images)
        return features.take(torch.arange(len(features)).flip(0))

    monkeypatch.setattr(token_models, "image_features", reversed_features)
    with pytest.raises(ValueError, match="computes Qwen2_5_VLForConditionalGeneration differently from transformers"):
        open_engine(folder)


def test_placeholders_and_features_are_counted(folder: Path) -> None:
    engine = open_engine(folder)
    batch = batch_for(folder)
    images = batch.get("multi_modal_inputs").tolist()
    batch["multi_modal_inputs"] = image_column([images[3], *images[1:]])
    with pytest.raises(ValueError, match="2 placeholder tokens of images, but 8 features"):
        engine.forward(batch, ALL)
    batch["multi_modal_inputs"] = image_column([None, *images[1:]])
    with pytest.raises(ValueError, match="2 placeholder tokens of images, but 0 features"):
        engine.forward(batch, ALL)
