"""Rollouts of prompts with images: what is decoded equals transformers' own forward, and only equal images are shared."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForImageTextToText

from lockstep.engines.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.engines.rollout.embedded import prompt_images
from lockstep.engines.rollout.embedded.sampler import SamplingBatch, sample, uniform
from lockstep.engines.rollout.hf import HFEngine
from lockstep.models.attention import ATTENTION_NAME
from lockstep.models.experts import EXPERTS_NAME
from lockstep.models.known_models import install_decoder_layers, of_language_model
from lockstep.models.model_check import transformers_forward
from lockstep.models.placeholders import placeholder_ids
from lockstep.models.split_weights import check_sizes
from lockstep.models.vision import own_inputs
from lockstep.protocol.images import ImageInputs
from tests.engines.rollout.rollout_cases import (
    DEVICES,
    EOS,
    PAD,
    assert_same,
    device_or_skip,
    embedded,
    rollout_config,
    tiny_model,
)
from tests.engines.rollout.test_out_of_memory import most_tokens, refuse
from tests.models.vision_families import END, IMAGE, START, images_for, save_tiny_vision

MORE = ("llava", "qwen2_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "llava_next", "smolvlm", "idefics3", "internvl")
FAMILIES = ["qwen2_5_vl", "qwen3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)]


def vision_model(name: str, folder: Path, device: torch.device) -> Any:
    model = AutoModelForImageTextToText.from_pretrained(save_tiny_vision(name, folder), dtype=torch.float32)
    model.set_attn_implementation(of_language_model(model.config, ATTENTION_NAME))
    model.set_experts_implementation(EXPERTS_NAME)
    install_decoder_layers(model)
    return model.eval().to(device)


def prompt(start: list[int], images: ImageInputs | None) -> list[int]:
    ids = list(start)
    for num_tokens in () if images is None else images.num_tokens:
        ids += [START, *[IMAGE] * num_tokens, END, 7]
    return ids


def requests_with_images(model: Any, name: str, **sampling: Any) -> list[GenerationRequest]:
    """Groups of samples: one image, another under the same text, two images of different sizes, the same two the other way round
    as another prompt, and text alone."""
    model.cpu()
    first = images_for(model, name, 1, [(1, 2)])
    other = images_for(model, name, 2, [(1, 2)])
    both = images_for(model, name, 3, [(2, 1), (2, 3)])
    later = first.then(other)
    cases = [([5, 6, 8], first), ([5, 6, 8], other), ([9, 11], both), ([9, 11], None), ([12], later)]
    settings: dict[str, Any] = dict(temperature=1.3, max_tokens=9) | sampling
    return [
        GenerationRequest(prompt(start, images), SamplingParams(**settings), seed=10 * i + sample, images=images)
        for sample in range(3)
        for i, (start, images) in enumerate(cases)
    ]


@torch.no_grad()
def teacher_forced(model: Any, request: GenerationRequest, completion: Completion) -> torch.Tensor:
    """Log-probs by one forward of transformers, with the processor's tensors."""
    ids = torch.tensor([request.prompt_ids + completion.token_ids], device=model.device)
    inputs = {} if request.images is None else own_inputs(model, ids, request.images, len(request.prompt_ids))
    with transformers_forward(model):
        logits = model(input_ids=ids, use_cache=False, **inputs).logits[0].float()
    log_probs = (logits / request.sampling.temperature).log_softmax(-1)
    first = len(request.prompt_ids)
    return log_probs[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0].cpu()


@pytest.mark.parametrize("device_name", DEVICES)
@pytest.mark.parametrize("name", FAMILIES)
def test_decoding_equals_transformers(
    name: str, device_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = device_or_skip(device_name)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    model = vision_model(name, tmp_path, device)
    requests = requests_with_images(model, name)
    model.to(device)
    expected = embedded(model).generate(requests)
    for request, completion in zip(requests, expected):
        assert IMAGE not in completion.token_ids
        theirs = teacher_forced(model, request, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), theirs, atol=1e-4, rtol=0)
    by_image = [completion.token_ids for completion in expected[:2]]
    assert by_image[0] != by_image[1]
    for changes in (
        {"enable_prefix_caching": False},
        {"max_num_batched_tokens": 5, "max_num_seqs": 4},  # prompts in chunks that end within images
        {"num_blocks": 14},  # preempts
    ):
        got = embedded(model, **changes).generate(requests)
        assert_same(got, expected)
        assert any(c.num_preempted for c in got) == ("num_blocks" in changes)
    alone = embedded(model)
    for number in (1, 2, 3):
        assert_same(alone.generate([requests[number]]), [expected[number]])


def test_ranks_cannot_hold_a_vision_model_together(qwen: Any) -> None:
    with pytest.raises(ValueError, match=r"tensor_model_parallel_size=2: .*has a vision tower.*; set 1"):
        check_sizes(qwen, 2)


@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "gemma4", "paligemma"])
def test_generate_of_transformers(name: str, tmp_path: Path) -> None:
    """The hf engine; tokens of an image see each other in Gemma and PaliGemma, so the embedded engine refuses them. Samples of one
    prompt, which need no padding, are computed as others are."""
    model = vision_model(name, tmp_path, torch.device("cpu"))
    requests = requests_with_images(model, name, max_tokens=5)
    engine = HFEngine(rollout_config(max_num_seqs=4), [EOS], PAD)
    engine.bind(model)
    completions = engine.generate(requests)
    alike = [request for request in requests if request.prompt_ids == requests[3].prompt_ids]
    for request, completion in [*zip(requests, completions), *zip(alike, engine.generate(alike))]:
        assert IMAGE not in completion.token_ids
        theirs = teacher_forced(model, request, completion)
        torch.testing.assert_close(torch.tensor(completion.log_probs), theirs, atol=1e-4, rtol=0)
    if name == "qwen2_5_vl":
        assert_same(completions, embedded(model).generate(requests))
    else:
        with pytest.raises(ValueError, match="name=hf"):
            embedded(model).generate(requests)


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return vision_model("qwen2_5_vl", tmp_path_factory.mktemp("qwen"), torch.device("cpu"))


def test_equal_prompts_are_computed_once_but_only_with_equal_images(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[list[ImageInputs]] = []
    original = prompt_images.image_features

    def counted(model: Any, images: Any) -> Any:
        computed.append(list(images))
        return original(model, images)

    monkeypatch.setattr(prompt_images, "image_features", counted)
    requests = requests_with_images(qwen, "qwen2_5_vl")
    same_text = [r for r in requests if r.prompt_ids == requests[0].prompt_ids]
    engine = embedded(qwen)
    engine.generate([same_text[0]])  # and the comparison with transformers
    assert engine.step_loop is not None
    before = engine.step_loop.num_prefill_tokens
    computed.clear()
    engine.generate(same_text)
    assert engine.step_loop.num_prefill_tokens - before == 2 * len(same_text[0].prompt_ids)
    assert [len(sets) for sets in computed] == [2]
    # without sharing, each sample computes its prompt, and the step computes each image once
    alone = embedded(qwen, enable_prefix_caching=False)
    alone.generate([same_text[0]])
    computed.clear()
    alone.generate(same_text)
    assert [len(sets) for sets in computed] == [2]
    # the same text with the images in another order is another prompt
    swapped = requests[1].images.then(requests[0].images)  # type: ignore[union-attr]
    pair = [requests[4], replace(requests[4], images=swapped)]
    tokens = [c.token_ids for c in embedded(qwen).generate(pair)]
    assert tokens[0] != tokens[1]


def test_aborted_requests_go_on_with_their_images(qwen: Any) -> None:
    requests = requests_with_images(qwen, "qwen2_5_vl", max_tokens=40)[:5]
    expected = embedded(qwen).generate(requests)
    engine = embedded(qwen)
    with engine.serving():
        for number, request in enumerate(requests):
            engine.add(number, request)
        finished = engine.step()
        finished |= engine.step()
        started = engine.abort(engine.unfinished())
    assert started and any(c.token_ids for c in started.values())
    rest = engine.generate([requests[number].after(c.token_ids) for number, c in started.items()])
    joined = dict(finished) | {n: c.then(r) for (n, c), r in zip(started.items(), rest)}
    assert_same([joined[n] for n in range(len(requests))], expected)


def test_memory_that_does_not_suffice_changes_nothing(qwen: Any) -> None:
    """Steps are taken back and prompts computed again, in chunks."""
    requests = requests_with_images(qwen, "qwen2_5_vl")
    engine = embedded(qwen, enable_prefix_caching=False)
    expected = engine.generate(requests)
    refuse(engine, "forward", most_tokens(17))
    assert_same(engine.generate(requests), expected)
    assert engine.lowered_limits()


def test_wrong_images_are_refused(qwen: Any) -> None:
    request = requests_with_images(qwen, "qwen2_5_vl")[0]
    engine = embedded(qwen)
    with pytest.raises(ValueError, match=rf"placeholder tokens \({IMAGE}\) of an image or video, but no image"):
        engine.generate([replace(request, images=None)])
    with pytest.raises(ValueError, match="placeholder tokens of images, but 2 features"):
        engine.generate([replace(request, prompt_ids=[*request.prompt_ids, IMAGE])])
    video = qwen.config.video_token_id
    with pytest.raises(
        ValueError, match=rf"1 placeholder tokens \({video}\) of .* video, whose placeholder is token {IMAGE}"
    ):
        engine.generate([replace(request, prompt_ids=[video, *request.prompt_ids])])
    assert len(engine.generate([request])) == 1


def test_a_model_that_computes_images_differently_is_refused(qwen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison with transformers, when the engine gets its first request, has an image."""
    places = lambda model, ids, images: torch.arange(len(ids)).expand(3, -1)  # noqa: E731
    monkeypatch.setattr(prompt_images, "rope_positions", places)
    with pytest.raises(ValueError, match="computes Qwen2_5_VLForConditionalGeneration differently from transformers"):
        embedded(qwen).generate([GenerationRequest([5, 6], SamplingParams(max_tokens=1))])


def test_a_text_model_refuses_images(qwen: Any) -> None:
    images = requests_with_images(qwen, "qwen2_5_vl")[0].images
    with pytest.raises(ValueError, match="which qwen2 cannot read: "):
        embedded(tiny_model()).generate([GenerationRequest([3, 4], SamplingParams(), images=images)])


@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.0}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.9}])
def test_placeholders_are_never_sampled(sampling: dict[str, Any]) -> None:
    """Log-probs are those of the full distribution."""
    logits = torch.randn(40, 12, generator=torch.Generator().manual_seed(0))
    excluded = torch.tensor([3, 7])
    logits[:, excluded] = 9.0
    params = [SamplingParams(**sampling)] * len(logits)
    random = uniform(range(40), range(40))
    tokens, log_probs = sample(logits, SamplingBatch(params, logits.device, excluded), random)
    assert not set(tokens.tolist()) & {3, 7}
    temperature = params[0].temperature or 1.0
    torch.testing.assert_close(
        log_probs, (logits / temperature).log_softmax(-1).gather(1, tokens[:, None])[:, 0], atol=1e-6, rtol=0
    )
    without = torch.cat([logits[:, :3], logits[:, 4:7], logits[:, 8:]], 1)
    places = torch.tensor([*range(3), *range(4, 7), *range(8, 12)])
    assert torch.equal(tokens, places[sample(without, SamplingBatch(params, logits.device), random)[0]])


def test_placeholder_ids(qwen: Any) -> None:
    assert IMAGE in placeholder_ids(qwen.config)
    assert placeholder_ids(qwen.config.get_text_config()) == ()
