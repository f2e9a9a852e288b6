"""A policy in a Hugging Face folder: generate answers with the rollout engine, save a copy."""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from lockstep.utils.fs import is_remote

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lockstep.data.image_prompts import ImageEncoder
    from lockstep.engines.rollout.rollout_engine import RolloutEngine
    from lockstep.protocol.images import ImageInputs

Prompt = str | Sequence[Mapping[str, Any]]
"""Text, which is the message of a user, or messages `{"role": ..., "content": ...}`. A content is text or a list of parts:
`{"type": "text", "text": ...}`, `{"type": "image", "image": path, bytes, data URI or PIL image}`."""

STREAM_TOKENS = 16
"""Tokens generated at a time by `Policy.stream`."""


class Policy:
    """The model that `path` means, as in `actor_rollout_ref.model.path`. It is loaded by the first `generate`, and freed by
    `unload`."""

    def __init__(self, path: Path | str) -> None:
        self.path = path if is_remote(str(path)) else Path(path)
        self._loaded: tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]] | None = None
        self._encoder: ImageEncoder | None = None
        self._engine: RolloutEngine | None = None
        self._lengths = (0, 0)

    def __repr__(self) -> str:
        return f"Policy({str(self.path)!r})"

    def generate(
        self, prompts: Prompt | Sequence[Prompt], *, n: int = 1, max_tokens: int = 256, seed: int = 0, **sampling: Any
    ) -> Any:
        """The answer to each prompt, as text; a list of `n` answers each if `n` is above 1. One prompt gives one answer.

        sampling: `temperature` (1.0; 0 is greedy), `top_p`, `top_k`, `min_p`, `stop_token_ids`, `ignore_eos`.
        """
        from lockstep.protocol.generation import GenerationRequest, SamplingParams
        from lockstep.utils.decoding import decode_all

        is_one = isinstance(prompts, str) or (bool(prompts) and isinstance(prompts[0], Mapping))
        _, tokenizer, eos_ids = self._load()
        found = [self._encode(prompt) for prompt in cast(Sequence[Prompt], [prompts] if is_one else prompts)]
        ids = [prompt_ids for prompt_ids, _ in found]
        params = SamplingParams(max_tokens=max_tokens, **sampling)
        requests = [
            GenerationRequest(prompt_ids, params, seed=seed * len(ids) * n + number * n + sample, images=images)
            for number, (prompt_ids, images) in enumerate(found)
            for sample in range(n)
        ]
        completions = self._engine_for(max(map(len, ids), default=1), max_tokens).generate(requests)
        texts = decode_all(tokenizer, [_without_end(c.token_ids, eos_ids) for c in completions])
        answers: list[Any] = [texts[i : i + n] if n > 1 else texts[i] for i in range(0, len(texts), n)]
        return answers[0] if is_one else answers

    def stream(self, prompt: Prompt, *, max_tokens: int = 256, seed: int = 0, **sampling: Any) -> Iterator[str]:
        """The answer to one prompt piece by piece, with any engine; together they are what `generate` gives.

        A token depends only on the seed and its position, so an answer can be continued from its first tokens.
        """
        from lockstep.protocol.generation import GenerationRequest, SamplingParams
        from lockstep.utils.decoding import decode_all

        _, tokenizer, eos_ids = self._load()
        prompt_ids, images = self._encode(prompt)
        shown = ""
        done: list[int] = []
        engine = self._engine_for(len(prompt_ids) + max_tokens, STREAM_TOKENS)
        while len(done) < max_tokens:
            params = SamplingParams(max_tokens=min(STREAM_TOKENS, max_tokens - len(done)), **sampling)
            (completion,) = engine.generate([GenerationRequest(prompt_ids + done, params, seed, images)])
            done += completion.token_ids
            is_end = completion.stop_reason == "stop" or len(done) >= max_tokens
            (text,) = decode_all(tokenizer, [_without_end(done, eos_ids)])
            if is_end or not text.endswith("\N{REPLACEMENT CHARACTER}"):  # else the last character is incomplete
                yield text[len(shown) :]
                shown = text
            if is_end:
                return

    def num_tokens(self, prompt: Prompt) -> int:
        """Length of a prompt in tokens, with the chat template."""
        return len(self._encode(prompt)[0])

    @property
    def max_positions(self) -> int | None:
        """The longest sequence of the model, if its config says so."""
        return getattr(self._load()[0].config.get_text_config(), "max_position_embeddings", None)

    def save(self, folder: Path | str) -> Path:
        """Copy the model and its tokenizer to `folder`; returns it."""
        return Path(shutil.copytree(self._folder(), Path(folder).expanduser(), dirs_exist_ok=True))

    def unload(self) -> None:
        """Free the memory; the next `generate` loads the model again."""
        self._loaded = self._engine = None
        self._lengths = (0, 0)

    def _folder(self) -> Path:
        from lockstep.utils.model_path import is_model_folder, local_model_folder

        folder = local_model_folder(self.path, "policy")
        if not is_model_folder(folder):
            raise ValueError(f"{folder} is neither a model, a checkpoint nor a run: it has no config.json")
        return folder

    def _load(self) -> "tuple[PreTrainedModel, PreTrainedTokenizerBase, list[int]]":
        if self._loaded is None:
            import torch

            from lockstep.config.data import ImageDataConfig
            from lockstep.config.model import HFModelConfig
            from lockstep.data.image_prompts import ImageEncoder
            from lockstep.models.loading import load_causal_lm, resolve_dtype
            from lockstep.models.processor import hf_processor
            from lockstep.models.tokenizer import eos_token_ids, hf_tokenizer
            from lockstep.utils.device import resolve_device
            from lockstep.utils.model_path import base_folder

            device = torch.device(resolve_device("auto"))
            base = base_folder(self._folder(), "policy")  # of an adapter; else the folder itself
            tokenizer = hf_tokenizer(self.path, key="policy")
            config = HFModelConfig(path=str(self.path))
            model = load_causal_lm(config, "policy", resolve_dtype("auto", device), device)
            processor = hf_processor(self.path, tokenizer, ImageDataConfig(), key="policy")
            self._encoder = None if processor is None else ImageEncoder(processor)
            self._loaded = model, tokenizer, eos_token_ids(tokenizer, base)
        return self._loaded

    def _encode(self, prompt: Prompt) -> "tuple[list[int], ImageInputs | None]":
        """Token ids and images of a prompt; ValueError if it has images and the model reads none."""
        from lockstep.data.image_prompts import image_values, read_pictures, with_image_parts

        tokenizer = self._load()[1]
        messages = with_image_parts([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        if self._encoder is not None:
            messages = self._encoder.templated(messages)
        text: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        pictures = read_pictures(image_values(messages))
        if not pictures:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"]), None
        if self._encoder is None:
            raise ValueError(f"{self.path} reads no images")
        return self._encoder(text, pictures)

    def _engine_for(self, prompt_length: int, response_length: int) -> "RolloutEngine":
        if self._engine is None or prompt_length > self._lengths[0] or response_length > self._lengths[1]:
            from lockstep.config.actor_rollout_ref import RolloutConfig
            from lockstep.engines.rollout import create_rollout_engine

            model, tokenizer, eos_ids = self._load()
            # room for longer prompts, so that a conversation that grows needs few engines
            room = 1 << (max(prompt_length, self._lengths[0]) - 1).bit_length()
            self._lengths = room, max(response_length, self._lengths[1])
            config = RolloutConfig(prompt_length=self._lengths[0], response_length=self._lengths[1])
            self._engine = create_rollout_engine(config, eos_ids, tokenizer.pad_token_id)
            self._engine.bind(model)
        return self._engine


def _without_end(token_ids: list[int], eos_ids: list[int]) -> list[int]:
    return token_ids[:-1] if token_ids and token_ids[-1] in eos_ids else token_ids
