#!/usr/bin/env bash
# Supervised warm-up of SmolLM2-135M on the solutions of GSM8K, before GRPO (docs/learning_runs.md).
#
#   MODEL=~/models/SmolLM2-135M-Instruct DATA=~/data/gsm8k examples/sft_smollm2_gsm8k.sh [key=value ...]
#
# DATA: folder with pairs.parquet (examples/data_preprocess/gsm8k_pairs.py). RUN: folder for checkpoints and metrics; the model
# is in $RUN/global_step_N/huggingface. Further arguments override the settings below.
set -euo pipefail
: "${MODEL:?the folder of SmolLM2-135M-Instruct}"
: "${DATA:?the folder with pairs.parquet}"
RUN=${RUN:-runs/sft_smollm2_gsm8k}

exec "${PYTHON:-python3}" -m lockstep.trainer.fsdp_sft_trainer \
    model.path="$MODEL" \
    data.train_files="$DATA/pairs.parquet" \
    data.prompt_key=prompt \
    data.response_key=response \
    data.train_batch_size=64 \
    data.max_length=512 \
    data.truncation=right \
    data.max_token_len_per_gpu=32768 \
    optim.lr=3e-4 \
    optim.lr_warmup_steps_ratio=0.05 \
    optim.min_lr_ratio=0.1 \
    optim.betas=[0.9,0.999] \
    trainer.total_epochs=3 \
    trainer.seed=0 \
    trainer.default_local_dir="$RUN" \
    "$@"
