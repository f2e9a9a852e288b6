"""Prompts with images for engines that prepare images themselves: they get one placeholder token per image and its file."""

from lockstep.protocol.generation import GenerationRequest

NO_VIDEOS = "has no videos of prompts; set actor_rollout_ref.rollout.name=embedded or hf"
NEVER = -100.0
"""The least `logit_bias` of vLLM and SGLang: a token with it is never sampled."""


def check_no_videos(request: GenerationRequest, engine: str) -> None:
    if request.images is not None and request.images.has_videos:
        raise ValueError(f"the prompt has videos, but {engine} {NO_VIDEOS}")


def unexpanded(request: GenerationRequest) -> list[int]:
    """The prompt with one placeholder per image, which the engine expands; ValueError if the placeholders of an image are not one
    run, so that its text before the expansion is not known."""
    assert request.images is not None
    token_id = request.images.token_id
    ids: list[int] = []
    place = 0
    for num_tokens in request.images.num_tokens:
        start = request.prompt_ids.index(token_id, place)
        place, before = start + num_tokens, place
        if request.prompt_ids[start:place] != [token_id] * num_tokens:
            raise ValueError(
                "the model's processor writes more than placeholders for an image, which the engine would have to write again; "
                "use actor_rollout_ref.rollout.name=embedded"
            )
        ids += [*request.prompt_ids[before:start], token_id]
    return ids + request.prompt_ids[place:]
