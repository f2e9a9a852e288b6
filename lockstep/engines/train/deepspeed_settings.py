"""The settings that DeepSpeed is started with: the run's own, and those of a user's DeepSpeed JSON (`deepspeed.config_path`).

    keys of the section `deepspeed` ─► + the file's values ─► the dictionary for `deepspeed.initialize`

What the run decides (batch sizes, optimizer, schedule, clipping, precision) may stand in the file as "auto" or with the run's
value; anything else is refused with its line. Every other value of the file is passed on, and wins over the section's keys.
"""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config.deepspeed import DeepSpeedEngineConfig
from lockstep.config.model import FSDPOptimizerConfig

AUTO = "auto"
EPS = 1e-8
"""Of AdamW, as in torch."""

_BATCH_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
_OF_THE_RUN = {
    **dict.fromkeys(_BATCH_SIZES, "batch sizes are those of the run (*_mini_batch_size, *_micro_batch_size_per_gpu)"),
    "scheduler": "the learning rate follows the run's optim section (lr, lr_scheduler_type, lr_warmup_steps)",
    "amp": "precision is the run's (deepspeed.dtype)",
    "torch_autocast": "precision is the run's (deepspeed.dtype)",
    "data_types": "precision is the run's (deepspeed.dtype)",
    "managed_gradient_accumulation": "the run accumulates its micro-batches itself",
    "zero_allow_untested_optimizer": "the optimizer is the run's: torch's AdamW",
    "zero_force_ds_cpu_optimizer": "the optimizer is the run's: torch's AdamW",
    "sequence_parallel_size": "sequences are not split over ranks by this engine",
    "data_parallel_size": "all ranks of the role are data-parallel",
    "tensor_parallel": "this engine shards by ZeRO alone; for tensor parallelism set strategy=megatron",
    "pipeline": "this engine shards by ZeRO alone; for pipeline parallelism set strategy=megatron",
    "compression_training": "weights reach the rollout uncompressed",
    "data_efficiency": "the batches are the run's",
    "curriculum_learning": "the batches are the run's",
    "hybrid_engine": "the rollout is the run's (rollout.name)",
}
"""Top-level keys of the file with no value but "auto", and why."""

_DTYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class DeepSpeedSettings:
    """values: for `deepspeed.initialize`. stage: ZeRO's."""

    values: dict[str, Any]
    stage: int

    @property
    def offloads_parameters(self) -> bool:
        return self._offloads("offload_param")

    @property
    def offloads_optimizer(self) -> bool:
        return self._offloads("offload_optimizer")

    def _offloads(self, name: str) -> bool:
        section = self.values["zero_optimization"].get(name) or {}
        return section.get("device", "none") != "none"


def build_settings(
    config: DeepSpeedEngineConfig, optim: FSDPOptimizerConfig | None, clip_grad: float, dtype: torch.dtype
) -> DeepSpeedSettings:
    """dtype: the model computes in it. optim: None for a model that only computes."""
    if dtype not in _DTYPES:
        raise ValueError(
            f"deepspeed.dtype={config.dtype} is not supported by strategy=deepspeed: set deepspeed.dtype to bfloat16 or float32, "
            "or strategy=fsdp for float16"
        )
    if optim is not None and config.model_dtype not in ("fp32", "float32"):
        raise ValueError(
            f"deepspeed.model_dtype={config.model_dtype} is not supported by strategy=deepspeed, whose master weights are float32: "
            "set deepspeed.model_dtype=fp32, or strategy=fsdp for bfloat16 masters"
        )
    values = _run_values(config, optim, clip_grad, dtype)
    if config.config_path is not None:
        values = _merged(values, _UserFile(Path(config.config_path), values, optim).settings())
    zero = values["zero_optimization"]
    stage = zero["stage"]
    settings = DeepSpeedSettings(values, stage)
    if optim is not None and dtype == torch.bfloat16 and stage == 0:
        raise ValueError(
            "deepspeed.zero_stage=0 keeps no float32 master weights: set deepspeed.zero_stage=1 (on one GPU it is the same) or "
            "deepspeed.dtype=float32"
        )
    if optim is not None and settings.offloads_parameters and stage < 3:
        raise ValueError(
            f"deepspeed.param_offload=true needs sharded parameters: set deepspeed.zero_stage=3 (it is {stage}), or "
            "deepspeed.param_offload=false"
        )
    if optim is not None and settings.offloads_optimizer and stage == 0:
        raise ValueError("deepspeed.optimizer_offload=true needs deepspeed.zero_stage=1, 2 or 3 (it is 0)")
    return settings


def _run_values(
    config: DeepSpeedEngineConfig, optim: FSDPOptimizerConfig | None, clip_grad: float, dtype: torch.dtype
) -> dict[str, Any]:
    zero: dict[str, Any] = {
        "stage": config.zero_stage,
        "memory_efficient_linear": False,  # it would replace torch.nn.functional.linear in the whole process
    }
    if config.param_offload:
        zero["offload_param"] = {"device": "cpu"}
    if config.optimizer_offload and optim is not None:
        zero["offload_optimizer"] = {"device": "cpu"}
    values: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,  # of no effect: rows are counted by the run
        "gradient_accumulation_steps": 1,  # a divisor of the loss; boundaries are set by hand
        "gradient_clipping": clip_grad,
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,  # torch's fused AdamW runs on the host as well
        "bf16": {"enabled": dtype == torch.bfloat16},
        "fp16": {"enabled": False},
        "steps_per_print": None,
    }
    if dtype == torch.bfloat16:
        values["data_types"] = {"grad_accum_dtype": "fp32"}
        values["communication_data_type"] = "fp32"
    return values


class _UserFile:
    """A user's JSON. run: the run's values, which those of the file are compared with."""

    def __init__(self, path: Path, run: dict[str, Any], optim: FSDPOptimizerConfig | None) -> None:
        self._path = path
        self._run = run
        self._optim = optim
        try:
            self._text = path.read_text()
        except OSError as error:
            raise ValueError(f"deepspeed.config_path={str(path)!r} cannot be read: {error.strerror}") from error
        try:
            self._values = json.loads(self._text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{error.lineno}: deepspeed.config_path is not JSON: {error.msg}") from error
        if not isinstance(self._values, dict):
            raise ValueError(f"{path}:1: deepspeed.config_path holds no JSON object")

    def settings(self) -> dict[str, Any]:
        """What the file adds to the run's values, without "auto"."""
        kept = {}
        for key in ("zero_optimization", "optimizer"):
            if not isinstance(self._values.get(key, {}), dict) and not _is_auto(self._values[key]):
                raise ValueError(
                    f"{self._path}:{self._line((key,))}: {key} in deepspeed.config_path must be a JSON object"
                )
        for key, value in self._values.items():
            if key in _OF_THE_RUN:
                if not _is_auto(value):
                    raise self._refused((key,), value, _OF_THE_RUN[key])
            elif key == "optimizer":
                self._check_optimizer(value)
            elif key in ("bf16", "bfloat16", "fp16"):
                kept[key.replace("bfloat16", "bf16")] = self._precision(key, value)
            elif key == "gradient_clipping":
                self._compare((key,), value, self._run[key], "clip_grad")
            elif not _is_auto(value):
                kept[key] = _without_auto(value)
        return kept

    def _precision(self, key: str, value: Any) -> dict[str, Any]:
        section = dict(value) if isinstance(value, dict) else {"enabled": value}
        own = self._run["fp16" if key == "fp16" else "bf16"]["enabled"]
        self._compare((key, "enabled"), section.pop("enabled", AUTO), own, "deepspeed.dtype")
        return {} if key == "fp16" else _without_auto(section)

    def _check_optimizer(self, value: Any) -> None:
        if self._optim is None:
            return
        section = value if isinstance(value, dict) else {}
        if str(section.get("type", AUTO)).lower() not in ("adamw", AUTO):
            raise self._refused(("optimizer", "type"), section.get("type"), "the optimizer is the run's: AdamW")
        own = {"lr": self._optim.lr, "weight_decay": self._optim.weight_decay, "betas": list(self._optim.betas)}
        own |= {"eps": EPS}
        params = section.get("params", AUTO)
        for name, given in ({} if params == AUTO else params).items():
            if name not in own:
                if not _is_auto(given):
                    raise self._refused(("optimizer", "params", name), given, "the run's AdamW has no such setting")
                continue
            self._compare(("optimizer", "params", name), given, own[name], f"optim.{name}")

    def _compare(self, path: tuple[str, ...], given: Any, own: Any, key: str) -> None:
        if not _is_auto(given) and given != own:
            raise self._refused(path, given, f"the run's {key} gives {json.dumps(own)}")

    def _refused(self, path: tuple[str, ...], given: Any, reason: str) -> ValueError:
        return ValueError(
            f"{self._path}:{self._line(path)}: {'.'.join(path)}={json.dumps(given)} in deepspeed.config_path conflicts with the "
            f'run: {reason}. Remove it from the file or set it to "auto"'
        )

    def _line(self, path: tuple[str, ...]) -> int:
        """The line of a key: its first mention after those that contain it."""
        place = 0
        for key in path:
            found = re.compile(rf'"{re.escape(key)}"\s*:').search(self._text, place)
            place = found.end() if found else place
        return self._text.count("\n", 0, place) + 1


def _is_auto(value: Any) -> bool:
    """Whether it leaves everything to the run."""
    if isinstance(value, dict):
        return bool(value) and all(_is_auto(item) for item in value.values())
    return value == AUTO


def _without_auto(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {name: _without_auto(item) for name, item in value.items() if item != AUTO}


def _merged(own: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """`own` with the values of `given`, section by section."""
    result = dict(own)
    for key, value in given.items():
        both = isinstance(value, dict) and isinstance(own.get(key), dict)
        result[key] = _merged(own[key], value) if both else value
    return result
