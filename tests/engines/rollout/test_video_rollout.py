"""Rollouts of prompts with videos: what is decoded equals transformers' own forward, and only equal videos are shared."""

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded import prompt_images
from lockstep.engines.rollout.hf import HFEngine
from lockstep.engines.rollout.sent_images import check_no_videos
from lockstep.models.model_check import transformers_forward
from lockstep.models.video_positions import fix_video_positions
from tests.engines.rollout.rollout_cases import EOS, PAD, assert_same, embedded, rollout_config
from tests.engines.rollout.test_vision_rollout import vision_model
from tests.models.video_families import FAMILIES, VIDEO, own_inputs_of, prompt_of, videos_for
from tests.models.vision_families import IMAGE, images_for

IN_EVERY_RUN = ("qwen2_5_vl", "qwen3_vl")
CASES = [pytest.param(name, marks=() if name in IN_EVERY_RUN else pytest.mark.slow) for name in FAMILIES]


def video_model(name: str, folder: Path) -> Any:
    model = vision_model(name, folder, torch.device("cpu"))
    fix_video_positions(model)  # as `load_causal_lm` does
    return model


def requests_with_videos(model: Any, name: str, **sampling: Any) -> list[GenerationRequest]:
    """Three samples each of: a video, another under the same text, an image between two videos, an image, and text."""
    image = images_for(model, name, 1, [(1, 2)])
    first, other = videos_for(name, 1, (5, 1, 2)), videos_for(name, 2, (5, 1, 2))
    mixed = videos_for(name, 3, (2, 2, 1)).then(image).then(videos_for(name, 4, (4, 1, 1)))
    cases = [([5, 6, 8], first), ([5, 6, 8], other), ([9, 11], mixed), ([9, 11], image), ([12, 9], None)]
    settings: dict[str, Any] = dict(temperature=1.3, max_tokens=7) | sampling
    return [
        GenerationRequest(prompt_of(name, start, images), SamplingParams(**settings), seed=10 * i + n, images=images)
        for n in range(3)
        for i, (start, images) in enumerate(cases)
    ]


@torch.no_grad()
def teacher_forced(model: Any, name: str, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    ids = request.prompt_ids + completion.token_ids
    with transformers_forward(model):
        logits = model(**own_inputs_of(name, ids, request.images), use_cache=False).logits[0].float()
    log_probs = (logits / request.sampling.temperature).log_softmax(-1)
    first = len(request.prompt_ids)
    return log_probs[first - 1 : -1].gather(1, torch.tensor(ids)[first:, None])[:, 0]


def check(model: Any, name: str, requests: list[GenerationRequest], completions: list[Completion]) -> None:
    for request, completion in zip(requests, completions):
        assert not {IMAGE, VIDEO} & set(completion.token_ids)
        theirs = teacher_forced(model, name, request, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), theirs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", CASES)
def test_decoding_equals_transformers(name: str, tmp_path: Path) -> None:
    model = video_model(name, tmp_path)
    requests = requests_with_videos(model, name)
    expected = embedded(model).generate(requests)
    check(model, name, requests, expected)
    assert expected[0].token_ids != expected[1].token_ids
    for changes in (
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},  # prompts in chunks that end within videos
        {"num_blocks": 16},
    ):
        assert_same(embedded(model, **changes).generate(requests), expected)


@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_generate_of_transformers(name: str, tmp_path: Path) -> None:
    model = video_model(name, tmp_path)
    requests = requests_with_videos(model, name, max_tokens=5)
    engine = HFEngine(rollout_config(max_num_seqs=4), [EOS], PAD)
    engine.bind(model)
    completions = engine.generate(requests)
    check(model, name, requests, completions)
    assert_same(completions, embedded(model).generate(requests))


def test_equal_videos_are_computed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = video_model("qwen2_5_vl", tmp_path)
    computed: list[Any] = []
    original = prompt_images.image_features

    def counted(model: Any, images: Any) -> Any:
        computed.extend(images)
        return original(model, images)

    requests = requests_with_videos(model, "qwen2_5_vl")
    engine = embedded(model)
    engine.generate(requests[4:5])  # and the comparison with transformers
    monkeypatch.setattr(prompt_images, "image_features", counted)
    same_text = [request for request in requests if request.prompt_ids == requests[0].prompt_ids]
    engine.generate(same_text)
    assert len(same_text) == 6
    assert sorted(images.digests for images in computed) == sorted({request.images.digests for request in same_text})


def test_wrong_videos_are_refused(tmp_path: Path) -> None:
    model = video_model("qwen2_5_vl", tmp_path)
    video = videos_for("qwen2_5_vl", 1, (2, 1, 1))
    sampling = SamplingParams(max_tokens=2)
    for ids, images, message in (
        ([5, VIDEO, VIDEO], None, r"2 placeholder tokens \(93\) of an image or video, but no image"),
        ([5, VIDEO], video, "1 placeholder tokens of images, but 2 features"),
    ):
        with pytest.raises(ValueError, match=message):
            embedded(model).generate([GenerationRequest(ids, sampling, images=images)])
    request = GenerationRequest([5, VIDEO, VIDEO], sampling, images=video)
    with pytest.raises(
        ValueError, match=r"has videos, but rollout.name=vllm has no videos of prompts; set .*name=embedded or hf"
    ):
        check_no_videos(request, "rollout.name=vllm")


def test_a_model_without_videos_refuses_them(tmp_path: Path) -> None:
    model = vision_model("llava", tmp_path, torch.device("cpu"))
    request = GenerationRequest([5, VIDEO], SamplingParams(max_tokens=2), images=videos_for("qwen2_vl", 1, (1, 1, 1)))
    with pytest.raises(ValueError, match="the prompt has videos: models of type llava read no videos"):
        embedded(model).generate([request])
