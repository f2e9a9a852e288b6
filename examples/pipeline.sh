#!/usr/bin/env bash
# A model's whole way: SFT, GRPO, generation, evaluation, export, and the exported model loaded again. The numbers agree at every
# hand-over: `lockstep eval` gives those of the last validation of GRPO, and so does a validation of the exported model.
#
#   examples/pipeline.sh [FOLDER]
#
# FOLDER (runs/pipeline) gets all files, also a tiny model and its data: nothing is downloaded, and a CPU needs a minute.
set -euo pipefail
OUT=${1:-runs/pipeline}
PYTHON=${PYTHON:-python3}
DATA=$OUT/tiny
REWARD=custom_reward_function.path=$DATA/reward.py
LENGTHS="data.max_prompt_length=64 data.max_response_length=16"

"$PYTHON" "$(dirname "$0")/make_tiny_model.py" --output "$DATA"

# 1. Supervised fine-tuning: the answers learn their form, half of it digits.
"$PYTHON" -m lockstep sft model.path="$DATA/model" data.train_files="$DATA/sft.jsonl" data.train_batch_size=32 data.max_length=96 \
    optim.lr=3e-3 trainer.total_epochs=5 trainer.default_local_dir="$OUT/sft"

# 2. GRPO from there: the reward is the share of digits. A run's folder is a model path: its newest checkpoint.
VALIDATION="actor_rollout_ref.rollout.val_kwargs.do_sample=true actor_rollout_ref.rollout.val_kwargs.temperature=0.8"
VALIDATION+=" actor_rollout_ref.rollout.val_kwargs.n=4"
# shellcheck disable=SC2086
"$PYTHON" -m lockstep grpo actor_rollout_ref.model.path="$OUT/sft" data.train_files="$DATA/train.jsonl" data.val_files="$DATA/val.jsonl" \
    data.train_batch_size=32 $LENGTHS $VALIDATION "$REWARD" actor_rollout_ref.actor.ppo_mini_batch_size=32 \
    actor_rollout_ref.actor.optim.lr=1e-3 actor_rollout_ref.rollout.n=8 trainer.total_training_steps=6 trainer.test_freq=6 \
    trainer.default_local_dir="$OUT/grpo"

# 3. and 4. Answers to the validation prompts, sampled as in validation, and their scores.
# shellcheck disable=SC2086
"$PYTHON" -m lockstep generate model.path="$OUT/grpo" data.path="$DATA/val.jsonl" data.n_samples=4 $LENGTHS rollout.temperature=0.8 \
    rollout.top_k=-1 rollout.top_p=1.0 data.output_path="$OUT/answers.parquet"
"$PYTHON" -m lockstep eval data.path="$OUT/answers.parquet" "$REWARD" data.output_path="$OUT/evaluation.json"

# 5. A Hugging Face folder, checked against the checkpoint.
"$PYTHON" -m lockstep export "$OUT/grpo" -o "$OUT/model" --overwrite

# 6. The exported model, validated by the training program.
# shellcheck disable=SC2086
"$PYTHON" -m lockstep grpo actor_rollout_ref.model.path="$OUT/model" data.val_files="$DATA/val.jsonl" $LENGTHS $VALIDATION "$REWARD" \
    trainer.val_only=true trainer.default_local_dir="$OUT/reloaded"

"$PYTHON" -c '
import json, pathlib, sys

out = pathlib.Path(sys.argv[1])
trained, reloaded = (json.loads((out / run / "metrics.jsonl").read_text().splitlines()[-1]) for run in ("grpo", "reloaded"))
evaluated = json.loads((out / "evaluation.json").read_text())["metrics"]
for name in (name for name in trained if name.startswith("val-core/")):
    print(f"{name}: {trained[name]} in training, {evaluated[name]} by lockstep eval, {reloaded[name]} after export")
    if not trained[name] == evaluated[name] == reloaded[name]:
        sys.exit("the numbers differ")
' "$OUT"
