"""How verl's SFT configurations (`sft_trainer.yaml`, `sft_trainer_engine.yaml`) differ from ours; see `compat`.

Preference training, which verl does not have, understands the same spellings of model, engine and optimizer.
"""

from lockstep.config import compat
from lockstep.config.compat import Tables, Unsupported, moved
from lockstep.config.megatron import McoreEngineConfig
from lockstep.config.model import FSDPEngineConfig
from lockstep.config.schema import keys

_SECTIONS = {
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.actor.fsdp_config.": "model.fsdp_config.",
    "actor_rollout_ref.actor.megatron.": "model.megatron.",
    "actor_rollout_ref.actor.optim.": "optim.",
    "actor_rollout_ref.actor.strategy": "model.strategy",
    "trainer.device": "trainer.device",
    "trainer.logger": "trainer.logger",
    "data.use_shm": "data.use_shm",
    "global_profiler.": "global_profiler.",
}
"""Where PPO has a section or key that means the same here."""


_MEGATRON = sorted(keys(McoreEngineConfig).keys() - keys(FSDPEngineConfig).keys())
"""What the section `engine` of verl has only with Megatron."""

ALIASES = {
    "model.partial_pretrain": "model.path",
    "model.fsdp_config.cpu_offload": "model.fsdp_config.offload_policy",
    "engine": "model.fsdp_config",
    "model.fsdp_config.strategy": "model.strategy",
    **{f"model.fsdp_config.{key}": f"model.megatron.{key}" for key in _MEGATRON},
    "checkpoint": "trainer.checkpoint",
    "use_remove_padding": "model.use_remove_padding",
    "ulysses_sequence_parallel_size": "model.fsdp_config.ulysses_sequence_parallel_size",
    "data.micro_batch_size": "data.micro_batch_size_per_gpu",
    "data.chat_template": "model.custom_chat_template",
    "data.multiturn.messages_key": "data.messages_key",
    "data.multiturn.tools_key": "data.tools_key",
    "data.multiturn.enable_thinking_key": "data.enable_thinking_key",
    "optim.warmup_steps": "optim.lr_warmup_steps",
    "optim.warmup_steps_ratio": "optim.lr_warmup_steps_ratio",
    "optim.warmup_style": "optim.lr_scheduler_type",
    "optim.lr_scheduler": "optim.lr_scheduler_type",
    "global_profiler.steps": "trainer.profile_steps",
    **compat.PROFILER_ALIASES,
}

UNSUPPORTED_KEYS = {
    **{key: entry for key, entry in moved(compat.UNSUPPORTED_KEYS, _SECTIONS).items() if key not in ALIASES},
    "trainer.profile_interval": Unsupported("set trainer.profile_steps to the steps to profile", (None, [-1, -1])),
}

_TORCHRUN = "torchrun starts the processes (--nnodes, --nproc_per_node)"

NO_EFFECT = {
    **moved(compat.NO_EFFECT, _SECTIONS),
    "model.fsdp_config.offload_params": "model.fsdp_config.offload_policy keeps the parameters in host memory",
    "data.pad_mode": "sequences are packed; set model.use_remove_padding=false for padded rows",
    "trainer.nnodes": _TORCHRUN,
    "trainer.n_gpus_per_node": _TORCHRUN,
}

TABLES = Tables(
    ALIASES,
    moved(compat.VALUE_ALIASES, _SECTIONS),
    unsupported_keys=UNSUPPORTED_KEYS,
    unsupported_values=moved(compat.UNSUPPORTED_VALUES, _SECTIONS),
    no_effect=NO_EFFECT,
)

PREFERENCE_TABLES = Tables(
    {
        name: target
        for name, target in ALIASES.items()
        if target == "data.micro_batch_size_per_gpu" or "data." not in target
    },
    moved(compat.VALUE_ALIASES, _SECTIONS),
    unsupported_keys=UNSUPPORTED_KEYS,
    unsupported_values=moved(compat.UNSUPPORTED_VALUES, _SECTIONS),
    no_effect=NO_EFFECT,
)
