#!/usr/bin/env bash
# REINFORCE++: discounted returns of one sample per prompt, normalised over the whole batch; per-token KL penalty in the
# reward; no critic.
#
#   MODEL=~/models/Qwen2.5-1.5B-Instruct DATA=~/data/gsm8k examples/reinforce_plus_plus.sh [key=value ...]
#
# MODEL: folder of the model. DATA: folder with train.parquet and test.parquet (see examples/data_preprocess).
# RUN: folder for checkpoints and metrics. Further arguments override the settings below.
set -euo pipefail
: "${MODEL:?the folder of a Hugging Face causal language model}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/reinforce_plus_plus}

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=reinforce_plus_plus \
    algorithm.gamma=1.0 \
    algorithm.use_kl_in_reward=true \
    algorithm.kl_penalty=kl \
    algorithm.kl_ctrl.kl_coef=0.001 \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.rollout.n=1 \
    trainer.total_epochs=3 \
    trainer.save_freq=50 \
    trainer.test_freq=10 \
    trainer.default_local_dir="$RUN" \
    "$@"
