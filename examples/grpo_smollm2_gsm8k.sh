#!/usr/bin/env bash
# GRPO of SmolLM2-135M on GSM8K, after the supervised warm-up of examples/sft_smollm2_gsm8k.sh (docs/learning_runs.md).
#
#   MODEL=~/models/SmolLM2-135M-warm DATA=~/data/gsm8k examples/grpo_smollm2_gsm8k.sh [key=value ...]
#
# MODEL: global_step_N/huggingface of the warm-up's run. DATA: folder with train.parquet and test.parquet (examples/data_preprocess/gsm8k.py).
# RUN: folder for checkpoints and metrics. Further arguments override the settings below.
set -euo pipefail
: "${MODEL:?global_step_N/huggingface of the run of examples/sft_smollm2_gsm8k.sh}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/grpo_smollm2_gsm8k}

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.val_max_samples=500 \
    data.train_batch_size=64 \
    data.max_prompt_length=320 \
    data.max_response_length=256 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.entropy_coeff=0.002 \
    actor_rollout_ref.actor.optim.lr=2e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \
    +custom_reward_function.reward_kwargs.format_score=0 \
    trainer.total_epochs=100 \
    trainer.total_training_steps=400 \
    trainer.test_freq=20 \
    trainer.logger=[console,file] \
    trainer.validation_data_dir="$RUN/validation" \
    trainer.default_local_dir="$RUN" \
    "$@"
