#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct with LoRA on two CPU cores: sums of two numbers, about ten minutes (docs/lora.md).
#
#   examples/grpo_smollm2_lora.sh [key=value ...]
#
# MODEL: folder of the model, or its name on the Hugging Face Hub (the default, 270 MB are downloaded once). Without a
# network, copy the folder from another machine and set MODEL to it. RUN: folder for data, checkpoints and metrics.
# Further arguments override the settings below; on a GPU, larger batches learn faster.
set -euo pipefail
MODEL=${MODEL:-HuggingFaceTB/SmolLM2-135M-Instruct}
RUN=${RUN:-runs/grpo_smollm2_lora}
HERE=$(dirname "$0")
if [[ $MODEL == */*/* || -d $MODEL ]] && [[ ! -f $MODEL/config.json ]]; then
    echo "MODEL=$MODEL has no config.json; set MODEL to a folder of SmolLM2-135M-Instruct, or unset it to download the model" >&2
    exit 2
fi

"${PYTHON:-python3}" "$HERE/sums.py" "$RUN/data"
exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    custom_reward_function.path="$HERE/sums.py" \
    data.train_files="$RUN/data/train.parquet" \
    data.val_files="$RUN/data/test.parquet" \
    data.train_batch_size=8 \
    data.max_prompt_length=64 \
    data.max_response_length=24 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.model.lora_rank=16 \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.actor.ppo_mini_batch_size=8 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.optim.lr=3e-4 \
    actor_rollout_ref.rollout.n=8 \
    trainer.total_training_steps=20 \
    trainer.test_freq=10 \
    trainer.logger=[console,file] \
    trainer.default_local_dir="$RUN" \
    "$@"
