#!/usr/bin/env bash
# GRPO of SmolLM2-135M on word problems, with or without a calculator, after examples/sft_smollm2_calculator.sh (docs/learning_runs.md).
#
#   ARM=calculator MODEL=runs/sft_smollm2_calculator DATA=~/data/calculator examples/grpo_smollm2_calculator.sh [key=value ...]
#
# ARM: calculator (the default) or plain; the arms differ in nothing else. MODEL: the folder of the warm-up's run. DATA: folder with
# train.parquet and test.parquet (examples/data_preprocess/calculator_problems.py). RUN: folder for checkpoints and metrics.
# Further arguments override the settings below.
set -euo pipefail
ARM=${ARM:-calculator}
: "${MODEL:?the folder of the run of examples/sft_smollm2_calculator.sh}"
: "${DATA:?the folder with train.parquet and test.parquet}"
RUN=${RUN:-runs/grpo_smollm2_$ARM}

case $ARM in
calculator)
    AGENT=(
        actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent
        actor_rollout_ref.rollout.multi_turn.tool_config_path="$(dirname "$0")/tools/calculator.yaml"
    ) ;;
plain) AGENT=(actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent) ;;
*) echo "ARM=$ARM: must be calculator or plain" >&2; exit 2 ;;
esac

exec "${PYTHON:-python3}" -m lockstep.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    +custom_reward_function.reward_kwargs.scorer=gsm8k \
    +custom_reward_function.reward_kwargs.format_score=0 \
    data.train_files="$DATA/train.parquet" \
    data.val_files="$DATA/test.parquet" \
    data.train_batch_size=64 \
    data.max_prompt_length=128 \
    data.max_response_length=256 \
    actor_rollout_ref.model.path="$MODEL" \
    actor_rollout_ref.model.enable_gradient_checkpointing=false \
    actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.use_dynamic_bsz=true \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32768 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.actor.entropy_coeff=0.002 \
    actor_rollout_ref.actor.optim.lr=1e-5 \
    actor_rollout_ref.actor.optim.lr_warmup_steps=5 \
    actor_rollout_ref.rollout.n=16 \
    actor_rollout_ref.rollout.temperature=1.0 \
    actor_rollout_ref.rollout.max_num_seqs=1024 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.2 \
    "${AGENT[@]}" \
    trainer.total_epochs=100 \
    trainer.total_training_steps=150 \
    trainer.test_freq=10 \
    trainer.logger=[console,file] \
    trainer.validation_data_dir="$RUN/validation" \
    trainer.default_local_dir="$RUN" \
    "$@"
