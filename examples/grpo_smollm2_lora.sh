#!/usr/bin/env bash
# GRPO of SmolLM2-135M-Instruct on easy word problems with LoRA: adapters on a frozen model (docs/lora.md).
#
#   MODEL=~/models/SmolLM2-135M-Instruct DATA=~/data/easy examples/grpo_smollm2_lora.sh [key=value ...]
#
# The settings of grpo_smollm2_easy.sh, with adapters, their learning rate, and a KL term, whose reference needs no second model.
set -euo pipefail
export RUN=${RUN:-runs/grpo_smollm2_lora}

exec "$(dirname "$0")/grpo_smollm2_easy.sh" \
    actor_rollout_ref.model.lora_rank=32 \
    actor_rollout_ref.model.lora_alpha=64 \
    actor_rollout_ref.actor.use_kl_loss=true \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.entropy_coeff=0 \
    actor_rollout_ref.actor.optim.lr=2e-4 \
    "$@"
