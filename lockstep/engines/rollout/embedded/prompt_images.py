"""The images of prompts that are computed: rotary positions, and the features that each chunk of a prompt needs.

    request ─► PromptImages (one for equal prompts) ─► at its first chunk: tower ─► features ─► a slice for each chunk

A token has two positions: its place in the cache, which counts tokens, and the rotary one, which a model with several rotary axes
takes from the image. After the prompt they differ by a constant of the sequence, `rope_delta`.
"""

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from lockstep.engines.rollout.rollout_engine import check_request_images
from lockstep.models.vision import (
    ImageFeatures,
    image_features,
    is_vision,
    rope_positions,
    why_own_forward_with_images,
)
from lockstep.protocol.generation import GenerationRequest
from lockstep.protocol.images import ImageInputs, content_ids


class PromptImages:
    """
    images:     of the prompt.
    positions:  (3, L) rotary positions of the prompt's tokens; None if they are their places.
    rope_delta: rotary position of a token after the prompt, minus its place.
    features:   of all placeholders; only while a part of the prompt is computed and another is not.
    """

    def __init__(self, prompt_ids: Sequence[int], images: ImageInputs, positions: np.ndarray | None) -> None:
        self.images = images
        self.positions = positions
        self.rope_delta = 0 if positions is None else int(positions.max()) + 1 - len(prompt_ids)
        self.features: ImageFeatures | None = None
        self._num_before = np.cumsum([0, *(token in images.placeholders for token in prompt_ids)])

    def feature_range(self, start: int, stop: int) -> tuple[int, int]:
        """The features of the tokens start..stop of a sequence with this prompt."""
        last = len(self._num_before) - 1
        return int(self._num_before[min(start, last)]), int(self._num_before[min(stop, last)])

    def rotary(self, start: int, stop: int) -> np.ndarray:
        """(3, stop - start) rotary positions of these tokens of a sequence with this prompt."""
        places = np.broadcast_to(np.arange(start, stop) + self.rope_delta, (3, stop - start))
        if self.positions is None:
            return places
        known = self.positions[:, start:stop]
        return np.concatenate([known, places[:, known.shape[1] :]], 1)


ImageChunk = tuple[PromptImages, int, int]
"""Images of a prompt, and which of their features (start, stop) are needed."""


class ImagePrompts:
    """The prompts with images of unfinished sequences; equal ones are one object."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self.takes_images = is_vision(model.config)
        self._known: WeakValueDictionary[tuple[int, ...], PromptImages] = WeakValueDictionary()

    def find(self, request: GenerationRequest) -> PromptImages | None:
        """Those of a request; ValueError if its placeholders and its images do not match."""
        check_request_images(request, self._model.config)
        images = request.images
        if images is None:
            return None
        if reason := why_own_forward_with_images(self._model.config):
            raise ValueError(
                f"the embedded rollout cannot read images with {type(self._model).__name__}: {reason}; "
                "use actor_rollout_ref.rollout.name=hf for this model"
            )
        key = tuple(content_ids(request.prompt_ids, images))
        found = self._known.get(key)
        if found is None:
            positions = rope_positions(self._model, list(request.prompt_ids), images)
            array = None if positions is None else positions.cpu().numpy()
            found = self._known[key] = PromptImages(request.prompt_ids, images, array)
        return found

    def features(self, chunks: Sequence[ImageChunk]) -> ImageFeatures | None:
        """The features of these chunks, one after the other; None if there are no chunks. All of a prompt's features are kept from
        its first chunk to its last."""
        if not chunks:
            return None
        self._compute(prompt for prompt, _, _ in chunks)
        found = [prompt.features.slice(start, stop) for prompt, start, stop in chunks if prompt.features is not None]
        for prompt, _, stop in chunks:
            if stop == sum(prompt.images.num_tokens):
                prompt.features = None
        return ImageFeatures.cat(found)

    def _compute(self, prompts: Iterable[PromptImages]) -> None:
        """Compute the features that are missing: those of equal images once."""
        missing: dict[tuple[bytes, ...], list[PromptImages]] = {}
        for prompt in dict.fromkeys(prompts):
            if prompt.features is None:
                missing.setdefault(prompt.images.digests, []).append(prompt)
        if not missing:
            return
        sets = [same[0].images for same in missing.values()]
        features = image_features(self._model, sets)
        start = 0
        for images, same in zip(sets, missing.values()):
            stop = start + sum(images.num_tokens)
            for prompt in same:
                prompt.features = features.slice(start, stop)
            start = stop

    def forget(self) -> None:
        """Drop all: the weights may change."""
        self._known.clear()
