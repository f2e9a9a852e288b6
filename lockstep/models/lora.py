"""LoRA: low-rank adapters of peft on frozen linear layers.

    y = x W^T + (alpha / rank) * (x A^T) B^T       W in the compute dtype; A (R, I) random and B (O, R) zero at first, both trained

Adapters are peft's layers around the linear layers of a transformers model: `q_proj.weight` becomes `q_proj.base_layer.weight`,
beside `q_proj.lora_A.default.weight` and `q_proj.lora_B.default.weight`. `kernels/linear.py` computes them, and the check at load
time compares that with peft's own forward. A folder of an adapter is peft's: adapter_config.json and adapter_model.safetensors.
"""

import copy
import logging
import math
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lockstep.config.model import HFModelConfig
from lockstep.kernels.linear import Adapter
from lockstep.models.attention_variants import PackedIndexer
from lockstep.models.decoder import decoder_of
from lockstep.models.four_bit import is_4bit
from lockstep.models.state_mixer import DIRECT_WEIGHTS
from lockstep.models.token_models import TokenModel
from lockstep.models.vision import is_vision, tower_of
from lockstep.utils.distributed import current_rank
from lockstep.utils.model_path import is_adapter, local_model_folder, locate_model

if TYPE_CHECKING:
    from peft import LoraConfig

logger = logging.getLogger(__name__)

ADAPTER = "default"
"""The adapter's name in peft's layers."""
_PREFIX = "base_model.model."
"""Prefix of the names in an adapter's file."""
SCORE_HEAD = "score.weight"
_PLAIN = {
    "bias": "none",
    "use_dora": False,
    "lora_bias": False,
    "fan_in_fan_out": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "target_parameters": None,
    "trainable_token_indices": None,
    "layer_replication": None,
}
"""Settings of peft that are served with this value only."""
_KEEP_THE_BASE = ("gaussian", "eva", "orthogonal")
"""Initialisations of peft, besides the default, that leave the base weights as they are; PiSSA and others subtract from them."""

_REFUSED = {"out_proj"}
"""Linear layers that peft refuses in the types of `_NO_ADAPTER`, since fused kernels use their weight directly."""
_NO_ADAPTER: dict[str, set[str]] = {
    **dict.fromkeys(("falcon_h1", "mamba2", "nemotron_h"), _REFUSED),
    **dict.fromkeys(("mamba", "falcon_mamba"), _REFUSED | DIRECT_WEIGHTS),
    "jamba": DIRECT_WEIGHTS,
}
"""Model type -> linear layers without an adapter."""


def base_name(name: str) -> str:
    """The name that a parameter has without adapters."""
    return name.replace(".base_layer.", ".")


def file_name(hf_name: str) -> str:
    """The name of a trained parameter in an adapter's file."""
    return _PREFIX + hf_name.replace(f".{ADAPTER}.", ".")


def of_adapter(name: str) -> bool:
    """Whether the parameter is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


def adapter_layers(model: nn.Module) -> dict[str, Any]:
    """peft's layers by the name of the linear layer they wrap; empty for a model without adapters."""
    return {name: module for name, module in model.named_modules() if hasattr(module, "lora_A")}


def has_adapters(model: nn.Module) -> bool:
    return any(hasattr(module, "lora_A") for module in model.modules())


@contextmanager
def adapters_off(model: nn.Module) -> Iterator[None]:
    """The model computes as its base inside."""
    layers = adapter_layers(model).values()
    # peft's enable_adapters would also set requires_grad of the parameters, which may be sharded
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
@torch.no_grad()
def trial_adapters(model: nn.Module) -> Iterator[None]:
    """Give every adapter a B that is not zero inside, so that a check of the model covers adapters before they are trained."""
    weights = [layer.lora_B[ADAPTER].weight for layer in adapter_layers(model).values()]
    shards = [(w.to_local() if isinstance(w, DTensor) else w).detach() for w in weights]
    before = [shard.clone() for shard in shards]
    for shard in shards:
        shard.copy_(torch.linspace(-0.02, 0.02, shard.numel(), device=shard.device).view(shard.shape))
    try:
        yield
    finally:
        for shard, values in zip(shards, before):
            shard.copy_(values)


def install_adapters(
    model: TokenModel, config: HFModelConfig, key: str, *, dtype: torch.dtype, device: torch.device, seed: int
) -> None:
    """Freeze the transformer and add adapters in `dtype`: random ones from `seed`, or those of `lora_adapter_path`.

    No-op if `lora_rank` is 0.
    key: the config section, for messages. A head on top of the transformer (a critic's) stays trained, in `dtype` too.
    """
    if config.lora_rank == 0:
        return
    folder = None
    if config.lora_adapter_path is not None:
        name = f"{key}.lora_adapter_path"
        folder = local_model_folder(config.lora_adapter_path, name)
        if not is_adapter(folder):
            raise ValueError(f"{name}={config.lora_adapter_path}: it has no adapter_config.json: not a peft adapter")
    lora = _new_config(model, config, key) if folder is None else _saved_config(folder, config, key)
    transformer = model.transformer
    linears = sorted({name.rpartition(".")[2] for name, m in transformer.named_modules() if isinstance(m, nn.Linear)})
    _inject(transformer, lora, f"{key}.target_modules={config.target_modules}", linears, config, key)
    if config.freeze_vision_tower and (tower := tower_of(transformer)) is not None:
        _check_frozen(transformer, tower, "target_modules" if folder is None else "lora_adapter_path", key)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapter_layers(transformer).values():
            a, b = layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]
            weight = nn.init.kaiming_uniform_(torch.empty(a.weight.shape), a=math.sqrt(5), generator=generator)
            a.weight = nn.Parameter(weight.to(device, dtype))
            b.weight = nn.Parameter(torch.zeros(b.weight.shape, device=device, dtype=dtype))
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
    if folder is not None:
        _load(model, folder, f"{key}.lora_adapter_path={config.lora_adapter_path}")
    if current_rank() == 0:
        trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        share = trained / sum(parameter.numel() for parameter in model.parameters())
        number = len(adapter_layers(transformer))
        logger.info("LoRA: %d layers of %s, %.3g M parameters (%.2g %%)", number, key, trained / 1e6, 100 * share)


def copy_adapters(source: PreTrainedModel, target: PreTrainedModel) -> None:
    """Give `target` the same adapters as `source`, without memory; no-op if it has none."""
    if has_adapters(source):
        from peft import inject_adapter_in_model

        inject_adapter_in_model(copy.deepcopy(adapter_config(source)), target, ADAPTER, low_cpu_mem_usage=True)


def save_adapter(
    model: TokenModel, weights: Iterable[tuple[str, Tensor]], tokenizer: PreTrainedTokenizerBase, folder: Path
) -> None:
    """Write an adapter that `peft.PeftModel.from_pretrained` loads, and the tokenizer. Collective.

    weights: the trained parameters, whole, by their Hugging Face names; every rank iterates.
    """
    tensors = {file_name(name): tensor.detach().cpu().contiguous() for name, tensor in weights}
    if current_rank() > 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    lora = copy.deepcopy(adapter_config(model.transformer))
    lora.inference_mode = True
    lora.save_pretrained(str(folder))
    tokenizer.save_pretrained(folder)


@torch.no_grad()
def merged(weight: Tensor, adapter: Adapter, start: int = 0) -> Tensor:
    """weight + scale * B A in float32, rounded once. weight: rows of the layer's weight, from row `start` on."""
    a, b = adapter.a.to(weight.device).float(), adapter.b[start : start + len(weight)].to(weight.device).float()
    return torch.addmm(weight.float(), b, a, alpha=adapter.scale).to(weight.dtype)


def merge_adapters(
    model: nn.Module, weights: Iterable[tuple[str, Tensor]], adapters: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model that computes the same without adapters.

    weights: all parameters of `model`; adapters: at least those of its adapters. Whole, by their Hugging Face names.
    """
    layers = adapter_layers(model)
    own = dict(model.named_parameters())
    for path in layers:
        if f"{path}.base_layer.weight" not in own:
            raise ValueError(f"the adapter of {path} cannot be merged: the layer's weight is tied to another layer")
    for name, weight in weights:
        path = name.removesuffix(".base_layer.weight")
        if path in layers:
            a, b = (adapters[f"{path}.lora_{part}.{ADAPTER}.weight"] for part in "AB")
            weight = merged(weight, Adapter(a, b, layers[path].scaling[ADAPTER]))
        if not of_adapter(name):
            yield base_name(name), weight


def read_adapter(folder: Path, what: str) -> tuple[dict[str, Adapter], Tensor | None]:
    """Adapters of a folder by the name of their linear layer, and the score head if it has one. what: the setting, for messages."""
    lora = _read_config(folder, what)
    scale = lora.lora_alpha / (math.sqrt(lora.r) if lora.use_rslora else lora.r)
    tensors = {name.removeprefix(_PREFIX): tensor for name, tensor in _read_tensors(folder, what).items()}
    adapters: dict[str, Adapter] = {}
    for name in [name for name in tensors if name.endswith(".lora_A.weight")]:
        path = name.removesuffix(".lora_A.weight")
        a, b = tensors.pop(name), tensors.pop(f"{path}.lora_B.weight", None)
        if b is None:
            raise ValueError(f"{what}: {path} has lora_A but no lora_B")
        adapters[path] = Adapter(a, b, scale)
    if not adapters:
        raise ValueError(f"{what}: the folder has no LoRA tensors")
    if others := sorted(tensors.keys() - {SCORE_HEAD}):
        raise ValueError(
            f"{what}: it also trained {others[0]}, which is not a LoRA adapter of a linear layer: not supported"
        )
    return adapters, tensors.get(SCORE_HEAD)


def adapter_config(model: PreTrainedModel) -> "LoraConfig":
    """The LoRA config of a model with adapters."""
    return cast(Any, model.peft_config)[ADAPTER]


def _new_config(model: TokenModel, config: HFModelConfig, key: str) -> "LoraConfig":
    from peft import LoraConfig

    is_scalar = hasattr(model, "score")
    base = locate_model(config.path, f"{key}.path")  # of a checkpoint the folder in it, which peft can open
    return LoraConfig(
        r=config.lora_rank,
        lora_alpha=config.lora_alpha,
        target_modules=_targets(model, config, key),
        exclude_modules=config.exclude_modules,
        base_model_name_or_path=str(base.resolve()) if isinstance(base, Path) else config.path,
        task_type="SEQ_CLS" if is_scalar else "CAUSAL_LM",
        modules_to_save=["score"] if is_scalar else None,
    )


def _targets(model: TokenModel, config: HFModelConfig, key: str) -> str | list[str]:
    """`target_modules` without the layers that cannot have an adapter."""
    transformer = model.transformer
    none = _NO_ADAPTER.get(transformer.config.get_text_config().model_type, set())
    untrained = _indexer_layers(transformer)
    if config.target_modules != "all-linear":
        names = set(config.target_modules) if isinstance(config.target_modules, list) else set()
        if named := sorted(none & names):
            raise ValueError(
                f"{key}.target_modules: {type(transformer).__name__} uses the weight of {', '.join(named)} directly, where an "
                "adapter has no effect; leave it out"
            )
        if named := sorted(untrained & names):
            raise ValueError(
                f"{key}.target_modules: {', '.join(named)} of {type(transformer).__name__} is in the indexer, which only picks "
                "keys: an adapter there gets no gradient; leave it out"
            )
        if isinstance(config.target_modules, list) and is_vision(transformer.config):
            return _in_language_model(transformer, config.target_modules, f"{key}.target_modules")
        return config.target_modules
    head = transformer.get_output_embeddings()
    is_seeing = is_vision(transformer.config)
    linears = {
        path.rpartition(".")[2]
        for path, module in (decoder_of(transformer) if is_seeing else transformer).named_modules()
        if isinstance(module, nn.Linear) and module is not head
    }
    left_out = {name for name in linears if name in none | untrained or _means_experts([name], transformer)}
    if is_seeing:
        return _in_language_model(transformer, sorted(linears - left_out), f"{key}.target_modules")
    if not left_out and not _means_experts("all-linear", transformer):
        return "all-linear"
    if current_rank() == 0:
        found = (", ".join(sorted(names)) or "none" for names in (linears - left_out, left_out))
        logger.info(
            "LoRA: adapters of %s are on %s; left out wherever they are: %s", type(transformer).__name__, *found
        )
    return sorted(linears - left_out)


def _in_language_model(transformer: PreTrainedModel, names: Sequence[str], key: str) -> str:
    """A regular expression of the layers of these names in the language model of a vision model, for peft."""
    decoder = decoder_of(transformer)
    prefix = next(path for path, module in transformer.named_modules() if module is decoder)
    own = {path.rpartition(".")[2] for path, module in decoder.named_modules() if isinstance(module, nn.Linear)}
    if unknown := sorted(set(names) - own):
        raise ValueError(
            f"{key}: {', '.join(unknown)} is no linear layer of the language model of {type(transformer).__name__}, whose linear "
            f"layers are {', '.join(sorted(own))}; a regular expression of whole paths selects layers of its vision tower"
        )
    return rf"{re.escape(prefix)}\..*\.({'|'.join(map(re.escape, names))})"


def _indexer_layers(transformer: nn.Module) -> set[str]:
    """Names of the linear layers of indexers, which run without gradients (DeepSeek-V3.2)."""
    indexers = [module for module in transformer.modules() if isinstance(module, PackedIndexer)]
    return {name for module in indexers for name, child in module.named_children() if isinstance(child, nn.Linear)}


def _means_experts(targets: str | list[str], transformer: PreTrainedModel) -> bool:
    """Whether peft takes the names to mean the model's experts, which are no linear layers (Mixtral, Qwen3-MoE, MiniMax, …)."""
    from peft import LoraConfig
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    probe = LoraConfig(target_modules=targets)
    try:
        convert_peft_config_for_transformers(probe, transformer, None)
    except ValueError:  # one of several names that are fused
        return True
    return bool(probe.target_parameters)


def _saved_config(folder: Path, config: HFModelConfig, key: str) -> "LoraConfig":
    what = f"{key}.lora_adapter_path={config.lora_adapter_path}"
    lora = _read_config(folder, what)
    if lora.r != config.lora_rank:
        raise ValueError(f"{what}: the adapter has rank {lora.r}, not {config.lora_rank}; set {key}.lora_rank={lora.r}")
    lora.inference_mode = False
    lora.lora_dropout = 0.0  # no noise: the policy that trains is the one that was sampled
    return lora


def _read_config(folder: Path, what: str) -> "LoraConfig":
    from peft import LoraConfig, PeftConfig

    try:
        lora = PeftConfig.from_pretrained(str(folder))
    except (TypeError, ValueError, KeyError) as error:
        raise ValueError(f"{what}: its adapter_config.json cannot be read: {error}") from error
    if not isinstance(lora, LoraConfig):
        raise ValueError(f"{what}: is a {lora.peft_type} adapter; only LoRA is supported")
    for name, plain in _PLAIN.items():
        if (getattr(lora, name, None) or plain) != plain:
            raise ValueError(f"{what}: {name}={getattr(lora, name)} of its adapter_config.json is not supported")
    if isinstance(lora.init_lora_weights, str) and lora.init_lora_weights not in _KEEP_THE_BASE:
        raise ValueError(
            f"{what}: init_lora_weights={lora.init_lora_weights} of its adapter_config.json is not supported: it changed the base; "
            "merge it with peft first"
        )
    return lora


def _read_tensors(folder: Path, what: str) -> dict[str, Tensor]:
    from peft import load_peft_weights

    # peft would ask the Hub for a folder without weights
    if not any((folder / f"adapter_model.{kind}").is_file() for kind in ("safetensors", "bin")):
        raise ValueError(f"{what}: the folder has no adapter_model.safetensors")
    try:
        return cast(dict[str, Tensor], load_peft_weights(str(folder), device="cpu"))
    except pickle.UnpicklingError as error:
        raise ValueError(f"{what}: its adapter_model.bin holds more than tensors; convert it to safetensors") from error
    except (OSError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{what}: its weights cannot be read: {error}") from error


def _inject(
    transformer: PreTrainedModel, lora: "LoraConfig", what: str, linears: list[str], config: HFModelConfig, key: str
) -> None:
    from peft import inject_adapter_in_model
    from peft.tuners.lora.layer import Linear

    known = f"its linear layers are {', '.join(linears)}"
    name = type(transformer).__name__
    try:
        inject_adapter_in_model(lora, transformer, ADAPTER, low_cpu_mem_usage=True)
    except ValueError as error:
        if config.exclude_modules and "exclude" in str(error):
            raise ValueError(
                f"{key}.exclude_modules={config.exclude_modules} excludes every layer that {what} selects; {known}"
            ) from error
        raise ValueError(f"{what} matches no linear layer of {name}; {known}") from error
    layers = adapter_layers(transformer)
    odd = [
        path
        for path, layer in layers.items()
        if not isinstance(layer, Linear) and not (hasattr(layer, "weight") and is_4bit(layer.weight))
    ]
    if others := sorted({path.rpartition(".")[2] for path in odd}):
        raise ValueError(f"{what}: {', '.join(others)} of {name} is not a linear layer; {known}")
    if isinstance(lora.target_modules, list | set) and isinstance(config.target_modules, list):
        wanted = [target for target in config.target_modules if target in lora.target_modules]
        unmatched = [t for t in wanted if not any(path == t or path.endswith(f".{t}") for path in layers)]
        if unmatched and not config.exclude_modules:
            raise ValueError(f"{what}: {', '.join(unmatched)} matches no linear layer of {name}; {known}")


def _check_frozen(transformer: PreTrainedModel, tower: nn.Module, setting: str, key: str) -> None:
    """ValueError if an adapter is in the tower."""
    in_tower = set(tower.modules())
    if found := [path for path, layer in adapter_layers(transformer).items() if layer in in_tower]:
        leave_out = f"leave it out ({key}.exclude_modules)" if setting == "target_modules" else "take another adapter"
        raise ValueError(
            f"{key}.freeze_vision_tower=true, but {key}.{setting} puts adapters on {len(found)} layers of the tower, such as "
            f"{found[0]}; {leave_out}, or set {key}.freeze_vision_tower=false"
        )


@torch.no_grad()
def _load(model: TokenModel, folder: Path, what: str) -> None:
    """Copy a folder's tensors into the adapters of a model that is not sharded yet."""
    tensors = _read_tensors(folder, what)
    own = {file_name(model.hf_name(name)): p for name, p in model.named_parameters() if p.requires_grad}
    if other := sorted(tensors.keys() ^ own.keys()):
        state = "has" if other[0] in tensors else "lacks"
        raise ValueError(
            f"{what}: is not an adapter of this model: it {state} {other[0]} (and {len(other) - 1} more differ)"
        )
    for name, parameter in own.items():
        if tensors[name].shape != parameter.shape:
            shapes = f"{tuple(tensors[name].shape)} instead of {tuple(parameter.shape)}"
            raise ValueError(f"{what}: is an adapter of another base model: {name} has shape {shapes}")
        parameter.copy_(tensors[name])
