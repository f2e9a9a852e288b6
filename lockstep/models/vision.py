"""Images of a vision-language model: features of its tower at the places of placeholder tokens, and the positions that follow.

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
from lockstep.protocol.images import ImageInputs
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
    """The features of all images, by the model's own tower and projector; differentiable.

    model: a model with `get_image_features`, on whose device and in whose dtype they are computed. Images whose tensors have the
    same shape beyond the first dimension are computed together.
    """
    found: list[ImageFeatures | None] = [None] * len(images)
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, image in enumerate(images):
        shapes = tuple((name, *value.shape[1:]) for name, value in sorted(image.tensors.items()))
        alike.setdefault(shapes, []).append(i)
    for rows in alike.values():
        features = _features_of(model, [images[i] for i in rows])
        start = 0
        for i in rows:
            found[i] = features.slice(start, start := start + sum(images[i].num_tokens))
        if start != len(features):
            raise ValueError(
                f"{type(model).__name__} has {len(features)} features for images with {start} placeholder tokens: its processor "
                "does not fit it"
            )
    return ImageFeatures.cat([features for features in found if features is not None])


def _features_of(model: Any, images: Sequence[ImageInputs]) -> ImageFeatures:
    weight = model.get_input_embeddings().weight
    known = inspect.signature(base_of(model).get_image_features).parameters
    names = [name for name in images[0].tensors if name in known]
    inputs = {name: _like(torch.cat([image.tensors[name] for image in images]), weight) for name in names}
    out = model.get_image_features(**inputs, return_dict=True)
    deepstack = getattr(out, "deepstack_features", None) or ()
    return ImageFeatures(_flat(out.pooler_output), tuple(_flat(layer) for layer in deepstack))


def _like(value: Tensor, weight: Tensor) -> Tensor:
    """On the weight's device and, if it is floating point, in its dtype."""
    return to_device(value.to(weight.dtype) if value.is_floating_point() else value, weight.device)


def _flat(features: Any) -> Tensor:
    """(N, E) of features that are a tensor (…, E) or one tensor per image."""
    parts = [features] if isinstance(features, Tensor) else features
    return torch.cat([part.flatten(0, -2) for part in parts])


def embed_images(model: Any, token_ids: Tensor, features: ImageFeatures | None, token_id: int | None) -> dict[str, Any]:
    """Keyword arguments for the decoder instead of input_ids (1, T): embeddings with the features at the placeholders.

    token_id: the placeholder token; there are as many of them as features.
    """
    if features is None:
        return {"inputs_embeds": model.get_input_embeddings()(token_ids)}
    is_image = token_ids.eq(-1 if token_id is None else token_id)
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

    After the last image they are consecutive and the same in all three rows.
    """
    base = base_of(model)
    if not hasattr(base, "get_rope_index"):
        return None
    if images is None:
        return torch.arange(len(token_ids)).expand(3, -1)
    ids = torch.tensor([list(token_ids)])
    tensors = {name: value.cpu() for name, value in images.tensors.items() if name.endswith("grid_thw")}
    is_image = (ids == images.token_id).int()
    positions: Tensor = base.get_rope_index(ids, mm_token_type_ids=is_image, **tensors)[0]
    return positions[:, 0]


def base_of(model: Any) -> Any:
    """The transformers model without its head: tower, projector and language model."""
    return model if model.base_model is model else model.base_model


def own_inputs(
    model: Any, token_ids: Tensor, images: ImageInputs, num_prompt_tokens: int | None = None
) -> dict[str, Tensor]:
    """Keyword arguments of the model's own forward for a row (1, L) with images, or for prompts (B, L) padded on the left.
    num_prompt_tokens: of a row; None for prompts."""
    weight = model.get_input_embeddings().weight
    inputs = {name: _like(value, weight) for name, value in images.tensors.items()}
    known = inspect.signature(base_of(model).forward).parameters
    kinds = [name for name in ("mm_token_type_ids", "token_type_ids") if name in known]
    if model.config.model_type in PREFIX_TYPES:
        place = torch.arange(token_ids.shape[1], device=token_ids.device)
        is_response = place >= (num_prompt_tokens or len(place))
        return inputs | dict.fromkeys(kinds, is_response.int().expand_as(token_ids))
    return inputs | dict.fromkeys(kinds, (token_ids == images.token_id).int())


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
