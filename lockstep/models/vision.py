"""Images and videos of a vision-language model: features of its tower at placeholder tokens, and the positions that follow.

    ImageInputs ─► tower and projector (transformers' own) ─► features (N, E) ─┐
    token ids   ─► embedding ──────────────────────────────────────────────────┴─► inputs_embeds of the language model

Training and the embedded engine compute with these functions. N placeholder tokens of all images, E width, T tokens, L tokens of
one sequence.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PretrainedConfig,
    PreTrainedModel,
)

from lockstep.models.decoder import decoder_of
from lockstep.models.placeholders import tokens_among
from lockstep.models.video_positions import continue_after_videos
from lockstep.protocol.images import SECONDS, ImageInputs
from lockstep.utils.device import to_device
from lockstep.utils.vision import SEEING

TEXT_ONLY: dict[str, str] = {
    "mllama": "its layers attend to images by cross attention, which packed tokens and the KV cache do not have",
}
"""Types of vision models whose language model is loaded alone, and why they cannot read images."""

PACKED_IMAGES = frozenset(
    {
        *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"),
        *("llava", "llava_next", "smolvlm", "idefics3", "internvl"),
    }
)
"""Types of vision models that compute images among packed tokens: their attention is causal at image tokens too."""


PREFIX_TYPES = frozenset({"paligemma"})
"""Types whose tokens of a prompt with images see all of it; the type of a token tells prompt and response apart."""


def is_vision(hf_config: PretrainedConfig) -> bool:
    """Whether the model reads images: AutoModelForImageTextToText loads it with its vision tower."""
    return hf_config.model_type in SEEING and getattr(hf_config, "vision_config", None) is not None


def why_no_images(hf_config: PretrainedConfig) -> str:
    """Why the model cannot read images; empty if it can."""
    if is_vision(hf_config):
        return ""
    return TEXT_ONLY.get(hf_config.model_type, "it is not among the vision models of docs/vision.md")


def why_own_forward_with_images(hf_config: PretrainedConfig) -> str | None:
    """Why rows with images are computed by the model's own forward, one row at a time; None if they can be packed."""
    if hf_config.model_type in PACKED_IMAGES:
        return None
    return "its image tokens see later ones"


def auto_class(hf_config: PretrainedConfig) -> Any:
    """The Auto class of transformers that loads the model with its language-model head."""
    return AutoModelForImageTextToText if is_vision(hf_config) else AutoModelForCausalLM


def body_of(model: PreTrainedModel) -> Any:
    """What a head of one number reads: the decoder, of a vision model with its tower."""
    return base_of(model) if is_vision(model.config) else decoder_of(model)


@dataclass(frozen=True)
class ImageFeatures:
    """embeds: (N, E) in the order of the placeholders. deepstack: (N, E) to add after each of the first layers (Qwen3-VL)."""

    embeds: Tensor
    deepstack: tuple[Tensor, ...] = ()

    def slice(self, start: int, stop: int) -> "ImageFeatures":
        return ImageFeatures(self.embeds[start:stop], tuple(layer[start:stop] for layer in self.deepstack))

    def take(self, index: Tensor) -> "ImageFeatures":
        """The features of these numbers (P,)."""
        return ImageFeatures(self.embeds[index], tuple(layer[index] for layer in self.deepstack))

    @staticmethod
    def cat(parts: Sequence["ImageFeatures"]) -> "ImageFeatures":
        if len(parts) == 1:
            return parts[0]
        layers = zip(*(part.deepstack for part in parts))
        return ImageFeatures(torch.cat([part.embeds for part in parts]), tuple(map(torch.cat, layers)))

    def __len__(self) -> int:
        return len(self.embeds)


def image_features(model: Any, images: Sequence[ImageInputs]) -> ImageFeatures:
    """The features of all images and videos, by the model's own tower and projector; differentiable.

    model: a model with `get_image_features`, on whose device and in whose dtype they are computed. Images whose tensors have the
    same shape beyond the first dimension are computed together, and so are videos.
    """
    found: list[dict[bool, ImageFeatures]] = [{} for _ in images]
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, image in enumerate(images):
        for videos in sorted(set(image.kinds)):
            shapes = ((name, *value.shape[1:]) for name, value in sorted(image.tensors_of(videos).items()))
            alike.setdefault((videos, *shapes), []).append(i)
    for (videos, *_), rows in alike.items():
        features = _features_of(model, [images[i].tensors_of(videos) for i in rows], videos)
        start = 0
        for i in rows:
            found[i][videos] = features.slice(start, start := start + images[i].num_tokens_of(videos))
        if start != len(features):
            what = "videos" if videos else "images"
            raise ValueError(
                f"{type(model).__name__} has {len(features)} features for {what} with {start} placeholder tokens: its processor "
                "does not fit it"
            )
    return ImageFeatures.cat([_in_order(image, of_kind) for image, of_kind in zip(images, found)])


def _in_order(images: ImageInputs, of_kind: dict[bool, ImageFeatures]) -> ImageFeatures:
    """The features of images and videos in the order of the placeholders."""
    if len(of_kind) == 1:
        return next(iter(of_kind.values()))
    start = {False: 0, True: 0}
    parts = []
    for is_video, number in zip(images.kinds, images.num_tokens):
        parts.append(of_kind[is_video].slice(start[is_video], start[is_video] + number))
        start[is_video] += number
    return ImageFeatures.cat(parts)


def _features_of(model: Any, tensors: Sequence[dict[str, Tensor]], videos: bool) -> ImageFeatures:
    method = "get_video_features" if videos else "get_image_features"
    weight = model.get_input_embeddings().weight
    known = inspect.signature(getattr(base_of(model), method)).parameters
    inputs = {name: _like(torch.cat([one[name] for one in tensors]), weight) for name in tensors[0] if name in known}
    out = getattr(model, method)(**inputs, return_dict=True)
    deepstack = getattr(out, "deepstack_features", None) or ()
    return ImageFeatures(_flat(out.pooler_output), tuple(_flat(layer) for layer in deepstack))


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """On the weight's device and, if it is floating point, in its dtype."""
    return to_device(value.to(weight.dtype) if value.is_floating_point() else value, weight.device)


def _flat(features: Any) -> Tensor:
    """(N, E) of features that are a tensor (…, E) or one tensor per image."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.flatten(0, -2) for part in parts])


def embed_images(
    model: Any, token_ids: Tensor, features: ImageFeatures | None, placeholders: Sequence[int]
) -> dict[str, Any]:
    """Keyword arguments for the decoder instead of input_ids (1, T): embeddings with the features at the placeholders.

    placeholders: their tokens; there are as many of them as features.
    """
    if features is None:
        return {"inputs_embeds": model.get_input_embeddings()(token_ids)}
    is_image = tokens_among(token_ids, placeholders)
    # a placeholder's own embedding is not used, and its id may lie beyond the vocabulary
    embeds = model.get_input_embeddings()(token_ids.masked_fill(is_image, 0))
    embeds = embeds.masked_scatter(is_image[..., None], features.embeds.to(embeds.dtype))
    if not features.deepstack:
        return {"inputs_embeds": embeds}
    return {
        "inputs_embeds": embeds,
        "visual_pos_masks": is_image,
        "deepstack_visual_embeds": list(features.deepstack),
    }


def rope_positions(model: Any, token_ids: Sequence[int], images: ImageInputs | None) -> Tensor | None:
    """(3, L) positions in time, height and width on the CPU, by the model's own `get_rope_index`; None if positions are 0..L-1.

    After the last image they are consecutive and the same in all three rows; see `continue_after_videos`.
    """
    base = base_of(model)
    if not hasattr(base, "get_rope_index"):
        return None
    if images is None:
        return torch.arange(len(token_ids)).expand(3, -1)
    ids = torch.tensor([list(token_ids)])
    tensors = {
        name: value.cpu() for name, value in images.tensors.items() if name.endswith("grid_thw") or name == SECONDS
    }
    kinds = _token_kinds(ids, images)
    positions: Tensor = base.get_rope_index(ids, mm_token_type_ids=kinds, **tensors)[0]
    return continue_after_videos(positions[:, 0], kinds[0])


def _token_kinds(token_ids: Tensor, images: ImageInputs) -> Tensor:
    """1 at placeholders of images, 2 at those of videos, else 0."""
    kinds = (token_ids == images.token_id).int()
    return kinds if images.video_token_id is None else kinds + 2 * (token_ids == images.video_token_id).int()


def base_of(model: Any) -> Any:
    """The transformers model without its head: tower, projector and language model."""
    return model if model.base_model is model else model.base_model


def own_inputs(
    model: Any, token_ids: Tensor, images: ImageInputs, num_prompt_tokens: int | None = None
) -> dict[str, Tensor]:
    """Keyword arguments of the model's own forward for a row (1, L) with images, or for prompts (B, L) padded on the left.
    num_prompt_tokens: of a row; None for prompts."""
    weight = model.get_input_embeddings().weight
    inputs = {name: _like(value, weight) for name, value in images.tensors.items() if name != SECONDS}
    if SECONDS in images.tensors:  # times are not rounded to the weights' type
        inputs[SECONDS] = to_device(images.tensors[SECONDS], weight.device)
    known = inspect.signature(base_of(model).forward).parameters
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in known]
    if model.config.model_type in PREFIX_TYPES:
        place = torch.arange(token_ids.shape[1], device=token_ids.device)
        is_response = place >= (num_prompt_tokens or len(place))
        return inputs | dict.fromkeys(kinds, is_response.int().expand_as(token_ids))
    return inputs | dict.fromkeys(kinds, _token_kinds(token_ids, images))


def tower_of(model: Any) -> nn.Module | None:
    """The vision tower, if the model has one by a known name."""
    names = ("visual", "vision_tower", "vision_model", "vision_encoder")
    found = (getattr(base_of(model), name, None) for name in names)
    return next((module for module in found if isinstance(module, nn.Module)), None)


def freeze_tower(model: PreTrainedModel, key: str) -> None:
    """Leave the tower untrained. key: the model's config section, for messages."""
    tower = tower_of(model)
    if tower is None:
        raise ValueError(
            f"{key}.freeze_vision_tower=true, but {type(model).__name__} has no vision tower; set it to false"
        )
    tower.requires_grad_(False)


def check_images(hf_config: PretrainedConfig, *, seed: int) -> ImageInputs | None:
    """A small random image for a model that packs images, as its processor would make it; None for any other."""
    config: Any = hf_config
    if not is_vision(config) or why_own_forward_with_images(config) is not None:
        return None
    vision = config.vision_config
    tensors: dict[str, Tensor] = {}
    if hasattr(vision, "spatial_merge_size"):  # Qwen
        merge, patch = vision.spatial_merge_size, vision.patch_size
        tensors["image_grid_thw"] = torch.tensor([[1, 2 * merge, 3 * merge]])
        shape: tuple[int, ...] = (6 * merge**2, vision.in_channels * vision.temporal_patch_size * patch**2)
        num_tokens = 6
    else:
        height, width = _pair(vision.image_size)
        rows, columns = height // _pair(vision.patch_size)[0], width // _pair(vision.patch_size)[1]
        shape = (1, 3, height, width)
        num_tokens = rows * columns
        if hasattr(config, "scale_factor"):  # SmolVLM, Idefics 3: images of a row
            shape = (1, *shape)
            num_tokens //= config.scale_factor**2
        elif hasattr(config, "downsample_ratio"):  # InternVL
            num_tokens = int(num_tokens * config.downsample_ratio**2)
        elif vision.model_type != "clip_vision_model" or config.vision_feature_select_strategy != "default":
            return None  # LLaVA with another tower
        elif pinpoints := getattr(
            config, "image_grid_pinpoints", None
        ):  # LLaVA-Next: the whole, and tiles with line ends
            down, across = pinpoints[0][0] // height, pinpoints[0][1] // width
            tensors["image_sizes"] = torch.tensor([pinpoints[0]])
            shape = (1, 1 + down * across, *shape[1:])
            num_tokens += down * rows * (across * columns + 1)
    tensors["pixel_values"] = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return ImageInputs(tensors, image_token(config), (num_tokens,), (seed.to_bytes(16, "little"),))


def _pair(size: Any) -> tuple[int, int]:
    """Height and width of a setting that is a number or both."""
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def image_token(hf_config: PretrainedConfig) -> int:
    """The placeholder token."""
    found: int | None = getattr(hf_config, "image_token_id", None)
    return found if found is not None else int(hf_config.image_token_index)


def tower_parameters(model: Any) -> dict[str, nn.Parameter]:
    """The parameters outside of the language model and the heads, by name: those of the tower and the projector."""
    inside = {*decoder_of(model).parameters(), *model.get_input_embeddings().parameters()}
    head = model.get_output_embeddings()
    inside |= set() if head is None else set(head.parameters())
    return {name: parameter for name, parameter in model.named_parameters() if parameter not in inside}


def with_tower_in_graph(model: Any, values: Tensor) -> Tensor:
    """The values; their backward adds zero to the gradient of every trained parameter of the tower and the projector.

    So that all ranks reduce the gradients of the same parameters, whichever have images, and layers that no feature comes from
    (the last ones of LLaVA's tower) have one too.
    """
    trained = [p for p in tower_parameters(model).values() if p.requires_grad] if torch.is_grad_enabled() else []
    found: Tensor = _ZeroGradients.apply(values, *trained) if trained else values
    return found


class _ZeroGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype) for parameter in parameters]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad, *(grad.new_zeros((), dtype=dtype).expand(shape) for shape, dtype in ctx.like)
