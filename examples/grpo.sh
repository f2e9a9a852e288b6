#!/usr/bin/env bash
# GRPO: 16 samples per prompt are compared with each other, so there is no critic.
#
#   MODEL=~/models/Qwen2.5-7B-Instruct DATA=~/data/gsm8k examples/grpo.sh [key=value ...]
#
# MODEL: folder of the model. DATA: folder with train.parquet and test.parquet (see examples/data_preprocess).
# RUN: folder for checkpoints and metrics. Further arguments override the settings below.
set -euo pipefail
: "${MODEL:?the folder of a Hugging Face causal language model}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/grpo}

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    algorithm.use_kl_in_reward=false \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=2048 \
    data.max_response_length=2048 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.use_remove_padding=true \
    actor_rollout_ref.model.enable_gradient_checkpointing=true \
    actor_rollout_ref.actor.ppo_mini_batch_size=16 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.clip_ratio_low=0.2 \
    actor_rollout_ref.actor.clip_ratio_high=0.2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.fsdp_config.param_offload=true \
    actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.top_p=0.9 \
    trainer.total_epochs=1 \
    trainer.save_freq=100 \
    trainer.test_freq=50 \
    trainer.default_local_dir="$RUN" \
    "$@"
