"""Write a folder that `from_pretrained` opens: a policy as a causal LM, a critic as a one-label sequence classifier."""

import copy
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES


def save_policy(
    model: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """state: whole weights of a `PolicyModel` (names begin with `model.`)."""
    weights = {name.removeprefix("model."): tensor for name, tensor in state.items()}
    model.save_pretrained(folder, state_dict=weights)
    tokenizer.save_pretrained(folder)


def save_scalar_model(
    body: PreTrainedModel, state: dict[str, Tensor], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """state: whole weights of a `ScalarModel` (names begin with `body.` or `score.`)."""
    folder.mkdir(parents=True, exist_ok=True)
    prefix = f"{body.base_model_prefix}."
    weights = {_classifier_name(name, prefix): tensor.contiguous() for name, tensor in state.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(body.config)
    config.num_labels = 1
    config.pad_token_id = tokenizer.pad_token_id
    architecture = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.get(config.model_type)
    if architecture is not None:
        config.architectures = [architecture]
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _classifier_name(name: str, prefix: str) -> str:
    return prefix + name.removeprefix("body.") if name.startswith("body.") else name
