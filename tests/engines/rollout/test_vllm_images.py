"""The vllm engine with images: log-probs, caches, weight updates. `make test-vllm` runs the tests that need vLLM."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from lockstep.config.actor_rollout_ref import RolloutConfig
from lockstep.config.model import HFModelConfig
from lockstep.data.image_prompts import ImageEncoder
from lockstep.data.images import read_image
from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams, vllm
from lockstep.engines.rollout.vllm import VllmEngine
from lockstep.models.placeholders import placeholder_ids
from lockstep.models.processor import load_processor
from lockstep.utils.fingerprint import fingerprint
from tests.engines.rollout.test_vision_rollout import teacher_forced
from tests.tiny_vision import image_message, save_tiny_vision_model, tiny_image, tiny_vision_config

CPU, EOS = torch.device("cpu"), 2
HEADS = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
"""Of a size that vLLM's CPU kernels know."""
needs_vllm = pytest.mark.skipif(
    None in map(importlib.util.find_spec, ("vllm", "torchvision")), reason="needs vLLM with torchvision: make test-vllm"
)


def new_engine() -> VllmEngine:
    sizes: dict[str, Any] = {"prompt_length": 96, "response_length": 32, "max_num_seqs": 8}
    return VllmEngine(RolloutConfig(name="vllm", seed=7, load_format="auto", **sizes), [EOS], 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_vision_model(tmp_path_factory.mktemp("model"), "qwen2_5_vl", **HEADS)


@pytest.fixture(scope="module")
def engine(folder: Path) -> VllmEngine:
    made = new_engine()
    made.load(HFModelConfig(path=str(folder)), "actor_rollout_ref.model", torch.float32, CPU)
    return made


@pytest.fixture
def weights(folder: Path, engine: VllmEngine) -> dict[str, Tensor]:
    """Those of the files, which the engine gets back for each test."""
    found = load_file(folder / "model.safetensors")
    send(engine, found)
    return found


@pytest.fixture
def reference(folder: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def send(engine: VllmEngine, weights: dict[str, Tensor]) -> None:
    tensors = list(weights.items())
    engine.begin_update()
    for bucket in (tensors[::2], tensors[1::2]):
        engine.update_weights(iter(bucket))
    engine.finish_update(engine.policy_version + 1)


def request(folder: Path, *sizes: tuple[int, int], seed: int = 0, **sampling: Any) -> GenerationRequest:
    """A question about images of these sizes. seed: of their pixels."""
    processor = load_processor(folder)
    text = processor.apply_chat_template(image_message("what?", len(sizes)), add_generation_prompt=True, tokenize=False)
    params = SamplingParams(**{"max_tokens": 10} | sampling)
    if not sizes:
        return GenerationRequest(processor.tokenizer(text)["input_ids"], params, seed=seed)
    pictures = [read_image(tiny_image(*size, seed=seed + number)) for number, size in enumerate(sizes)]
    ids, images = ImageEncoder(processor)(text, pictures)
    return GenerationRequest(ids, params, seed=seed, images=images)


def check(model: Any, requests: list[GenerationRequest], completions: list[Completion]) -> None:
    """Log-probs are those of transformers, and no placeholder was sampled."""
    for asked, completion in zip(requests, completions, strict=True):
        temperature = asked.sampling.temperature or 1.0
        at = replace(asked, sampling=replace(asked.sampling, temperature=temperature))
        expected = teacher_forced(model, at, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), expected, atol=1e-4, rtol=0)
        assert not set(completion.token_ids) & set(placeholder_ids(model.config))


def test_prompts_are_checked_before_vllm_gets_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the other engines."""
    engine = new_engine()
    with pytest.raises(RuntimeError, match="no model yet"):
        engine.add(0, GenerationRequest([3], SamplingParams()))
    config = tiny_vision_config("qwen2_5_vl")
    monkeypatch.setattr(engine, "_hf_config", config)
    typed = GenerationRequest([3, config.image_token_id], SamplingParams())
    with pytest.raises(ValueError, match=r"1 placeholder tokens .* of an image or video, but no image"):
        engine.add(0, typed)
    assert not engine.unfinished()


@pytest.mark.vllm
@needs_vllm
def test_log_probs_equal_transformers(
    engine: VllmEngine, weights: dict[str, Tensor], reference: Any, folder: Path
) -> None:
    """Of samples and greedy responses to several images, one, and none in a batch."""
    requests = [
        request(folder, *sizes, seed=seed, temperature=temperature)
        for seed, sizes in enumerate([((48, 32),), ((32, 64), (16, 16)), ()])
        for temperature in (1.0, 0.6, 0.0)
    ]
    completions = engine.generate(requests)
    check(reference, requests, completions)
    for asked, completion in zip(requests[::3], completions[2::3]):
        inputs = {} if asked.images is None else asked.images.tensors
        ids = torch.tensor([asked.prompt_ids])
        kinds = (ids == reference.config.image_token_id).int()
        more = {} if asked.images is None else {"mm_token_type_ids": kinds}
        first = reference(input_ids=ids, **inputs, **more).logits[0, -1].argmax()
        assert completion.token_ids[0] == first


@pytest.mark.vllm
@needs_vllm
def test_the_same_text_with_another_image(
    engine: VllmEngine, weights: dict[str, Tensor], reference: Any, folder: Path
) -> None:
    """No cached prefix or feature of one image is used for the other."""
    requests = [request(folder, (32, 32), seed=seed, temperature=0.0) for seed in (1, 2, 1)]
    assert requests[0].prompt_ids == requests[1].prompt_ids
    completions = engine.generate(requests)
    completions += engine.generate(requests)
    check(reference, requests * 2, completions)
    first, other = completions[0].log_probs[0], completions[1].log_probs[0]
    assert abs(first - other) > 1e-2 or completions[0].token_ids[0] != completions[1].token_ids[0]


@pytest.mark.vllm
@needs_vllm
def test_a_placeholder_is_not_sampled_if_it_is_the_likeliest(
    engine: VllmEngine, weights: dict[str, Tensor], reference: Any, folder: Path
) -> None:
    asked = [request(folder, (32, 32), temperature=temperature) for temperature in (0.0, 0.7)]
    likeliest = engine.generate(asked[:1])[0].token_ids[0]
    head = weights["lm_head.weight"].clone()
    head[list(placeholder_ids(reference.config))] = 1.5 * head[likeliest]
    send(engine, weights | {"lm_head.weight": head})
    reference.lm_head.weight.data.copy_(head)
    completions = engine.generate(asked)
    check(reference, asked, completions)
    assert completions[0].token_ids[0] == likeliest and completions[0].log_probs[0] < -0.7


@pytest.mark.vllm
@needs_vllm
def test_new_weights_of_the_tower_take_effect(
    engine: VllmEngine, weights: dict[str, Tensor], reference: Any, folder: Path
) -> None:
    """Features of an image that vLLM has seen are computed again, and every tensor is read back."""
    asked = [request(folder, (48, 32)), request(folder)]
    before = engine.generate(asked)
    changed = {name: tensor * 1.5 if name.startswith("visual.") else tensor for name, tensor in weights.items()}
    send(engine, changed)
    assert engine.fingerprints(list(changed)) == {name: fingerprint(tensor) for name, tensor in changed.items()}
    assert engine.unread_weights(list(changed)) == {}
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            parameter.mul_(1.5 if ".visual." in name else 1.0)
    completions = engine.generate(asked)
    check(reference, asked, completions)
    assert before[0].log_probs != completions[0].log_probs and before[1].log_probs == completions[1].log_probs


@pytest.mark.vllm
@needs_vllm
def test_aborted_requests_go_on_with_their_images(
    engine: VllmEngine, weights: dict[str, Tensor], reference: Any, folder: Path
) -> None:
    asked = request(folder, (48, 32), (16, 32), temperature=0.0)
    expected = engine.generate([asked])[0]
    with engine.serving():
        engine.add(0, asked)
        for _ in range(3):
            engine.step()
        part = engine.abort([0])[0]
    assert 0 < len(part.token_ids) < 10
    joined = part.then(engine.generate([asked.after(part.token_ids)])[0])
    assert joined.token_ids == expected.token_ids
    check(reference, [asked], [joined])


@pytest.mark.vllm
@needs_vllm
def test_other_pixel_limits_are_named(engine: VllmEngine, folder: Path) -> None:
    asked = request(folder, (48, 32))
    assert asked.images is not None
    shorter = replace(asked.images, num_tokens=(asked.images.num_tokens[0] - 1,))
    token = asked.images.token_id
    ids = list(asked.prompt_ids)
    ids.remove(token)
    with pytest.raises(ValueError, match=r"as 32 tokens, the run's processor as 31; .*mm_processor_kwargs"):
        engine.generate([replace(asked, prompt_ids=ids, images=shorter)])
    assert len(engine.generate([asked])) == 1


def test_missing_torchvision_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM says only that the model's class could not be inspected."""

    def fail(**_: Any) -> None:
        raise ValueError("failed to be inspected")

    tiny_vision_config("qwen2_5_vl").save_pretrained(tmp_path)
    monkeypatch.setattr(vllm, "import_vllm", lambda: SimpleNamespace(LLM=fail))
    monkeypatch.setattr(vllm, "is_torchvision_available", lambda: False)
    with pytest.raises(
        ValueError, match=r"name=vllm: .* need torchvision, in the version for torch 2\..*be inspected\)"
    ):
        new_engine().load(HFModelConfig(path=str(tmp_path)), "m", torch.float32, CPU)
