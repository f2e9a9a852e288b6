"""OpenAI's `/v1/completions`: prompts as text, whose special tokens count as such, or token ids; without a chat template.

`content_parts` (vLLM's name) has the images of a prompt of token ids, in which one image token stands for each.
"""

from collections.abc import AsyncIterator, Sequence
from itertools import accumulate
from typing import Any, ClassVar

from pydantic import Field

from lockstep.agents.endpoint.answers import Answer, Session
from lockstep.agents.endpoint.chat import StreamOptions, stop_strings, usage
from lockstep.agents.endpoint.errors import invalid
from lockstep.agents.endpoint.fields import Body, Event, Items, ProtocolCall, image_of, new_id, now
from lockstep.agents.endpoint.recorder import Prompt
from lockstep.data.images import ImageError, read_image

MAX_CHOICES = 1024


class CompletionBody(Body):
    only: ClassVar = {
        "frequency_penalty": (0,),
        "presence_penalty": (0,),
        "logit_bias": ({},),
        "best_of": (1,),
        "echo": (False,),
        "suffix": ("",),
        "logprobs": (0, 1),
    }

    prompt: str | list[int] | list[str] | list[list[int]]
    content_parts: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(None, ge=1)
    n: int = Field(1, ge=1, le=128)
    stop: str | list[str] | None = None
    logprobs: int | None = None
    return_token_ids: bool | None = None
    stream_options: StreamOptions | None = None


class Completions(ProtocolCall):
    body: CompletionBody

    def __init__(self, data: Any, session: Session) -> None:
        self.body = body = CompletionBody.read(data)
        self.request = body.answer_request(max_tokens=body.max_tokens, stop=stop_strings(body.stop), n=body.n)
        several: list[Any] = body.prompt if _is_several(body.prompt) else [body.prompt]  # type: ignore[assignment]
        if not 1 <= len(several) * body.n <= MAX_CHOICES:
            raise invalid(f"prompt: {len(several)} prompts x n={body.n}; 1 to {MAX_CHOICES} are allowed", "prompt")
        if body.content_parts:
            self.prompts = [_prompt_with_images(several, body.content_parts, session)]
        else:
            self.prompts = [_prompt(one, session) for one in several]
        self._head = {"id": new_id("cmpl-"), "object": "text_completion", "created": now(), "model": body.model}
        self._decode = session.recorder.renderer.tokenizer.decode

    def document(self, answers: Sequence[Answer]) -> dict[str, Any]:
        choices = []
        for number, answer in enumerate(answers):
            more: dict[str, Any] = {"logprobs": self._logprobs(answer.token_ids, answer.log_probs)}
            if self.body.return_token_ids:
                more |= {"token_ids": answer.token_ids, "prompt_token_ids": answer.prompt_ids}
            choices.append({"index": number, "text": answer.text, "finish_reason": answer.finish, **more})
        return {**self._head, "choices": choices, "usage": usage(answers, len(self.prompts))}

    def _logprobs(self, token_ids: list[int], log_probs: list[float]) -> dict[str, Any] | None:
        if self.body.logprobs is None:
            return None
        tokens = [self._decode([token]) for token in token_ids]
        offsets = list(accumulate(map(len, tokens[:-1]), initial=0))[: len(tokens)]
        return {"tokens": tokens, "token_logprobs": log_probs, "top_logprobs": None, "text_offset": offsets}

    async def events(self, items: Items) -> AsyncIterator[Event]:
        answers: list[tuple[int, Answer]] = []
        async for number, item in items:
            if isinstance(item, Answer):
                answers.append((number, item))
                yield self._chunk(number, "", item.finish)
            else:
                more: dict[str, Any] = {"logprobs": self._logprobs(item.token_ids, item.log_probs)}
                if self.body.return_token_ids:
                    more["token_ids"] = item.token_ids
                yield self._chunk(number, item.text, None, **more)
        if self.body.stream_options and self.body.stream_options.include_usage:
            in_order = [answer for _, answer in sorted(answers, key=lambda pair: pair[0])]
            yield None, {**self._head, "choices": [], "usage": usage(in_order, len(self.prompts))}
        yield None, "[DONE]"

    def _chunk(self, number: int, text: str, finish: str | None, **more: Any) -> Event:
        choice = {"index": number, "text": text, "finish_reason": finish, "logprobs": None, **more}
        return None, {**self._head, "choices": [choice]}


def _is_several(prompt: str | list[Any]) -> bool:
    return isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)


def _prompt(prompt: str | list[int], session: Session) -> Prompt:
    if isinstance(prompt, str):
        return session.prompt_for_text(prompt)
    _check_ids(prompt, session)
    return session.recorder.prompt_for_ids(prompt)


def _prompt_with_images(prompts: list[Any], parts: list[dict[str, Any]], session: Session) -> Prompt:
    if len(prompts) != 1 or not isinstance(prompts[0], list):
        raise invalid(
            "content_parts: images need one prompt of token ids, with one image token for each", "content_parts"
        )
    encoder = session.recorder.renderer.encoder
    if encoder is None:
        raise invalid("content_parts: this model reads no images", "content_parts")
    _check_ids(prompts[0], session)
    try:
        pictures = [read_image(image_of(part, "content_parts")["image"]) for part in parts]
        ids, images = encoder.expand(prompts[0], pictures)
    except ImageError as error:
        raise invalid(f"content_parts: {error}", "content_parts") from error
    return session.recorder.prompt_for_ids(ids, images)


def _check_ids(prompt: list[int], session: Session) -> None:
    vocabulary = len(session.recorder.renderer.tokenizer)
    if not all(0 <= token < vocabulary for token in prompt):
        raise invalid(f"prompt: token ids must lie in 0..{vocabulary - 1}", "prompt")
