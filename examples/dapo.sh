#!/usr/bin/env bash
# DAPO: GRPO without KL, with asymmetric clipping (0.28 above, 0.2 below), token-mean loss, dynamic sampling of groups whose
# samples all have the same score, and a soft penalty for overlong answers.
#
#   MODEL=~/models/Qwen2.5-7B-Instruct DATA=~/data/dapo_math examples/dapo.sh [key=value ...]
#
# MODEL: folder of the model. DATA: folder with train.parquet and test.parquet (see examples/data_preprocess).
# RUN: folder for checkpoints and metrics. Further arguments override the settings below; the lengths and batch sizes can
# also be set by environment variables (MAX_RESPONSE_LENGTH=8192), and the overlong buffer follows.
set -euo pipefail
: "${MODEL:?the folder of a Hugging Face causal language model}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/dapo}

clip_ratio_low=0.2
clip_ratio_high=0.28

train_batch_size=${TRAIN_BATCH_SIZE:-64}
ppo_mini_batch_size=${PPO_MINI_BATCH_SIZE:-16}
n_resp_per_prompt=${N_RESP_PER_PROMPT:-16}
n_resp_per_prompt_val=${N_RESP_PER_PROMPT_VAL:-30}

max_prompt_length=${MAX_PROMPT_LENGTH:-2048}
max_response_length=${MAX_RESPONSE_LENGTH:-16384}
overlong_buffer=$((max_response_length / 4))

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=false \
    algorithm.filter_groups.enable=true \
    algorithm.filter_groups.metric=seq_reward \
    algorithm.filter_groups.max_num_gen_batches=10 \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size="$train_batch_size" \
    data.max_prompt_length="$max_prompt_length" \
    data.max_response_length="$max_response_length" \
    data.truncation=left \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.use_kl_loss=false \
    actor_rollout_ref.actor.clip_ratio_low="$clip_ratio_low" \
    actor_rollout_ref.actor.clip_ratio_high="$clip_ratio_high" \
    actor_rollout_ref.actor.loss_agg_mode=token-mean \
    actor_rollout_ref.actor.ppo_mini_batch_size="$ppo_mini_batch_size" \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu="$((max_prompt_length + max_response_length))" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.rollout.mode=async \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.9 \
    actor_rollout_ref.rollout.n="$n_resp_per_prompt" \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.n="$n_resp_per_prompt_val" \
    actor_rollout_ref.rollout.val_kwargs.do_sample=true \
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
    actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
    reward_model.reward_manager=dapo \
    reward_model.reward_kwargs.overlong_buffer_cfg.enable=true \
    reward_model.reward_kwargs.overlong_buffer_cfg.len="$overlong_buffer" \
    reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
    reward_model.reward_kwargs.overlong_buffer_cfg.log=true \
    trainer.logger=console \
    trainer.val_before_train=true \
    trainer.save_freq=30 \
    trainer.test_freq=5 \
    trainer.total_epochs=1 \
    trainer.default_local_dir="$RUN" \
    "$@"
