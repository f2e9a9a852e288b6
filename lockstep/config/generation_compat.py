"""How verl's `generation.yaml` and `evaluation.yaml` differ from our configurations; see `compat`."""

from lockstep.config import compat
from lockstep.config.compat import Tables, Unsupported, moved

_RAY = {"ray_kwargs.ray_init": "ray_init", "ray_kwargs.timeline_json_file": "ray_init.timeline_json_file"}
_SECTIONS = {
    "actor_rollout_ref.model.": "model.",
    "actor_rollout_ref.rollout.": "rollout.",
    "trainer.device": "trainer.device",
}
"""Where PPO has a section or key that means the same here."""

_NO_TRAINING = "the model is not trained"
_OWN_KEYS = "validation's sampling is generation's own: set rollout.temperature, top_k, top_p, min_p, do_sample and data.n_samples"

GENERATION = Tables(
    aliases={
        **_RAY,
        "actor_rollout_ref.model": "model",
        "actor_rollout_ref.rollout": "rollout",
        "rollout.prompt_length": "data.max_prompt_length",
        "rollout.response_length": "data.max_response_length",
        "rollout.max_new_tokens": "data.max_response_length",
    },
    value_aliases={"rollout.name": {"naive": "hf"}},
    unsupported_keys={
        **moved(compat.UNSUPPORTED_KEYS, _SECTIONS),
        "rollout.n": Unsupported("data.n_samples is the number of responses per prompt; set 1", (None, 1)),
        "rollout.val_kwargs": Unsupported(_OWN_KEYS),
        "rollout.calculate_log_probs": Unsupported("the output has texts, no log-probs; set false"),
    },
    unsupported_values={
        **moved(compat.UNSUPPORTED_VALUES, _SECTIONS),
        "rollout.name": {"trtllm": "set embedded, hf, vllm, sglang, tgi or server"},
    },
    no_effect={
        **moved(compat.NO_EFFECT, _SECTIONS),
        "actor": _NO_TRAINING,
        "actor_rollout_ref.actor": _NO_TRAINING,
        "rollout.load_format": "the model is always read from its folder",
        "rollout.mode": "responses are the same in both modes",
        "rollout.checkpoint_engine": _NO_TRAINING,
        "rollout.log_prob_micro_batch_size": "no log-probs are computed",
        "rollout.log_prob_micro_batch_size_per_gpu": "no log-probs are computed",
        "rollout.log_prob_use_dynamic_bsz": "no log-probs are computed",
        "rollout.log_prob_max_token_len_per_gpu": "no log-probs are computed",
    },
)

EVALUATION = Tables(
    aliases={
        "reward.custom_reward_function": "custom_reward_function",
        "reward_manager.name": "reward_model.reward_manager",
        "data.reward_fn_key": "data.data_source_key",
    },
    no_effect=dict.fromkeys(
        ("ray_init", "ray_kwargs"),
        "responses are scored in processes of this machine: reward_model.reward_kwargs.num_workers",
    ),
)
