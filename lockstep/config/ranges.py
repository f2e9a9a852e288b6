"""The allowed numbers of each key."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lockstep.config.errors import Problem
from lockstep.utils.sampling_limits import MAX_TEMPERATURE

Range = tuple[Callable[[Any], bool], str]
POSITIVE: Range = (lambda x: x > 0, "must be greater than 0")
NOT_NEGATIVE: Range = (lambda x: x >= 0, "must be 0 or more")
UNIT: Range = (lambda x: 0 <= x <= 1, "must be between 0 and 1")
SHARE: Range = (lambda x: 0 < x <= 1, "must be greater than 0 and at most 1")
COUNT_OR_ALL: Range = (lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for all")
EVERY_OR_NEVER: Range = (lambda x: x == -1 or x >= 1, "must be 1 or more, or -1 for never")
RANGES: dict[str, Range] = {
    "max_prompt_length": POSITIVE,
    "max_response_length": POSITIVE,
    "prompt_length": POSITIVE,
    "response_length": POSITIVE,
    "train_batch_size": POSITIVE,
    "val_batch_size": POSITIVE,
    "gen_batch_size": POSITIVE,
    "over_sample_rate": (lambda x: 0 <= x < 1, "must be at least 0 and below 1"),
    "seed": NOT_NEGATIVE,
    "betas": (lambda pair: all(0 <= x < 1 for x in pair), "must be two numbers of at least 0 and below 1"),
    "ppo_mini_batch_size": POSITIVE,
    "ppo_micro_batch_size_per_gpu": POSITIVE,
    "forward_micro_batch_size_per_gpu": POSITIVE,
    "log_prob_micro_batch_size_per_gpu": POSITIVE,
    "micro_batch_size_per_gpu": POSITIVE,
    "ppo_max_token_len_per_gpu": POSITIVE,
    "forward_max_token_len_per_gpu": POSITIVE,
    "log_prob_max_token_len_per_gpu": POSITIVE,
    "ppo_epochs": POSITIVE,
    "n": POSITIVE,
    "max_num_seqs": POSITIVE,
    "max_num_batched_tokens": POSITIVE,
    "max_model_len": POSITIVE,
    "kv_block_size": POSITIVE,
    "total_epochs": POSITIVE,
    "nnodes": POSITIVE,
    "reward_model.nnodes": NOT_NEGATIVE,
    "max_restarts": NOT_NEGATIVE,
    "max_staleness": NOT_NEGATIVE,
    "profile_steps": (lambda steps: all(step >= 1 for step in steps), "must be steps, the first of which is 1"),
    "trace_alloc_max_entries": POSITIVE,
    "nccl_timeout": POSITIVE,
    "num_cpus": POSITIVE,
    "update_weights_bucket_megabytes": POSITIVE,
    "lora_rank": NOT_NEGATIVE,
    "lora_alpha": POSITIVE,
    "fsdp_size": COUNT_OR_ALL,
    "n_gpus_per_node": POSITIVE,
    "tensor_model_parallel_size": POSITIVE,
    "ulysses_sequence_parallel_size": POSITIVE,
    "max_ckpt_to_keep": POSITIVE,
    "max_length": POSITIVE,
    "max_token_len_per_gpu": POSITIVE,
    "max_actor_ckpt_to_keep": POSITIVE,
    "max_critic_ckpt_to_keep": POSITIVE,
    "filter_overlong_prompts_workers": POSITIVE,
    "horizon": POSITIVE,
    "target_kl": POSITIVE,
    "clip_ratio_c": (lambda x: x > 1, "must be greater than 1"),
    "loss_scale_factor": POSITIVE,
    "timeout_s": POSITIVE,
    "connect_timeout_s": POSITIVE,
    "tool_timeout_s": POSITIVE,
    "max_assistant_turns": POSITIVE,
    "max_user_turns": POSITIVE,
    "max_parallel_calls": POSITIVE,
    "max_tool_response_length": POSITIVE,
    "max_retries": NOT_NEGATIVE,
    "retry_backoff_s": POSITIVE,
    "max_outstanding": POSITIVE,
    "max_concurrent": POSITIVE,
    "max_rpm": POSITIVE,
    "max_tpm": POSITIVE,
    "estimated_tokens_per_request": POSITIVE,
    "max_tokens": POSITIVE,
    "clip_grad": POSITIVE,
    "grad_clip": POSITIVE,
    "lr": NOT_NEGATIVE,
    "weight_decay": NOT_NEGATIVE,
    "kl_coef": NOT_NEGATIVE,
    "kl_loss_coef": NOT_NEGATIVE,
    "clip_ratio": NOT_NEGATIVE,
    "clip_ratio_low": NOT_NEGATIVE,
    "clip_ratio_high": NOT_NEGATIVE,
    "cliprange_value": NOT_NEGATIVE,
    "temperature": (lambda x: 0 <= x <= MAX_TEMPERATURE, f"must be 0 to {MAX_TEMPERATURE:g}"),
    "critic_warmup": NOT_NEGATIVE,
    "dataloader_num_workers": NOT_NEGATIVE,
    "num_workers": NOT_NEGATIVE,
    "log_val_generations": NOT_NEGATIVE,
    "max_num_gen_batches": NOT_NEGATIVE,
    "egpo_lambda": NOT_NEGATIVE,
    "ppo_kl_coef": NOT_NEGATIVE,
    "dro_beta": NOT_NEGATIVE,
    "egpo_alpha": POSITIVE,
    "tau_pos": POSITIVE,
    "tau_neg": POSITIVE,
    "center_rewards_coefficient": NOT_NEGATIVE,
    "dpo.beta": POSITIVE,
    "label_smoothing": (lambda x: 0 <= x < 0.5, "must be at least 0 and below 0.5"),
    "clip_cov_ratio": UNIT,
    "kl_cov_ratio": UNIT,
    "gamma": UNIT,
    "lam": UNIT,
    "lr_warmup_steps_ratio": UNIT,
    "min_lr_ratio": UNIT,
    "top_p": SHARE,
    "min_p": UNIT,
    "gpu_memory_utilization": SHARE,
    "top_k": COUNT_OR_ALL,
    "max_samples": COUNT_OR_ALL,
    "n_samples": POSITIVE,
    "batch_size": POSITIVE,
    "train_max_samples": COUNT_OR_ALL,
    "val_max_samples": COUNT_OR_ALL,
    "save_freq": (lambda x: x >= -1, "must be 1 or more, -1 for only the last step, or 0 for never"),
    "test_freq": EVERY_OR_NEVER,
}
"""Field name, in any section, or full key to its allowed values; null is always allowed."""


def ranges(values: Mapping[str, Any]) -> Iterator[Problem]:
    """Numbers out of range."""
    for name, value in values.items():
        rule = RANGES.get(name) or RANGES.get(name.rsplit(".", 1)[-1])
        if rule is not None and value is not None and not rule[0](value):
            yield Problem(name, value, rule[1])
    steps = values.get("trainer.total_training_steps")
    if steps is not None and steps < 1:
        yield Problem("trainer.total_training_steps", steps, "must be 1 or more, or null for all epochs")
