"""Tiny random vision-language models of each family, and batches with images for them."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoConfig, AutoModelForImageTextToText

from lockstep.models.vision import base_of
from lockstep.protocol.images import ImageInputs
from lockstep.protocol.tokens import image_column

IMAGE, START, END, VOCAB = 90, 91, 92, 96
WIDTH = 32

Pixels = Callable[[torch.Generator, Sequence[tuple[int, int]]], dict[str, torch.Tensor]]
"""(generator, (height, width) of each image in units of the family) -> what its processor would return."""


@dataclass(frozen=True)
class Family:
    """config: settings over AutoConfig.for_model. pixels: makes the tensors of images."""

    config: dict[str, Any]
    pixels: Pixels


def _text(model_type: str | None = None, **extra: Any) -> dict[str, Any]:
    text: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": False,
    }
    return text | ({} if model_type is None else {"model_type": model_type}) | extra


def _qwen_pixels(temporal: int = 2, patch: int = 4) -> Pixels:
    def make(generator: torch.Generator, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        grids = torch.tensor([[1, 2 * h, 2 * w] for h, w in sizes])
        num = int(grids.prod(-1).sum())
        return {
            "pixel_values": torch.randn(num, 3 * temporal * patch * patch, generator=generator),
            "image_grid_thw": grids,
        }

    return make


def _square_pixels(size: int) -> Pixels:
    def make(generator: torch.Generator, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.randn(len(sizes), 3, size, size, generator=generator)}

    return make


def _nested_pixels(generator: torch.Generator, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    pixels = torch.randn(1, len(sizes), 3, 16, 16, generator=generator)
    return {"pixel_values": pixels, "pixel_attention_mask": torch.ones(1, len(sizes), 16, 16, dtype=torch.long)}


def _tiled_pixels(generator: torch.Generator, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """One tile of the whole and two more, of images 16 x 32 and 32 x 16."""
    shapes = torch.tensor([[16, 32] if w >= h else [32, 16] for h, w in sizes])
    return {"pixel_values": torch.randn(len(sizes), 3, 3, 16, 16, generator=generator), "image_sizes": shapes}


def _patches_with_places(generator: torch.Generator, sizes: Sequence[tuple[int, int]]) -> dict[str, torch.Tensor]:
    """Gemma 4: 16 patches of an image of 4 x 4, which are pooled to 4."""
    y, x = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    places = torch.stack([x.flatten(), y.flatten()], -1).expand(len(sizes), -1, -1).contiguous()
    return {"pixel_values": torch.rand(len(sizes), 16, 3 * 4 * 4, generator=generator), "image_position_ids": places}


_QWEN_TOKENS = {
    "image_token_id": IMAGE,
    "video_token_id": 93,
    "vision_start_token_id": START,
    "vision_end_token_id": END,
}
_QWEN2_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
_QWEN3_VISION = {
    **_QWEN2_VISION,
    "hidden_size": 16,
    "intermediate_size": 24,
    "out_hidden_size": WIDTH,
    "num_position_embeddings": 16,
}
_CLIP = {"model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 24, "projection_dim": 16}
_CLIP |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}
_SIGLIP = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_SIGLIP |= {"image_size": 16, "patch_size": 4}
_MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
_MROPE_MIXED = {"rope_parameters": _MROPE["rope_parameters"] | {"mrope_interleaved": True}}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "decoder_sparse_step": 1}
_DELTA = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    },
}

FAMILIES: dict[str, Family] = {
    "qwen2_vl": Family(
        {
            "text_config": _text(**_MROPE),
            "vision_config": _QWEN2_VISION | {"embed_dim": 16, "hidden_size": WIDTH, "mlp_ratio": 2},
            **_QWEN_TOKENS,
        },
        _qwen_pixels(),
    ),
    "qwen2_5_vl": Family(
        {
            "text_config": _text(**_MROPE),
            "vision_config": _QWEN2_VISION
            | {"hidden_size": 16, "intermediate_size": 24, "out_hidden_size": WIDTH, "window_size": 16}
            | {"fullatt_block_indexes": [1]},
            **_QWEN_TOKENS,
        },
        _qwen_pixels(),
    ),
    "qwen3_vl": Family(
        {
            "text_config": _text(head_dim=8, **_MROPE_MIXED),
            "vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]},
            **_QWEN_TOKENS,
        },
        _qwen_pixels(),
    ),
    "qwen3_vl_moe": Family(
        {
            "text_config": _text(head_dim=8, **_MROPE_MIXED, **_EXPERTS),
            "vision_config": _QWEN3_VISION | {"deepstack_visual_indexes": [0]},
            **_QWEN_TOKENS,
        },
        _qwen_pixels(),
    ),
    "qwen3_5": Family(
        {"text_config": _text(**_DELTA), "vision_config": _QWEN3_VISION, **_QWEN_TOKENS},
        _qwen_pixels(),
    ),
    "qwen3_5_moe": Family(
        {
            "text_config": _text(**_DELTA, **_EXPERTS, shared_expert_intermediate_size=16),
            "vision_config": _QWEN3_VISION,
            **_QWEN_TOKENS,
        },
        _qwen_pixels(),
    ),
    "llava": Family(
        {"text_config": _text("llama"), "vision_config": _CLIP, "image_token_index": IMAGE}, _square_pixels(16)
    ),
    "llava_next": Family(
        {
            "text_config": _text("qwen2"),
            "vision_config": _CLIP,
            "image_token_index": IMAGE,
            "image_grid_pinpoints": [[16, 32], [32, 16]],
        },
        _tiled_pixels,
    ),
    "smolvlm": Family(
        {"text_config": _text("llama"), "vision_config": _SIGLIP, "image_token_id": IMAGE, "scale_factor": 2},
        _nested_pixels,
    ),
    "idefics3": Family(
        {"text_config": _text("llama"), "vision_config": _SIGLIP, "image_token_id": IMAGE, "scale_factor": 2},
        _nested_pixels,
    ),
    "internvl": Family(
        {
            "text_config": _text("qwen2"),
            "vision_config": _SIGLIP | {"image_size": [16, 16], "patch_size": [4, 4]},
            "image_token_id": IMAGE,
            "image_seq_length": 4,
        },
        _square_pixels(16),
    ),
    "gemma3": Family(
        {
            "text_config": _text("gemma3_text", head_dim=8, query_pre_attn_scalar=8, sliding_window=6),
            "vision_config": _SIGLIP,
            "image_token_index": IMAGE,
            "boi_token_index": START,
            "eoi_token_index": END,
            "mm_tokens_per_image": 4,
        },
        _square_pixels(16),
    ),
    "paligemma": Family(
        {
            "text_config": _text("gemma", head_dim=8),
            "vision_config": _SIGLIP | {"projection_dim": WIDTH},
            "projection_dim": WIDTH,
            "image_token_index": IMAGE,
        },
        _square_pixels(16),
    ),
    "gemma4": Family(
        {
            "text_config": _text("gemma4_text", head_dim=8, global_head_dim=8, sliding_window=6)
            | {"vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
            | {"layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 24,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 8,
                "patch_size": 4,
                "position_embedding_size": 16,
                "pooling_kernel_size": 2,
                "default_output_length": 4,
            },
            "audio_config": None,
            "image_token_id": IMAGE,
            "boi_token_id": START,
            "eoi_token_id": END,
        },
        _patches_with_places,
    ),
}


def save_tiny_vision(name: str, folder: Path) -> Path:
    """A model of the family with random weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **FAMILIES[name].config))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.5 * parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    return folder


def images_for(model: Any, name: str, seed: int, sizes: Sequence[tuple[int, int]]) -> ImageInputs:
    """Random images; the number of their placeholders is read off the model's own features, image by image."""
    generator = torch.Generator().manual_seed(seed)
    tensors = FAMILIES[name].pixels(generator, sizes)
    known = {key: value for key, value in tensors.items() if key != "pixel_attention_mask"}
    with torch.no_grad():
        found = base_of(model).get_image_features(**known, return_dict=True).pooler_output
    parts = list(found) if not isinstance(found, torch.Tensor) or found.ndim == 3 else list(found.chunk(len(sizes)))
    digests = tuple(hashlib.blake2b(f"{seed} {i}".encode(), digest_size=16).digest() for i in range(len(sizes)))
    return ImageInputs(tensors, IMAGE, tuple(len(part) for part in parts), digests)


def rows_with_images(model: Any, name: str) -> TensorDict:
    """Six rows: one image, the same again with another response, other images under the same text, two images of different
    sizes, and two rows of text alone."""
    generator = torch.Generator().manual_seed(1)
    first = images_for(model, name, 1, [(1, 2)])
    other = images_for(model, name, 2, [(1, 2)])
    both = images_for(model, name, 3, [(2, 1), (2, 3)])
    images = [first, first, other, both, None, None]
    prompts = [_prompt(generator, image) for image in images]
    prompts[2] = prompts[1] = prompts[0]
    responses = [torch.randint(3, 80, (n,), generator=generator).tolist() for n in (3, 5, 5, 4, 6, 2)]
    return batch_of_rows(prompts, responses, images)


def _prompt(generator: torch.Generator, images: ImageInputs | None) -> list[int]:
    ids = torch.randint(3, 80, (3,), generator=generator).tolist()
    for num_tokens in () if images is None else images.num_tokens:
        ids += [START, *[IMAGE] * num_tokens, END, 7]
    return ids


def batch_of_rows(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], images: Sequence[ImageInputs | None]
) -> TensorDict:
    before, after = max(map(len, prompts)), max(map(len, responses))
    ids = torch.zeros(len(prompts), before + after, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, (prompt, response) in enumerate(zip(prompts, responses)):
        ids[row, before - len(prompt) : before + len(response)] = torch.tensor([*prompt, *response])
        mask[row, before - len(prompt) : before + len(response)] = 1
    return TensorDict(
        {
            "prompts": ids[:, :before],
            "responses": ids[:, before:],
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clamp_min(0),
            "response_mask": mask[:, before:],
            "multi_modal_inputs": image_column(images),
        },
        batch_size=[len(prompts)],
    )


def reference_log_probs(model: Any, batch: TensorDict) -> torch.Tensor:
    """(B, R) by transformers' own forward, row by row, with the processor's tensors; differentiable."""
    width = batch["responses"].shape[1]
    rows = []
    for row, images in enumerate(batch.get("multi_modal_inputs").tolist()):
        ids = batch["input_ids"][row][batch["attention_mask"][row].bool()][None]
        kinds = (ids == IMAGE).int()
        if model.config.model_type == "paligemma":  # 0 in the prefix, 1 in the suffix
            kinds = (torch.arange(ids.shape[1]) >= ids.shape[1] - int(batch["response_mask"][row].sum())).int()[None]
        inputs = {} if images is None else {**images.tensors, "mm_token_type_ids": kinds, "token_type_ids": kinds}
        if "token_type_ids" in inputs and model.config.model_type not in ("gemma3", "paligemma"):
            del inputs["token_type_ids"]
        if model.config.model_type in ("gemma3", "paligemma", "llava", "llava_next", "smolvlm", "idefics3", "internvl"):
            inputs.pop("mm_token_type_ids", None)
        log_probs = model(input_ids=ids, use_cache=False, **inputs).logits[0, :-1].float().log_softmax(-1)
        own = log_probs.gather(1, ids[0, 1:, None])[:, 0]
        num = int(batch["response_mask"][row].sum())
        rows.append(torch.nn.functional.pad(own[len(own) - num :], (0, width - num)))
    return torch.stack(rows)
