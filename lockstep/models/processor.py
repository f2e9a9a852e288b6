"""Processors of vision-language models: chat template, image preparation and tokenizer in one object."""

import json
import logging
import shutil
from functools import cache
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoProcessor, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name

from lockstep.config.data import ImageDataConfig
from lockstep.utils.model_path import base_folder, local_model_folder
from lockstep.utils.vision import model_type_of, reads_images, why_no_video_processor

logger = logging.getLogger(__name__)

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def hf_processor(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    config: ImageDataConfig,
    trust_remote_code: bool = False,
    key: str = "actor_rollout_ref.model.path",
) -> Any:
    """The processor of the model at `path` with this tokenizer and the config's pixel limits; None if the model reads no images.

    A tokenizer without a chat template gets the processor's. key: the config key of the path, for messages.
    """
    folder = base_folder(local_model_folder(path, key, weights=False), key, weights=False)
    processor = load_processor(folder, trust_remote_code) if reads_images(folder) else None
    if processor is None:
        if any(limit is not None for limit in (config.min_pixels, config.max_pixels, config.max_video_pixels)):
            raise ValueError(
                f"data.min_pixels, data.max_pixels and data.max_video_pixels: {key}={path} has no processor of images"
            )
        if reads_images(folder):
            logger.warning("%s=%s has no processor (%s): it is used for text", key, path, ", ".join(PROCESSOR_FILES))
        return None
    processor.tokenizer = tokenizer
    if tokenizer.chat_template is None:
        tokenizer.chat_template = processor.chat_template
    _limit_pixels(processor.image_processor, config)
    _limit_video_pixels(processor, config.max_video_pixels)
    return processor


def _limit_pixels(image_processor: Any, config: ImageDataConfig) -> None:
    limits = {"shortest_edge": config.min_pixels, "longest_edge": config.max_pixels}
    given = {edge: pixels for edge, pixels in limits.items() if pixels is not None}
    if not given:
        return
    if "max_pixels" not in getattr(getattr(image_processor, "valid_kwargs", None), "__annotations__", {}):
        raise ValueError(
            f"data.min_pixels={config.min_pixels}, data.max_pixels={config.max_pixels}: {type(image_processor).__name__} has no "
            "such limits; the model's preprocessor_config.json fixes the size of its images"
        )
    size = {edge: image_processor.size[edge] for edge in limits} | given
    if size["shortest_edge"] > size["longest_edge"]:
        raise ValueError(f"data.min_pixels={size['shortest_edge']} is above data.max_pixels={size['longest_edge']}")
    image_processor.size = size


def _limit_video_pixels(processor: Any, most: int | None) -> None:
    if most is None:
        return
    if reason := getattr(processor, "no_videos", f"{type(processor).__name__} takes no videos"):
        raise ValueError(f"data.max_video_pixels={most}: {reason}")
    size = dict(processor.video_processor.size) | {"longest_edge": most}
    if size["shortest_edge"] > most:
        raise ValueError(f"data.max_video_pixels={most} is below the model's least number, {size['shortest_edge']}")
    processor.video_processor.size = size


def load_processor(folder: str | Path, trust_remote_code: bool = False, **kwargs: Any) -> Any:
    """The processor in a local model folder; None if the folder has none (a text model).

    A processor that takes images and videos is loaded for images only if the model's videos are not read, if the folder has no
    settings for them, or if torchvision is missing, which transformers' video processors need. Then its `no_videos` says why; else
    that is empty. Without torchvision, images are prepared by PIL.
    """
    folder = Path(folder).expanduser()
    if not any((folder / name).is_file() for name in PROCESSOR_FILES):
        return None
    options = {"trust_remote_code": trust_remote_code, "local_files_only": True, **kwargs}
    processor_class = _processor_class(folder)
    no_videos = why_no_video_processor(model_type_of(folder))
    if not no_videos and not _has_video_settings(folder):
        no_videos = (
            f"{folder} has no settings of a video processor; copy video_preprocessor_config.json of the original model"
        )
    if processor_class is None or "video_processor" not in processor_class.get_attributes():
        processor = AutoProcessor.from_pretrained(str(folder), **options)
        no_videos = no_videos or f"{type(processor).__name__} takes none"
    else:
        cls = images_only(processor_class) if no_videos else processor_class
        processor = cls.from_pretrained(str(folder), **options)
    processor.no_videos = no_videos
    return processor


def copy_processor(model: PreTrainedModel, folder: Path) -> None:
    """Bring the processor's files from the folder that the model was loaded from, if it has some."""
    source = Path(model.config._name_or_path)
    for name in PROCESSOR_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _has_video_settings(folder: Path) -> bool:
    """Whether transformers finds those of a video processor. A folder that was saved by a processor for images only has none."""
    file = folder / "processor_config.json"
    is_nested = file.is_file() and "video_processor" in json.loads(file.read_text(encoding="utf-8"))
    return is_nested or any((folder / name).is_file() for name in PROCESSOR_FILES[1:])


def _processor_class(folder: Path) -> Any:
    """transformers' own class of the folder's processor; None if the folder names none of them."""
    for name in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        file = folder / name
        settings = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        if settings.get("processor_class"):
            return processor_class_from_name(settings["processor_class"])
    config = AutoConfig.from_pretrained(str(folder), local_files_only=True)
    return PROCESSOR_MAPPING.get(type(config), None)


@cache
def images_only(processor_class: Any) -> Any:
    """The class without its video processor, for which it gets None. It has the same name, which `save_pretrained` writes."""
    parts = processor_class.get_attributes()
    place = parts.index("video_processor")

    def arguments(cls: Any, *args: Any, **kwargs: Any) -> list[Any]:
        inherited: Any = ProcessorMixin._get_arguments_from_pretrained
        found = inherited.__func__(cls, *args, **kwargs)
        return [*found[:place], None, *found[place:]]

    members = {
        "get_attributes": classmethod(lambda cls: [*parts[:place], *parts[place + 1 :]]),
        "_get_arguments_from_pretrained": classmethod(arguments),
    }
    return type(processor_class.__name__, (processor_class,), members)
