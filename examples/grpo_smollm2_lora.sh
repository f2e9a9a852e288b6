#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct on easy word problems with LoRA: adapters on a frozen model (docs/lora.md).
#
#   MODEL=~/models/SmolLM2-135M-Instruct DATA=~/data/easy examples/grpo_smollm2_lora.sh [key=value ...]
#
# MODEL: folder of the model. DATA: folder with train.parquet and test.parquet (examples/data_preprocess/word_problems.py).
# RUN: folder for checkpoints and metrics. Further arguments override the settings below.
set -euo pipefail
: "${MODEL:?the folder of SmolLM2-135M-Instruct}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/grpo_smollm2_lora}

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    custom_reward_function.path="$(dirname "$0")/reward_smollm2.py" \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=448 \
    data.max_response_length=128 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \
    trainer.total_epochs=100 \
    trainer.total_training_steps=540 \
    trainer.test_freq=20 \
    trainer.logger=[console,file] \
    trainer.validation_data_dir="$RUN/validation" \
    trainer.default_local_dir="$RUN" \
    "$@"
