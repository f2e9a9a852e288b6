#!/usr/bin/env bash
# PPO on one GPU (or CPU): a critic, GAE advantages, a KL penalty against the reference in the reward.
#
#   MODEL=~/models/Qwen2.5-0.5B-Instruct DATA=~/data/gsm8k examples/ppo_single_gpu.sh [key=value ...]
#
# MODEL: folder of the model. DATA: folder with train.parquet and test.parquet (see examples/data_preprocess).
# RUN: folder for checkpoints and metrics. Further arguments override the settings below.
set -euo pipefail
: "${MODEL:?the folder of a Hugging Face causal language model}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/ppo_single_gpu}

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=16 \
    data.max_prompt_length=512 \
    data.max_response_length=256 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=4 \
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
    actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=4 \
    critic.model.path="$MODEL" \
    critic.optim.lr=1e-5 \
    critic.ppo_micro_batch_size_per_gpu=4 \
    algorithm.adv_estimator=gae \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_ctrl.kl_coef=0.001 \
    trainer.logger=console \
    trainer.val_before_train=false \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.save_freq=10 \
    trainer.test_freq=10 \
    trainer.total_epochs=3 \
    trainer.default_local_dir="$RUN" \
    "$@"
