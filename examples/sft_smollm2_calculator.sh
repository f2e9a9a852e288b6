#!/usr/bin/env bash
# Supervised warm-up of SmolLM2-135M on word problems, with or without calls of a calculator, before GRPO (docs/learning_runs.md).
#
#   ARM=calculator MODEL=~/models/SmolLM2-135M-Instruct DATA=~/data/calculator examples/sft_smollm2_calculator.sh [key=value ...]
#
# ARM: calculator or plain. DATA: the folder that examples/data_preprocess/calculator_problems.py wrote. RUN: folder for checkpoints and
# metrics; the model is in $RUN/global_step_N/huggingface. Further arguments override the settings below.
set -euo pipefail
: "${ARM:?calculator or plain}"
: "${MODEL:?the folder of SmolLM2-135M-Instruct}"
: "${DATA:?the folder with sft_calculator.parquet and sft_plain.parquet}"
RUN=${RUN:-runs/sft_smollm2_$ARM}

exec "${PYTHON:-python3}" -m lockstep.trainer.fsdp_sft_trainer \
    model.path="$MODEL" \
    data.train_files="$DATA/sft_$ARM.parquet" \
    data.train_batch_size=64 \
    data.max_length=512 \
    data.max_token_len_per_gpu=32768 \
    optim.lr=3e-4 \
    optim.lr_warmup_steps_ratio=0.05 \
    optim.min_lr_ratio=0.1 \
    optim.betas=[0.9,0.999] \
    trainer.total_epochs=1 \
    trainer.seed=0 \
    trainer.default_local_dir="$RUN" \
    "$@"
